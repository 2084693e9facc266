"""The wheel: what is in it, and that an environment with nothing of the checkout runs it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from email.message import Message
from email.parser import BytesParser
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

import pytest

import actorllm

ROOT = Path(__file__).parents[2]
PACKAGES = {"actorllm": ROOT / "actorllm", "actorllm_kernels": ROOT / "kernels" / "actorllm_kernels"}
OWN_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
INFO = f"actorllm-{actorllm.__version__}.dist-info"


def run(*command: str | Path, cwd: Path, timeout_s: float = 600) -> str:
    """What the command prints. It sees neither the checkout's packages nor those of this interpreter."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, f"{shlex.join(map(str, command))}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout


def build(folder: Path, *options: str) -> Path:
    """The wheel that `python -m build` leaves in the folder."""
    run(sys.executable, "-m", "build", *options, "--outdir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZipFile]:
    """Built with the packages of this environment: nothing is downloaded."""
    for package in ("build", "hatchling"):
        pytest.importorskip(package, reason=f"{package} builds the wheel, and is not installed: make test installs it")
    path = build(tmp_path_factory.mktemp("wheel"), "--wheel", "--no-isolation")
    with ZipFile(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def metadata(wheel: ZipFile) -> Message:
    return BytesParser().parsebytes(wheel.read(f"{INFO}/METADATA"))


def test_a_wheel_has_both_packages_whole_and_nothing_else(wheel: ZipFile) -> None:
    expected = {
        f"{name}/{file.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    found = {name for name in wheel.namelist() if not name.startswith(f"{INFO}/")}
    assert found == expected


@pytest.mark.parametrize(
    "name",
    [
        "actorllm/py.typed",
        "actorllm/server/grafana.json",
        "actorllm/server/page/index.html",
        "actorllm/server/page/page.css",
        "actorllm/server/page/live.js",
        "actorllm/server/page/chat.js",
        "actorllm/bundled/shapes/Qwen3-0.6B/config.json",
        "actorllm/slo/report/page.html",
        "actorllm/slo/sample.jsonl",
        "actorllm/bundled/storyteller/draft/config.json",
        "actorllm/bundled/storyteller/draft/model.safetensors",
        "actorllm/bundled/storyteller/model.safetensors",
        "actorllm/bundled/storyteller/tokenizer.json",
        "actorllm_kernels/configs.json",
        "actorllm_kernels/py.typed",
    ],
)
def test_a_wheel_has_what_is_no_code(wheel: ZipFile, name: str) -> None:
    folder = PACKAGES[name.split("/")[0]]
    assert wheel.read(name) == (folder / name.partition("/")[2]).read_bytes()


def test_a_wheel_has_the_licence_and_the_command(wheel: ZipFile) -> None:
    assert wheel.read(f"{INFO}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "actorllm = actorllm.cli:main" in wheel.read(f"{INFO}/entry_points.txt").decode().splitlines()


def test_the_metadata_say_what_the_package_says(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("actorllm", actorllm.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"Operating System :: POSIX :: Linux", "Typing :: Typed"} <= set(metadata.get_all("Classifier", []))
    required = {line.split(";")[0].split(">")[0].split("<")[0] for line in metadata.get_all("Requires-Dist", [])}
    assert {"torch", "triton", "transformers", "anyio", "posix-ipc", "orjson"} <= required
    assert not required & {"pytest", "hypothesis", "ruff", "mypy", "build", "hatchling"}


def environment_with_torch(version: str, folder: Path) -> Path:
    """The interpreter of an environment that knows the packages of this one by their metadata, and a torch of this version."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (packages,) = folder.glob("lib/python*/site-packages")
    for found in distributions():
        name = found.metadata["Name"]
        if name in ("actorllm", "torch"):
            continue
        info = packages / f"{name.replace('-', '_')}-{found.version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(found.read_text("METADATA") or "")
        (info / "RECORD").touch()
    info = packages / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (info / "RECORD").touch()
    return folder / "bin" / "python"


@pytest.mark.slow(reason="builds a wheel and makes three environments")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", ["2.11.0", "2.14.1+cpu", "2.15.0"])
def test_installing_into_an_environment_with_another_torch_changes_nothing_there(
    wheel: ZipFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)  # wishes of this machine as to torch are not the package's
    python = environment_with_torch(version, tmp_path / "venv")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--dry-run", "--quiet")
    path = f"{wheel.filename}[cli,laboratory,serve,structured]"
    report = json.loads(run(*pip, "--report", "-", path, cwd=tmp_path))
    assert [entry["metadata"]["name"] for entry in report["install"]] == ["actorllm"]


def claimed_versions() -> list[str]:
    """Of Python, by the classifiers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [line.split(" :: ")[-1] for line in project["classifiers"] if "Python :: 3." in line]
    assert project["requires-python"] == f">={names[0]}"
    return names


def interpreter(version: str) -> str:
    """One of this version. Skips the test where there is none."""
    if version == OWN_VERSION:
        return sys.executable
    path = shutil.which(f"python{version}")
    if path is None or subprocess.run([path, "--version"], capture_output=True, check=False).returncode:
        pytest.skip(f"there is no python{version} on the PATH")
    return path


@pytest.mark.slow(reason="installs the wheel and its dependencies in an empty environment")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", claimed_versions())
def test_an_empty_environment_runs_the_wheel(tmp_path: Path, version: str) -> None:
    """`python -m build` with its isolation, from the source distribution; then `pip install .` over it.

    constraints.txt is for the version of this interpreter; the others take what the ranges allow.
    """
    pytest.importorskip("build")
    python = interpreter(version)
    built, home, elsewhere = tmp_path / "dist", tmp_path / "venv", tmp_path / "elsewhere"
    built.mkdir()
    elsewhere.mkdir()
    wheel = build(built)
    run(python, "-m", "venv", home, cwd=elsewhere)
    constraints = ("--constraint", ROOT / "constraints.txt") if version == OWN_VERSION else ()
    pip = (home / "bin" / "python", "-m", "pip", "install", "--quiet", *constraints)
    run(*pip, *shlex.split(os.environ.get("TORCH_ARGS", "")), "torch", cwd=elsewhere, timeout_s=1800)
    run(*pip, f"{wheel}[cli]", cwd=elsewhere)
    check_installed(home, elsewhere)
    run(*pip, "--no-deps", "--force-reinstall", ROOT, cwd=elsewhere)
    check_installed(home, elsewhere)


def check_installed(home: Path, cwd: Path) -> None:
    """The commands and an example, in a folder with nothing of the checkout."""
    python, command = home / "bin" / "python", home / "bin" / "actorllm"
    run(python, "-m", "pip", "check", cwd=cwd)
    imported = "import actorllm, actorllm_kernels as k; print(actorllm.__version__, actorllm.__file__, k.__file__)"
    version, *files = run(python, "-c", imported, cwd=cwd).split()
    assert version == actorllm.__version__
    assert all(Path(file).is_relative_to(home) for file in files), files

    prompt = "Once upon a time"
    told = run(command, "generate", prompt, "--max-tokens", "8", cwd=cwd).rstrip("\n")
    assert told.startswith(prompt)
    assert len(told) > len(prompt)
    shape = "import actorllm; print(actorllm.AsyncLLM('Qwen3-0.6B', load_format='dummy').config.model.max_model_len)"
    assert int(run(python, "-c", shape, cwd=cwd)) > 1024

    shutil.copy(ROOT / "examples" / "embeddings.py", cwd)
    lines = run(python, "embeddings.py", cwd=cwd).splitlines()
    assert lines[0].startswith("4 vectors of ")
    assert len(lines) == 6
    scores = [float(line.split()[0]) for line in lines[2:]]
    assert scores == sorted(scores, reverse=True)

    points, page = cwd / "points.jsonl", cwd / "page.html"
    options = ("--num-requests", "40", "--seeds", "1", "--rates", "2", "--scales", "1", "--policies", "fcfs@512")
    run(command, "sweep", *options, "--results", points, "--report", page, cwd=cwd)
    assert "<html" in page.read_text()[:2000]
    for made in (points, page):
        made.unlink()
