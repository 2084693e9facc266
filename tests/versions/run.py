"""The tests that depend most on other packages, with versions of them that are not the project's own.

    python tests/versions/run.py [NAME ...] [--json FILE] [--python PATH ...]

NAME: a release of transformers, of those in RELEASES or another one. It is installed under build/versions, in front of the
packages of this interpreter; torch stays the one that is there. --python: another interpreter, for which everything that needs
no torch is tested, in a virtual environment of its own. Prints a line per version and writes the counts with date and versions.
The exit status is 1 if a test failed. `make test-versions` runs all releases; what came out is in docs/embedding.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
HOME = ROOT / "build" / "versions"

RELEASES = ("4.57.6", "5.8.1", "5.13.1", "5.17.0", "5.23.0")
"""Of transformers: the lowest of the range, the newest that was tried, and some between."""
LOWEST_RELEASE = (5, 8)
"""Which runs models without a fused forward: as in `actorllm.model.hf.loading`."""

FUSED = ("tests/api/test_llm.py", "tests/api/test_equality.py", "tests/model/cpu", "tests/model/families", "tests/text")
THROUGH_TRANSFORMERS = ("tests/model/hf", "tests/embedding/test_lent_module.py", "tests/text", "tests/api/test_llm.py")
WITHOUT_TORCH = tuple(
    f"tests/{name}" for name in ("testing", "messages", "kvcache", "scheduling", "text", "ring", "compat")
)
NEEDS_TORCH = {"torch", "triton"}

WARNINGS = (
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning",
    "ignore:Deprecated in 0.9.0:DeprecationWarning",
)
"""Of an older transformers, about other packages; a test that meets one of ours fails."""


def tested(python: Path | str, path: list[Path], selection: tuple[str, ...], log: Path) -> dict[str, Any]:
    """The counts of one run. path: in front of the packages of the interpreter."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT, ROOT / "kernels"]))}
    options = [word for warning in WARNINGS for word in ("-W", warning)]
    command = [str(python), "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *options, *selection]
    with log.open("w") as file:
        subprocess.run(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, check=False)
    summary = log.read_text().strip().splitlines()[-1]
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", summary)}
    return {kind: counts.get(kind, 0) for kind in ("passed", "failed", "skipped", "error")}


def found(python: Path | str, path: list[Path], *packages: str) -> dict[str, str]:
    """The versions that are imported, with that of the interpreter."""
    code = (
        "import importlib.metadata as m, platform, sys; print('python', platform.python_version());"
        "[print(name, m.version(name)) for name in sys.argv[1:]]"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    told = subprocess.run([str(python), "-c", code, *packages], env=env, capture_output=True, text=True, check=True)
    return dict(line.split(maxsplit=1) for line in told.stdout.splitlines())


def with_transformers(release: str) -> dict[str, Any]:
    folder = HOME / f"transformers-{release}"
    if not (folder / "transformers").is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        numpy = found(sys.executable, [], "numpy")["numpy"]  # two of them in one process would be an error of ours
        subprocess.run([*install, f"transformers=={release}", f"numpy=={numpy}"], check=True)
    versions = found(sys.executable, [folder], "transformers", "torch", "tokenizers")
    runs_modules = tuple(map(int, release.split(".")[:2])) >= LOWEST_RELEASE
    selection = THROUGH_TRANSFORMERS if runs_modules else FUSED
    counts = tested(sys.executable, [folder], selection, HOME / f"transformers-{release}.log")
    return {**versions, "tests": "models through transformers" if runs_modules else "fused models", **counts}


def with_python(interpreter: str) -> dict[str, Any]:
    version = found(interpreter, [])["python"]
    folder = HOME / f"python-{version}"
    python = folder / "bin" / "python"
    if not python.is_file():
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["test"]]
        wanted += [package for extra in project["project"]["optional-dependencies"].values() for package in extra]
        light = [line for line in wanted if re.split(r"[\s>=<;\[]", line)[0] not in NEEDS_TORCH]
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *light], check=True)
    counts = tested(python, [], WITHOUT_TORCH, HOME / f"python-{version}.log")
    return {**found(python, []), "torch": None, "tests": "without torch", **counts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", metavar="NAME")
    parser.add_argument("--python", action="append", default=[], metavar="PATH")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    HOME.mkdir(parents=True, exist_ok=True)
    rows: dict[str, dict[str, Any]] = {}
    if options.json and options.json.is_file():
        rows = json.loads(options.json.read_text())["runs"]
    bad = 0
    releases = options.releases or (() if options.python else RELEASES)
    for kind, names in (("transformers", releases), ("python", options.python)):
        for name in names:
            row = with_transformers(name) if kind == "transformers" else with_python(name)
            row["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
            label = f"{kind} {row[kind]}"
            bad += row["failed"] + row["error"] + (not row["passed"])
            rows[label] = row
            print(label, row, flush=True)
            if options.json:
                told = {"machine": f"{platform.system()} {platform.machine()}", "runs": rows}
                options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
