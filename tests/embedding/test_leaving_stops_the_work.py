"""A consumer that leaves ends the work for its request, wherever the request is, and no other stream notices.

The worker computes a step for every byte that a test writes into a pipe. So each request is left at a known point, and what is
computed afterwards is counted in steps and tokens.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

import actorllm.client.engine_supervisor
from actorllm import AsyncLLM, SamplingParams
from actorllm.actors.engine_thread import HostLoop
from actorllm.client.stream import RequestStream
from actorllm.intake import job_queue, tokenizer_pool
from actorllm.text.grammar import GrammarCompiler
from actorllm.text.tokenizer import Tokenizer
from tests.actors.scripted_topology import with_workers
from tests.actors.scripted_worker import VOCAB
from tests.scheduling.chained_tokens import reference_stream

pytestmark = pytest.mark.anyio

NUM_OTHERS = 2
HOW: dict[str, dict[str, Any]] = {
    "process": {},
    "inline": {"topology": "inline"},
    "fleet": {"data_parallel_size": 2, "ready_replicas": 2},
    "ranks": {"tensor_parallel_size": 2},
}
SLOW_FLEET = pytest.param(
    "fleet", marks=pytest.mark.slow(reason="the workers of a fleet load torch; quick tests have one")
)
TOPOLOGIES = pytest.mark.parametrize("topology", ["process", "inline", SLOW_FLEET, "ranks"])
TOPOLOGIES_AND_SEQUENCES = pytest.mark.parametrize(
    ("topology", "n"), [("process", 1), ("process", 4), ("inline", 1), ("inline", 4), ("fleet", 4), ("ranks", 4)]
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Gate:
    """Lets the worker compute steps."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def let(self, num_steps: int) -> None:
        os.write(self._fd, b"." * num_steps)

    def close(self) -> None:
        with suppress(BlockingIOError):
            self.let(60_000)  # to the end of the engine
        os.close(self._fd)


class Engine:
    """An engine with a gate, and other streams that run from the beginning to the end."""

    def __init__(self, llm: AsyncLLM, gate: Gate) -> None:
        self.llm = llm
        self.gate = gate
        self.others = [self.generate(prompt_of(seed, 3), endless(seed)) for seed in range(NUM_OTHERS)]
        self.tokens: list[list[int]] = [[] for _ in self.others]
        self._num_prompts = 0

    def generate(self, prompt: Any, params: SamplingParams) -> RequestStream:
        """By one replica, whose steps are counted."""
        return self.llm.generate(prompt, params, data_parallel_rank=0)

    async def counts(self) -> dict[str, Any]:
        """Of the scheduler, which answers while the worker is in a step."""
        answer = await HostLoop.current().result_of(self.llm._engine.ask_scheduler("statistics"))
        found: dict[str, Any] = {**answer["scheduler"], "grammars": answer["grammars"]}
        return found

    async def step(self, num_steps: int = 1) -> None:
        """Let so many steps be computed; returns when each of the other streams has its token of the last one."""
        self.gate.let(num_steps)
        for stream, tokens in zip(self.others, self.tokens, strict=True):
            wanted = len(tokens) + num_steps
            while len(tokens) < wanted:
                tokens[:] = (await anext(stream)).outputs[0].token_ids
            assert len(tokens) == wanted, "a step has given more than one token"

    async def begin(self) -> None:
        """Every other stream has its first token; steps that were planned before it came have none for it."""
        first, *rest = self.others
        while not all(self.tokens):
            self.gate.let(1)
            self.tokens[0] = list((await anext(first)).outputs[0].token_ids)
            for stream, tokens in zip(rest, self.tokens[1:], strict=True):
                output = stream.take()
                tokens[:] = tokens if output is None else output.outputs[0].token_ids

    async def until(self, is_true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        with anyio.fail_after(20):
            while not is_true(counts := await self.counts()):
                await anyio.sleep(0.002)
        return counts

    def new_prompt(self, length: int) -> list[int]:
        """No two have a block in common."""
        self._num_prompts += 1
        return prompt_of(100 + self._num_prompts, length)

    async def check_others(self) -> None:
        for seed, tokens in enumerate(self.tokens):
            assert tokens == reference_stream(prompt_of(seed, 3), seed, len(tokens), VOCAB)


def prompt_of(seed: int, length: int) -> list[int]:
    return [1 + (seed * 37 + at) % 4000 for at in range(length)]


def endless(seed: int, **arguments: Any) -> SamplingParams:
    return SamplingParams(max_tokens=400, ignore_eos=True, seed=seed, detokenize=False, **arguments)


@asynccontextmanager
async def engine_of(tmp_path: Path, topology: str, **arguments: Any) -> AsyncIterator[Engine]:
    gate = Gate(tmp_path / "gate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actorllm.client.engine_supervisor, "engine_topology", with_workers("GatedWorkerActor"))
        patch.setenv("ACTORLLM_TEST_GATE", str(tmp_path / "gate"))
        llm = AsyncLLM("storyteller", **{"max_num_seqs": 16, "block_size": 32, **HOW[topology], **arguments})
        await llm.start()
    try:
        engine = Engine(llm, gate)
        await engine.begin()
        yield engine
        await engine.step(3)
        await engine.check_others()
    finally:
        gate.close()
        llm.shutdown()


# Ways to leave --------------------------------------------------------------------------------------------------------

Start = Callable[[], RequestStream]
Ready = Callable[[], Awaitable[object]]


async def consume(start: Start) -> None:
    async for _ in start():
        pass


async def by_cancelling(start: Start, ready: Ready) -> None:
    task = asyncio.ensure_future(consume(start))
    await ready()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_a_timeout(start: Start, ready: Ready) -> None:
    async def patient() -> None:
        async with asyncio.timeout(None) as limit:
            limits.append(limit)
            await consume(start)

    limits: list[asyncio.Timeout] = []
    task = asyncio.ensure_future(patient())
    await ready()
    limits[0].reschedule(asyncio.get_running_loop().time())
    with pytest.raises(TimeoutError):
        await task


async def by_dropping(start: Start, ready: Ready) -> None:
    stream = start()
    await ready()
    del stream
    gc.collect()


async def by_closing(start: Start, ready: Ready) -> None:
    async with start():
        await ready()


async def by_a_break(start: Start, ready: Ready) -> None:
    """Behind the first output."""
    waiting = asyncio.ensure_future(ready())
    async for _ in start():
        await waiting
        break


async def by_a_dropped_generator(start: Start, ready: Ready) -> None:
    """Of the application; nothing calls its aclose but the loop. Behind the first output."""

    async def pieces() -> AsyncIterator[int]:
        async for output in start():
            yield len(output.outputs)

    waiting = asyncio.ensure_future(ready())
    generator = pieces()
    await anext(generator)
    await waiting
    del generator
    gc.collect()


AT_ONCE = [by_cancelling, by_a_timeout, by_dropping, by_closing]
BEHIND_AN_OUTPUT = [by_a_break, by_a_dropped_generator]


async def is_gone(engine: Engine, before: dict[str, Any]) -> None:
    """The request leaves no trace within one step, and nothing is computed for it after that.

    before: the counts when there were the other streams alone.
    """
    frontend = engine.llm._engine._frontend
    with anyio.fail_after(20):
        while frontend.statistics()["num_requests"] > NUM_OTHERS:
            await anyio.sleep(0.002)
    # The scheduler knows of the end. Nothing that this request had may need more than the step in flight.
    await engine.step()
    after = await engine.counts()
    assert after["num_running"] == NUM_OTHERS
    assert after["num_waiting"] == after["num_blocked"] == 0
    grown = sum(-(-(3 + len(tokens) + 2) // 32) for tokens in engine.tokens)
    assert after["kv"]["num_blocks"] - after["kv"]["num_free"] <= grown, "it keeps blocks"
    await engine.step(5)
    later = await engine.counts()
    assert later["num_prefill_tokens"] == after["num_prefill_tokens"], "its prompt is computed on"
    assert later["num_output_tokens"] - after["num_output_tokens"] == 5 * NUM_OTHERS, "it is given tokens"
    assert later["num_wasted_tokens"] == after["num_wasted_tokens"]
    assert later["num_failed_steps"] == before["num_failed_steps"]


# Where the request is -------------------------------------------------------------------------------------------------


@TOPOLOGIES_AND_SEQUENCES
async def test_while_it_waits_for_a_slot(tmp_path: Path, topology: str, n: int) -> None:
    async with engine_of(tmp_path, topology, max_num_seqs=NUM_OTHERS) as engine:
        for leave in AT_ONCE:
            before = await engine.counts()
            start = lambda: engine.generate(engine.new_prompt(40), endless(9, n=n))  # noqa: E731
            await leave(start, lambda: engine.until(lambda counts: counts["num_waiting"] == n))
            await is_gone(engine, before)
            after = await engine.counts()
            assert after["num_prefill_tokens"] == before["num_prefill_tokens"], "it has never had a slot"


@TOPOLOGIES_AND_SEQUENCES
async def test_in_the_middle_of_its_prompt(tmp_path: Path, topology: str, n: int) -> None:
    async with engine_of(tmp_path, topology, max_num_batched_tokens=34) as engine:
        for leave in AT_ONCE:
            before = await engine.counts()

            async def some_chunks(before: dict[str, Any] = before) -> None:
                await engine.until(lambda counts: counts["num_running"] + counts["num_waiting"] >= NUM_OTHERS + n)
                while (await engine.counts())["num_prefill_tokens"] < before["num_prefill_tokens"] + 64:
                    await engine.step()

            start = lambda: engine.generate(engine.new_prompt(300), endless(9, n=n))  # noqa: E731
            await leave(start, some_chunks)
            await is_gone(engine, before)
            after = await engine.counts()
            computed = after["num_prefill_tokens"] - before["num_prefill_tokens"]
            assert 64 <= computed < 64 + 4 * 32, "the rest of its prompt was computed"


@TOPOLOGIES_AND_SEQUENCES
async def test_while_it_is_given_tokens(tmp_path: Path, topology: str, n: int) -> None:
    async with engine_of(tmp_path, topology) as engine:
        for leave in AT_ONCE + BEHIND_AN_OUTPUT:
            before = await engine.counts()

            async def some_tokens(before: dict[str, Any] = before) -> None:
                await engine.until(lambda counts: counts["num_running"] + counts["num_waiting"] >= NUM_OTHERS + n)
                steps = 0
                while (await engine.counts())["num_running"] < NUM_OTHERS + n or steps < 4:
                    await engine.step()
                    steps += 1

            start = lambda: engine.generate(engine.new_prompt(40), endless(9, n=n))  # noqa: E731
            await leave(start, some_tokens)
            await is_gone(engine, before)


@contextmanager
def held(patch: pytest.MonkeyPatch, cls: type, name: str) -> Iterator[tuple[threading.Event, list[int]]]:
    """Calls of a method wait: (they may go on, one entry for each)."""
    right, may_go_on, calls = getattr(cls, name), threading.Event(), []

    def later(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        assert may_go_on.wait(30)
        return right(*arguments, **more)

    patch.setattr(cls, name, later)
    try:
        yield may_go_on, calls
    finally:
        may_go_on.set()


@TOPOLOGIES
async def test_while_its_prompt_is_read_or_waits_to_be(
    tmp_path: Path, topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        job_queue, "ORDER_GRACE_S", 60
    )  # none overtakes it, however long the collections of garbage take
    async with engine_of(tmp_path, topology) as engine:
        frontend = engine.llm._engine._frontend

        def intake() -> dict[str, Any]:
            found: dict[str, Any] = engine.llm._engine.statistics()["intake"]
            return found

        for n in (1, 4):
            for leave in AT_ONCE:
                before, last = await engine.counts(), frontend.last_rid
                with monkeypatch.context() as patch, held(patch, Tokenizer, "encode") as (may_go_on, calls):
                    start = lambda: engine.generate("Once upon a time", endless(9, n=n))  # noqa: B023, E731
                    is_read = anyio.Event()
                    async with anyio.create_task_group() as tasks:
                        for _ in range(4):
                            tasks.start_soon(leave, start, is_read.wait)  # type: ignore[arg-type]
                        with anyio.fail_after(20):
                            while (intake()["num_busy"], intake()["num_waiting"]) != (1, 3):
                                await anyio.sleep(0.002)
                        is_read.set()
                    may_go_on.set()
                    with anyio.fail_after(20):
                        while intake()["num_busy"] or intake()["num_waiting"]:
                            await anyio.sleep(0.002)
                    assert len(calls) == 1, "a prompt was read that nothing waited for"
                await is_gone(engine, before)
                assert frontend.last_rid == last, "a request that had gone was submitted"


async def test_what_was_read_before_the_end_was_seen_is_not_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The intake looks for requests that have gone; here it looks too late."""
    monkeypatch.setattr(tokenizer_pool, "WATCH_INTERVAL_S", 60)
    monkeypatch.setattr(tokenizer_pool.TokenizerPool, "look", lambda _: None)
    async with engine_of(tmp_path, "inline") as engine:
        frontend = engine.llm._engine._frontend
        last = frontend.last_rid
        with held(monkeypatch, Tokenizer, "encode") as (may_go_on, calls):
            stream = engine.generate("Once upon a time", endless(9))
            with anyio.fail_after(20):
                while not calls:
                    await anyio.sleep(0.002)
            stream.abort()
            may_go_on.set()
            (output,) = [output async for output in stream]
            assert output.outputs[0].finish_reason == "abort"
        assert frontend.last_rid == last


async def test_while_its_grammar_is_compiled_or_waits_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = 0
    async with engine_of(tmp_path, "inline") as engine:
        for n in (1, 4):
            for leave in AT_ONCE:
                before = await engine.counts()
                with monkeypatch.context() as patch, held(patch, GrammarCompiler, "compile") as (may_go_on, calls):
                    streams = []
                    for _ in range(8):  # more than are compiled at a time
                        number += 1
                        grammar = {"regex": f"[a-z]{{{number}}}"}
                        streams.append(engine.generate([5, 6, 7], endless(9, n=n, structured_outputs=grammar)))

                    async def queued() -> None:
                        await engine.until(lambda counts: counts["num_blocked"] == 9 * n)  # noqa: B023

                    number += 1
                    params = endless(9, n=n, structured_outputs={"regex": f"[a-z]{{{number}}}"})
                    await leave(lambda: engine.generate([5, 6, 7], params), queued)  # noqa: B023
                    await engine.until(lambda counts: counts["num_blocked"] == 8 * n)  # noqa: B023
                    num_begun = len(calls)
                    for stream in streams:
                        await stream.aclose()
                    await engine.until(lambda counts: counts["num_blocked"] == 0)
                    may_go_on.set()
                    await engine.until(lambda counts: not counts["grammars"]["num_running"])
                    assert len(calls) == num_begun < 8, "a grammar was compiled that nothing waited for"
                await is_gone(engine, before)
