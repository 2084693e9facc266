"""The `actorllm` command as a shell sees it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from actorllm import cli
from actorllm.config import BUNDLED_MODELS
from tests import programs

ROOT = Path(__file__).parents[2]
STORYTELLER = BUNDLED_MODELS["storyteller"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
SHORT = ("generate", "Once upon a time", "--num-threads", "1")
GENERATE = (*SHORT, "--max-tokens", "30")


def run(*arguments: str | bytes) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "actorllm.cli", *arguments]
    return programs.run(command, capture_output=True, text=True, timeout=50, env=ENVIRONMENT)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[0] in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return True


def read_some(process: subprocess.Popen[bytes], size: int) -> None:
    """Read this many bytes of its output, and perhaps a few more."""
    assert process.stdout is not None
    while size > 0:
        piece = os.read(process.stdout.fileno(), 1000)
        assert piece, "it ended early"
        size -= len(piece)


def all_gone(pids: list[int], timeout_s: float = 20) -> bool:
    deadline = time.monotonic() + timeout_s
    while not all(is_gone(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# generate -------------------------------------------------------------------------------------------------------------


def test_generate_prints_the_text_and_the_figures_apart() -> None:
    result = run(*GENERATE, "--seed", "7", "--ignore-eos", "--stats")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Once upon a time")
    assert result.stdout.endswith("\n")
    assert len(result.stdout) > 60
    assert re.search(r"^30 tokens; first after \d+\.\d+ s .* then \d+ tokens/s$", result.stderr, re.MULTILINE)
    assert len(result.stderr.splitlines()) == 1
    again = run(*GENERATE, "--seed", "7", "--ignore-eos", "--topology", "inline")
    assert again.stdout == result.stdout
    assert again.stderr == ""


def test_generate_stops_where_it_is_told_to() -> None:
    result = run(*GENERATE, "--temperature", "0", "--stop", " man", "--stop", " lived a")
    assert result.stdout == "Once upon a time there\n"


def test_generate_streams() -> None:
    """The first words are there long before the last ones could be."""
    arguments = ["generate", "Once upon a time", "--max-tokens", "1000", "--ignore-eos", "--num-threads", "1"]
    process = programs.popen(
        [sys.executable, "-m", "actorllm.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    try:
        assert process.stdout is not None
        read_some(process, 60)
        assert process.poll() is None
        children = programs.children_of(process.pid)
        assert len(children) == 2
        process.stdout.close()  # as `| head` does
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert all_gone(children)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def spans_of(path: Path) -> list[dict[str, Any]]:
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert sorted(names.values()) == ["scheduler", "worker"]
    spans = [event | {"process": names[event["pid"]]} for event in trace["traceEvents"] if event["ph"] == "X"]
    for span in spans:
        assert span["dur"] >= 0
        assert isinstance(span["ts"], float)
        assert span["tid"] == span["pid"]
    return spans


def test_the_timeline_shows_the_next_step_launched_before_text_is_made(tmp_path: Path) -> None:
    """So that the worker computes meanwhile, if the machine lets it."""
    file = tmp_path / "timeline.json"
    result = run(*SHORT, "--max-tokens", "300", "--ignore-eos", "--timeline", str(file))
    assert result.returncode == 0, result.stderr
    spans = spans_of(file)
    steps = {span["args"]["step"]: span for span in spans if span["process"] == "worker"}
    texts = {span["args"]["step"]: span for span in spans if span["name"].startswith("detokenize")}
    plans = {span["args"]["step"]: span for span in spans if span["name"].startswith("plan")}
    assert len(steps) >= 300
    assert len(texts) >= 300
    followed = texts.keys() & {number - 1 for number in plans}
    assert len(followed) >= len(texts) - 1, "all but the last"
    for number in followed:
        launched = plans[number + 1]["ts"] + plans[number + 1]["dur"]
        assert launched <= texts[number]["ts"] + 1, f"step {number + 1} waited for the text of the one before"
    for number, step in steps.items():
        assert plans[number]["ts"] <= step["ts"] + 1, "a step cannot run before it was planned"


def test_ctrl_c_ends_at_once() -> None:
    for is_speaking in (False, True):  # during the start, in the middle of the text
        process = programs.popen(
            [sys.executable, "-m", "actorllm.cli", *SHORT, "--max-tokens", "1000", "--ignore-eos"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        with process:
            try:
                assert process.stdout is not None
                assert process.stderr is not None
                read_some(process, 60 if is_speaking else 1)  # the prompt itself comes while the engine starts
                children = programs.children_of(process.pid)
                process.send_signal(signal.SIGINT)
                assert process.wait(30) == 130
                assert process.stderr.read() == b""
                assert all_gone(children)
            finally:
                process.kill()


# Bad input ------------------------------------------------------------------------------------------------------------


def test_a_corrupt_model_is_one_line(tmp_path: Path) -> None:
    for file in STORYTELLER.glob("*.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    result = run(*GENERATE, "--model", str(tmp_path))
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("actorllm: CorruptModelError: ")


def test_a_prompt_that_is_no_text() -> None:
    result = run("generate", b"\xff\xfe")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "Unicode" in result.stderr


def main_of(*arguments: str) -> int:
    try:
        code: Any = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    assert isinstance(code, int)
    return code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "Once", "--model", "nowhere"], ["no model 'nowhere'", "storyteller"]),
        (["info", "/nowhere"], ["/nowhere"]),
        (["generate", "Once", "--temperature", "-1"], ["temperature=-1.0 must be >= 0"]),
        (["generate", "Once", "--stop", ""], ["empty stop string"]),
        (["generate", "Once", "--max-model-len", "9999"], ["max_model_len=9999", "1024"]),
        (["generate", "Once", "--topology", "ray"], ["topology='ray'"]),
        (["generate", "Once", "--timeline", "/nowhere/at/all.json"], ["/nowhere/at/all.json"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main_of(*arguments) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("actorllm: ")
    for word in words:
        assert word in captured.err


@pytest.mark.parametrize(
    "arguments",
    [["generate", "Once", "--max-token", "3"], ["generate"], ["generate", "Once", "--seed", "x"], ["invent"]],
)
def test_what_the_command_does_not_know(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main_of(*arguments) == 2
    captured = capfd.readouterr()
    assert (captured.out + captured.err).strip()


# info -----------------------------------------------------------------------------------------------------------------


def test_info(capfd: pytest.CaptureFixture[str]) -> None:
    assert main_of("info", "storyteller") == 0
    output = capfd.readouterr().out
    for word in ("LlamaForCausalLM", "4096", "1024", "bfloat16", "8.0 MB", "4 query, 2 key/value"):
        assert word in output


def test_info_says_what_a_cache_of_8_bits_holds(capfd: pytest.CaptureFixture[str]) -> None:
    assert main_of("info", "storyteller", "--kv-cache-dtype", "int8") == 0
    assert "int8, 1,152 bytes a token, 1.78 times as many tokens as in bfloat16" in capfd.readouterr().out


def test_info_of_a_model_that_cannot_be_served(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tree = json.loads((STORYTELLER / "config.json").read_text()) | {"architectures": ["RwkvForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    assert main_of("info", str(tmp_path)) == 2
    assert "UnsupportedModelError: architecture 'RwkvForCausalLM' is not supported" in capfd.readouterr().err


def test_a_reader_that_leaves_early_is_no_failure() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "actorllm.cli", "info", "storyteller"]
    result = programs.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=50, env=environment)
    os.close(writing)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "actorllm", "--version"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True, env=ENVIRONMENT)
    assert found.stdout == run("--version").stdout != ""


def test_version_and_help(capfd: pytest.CaptureFixture[str]) -> None:
    for option in ("--version", "--help"):
        assert main_of(option) == 0
        assert capfd.readouterr().out


HIDDEN = (  # sys.modules says of a package that it is not there
    "import sys; sys.modules[{!r}] = None\nfrom actorllm.cli import main\nsys.exit(main(sys.argv[1:]))\n"
)


@pytest.mark.parametrize(
    ("package", "arguments", "sentence"),
    [
        ("cyclopts", ["info"], "the command needs cyclopts: pip install 'actorllm[cli]'"),
        ("fastapi", ["serve"], "pip install 'actorllm[serve]'"),
        ("starlette", ["run-batch", "in", "out"], "pip install 'actorllm[serve]'"),
        ("httpx2", ["trace", "fetch", "azure23-conv"], "a download needs httpx2: pip install 'actorllm[laboratory]'"),
        (
            "httpx2",
            ["replay", str(ROOT / "actorllm" / "slo" / "sample.jsonl"), "--url", "http://127.0.0.1:9"],
            "a replay against a server needs httpx2: pip install 'actorllm[laboratory]'",
        ),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, package: str, arguments: list[str], sentence: str
) -> None:
    environment = ENVIRONMENT | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", HIDDEN.format(package), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, env=environment)
    *_, line = result.stderr.splitlines()
    assert line.startswith("actorllm: ")
    assert sentence in line
    assert "Traceback" not in result.stderr
    assert (result.returncode, result.stdout) == (2, "")


def test_an_application_that_mounts_the_server_hears_of_the_extra() -> None:
    program = "import sys; sys.modules['fastapi'] = None\nfrom actorllm.server import create_app"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, env=ENVIRONMENT
    )
    last = result.stderr.splitlines()[-1]
    assert last == "ModuleNotFoundError: serving needs more packages (fastapi): pip install 'actorllm[serve]'"


def test_commands_that_need_no_extra_but_their_own_work_without_the_others() -> None:
    result = subprocess.run(
        [sys.executable, "-c", HIDDEN.format("httpx2"), "trace", "list"],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
        env=ENVIRONMENT,
    )
    assert "azure23-conv" in result.stdout
