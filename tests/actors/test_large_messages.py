"""Log-probabilities by the thousand: what is too much for a ring, or for one message, takes longer and harms nobody."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

import actorllm.client.engine_supervisor
from actorllm import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from actorllm.actors.engine_thread import HostLoop
from actorllm.actors.heartbeat import Heartbeat
from actorllm.actors.topology import ActorSpec, LinkSpec, Topology, attached_frontend, engine_topology
from actorllm.actors.worker import WorkerActor
from actorllm.attach import server as attach_server
from actorllm.errors import PeerLostError, RequestFailedError, WouldBlock
from actorllm.messages import StepFailed, StepPlan, StepResult
from tests.actors.launching_runner import Runner as LaunchingRunner
from tests.actors.narrow import OUTPUT_CAPACITY, RESULT_CAPACITY

VOCAB = 4096


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


# A worker whose link is full -------------------------------------------------------------------------------------------


class FullLink:
    """Takes nothing until it is flushed, and never a result of that many tokens."""

    peer = "scheduler"

    def __init__(self, longest: int = 10) -> None:
        self.is_open = True
        self.is_full = True
        self.longest = longest
        self.sent: list[Any] = []
        self.changed = anyio.Event()

    def send_nowait(self, message: Any) -> None:
        if isinstance(message, StepResult) and message.tokens.size > self.longest:
            raise ValueError(f"a message of {message.tokens.size} bytes exceeds the limit of {self.longest}")
        if self.is_full:
            raise WouldBlock("full")
        self.sent.append(message)

    async def wait_flushed(self) -> None:
        await self.changed.wait()
        if not self.is_open:
            raise PeerLostError("gone")

    def flush(self) -> None:
        self.is_full = False
        self.changed.set()

    def close(self) -> None:
        self.is_open = False
        self.changed.set()

    def finish(self) -> None:
        """Nothing has arrived unnoticed."""


class Runner:
    """Samples as many tokens as a plan has prefill slots."""

    launches_ahead = False

    def __init__(self) -> None:
        self.steps: list[int] = []

    def execute(self, plan: StepPlan) -> StepPlan:
        self.steps.append(plan.step)
        return plan

    def sample(self, plan: StepPlan, late: Any) -> StepResult:
        return StepResult(step=plan.step, tokens=plan.prefill_slots)

    def forget_requests(self) -> None:
        """There are none."""


@dataclasses.dataclass
class AtWork:
    worker: WorkerActor
    runner: Runner
    link: FullLink

    async def give(self, *plans: StepPlan, link: FullLink | None = None) -> None:
        for plan in plans:
            self.worker.on_message(link or self.link, plan)  # type: ignore[arg-type]
        self.worker.on_batch()
        await anyio.wait_all_tasks_blocked()


async def with_worker(check: Callable[[AtWork], Any], longest: int = 10) -> None:
    worker, runner, link = WorkerActor(), Runner(), FullLink(longest)
    worker.runner = runner  # type: ignore[assignment]
    worker.heartbeat = Heartbeat.of_thread()
    worker._wakeup = HostLoop.current().waiter()
    worker.on_link(link)  # type: ignore[arg-type]
    worker.is_running = True
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run)
        await check(AtWork(worker, runner, link))
        worker.is_running = False
        worker.wake()


async def test_no_step_begins_before_the_result_of_the_last_one_has_room() -> None:
    async def check(at_work: AtWork) -> None:
        worker, runner, link = at_work.worker, at_work.runner, at_work.link
        await at_work.give(StepPlan(step=1), StepPlan(step=2))
        assert (runner.steps, link.sent) == ([1], [])
        assert worker.heartbeat is not None
        assert worker.heartbeat.read().step == 0, "what takes so long is no step"
        link.flush()
        await anyio.wait_all_tasks_blocked()
        assert runner.steps == [result.step for result in link.sent] == [1, 2]

    await with_worker(check)


async def test_a_scheduler_that_dies_meanwhile_is_waited_for_no_more() -> None:
    async def check(at_work: AtWork) -> None:
        await at_work.give(StepPlan(step=1), StepPlan(step=2))
        at_work.link.close()
        await anyio.wait_all_tasks_blocked()
        other = FullLink()
        other.flush()
        at_work.worker.on_link(other)  # type: ignore[arg-type]
        await at_work.give(StepPlan(step=1), link=other)
        assert at_work.runner.steps == [1, 1]
        assert [result.step for result in other.sent] == [1]
        assert at_work.link.sent == []

    await with_worker(check)


async def test_a_result_longer_than_any_message_fails_its_step_only() -> None:
    async def check(at_work: AtWork) -> None:
        at_work.link.flush()
        large = StepPlan(step=1, prefill_slots=np.arange(9, dtype=np.int32))
        await at_work.give(large, StepPlan(step=2))
        failure, result = at_work.link.sent
        assert isinstance(failure, StepFailed)
        assert "its result cannot be sent: a message of 9 bytes" in failure.error
        assert (failure.step, result.step) == (1, 2)

    await with_worker(check, longest=8)


async def test_steps_that_are_launched_ahead_wait_as_well() -> None:
    """The one under way goes on; it is not reported before there is room, and no other is launched."""
    worker, link, runner = WorkerActor(), FullLink(), LaunchingRunner()
    worker.runner = runner  # type: ignore[assignment]
    worker.heartbeat = Heartbeat.of_thread()
    worker._wakeup = HostLoop.current().waiter()
    worker.on_link(link)  # type: ignore[arg-type]
    worker.is_running = True
    runner.launches_ahead = True  # type: ignore[attr-defined]
    runner.statistics = dict  # type: ignore[attr-defined]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run)
        for step in (1, 2, 3):
            worker.on_message(link, StepPlan(step=step))  # type: ignore[arg-type]
        worker.on_batch()
        await anyio.wait_all_tasks_blocked()
        for step in (1, 2):
            runner.handles[step].is_done = True
        worker.wake()
        await anyio.wait_all_tasks_blocked()
        assert runner.asked == [("execute", 1), ("execute", 2), ("finish", 1)]
        assert worker.heartbeat.read().step == 0, "no step takes so long"
        link.flush()
        await anyio.wait_all_tasks_blocked()
        assert [result.step for result in link.sent] == [1, 2]
        assert runner.asked[3:] == [("finish", 2), ("execute", 3)]
        assert worker.heartbeat.read().step == 3
        worker.is_running = False
        worker.wake()


# Whole engines, whose processes take little at a time ------------------------------------------------------------------


@pytest.fixture
def replace_actor(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """An engine built from now on has another actor of this name, and small rings for results and for outputs."""

    def narrowed(link: LinkSpec) -> LinkSpec:
        small = {"capacity_up": RESULT_CAPACITY} if link.name == "workers" else {"capacity_down": OUTPUT_CAPACITY}
        return dataclasses.replace(link, **small)

    def changed(topology: Topology, name: str, kind: str) -> Topology:
        path = f"tests.actors.narrow:{kind}"
        actors = tuple(dataclasses.replace(a, path=path, preload=()) if a.name == name else a for a in topology.actors)
        return dataclasses.replace(topology, actors=actors, links=tuple(map(narrowed, topology.links)))

    def joined(number: int) -> tuple[ActorSpec, LinkSpec]:
        spec, link = attached_frontend(number)
        return spec, narrowed(link)

    def replace(name: str, kind: str) -> None:
        made = lambda config: changed(engine_topology(config), name, kind)  # noqa: E731
        monkeypatch.setattr(actorllm.client.engine_supervisor, "engine_topology", made)
        monkeypatch.setattr(attach_server, "attached_frontend", joined)

    return replace


ARGUMENTS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_model_len": 64, "max_logprobs": -1}


def generate(prompts: list[list[int]], params: list[SamplingParams], **arguments: Any) -> list[RequestOutput]:
    with LLM("storyteller", **(ARGUMENTS | arguments)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.health().num_recoveries == 0
    return outputs


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Every token, text and log-probability."""
    for output, want in zip(outputs, expected, strict=True):
        assert [(o.token_ids, o.text) for o in output.outputs] == [(o.token_ids, o.text) for o in want.outputs]
        pairs = [(output.prompt_logprobs, want.prompt_logprobs)]
        pairs += [(o.logprobs, w.logprobs) for o, w in zip(output.outputs, want.outputs, strict=True)]
        for found, wanted in pairs:
            assert (found is None) == (wanted is None)
            for entries, others in zip(found or (), wanted or (), strict=True):
                assert (entries is None) == (others is None)
                if entries is not None and others is not None:
                    assert entries.keys() == others.keys()
                    assert next(iter(entries)) == next(iter(others))
                    assert [e.decoded_token for e in entries.values()] == [
                        others[token].decoded_token for token in entries
                    ]
                    values = [[of[token].logprob for token in entries] for of in (entries, others)]
                    np.testing.assert_allclose(*values, atol=1e-3)


def test_results_wait_for_their_ring(replace_actor: Callable[[str, str], None]) -> None:
    """Of sampled tokens and of prompts. A result is many times the ring, and the next one is there before it is read."""
    prompts = [[i + 1, 5, 7] for i in range(6)]
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=-1) for _ in range(3)]
    params += [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=-1) for _ in range(3)]
    expected = generate(prompts, params, topology="inline")
    replace_actor("worker0", "NarrowWorkerActor")
    assert_same(generate(prompts, params), expected)


def test_outputs_too_long_for_one_message_are_several(replace_actor: Callable[[str, str], None]) -> None:
    """Rows of many requests, tokens that were held back for the end, log-probabilities of a prompt; stops in between."""
    prompts = [[i + 1, 5, 7] for i in range(8)]
    kinds: list[dict[str, Any]] = [
        {"logprobs": -1},
        {"logprobs": -1, "temperature": 1.0},
        {"prompt_logprobs": -1, "logprobs": 3, "n": 2, "temperature": 1.0},
        {},
        {"logprobs": -1, "detokenize": False},
        {"logprobs": 5},
        {"logprobs": -1, "stop": ["e"]},
        {"prompt_logprobs": -1},
    ]
    default = {"temperature": 0.0, "max_tokens": 7, "ignore_eos": True}
    params = [SamplingParams(**default | {"seed": i} | kind) for i, kind in enumerate(kinds)]
    expected = generate(prompts, params, topology="inline")
    assert expected[6].outputs[0].finish_reason == "stop"
    replace_actor("scheduler", "NarrowSchedulerActor")
    assert_same(generate(prompts, params), expected)


async def stream(llm: AsyncLLM, prompt: list[int], interval: int) -> tuple[list[int], list[Any]]:
    """The tokens and their log-probabilities, as they come."""
    params = SamplingParams(
        temperature=0,
        max_tokens=9,
        ignore_eos=True,
        logprobs=-1,
        stream_interval=interval,
        output_kind=RequestOutputKind.DELTA,
    )
    tokens: list[int] = []
    logprobs: list[Any] = []
    async for output in llm.generate(prompt, params):
        tokens += output.outputs[0].token_ids
        logprobs += output.outputs[0].logprobs or []
        assert len(tokens) == len(logprobs)
    return tokens, logprobs


async def test_streams_of_guests_are_split_as_well(replace_actor: Callable[[str, str], None]) -> None:
    params = [SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=-1)] * 4
    expected = generate([[i + 1, 5, 7] for i in range(4)], params, topology="inline")
    replace_actor("scheduler", "NarrowSchedulerActor")
    owner = AsyncLLM("storyteller", name="large", **ARGUMENTS)
    await owner.start()
    guest = AsyncLLM.attach("large")
    found: dict[int, Any] = {}

    async def run(number: int) -> None:
        found[number] = await stream((owner, guest)[number % 2], [number + 1, 5, 7], interval=(1, 9, 4, 1000)[number])

    try:
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(run, number)
        assert owner.health().num_recoveries == 0
    finally:
        guest.shutdown()
        owner.shutdown()
    for number, output in enumerate(expected):
        tokens, logprobs = found[number]
        want = output.outputs[0]
        assert tokens == want.token_ids
        for entries, others in zip(logprobs, want.logprobs or (), strict=True):
            assert entries.keys() == others.keys()
            values = [[of[token].logprob for token in entries] for of in (entries, others)]
            np.testing.assert_allclose(*values, atol=1e-3)


async def test_output_that_no_message_holds_fails_its_request_only(replace_actor: Callable[[str, str], None]) -> None:
    replace_actor("scheduler", "StrictSchedulerActor")
    owner = AsyncLLM("storyteller", name="strict", **ARGUMENTS)
    await owner.start()
    guest = AsyncLLM.attach("strict")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=-1)
    ends: list[Any] = []

    async def ask(llm: AsyncLLM, params: SamplingParams) -> None:
        try:
            ends.append((await llm.complete([1, 5, 7], params)).outputs[0].token_ids)
        except RequestFailedError as error:
            ends.append(str(error))

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, owner, params)
            tasks.start_soon(ask, guest, greedy)
        await ask(guest, params)
        await ask(owner, greedy)
        await ask(owner, params)
        statistics = (await owner.stats())["scheduler"]
        assert statistics["scheduler"]["num_running"] == 0
        assert statistics["requests"]["finished"] == {"length": 3, "error": 2}
        assert owner.health().num_recoveries == 0
    finally:
        guest.shutdown()
        owner.shutdown()
    failed, streams = [end for end in ends if isinstance(end, str)], [end for end in ends if isinstance(end, list)]
    assert len(failed) == 2
    assert all("its output cannot be sent: a message of" in error for error in failed)
    assert len(streams) == 3
    assert streams[0] == streams[1] == streams[2]
