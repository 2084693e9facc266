"""Processes that do not die and do not go on: found, killed, and named."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import actorllm.client.engine_supervisor
from actorllm import AsyncLLM, SamplingParams
from actorllm.errors import ActorLLMError, EngineDeadError
from actorllm.scheduling.admission_policy import AdmissionPolicy
from actorllm.scheduling.policy import KeyPolicy
from tests.actors.scripted_topology import with_workers
from tests.actors.scripted_worker import VOCAB, SlowRunner
from tests.scheduling.chained_tokens import reference_stream

STUCK_TOKEN = 4093


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AsyncLLM]]:
    llms: list[AsyncLLM] = []
    monkeypatch.setattr(actorllm.client.engine_supervisor, "engine_topology", with_workers("SlowWorkerActor"))

    def make(**arguments: Any) -> AsyncLLM:
        given = {"heartbeat_timeout_s": 1.0, "skip_tokenizer_init": True, "on_failure": "raise"} | arguments
        llms.append(AsyncLLM("storyteller", **given))
        return llms[-1]

    yield make
    for llm in llms:
        llm.shutdown()


async def end_of(llm: AsyncLLM, prompt: list[int], during: Callable[[], object] | None = None) -> str:
    """What the stream of a long request ends with, if something happens after its first token."""
    params = SamplingParams(max_tokens=900, ignore_eos=True, detokenize=False)
    try:
        async for _ in llm.generate({"prompt_token_ids": prompt}, params):
            if during is not None:
                during()
                during = None
    except EngineDeadError as error:
        return str(error)
    raise AssertionError("it came to its end")


async def test_a_worker_that_does_not_come_back_from_a_step(build: Callable[..., AsyncLLM]) -> None:
    error = await end_of(build(step_timeout_s=0.5), [1, STUCK_TOKEN])
    assert "worker0 was killed because it was stuck: step 1 ran for " in error
    assert "deadline 0.5 s" in error
    assert "scripted_worker.py" in error, "its last words say where it was"


async def test_a_step_that_does_not_come_back_from_a_thread(
    build: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can kill it: the engine ends, and says where it was. What comes after all, comes to nobody."""
    is_let_go, threads = threading.Event(), []

    def hang(self: SlowRunner, plan: Any) -> Any:
        threads.append(threading.current_thread())
        assert is_let_go.wait(60)
        return plan

    monkeypatch.setattr(SlowRunner, "execute", hang)
    llm = build(topology="inline", step_timeout_s=0.5, on_failure="restart")
    llm._engine._supervisor._stop_timeout_s = 0.1  # type: ignore[union-attr]
    try:
        with anyio.fail_after(30):
            error = await end_of(llm, [1, 2])
        assert "worker0 failed with TimeoutError: step 1 ran for " in error
        assert "deadline 0.5 s; its thread cannot be stopped and is abandoned (step_timeout_s" in error
        assert "is_let_go.wait(60)" in "".join(llm.dead_error.__notes__)
        assert llm.health().state == "dead"
        with pytest.raises(EngineDeadError, match="TimeoutError"):
            llm.generate({"prompt_token_ids": [1, 2]})
        await anyio.to_thread.run_sync(llm.shutdown)
    finally:
        is_let_go.set()
    await anyio.to_thread.run_sync(threads[0].join, 30)
    assert not threads[0].is_alive()


async def test_steps_of_a_thread_that_end_in_time_are_no_concern_of_anybody(build: Callable[..., AsyncLLM]) -> None:
    llm = build(topology="inline", step_timeout_s=0.5)
    params = SamplingParams(max_tokens=250, ignore_eos=True, detokenize=False, seed=3)
    *_, last = [output async for output in llm.generate({"prompt_token_ids": [1, 2]}, params)]
    assert last.outputs[0].token_ids == reference_stream([1, 2], 3, 250, VOCAB)


@pytest.mark.parametrize("victim", ["worker0", "scheduler"])
async def test_a_process_that_is_stopped(build: Callable[..., AsyncLLM], victim: str) -> None:
    llm = build(step_timeout_s=30)
    error = await end_of(llm, [1, 2], lambda: os.kill(llm._engine.pids[victim], signal.SIGSTOP))
    assert f"{victim} was killed because it was stuck: the process was stopped for" in error


@pytest.mark.parametrize("victim", ["worker0", "scheduler"])
async def test_streams_go_on_over_a_process_that_was_stopped(build: Callable[..., AsyncLLM], victim: str) -> None:
    """To be killed for it is a death like any other."""
    llm = build(on_failure="restart")
    params = SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False, seed=3)
    stopped, tokens = 0, []
    async for output in llm.generate({"prompt_token_ids": [1, 2]}, params):
        tokens = list(output.outputs[0].token_ids)
        if not stopped:
            stopped = llm._engine.pids[victim]
            os.kill(stopped, signal.SIGSTOP)
    assert tokens == reference_stream([1, 2], 3, 200, VOCAB)
    assert llm._engine.pids[victim] != stopped
    assert "stuck: the process was stopped for" in str(llm.health().actors[victim].last_failure)


@pytest.mark.parametrize("victim", ["worker0", "scheduler"])
async def test_who_waits_for_an_answer_is_looked_after_as_well(build: Callable[..., AsyncLLM], victim: str) -> None:
    """There is no request, and still somebody waits."""
    llm = build(on_failure="restart")
    await llm.start()
    stopped = llm._engine.pids[victim]
    os.kill(stopped, signal.SIGSTOP)
    with anyio.fail_after(30):
        if victim == "scheduler":
            await llm.pause_generation()
            assert await llm.is_paused()
        else:
            with contextlib.suppress(ActorLLMError):
                await llm.stats()
    assert "stuck: the process was stopped for" in str(llm.health().actors[victim].last_failure)


async def test_several_sequences_of_one_request_are_looked_after_as_well(build: Callable[..., AsyncLLM]) -> None:
    """Nothing else is going on that would keep anybody awake."""
    llm = build(on_failure="restart")
    await llm.start()
    stopped = llm._engine.pids["worker0"]
    os.kill(stopped, signal.SIGSTOP)
    params = SamplingParams(n=2, max_tokens=3, ignore_eos=True, detokenize=False, seed=3)
    with anyio.fail_after(30):
        *_, last = [output async for output in llm.generate({"prompt_token_ids": [1, 2]}, params)]
    assert [len(sequence.token_ids) for sequence in last.outputs] == [3, 3]
    assert llm._engine.pids["worker0"] != stopped


class Endless(KeyPolicy):
    """Thinks about its third step for ever."""

    num_steps = 0

    def wake_at(self, view: Any) -> float:
        self.num_steps += 1
        while self.num_steps > 3:
            pass
        return float("inf")


class EndlessDeep(KeyPolicy):
    """Is caught where many frames lie between it and the loop."""

    def key(self, sequence: Any, view: Any, depth: int = 30) -> Any:
        if depth:
            return self.key(sequence, view, depth - 1)
        while True:
            pass


class EndlessGate(AdmissionPolicy):
    def on_step(self, done: Any, view: Any) -> None:
        while True:
            pass


async def test_a_policy_that_never_returns(build: Callable[..., AsyncLLM]) -> None:
    error = await end_of(build(scheduling_policy="tests.supervision.test_hangs:Endless"), [1, 2])
    assert "scheduler was killed because it was stuck: its loop has not turned for" in error
    assert "in wake_at" in error, "its last words say where it was"


@pytest.mark.parametrize(
    ("argument", "policy"),
    [("scheduling_policy", "Endless"), ("scheduling_policy", "EndlessDeep"), ("admission_policy", "EndlessGate")],
)
async def test_streams_go_on_without_a_policy_that_never_returns(
    build: Callable[..., AsyncLLM], argument: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"tests.supervision.test_hangs:{policy}"
    llm = build(on_failure="restart", **{argument: name})
    params = SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False, seed=3)
    *_, last = [output async for output in llm.generate({"prompt_token_ids": [1, 2]}, params)]
    assert list(last.outputs[0].token_ids) == reference_stream([1, 2], 3, 20, VOCAB)
    assert f"{argument.replace('_', ' ')} {name!r} did not return; the next scheduler goes on with" in caplog.text
    assert llm.health().actors["scheduler"].num_restarts == 1


OWNER = """
import json
import anyio
import actorllm.client.engine_supervisor
import actorllm.client.engine_supervisor
from actorllm import AsyncLLM, SamplingParams
from tests.actors.scripted_topology import with_workers

async def main():
    actorllm.client.engine_supervisor.engine_topology = with_workers("SlowWorkerActor")
    params = SamplingParams(max_tokens=400, ignore_eos=True, detokenize=False)
    async with AsyncLLM("storyteller", heartbeat_timeout_s=1, step_timeout_s=1, skip_tokenizer_init=True) as llm:
        is_first = True
        async for output in llm.generate({"prompt_token_ids": [1, 2]}, params):
            if is_first:
                print("running", flush=True)
            is_first = False
        print(json.dumps([len(output.outputs[0].token_ids), sorted(llm._engine.pids.values())]), flush=True)

anyio.run(main)
"""


def children_of(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted({int(child) for file in files for child in file.read_text().split()})


def test_an_engine_that_is_stopped_as_a_whole_goes_on_as_if_nothing_had_happened() -> None:
    """As by Ctrl-Z in a shell, by a debugger, or by the sleep of the machine."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "running\n"
        children = children_of(owner.pid)
        assert len(children) == 2
        for order in ([owner.pid, *children], [*children, owner.pid]):
            for pid in (*children, owner.pid):
                os.kill(pid, signal.SIGSTOP)
            time.sleep(1.5)  # longer than any limit: this is what is tested
            for pid in order:
                os.kill(pid, signal.SIGCONT)
        assert json.loads(owner.stdout.readline()) == [400, children], "nobody was replaced"
    assert owner.returncode == 0


async def test_nobody_looks_while_there_is_nothing_to_do(build: Callable[..., AsyncLLM]) -> None:
    llm = build()
    params = SamplingParams(max_tokens=2, detokenize=False)
    async for _ in llm.generate({"prompt_token_ids": [1, 2]}, params):
        pass
    supervisor: Any = llm._engine._supervisor
    with anyio.fail_after(30):
        while supervisor._watch._has_come is None or supervisor._watch._has_come.is_set():
            await anyio.sleep(0.01)
    stopped = llm._engine.pids["worker0"]
    os.kill(stopped, signal.SIGSTOP)
    await anyio.sleep(1.5)  # longer than the limit, and nobody minds
    os.kill(stopped, signal.SIGCONT)
    outputs = [output async for output in llm.generate({"prompt_token_ids": [1, 2]}, params)]
    assert outputs[-1].finished
    assert llm._engine.pids["worker0"] == stopped
