"""Owners of every kind, in processes of their own: how they start children, and that none survives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, sys, time
from actorllm.actors.echo import EchoConfig
from actorllm.actors.engine_thread import EngineThread
from actorllm.actors.supervisor import Supervisor
from actorllm.actors.topology import ActorSpec, LinkSpec, Topology
print("main runs", flush=True)
ECHO = "actorllm.actors.echo:EchoActor"
topology = Topology(
    (ActorSpec("front", ECHO, 8, "owner"), ActorSpec("echo0", ECHO, 0, PLACEMENT), ActorSpec("echo1", ECHO, 1, PLACEMENT)),
    (LinkSpec.broadcast("echoes", "front", ["echo0", "echo1"]),),
)
supervisor = Supervisor(topology, EchoConfig())
thread = EngineThread(supervisor)
thread.start(30)
front = supervisor.actor("front")
print("answers", thread.call(front.ask_all, front.links["echoes"], "ping").result(10), flush=True)
print("pids", *supervisor.pids.values(), flush=True)
"""


def program(ending: str, placement: str = "process") -> str:
    return PROGRAM.replace("PLACEMENT", repr(placement)) + ending + "\n"


@contextmanager
def running(*arguments: str, text: str = "") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdin is not None
    try:
        process.stdin.write(text)
        process.stdin.close()
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def read_pids(stream: IO[str]) -> list[int]:
    """Everything up to the line with the pids, which has the expected contents."""
    lines = []
    for line in stream:
        lines.append(line.strip())
        if line.startswith("pids"):
            break
    assert lines[:2] == ["main runs", "answers ['echo0', 'echo1']"], lines
    return [int(pid) for pid in lines[2].split()[1:]]


def rest_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it still writes to stdout, and its stderr, until it ends."""
    assert process.stdout is not None
    assert process.stderr is not None
    rest, errors = process.stdout.read(), process.stderr.read()
    process.wait(timeout=20)
    return rest, errors


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[0] != b"Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def seconds_until_gone(pids: list[int], limit: float = 10.0) -> float:
    start = time.monotonic()
    while any(map(is_running, pids)):
        assert time.monotonic() - start < limit, "children are left"
        time.sleep(0.001)
    return time.monotonic() - start


@pytest.mark.parametrize("how", ["-c", "script", "-", "-i"])
def test_children_start_from_any_main(tmp_path: Path, how: str) -> None:
    """Without a guard, without a file; __main__ runs once; leaving without a stop leaves nothing and does not hang."""
    script = tmp_path / "script.py"
    source = program("print('end', flush=True)")
    script.write_text(source)
    arguments = {"-c": ["-c", source], "script": [str(script)], "-": ["-"], "-i": ["-q", "-i"]}[how]
    interactive = (
        source.replace("topology = Topology(\n", "topology = Topology(").replace("\n    ", " ").replace("\n)", ")")
    )
    text = {"-": source, "-i": interactive}.get(how, "")
    with running(*arguments, text=text) as process:
        assert process.stdout is not None
        pids = read_pids(process.stdout)
        assert len(pids) == 2
        rest, errors = rest_of(process)
        assert rest.split() == ["end"], (rest, errors)
        if how != "-i":
            assert errors == ""
        assert process.returncode == 0
        assert not any(map(is_running, pids))


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("raise SystemExit(4)", 4),
        ("1 / 0", 1),
        ("thread.stop(); thread.stop()", 0),
        ("del thread, supervisor, front", 0),
    ],
)
def test_the_interpreter_ends_in_every_way(ending: str, code: int) -> None:
    with running("-c", program(ending)) as process:
        assert process.stdout is not None
        pids = read_pids(process.stdout)
        assert process.wait(timeout=20) == code
        assert not any(map(is_running, pids))


def test_the_interpreter_ends_inline() -> None:
    with running("-c", program("", "thread")) as process:
        assert process.stdout is not None
        assert read_pids(process.stdout) == []
        assert rest_of(process) == ("", "")
        assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_child_survives_a_killed_owner(number: signal.Signals) -> None:
    with running("-c", program("time.sleep(60)")) as process:
        assert process.stdout is not None
        pids = read_pids(process.stdout)
        assert all(map(is_running, pids))
        process.send_signal(number)
        seconds = seconds_until_gone(pids, limit=1.0)
        print(f"\nchildren gone {seconds * 1e3:.0f} ms after {number.name}")


def test_no_child_survives_an_owner_killed_in_the_middle_of_the_start() -> None:
    source = program("").replace("EchoConfig()", "EchoConfig(fail_at='hang')")
    with running("-c", source) as process:
        children: list[int] = []
        deadline = time.monotonic() + 20
        while len(children) < 2:
            assert time.monotonic() < deadline
            children = children_of(process.pid)
        process.kill()
        process.wait(timeout=20)
        seconds_until_gone(children, limit=2.0)


def test_ctrl_c_reaches_only_the_owner() -> None:
    ending = """
try:
    print("armed", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print(thread.call(front.ask_all, front.links["echoes"], "ping").result(10), flush=True)
"""
    with running("-c", program(ending)) as process:
        assert process.stdout is not None
        pids = read_pids(process.stdout)
        assert process.stdout.readline() == "armed\n"
        for pid in (process.pid, *pids):
            os.kill(pid, signal.SIGINT)
        rest, errors = rest_of(process)
        assert rest == "['echo0', 'echo1']\n", errors
        assert not any(map(is_running, pids))


def test_a_fork_of_the_owner_ends_without_harm() -> None:
    """Its exit runs the same atexit callbacks, and must stop nothing."""
    ending = """
pid = os.fork()
if pid == 0:
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
print(thread.call(front.ask_all, front.links["echoes"], "ping").result(10), flush=True)
"""
    with running("-c", program(ending)) as process:
        assert process.stdout is not None
        read_pids(process.stdout)
        rest, errors = rest_of(process)
        assert rest == "5\n['echo0', 'echo1']\n", errors


def test_a_child_imports_no_more_than_its_actor_needs() -> None:
    source = (
        "import sys; import actorllm.actors.supervisor, actorllm.actors.echo;"
        "print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    )
    with running("-c", source) as process:
        assert rest_of(process) == ("[]\n", "")


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += [int(child) for child in (task / "children").read_text().split()]
        except FileNotFoundError:
            continue
    return found
