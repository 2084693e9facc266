"""Ctrl-C and SIGTERM, in scripts, notebooks and services: the owner decides, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actorllm import LLMEngine, RequestOutput, SamplingParams
from actorllm.errors import EngineShutdownError
from tests import programs
from tests.actors.scripted_topology import LIGHT_WORKERS

ROOT = Path(__file__).parents[2]
PROMPT = "Once upon a time"

OWNER = """
import asyncio, os, signal, sys, threading, time
from actorllm import AsyncLLM, LLM, SamplingParams
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True, seed=1, temperature=0.5)
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)

def arm(llm):
    "Say so when requests are running, from another thread."
    def watch():
        while not llm._engine.ask_scheduler("statistics").result()["scheduler"]["num_running"]:
            time.sleep(0.01)
        print("armed", *llm._engine.pids.values(), flush=True)
    threading.Thread(target=watch, daemon=True).start()
"""

SCRIPT = (
    LIGHT_WORKERS
    + OWNER
    + """
llm = LLM("storyteller", num_threads=1)
arm(llm)
try:
    llm.generate(["Once"] * 3, ENDLESS, use_tqdm=False)
except KeyboardInterrupt:
    print("interrupted", flush=True)
while llm.stats()["scheduler"]["scheduler"]["num_running"]:
    time.sleep(0.01)
print("tokens", len(llm.generate("Once", SHORT, use_tqdm=False)[0].outputs[0].token_ids), flush=True)
"""
)

ASYNC = (
    OWNER
    + """
async def main():
    async with AsyncLLM("storyteller", num_threads=1) as llm:
        arm(llm)
        async for output in llm.generate("Once", ENDLESS):
            pass
asyncio.run(main())
"""
)

STARTING = (
    OWNER
    + """
print("starting", flush=True)
LLM("storyteller", num_threads=1)
"""
)

CELLS = (
    LIGHT_WORKERS
    + OWNER
    + """
async def complete(llm):
    "With a loop, on the same engine."
    both = AsyncLLM.__new__(AsyncLLM)
    both._adopt(llm._engine)
    await both.complete("Once", ENDLESS)

llm = LLM("storyteller", num_threads=1)
arm(llm)
llm.generate(["Once"] * 3, ENDLESS, use_tqdm=False)
print("tokens", len(llm.generate("Once", SHORT, use_tqdm=False)[0].outputs[0].token_ids), flush=True)
arm(llm)
asyncio.run(complete(llm))
print("tokens", len(llm.generate("Once", SHORT, use_tqdm=False)[0].outputs[0].token_ids), flush=True)
"""
)
"""Each line below the definitions is a cell; the engine of one is used in the next."""

SERVICE = (
    LIGHT_WORKERS
    + OWNER
    + """
def handler(*_):
    raise AssertionError("it is the loop's")

async def main():
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    signal.signal(signal.SIGTERM, handler)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    llm = AsyncLLM("storyteller", num_threads=1)
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    requests = [asyncio.ensure_future(llm.complete("Once", params)) for _ in range(3)]
    await llm.start()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    arm(llm)
    await stop.wait()
    print("drained", await llm.drain(30), flush=True)
    llm.shutdown()
    print("tokens", *[len((await request).outputs[0].token_ids) for request in requests], flush=True)
asyncio.run(main())
"""
)


class Program:
    """A program that runs, and what it has said so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pids: list[int] = []

    def wait_for(self, word: str) -> list[str]:
        """The rest of the line that begins with this word."""
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            assert line, f"it ended before it said {word!r}: {self.process.stderr.read()}"  # type: ignore[union-attr]
            first, *rest = line.split()
            if first == word:
                return rest

    def wait_until_armed(self) -> None:
        self.pids = [int(pid) for pid in self.wait_for("armed")]
        assert len(self.pids) == 2

    def signal(self, number: signal.Signals) -> None:
        """To everybody, as a terminal or a service manager does; children of a session of their own get it as well."""
        for pid in (*self.pids, self.process.pid):
            os.kill(pid, number)

    def end(self) -> tuple[str, str]:
        """What it still said on both streams; its processes are gone."""
        output, errors = self.process.communicate(timeout=30)
        for pid in self.pids:
            assert wait_until(lambda pid=pid: is_gone(pid)), f"process {pid} was left"  # type: ignore[misc]
        return output, errors


@contextmanager
def running(*arguments: str, stdin: str | None = None, is_copied: bool = True) -> Iterator[Program]:
    names = shared_memory()
    process = (programs.popen if is_copied else subprocess.Popen)(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdin is not None
        if stdin is not None:
            process.stdin.write(stdin)
            process.stdin.flush()
        yield Program(process)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            stream.close()
    assert shared_memory() <= names


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("allm-")}


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[0] in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(is_true: object, timeout_s: float = 30) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_true():  # type: ignore[operator]
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += map(int, (task / "children").read_text().split())
    return found


# Ctrl-C ---------------------------------------------------------------------------------------------------------------


def test_ctrl_c_out_of_generate_leaves_an_engine_that_works() -> None:
    with running("-c", SCRIPT) as program:
        program.wait_until_armed()
        program.signal(signal.SIGINT)
        output, errors = program.end()
        assert output == "interrupted\ntokens 2\n"
        assert errors == ""
        assert program.process.returncode == 0


def test_ctrl_c_that_nobody_catches_ends_everything() -> None:
    with running("-c", ASYNC) as program:
        program.wait_until_armed()
        program.signal(signal.SIGINT)
        _, errors = program.end()
        assert program.process.returncode == -signal.SIGINT
        assert errors.rstrip().endswith("KeyboardInterrupt")
        for others in ("child.py", "scheduler", "worker0", "Exception ignored"):
            assert others not in errors


def test_ctrl_c_while_the_engine_starts() -> None:
    with running("-c", STARTING, is_copied=False) as program:
        program.wait_for("starting")
        assert wait_until(lambda: len(children_of(program.process.pid)) == 2)
        program.pids = children_of(program.process.pid)
        program.signal(signal.SIGINT)
        _, errors = program.end()
        assert program.process.returncode == -signal.SIGINT
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert "child.py" not in errors


def test_ctrl_c_in_a_cell_and_the_next_cell_uses_the_same_engine() -> None:
    with running("-i", "-q", "-u", stdin=CELLS) as program:
        for _ in range(2):
            program.wait_until_armed()
            program.signal(signal.SIGINT)
            assert program.wait_for("tokens") == ["2"]
        assert program.process.stdin is not None
        program.process.stdin.write("exit()\n")
        program.end()
        assert program.process.returncode == 0


@pytest.mark.parametrize("when", ["in the middle of a step", "between two steps"])
def test_ctrl_c_in_an_engine_that_is_stepped(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes out between two steps, so that the next one goes on where it was."""
    engine = LLMEngine("storyteller", topology="inline", num_threads=1, dtype="float32")
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
    engine.add_request("undisturbed", PROMPT, params)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    expected = outputs[-1].outputs[0].token_ids
    stepper = engine._engine.stepper
    assert stepper is not None
    worker = stepper._worker
    execute, num_steps = worker.runner.execute, 0

    def interrupted(plan: object) -> object:
        nonlocal num_steps
        num_steps += 1
        handle = execute(plan)  # type: ignore[arg-type]
        if num_steps % 3 == 0 and when == "in the middle of a step":
            signal.raise_signal(signal.SIGINT)
        return handle

    monkeypatch.setattr(worker.runner, "execute", interrupted)
    engine.add_request("disturbed", PROMPT, params)
    num_interrupts = 0
    while engine.has_unfinished_requests():
        try:
            outputs += engine.step()
            if num_steps % 3 == 0 and when == "between two steps":
                signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts > 3
    assert outputs[-1].outputs[0].token_ids == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    engine.shutdown()


def test_a_handler_of_the_hosts_that_breaks_into_a_step_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LLMEngine("storyteller", topology="inline", num_threads=1)
    stepper = engine._engine.stepper
    assert stepper is not None

    def break_in(plan: object) -> object:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the handler raises")

    def leave(*_: object) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(stepper._worker.runner, "execute", break_in)
    before = signal.signal(signal.SIGINT, leave)
    try:
        engine.add_request("a", PROMPT, SamplingParams(max_tokens=2))
        with pytest.raises(SystemExit):
            engine.step()
        assert signal.getsignal(signal.SIGINT) is leave
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(EngineShutdownError):
        engine.add_request("b", PROMPT, SamplingParams(max_tokens=2))
    engine.shutdown()


# SIGTERM --------------------------------------------------------------------------------------------------------------


EXITING = (
    OWNER
    + """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("starting", flush=True)
llm = LLM("storyteller", num_threads=1)
if "it is idle" in sys.argv:
    llm.generate("Once", SHORT, use_tqdm=False)
    print("armed", *llm._engine.pids.values(), flush=True)
    time.sleep(60)
arm(llm)
llm.generate(["Once"] * 3, ENDLESS, use_tqdm=False)
"""
)


@pytest.mark.parametrize("when", ["it starts", "it generates", "it is idle"])
def test_a_script_that_exits_on_sigterm_stops_in_order(when: str) -> None:
    """The handler's SystemExit comes out of the constructor or of generate, and the exit stops what there is."""
    # A copy has one more child, which ends with the signal.
    with running("-c", EXITING, when, is_copied=when != "it starts") as program:
        program.wait_for("starting")
        if when != "it starts":
            program.wait_until_armed()
        else:
            assert wait_until(lambda: len(children_of(program.process.pid)) == 2)
            program.pids = children_of(program.process.pid)
        program.signal(signal.SIGTERM)
        assert program.end() == ("", "")
        assert program.process.returncode == 143


def test_a_service_that_hooks_sigterm_finishes_what_it_has() -> None:
    """Also when the service manager sends it to every process: those of the engine leave it to the owner."""
    with running("-c", SERVICE) as program:
        program.wait_until_armed()
        program.signal(signal.SIGTERM)
        output, errors = program.end()
        assert output == "drained True\ntokens 400 400 400\n"
        assert errors == ""
        assert program.process.returncode == 0
