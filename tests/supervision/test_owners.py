"""Owners of every kind, in processes of their own: how they start children, and that none survives them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from actorllm.actors import child
from tests import programs
from tests.actors.echo import EchoConfig

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, sys, time
from tests.actors.echo import EchoConfig
from actorllm.actors.engine_thread import EngineThread
from actorllm.supervision.supervisor import Supervisor
from actorllm.actors.topology import ActorSpec, LinkSpec, Topology
print("main runs", flush=True)
ECHO = "tests.actors.echo:EchoActor"
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
def running(*arguments: str, text: str = "", is_copied: bool = True) -> Iterator[subprocess.Popen[str]]:
    process = (programs.popen if is_copied else subprocess.Popen)(
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


def seconds_until_gone(pids: list[int]) -> float:
    start = time.monotonic()
    while any(map(is_running, pids)):
        assert time.monotonic() - start < 20, "children are left"
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


def test_children_have_the_import_path_of_the_owner(tmp_path: Path) -> None:
    """A class in a module beside the script, or in a folder that the script added."""
    (tmp_path / "more").mkdir()
    for folder, module in ((tmp_path, "beside"), (tmp_path / "more", "added")):
        (folder / f"{module}.py").write_text("from tests.actors.echo import EchoActor\nclass Mine(EchoActor): pass\n")
    (tmp_path / "supervisor.py").write_text("raise RuntimeError('not this one')\n")
    source = program("print(type(front).__module__, flush=True)")
    source = source.replace("ECHO, 8", "'beside:Mine', 8").replace("ECHO, 0", "'beside:Mine', 0")
    source = f"import sys\nsys.path.append({str(tmp_path / 'more')!r})\n" + source.replace("ECHO, 1", "'added:Mine', 1")
    script = tmp_path / "script.py"
    script.write_text(source)
    with running(str(script)) as process:
        assert process.stdout is not None
        read_pids(process.stdout)
        assert rest_of(process) == ("beside\n", "")


@contextmanager
def bare_child(owner: int) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, child.__file__, str(theirs.fileno()), str(owner)], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    try:
        yield process, ours
    finally:
        ours.close()
        process.kill()
        process.wait()


def start_frame(control: socket.socket, **fields: str) -> None:
    start = {"actor": "bare", "path": "tests.actors.echo:EchoActor", "rank": 0}
    modules = {"modules": [], "sys_path": [str(ROOT), *sys.path]}
    config = {"config_path": "tests.actors.echo:EchoConfig", "config": EchoConfig().to_json().decode()}
    child.send_frame(control, "start", **start | config | modules | fields)


def test_a_child_ends_with_its_control_socket() -> None:
    """However the owner ended: the parent-death signal is not the only tie."""
    with bare_child(os.getpid()) as (process, control):
        control.close()
        assert process.wait(20) == child.OWNER_GONE
    with bare_child(os.getpid()) as (process, control):
        start_frame(control)
        frame, _ = child.receive_frame(control)
        assert frame is not None
        assert frame["op"] == "started"
        control.close()
        assert process.wait(20) == child.OWNER_GONE


def test_a_child_whose_owner_died_before_it_lived() -> None:
    with bare_child(owner=os.getpid() + 1) as (process, _):
        assert process.wait(20) == child.OWNER_GONE


@pytest.mark.parametrize(
    ("fields", "op", "type_name"),
    [
        ({}, "juggle", "ValueError"),
        ({"path": "tests.actors.echo:Parrot"}, "configure", "AttributeError"),
        ({"config": "{"}, "configure", "JSONDecodeError"),
    ],
)
def test_a_child_reports_what_it_cannot_do(fields: dict[str, str], op: str, type_name: str) -> None:
    with bare_child(os.getpid()) as (process, control):
        start_frame(control, **fields)
        child.send_frame(control, op)
        frame, _ = child.receive_frame(control)
        while frame is not None and frame["op"] != "failed":
            frame, _ = child.receive_frame(control)
        assert frame is not None
        assert frame["type_name"] == type_name
        assert process.wait(20) == 1


def test_last_words_are_heard_by_one_who_was_not_listened_to() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        child.send_frame(ours, "juggle")
        child.send_frame(theirs, "failed")
        theirs.close()
        assert child.receive_frame(ours) == ({"op": "failed"}, ())
        assert child.receive_frame(ours) == (None, ())


def test_frames_have_a_limit() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, pytest.raises(ValueError, match="the limit is"):
        child.send_frame(ours, "started", facts={"text": "x" * child.MAX_PACKET})


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
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # so that none can do anything for its end
        process.send_signal(number)
        seconds = seconds_until_gone(pids)
        print(f"\nchildren gone {seconds * 1e3:.0f} ms after {number.name}")


def test_no_child_survives_an_owner_killed_in_the_middle_of_the_start() -> None:
    source = program("").replace("EchoConfig()", "EchoConfig(fail_at='hang')")
    with running("-c", source, is_copied=False) as process:  # whose children are those of the engine alone
        children: list[int] = []
        deadline = time.monotonic() + 20
        while len(children) < 2:
            assert time.monotonic() < deadline
            children = children_of(process.pid)
        process.kill()
        process.wait(timeout=20)
        seconds_until_gone(children)


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
        "import sys; import actorllm.supervision.supervisor, tests.actors.echo;"
        "print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    )
    with running("-c", source, is_copied=False) as process:
        assert rest_of(process) == ("[]\n", "")


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += [int(child) for child in (task / "children").read_text().split()]
        except FileNotFoundError:
            continue
    return found
