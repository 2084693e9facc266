"""Actors over the deaths of others: requests that workers die of, workers without a scheduler, a scheduler without workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import actorllm.client.engine_supervisor
from actorllm import AsyncLLM, RequestOutputKind, SamplingParams
from actorllm.actors import frontend as frontend_module
from actorllm.actors.engine_thread import HostLoop
from actorllm.actors.executor import FairExecutor
from actorllm.actors.frontend import Delta, FrontendActor
from actorllm.actors.record_file import read_recording
from actorllm.config import EngineConfig
from actorllm.errors import (
    EngineDeadError,
    EngineShutdownError,
    PeerLostError,
    PeerRestartedError,
    RequestFailedError,
    WouldBlock,
)
from actorllm.messages import NO_I32, Abort, LateInputs, Outputs, ProbeGroup, StepResult, Submit
from actorllm.supervision.death import OUT_OF_MEMORY_HINT
from actorllm.supervision.restart import RestartLimits
from tests.actors import deadly_policies
from tests.actors.scheduler_bench import FakeLink, running
from tests.actors.scheduler_bench import submit as submit_of
from tests.actors.scripted_topology import with_workers
from tests.actors.scripted_worker import DEADLY, VOCAB
from tests.actors.worker_bench import make_worker, plan_for
from tests.scheduling.chained_tokens import SIBLING, reference_stream


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


# Whole engines over scripted workers -----------------------------------------------------------------------------------


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AsyncLLM]]:
    quick = RestartLimits(first_delay_s=0.01)
    monkeypatch.setattr(actorllm.client.engine_supervisor, "engine_topology", with_workers("DeadlyWorkerActor"))
    monkeypatch.setattr(actorllm.client.engine_supervisor, "RestartLimits", lambda: quick)
    llms: list[AsyncLLM] = []

    def make(**arguments: Any) -> AsyncLLM:
        llms.append(AsyncLLM("storyteller", max_num_seqs=16, **arguments))
        return llms[-1]

    yield make
    for llm in llms:
        llm.shutdown()


@pytest.fixture
def llm(make_llm: Callable[..., AsyncLLM]) -> AsyncLLM:
    return make_llm()


PROMPT = [5, 6, 7]


def params_of(max_tokens: int | None = 30, seed: int = 1, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed, detokenize=False, **more)


def endless() -> SamplingParams:
    return params_of(None, output_kind=RequestOutputKind.DELTA)


async def tokens_of(llm: AsyncLLM, prompt: list[int], seed: int = 1, max_tokens: int = 30) -> list[int]:
    return (await llm.complete(prompt, params_of(max_tokens, seed))).outputs[0].token_ids


async def kill(llm: AsyncLLM, *names: str) -> None:
    """Returns when the engine has noticed."""
    pids = llm._engine.pids
    for name in names:
        os.kill(pids[name], signal.SIGKILL)
    while llm.health().num_recoveries == 0 and llm.health().state == "running":
        await anyio.sleep(0.001)
    while llm.health().state == "running" and any(llm._engine.pids.get(name) == pids[name] for name in names):
        await anyio.sleep(0.001)


async def scheduler_of(llm: AsyncLLM) -> dict[str, Any]:
    counts: dict[str, Any] = (await llm.stats())["scheduler"]["scheduler"]
    return counts


async def test_whoever_comes_after_the_end_hears_all_of_it(
    make_llm: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actorllm.client.engine_supervisor, "RestartLimits", lambda: RestartLimits(max_deaths=1))
    llm = make_llm()
    await llm.start()
    os.kill(llm._engine.pids["scheduler"], signal.SIGKILL)
    while not llm.errored:
        await anyio.sleep(0.001)
    expected = [
        OUT_OF_MEMORY_HINT,
        "The engine was not restarted: these were 1 deaths in a row without one token in between.",
    ]
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="scheduler was killed by signal 9") as caught:
            await llm.check_health()
        assert caught.value.__notes__ == expected


async def test_aborts_and_new_requests_while_nothing_runs(llm: AsyncLLM) -> None:
    streams = [llm.generate(PROMPT, endless(), request_id=str(i)) for i in range(4)]
    for stream in streams:
        await stream.__anext__()
    await kill(llm, "scheduler", "worker0")
    assert llm.health().state == "recovering"
    await llm.check_health()  # it is not dead
    await llm.abort("0")
    await streams[1].aclose()
    del streams[2]
    assert (await llm.stats())["scheduler"] is not None, "it waits for the next scheduler"
    assert await tokens_of(llm, PROMPT) == reference_stream(PROMPT, 1, 30, VOCAB)
    *_, last = [output async for output in streams[0]]
    assert last.outputs[0].finish_reason == "abort"
    await streams[2].__anext__()
    await llm.abort("3")
    *_, last = [output async for output in streams[2]]
    assert last.metrics is not None
    assert last.metrics.num_recoveries == 1
    assert 0 < last.metrics.recovery_time < 30
    assert last.metrics.first_token_ts < last.metrics.last_token_ts
    assert (await llm.stats())["frontend"]["num_requests"] == 0


@pytest.mark.parametrize("victims", [("worker0",), ("scheduler",), ("scheduler", "worker0")])
async def test_every_sequence_of_a_request_goes_on(llm: AsyncLLM, victims: tuple[str, ...]) -> None:
    """Killed with the first token of the first one, when some have none yet, and in the middle."""
    # As many tokens as do not all come while this process waits for a core; this seed draws none that the workers die of.
    params = params_of(600, seed=5, n=4, output_kind=RequestOutputKind.DELTA)
    prompt = list(range(5, 75))
    tokens: list[list[int]] = [[] for _ in range(4)]
    kills_at = [1, 150]
    async for output in llm.generate(prompt, params):
        for one in output.outputs:
            tokens[one.index] += one.token_ids
        if kills_at and sum(map(len, tokens)) >= kills_at[0]:
            kills_at.pop(0)
            killed = {name: llm._engine.pids[name] for name in victims}
            for pid in killed.values():
                os.kill(pid, signal.SIGKILL)
            # Until others have their place. A restart is counted while the pid is still that of the killed process.
            while any(llm._engine.pids.get(name, pid) == pid for name, pid in killed.items()):
                await anyio.sleep(0.001)
    assert not kills_at
    assert all(llm.health().actors[name].num_restarts == 2 for name in victims)
    for index in range(4):
        assert tokens[index] == reference_stream(prompt, 5 + SIBLING * index, 600, VOCAB), f"sequence {index}"


async def test_what_is_told_at_the_end_is_not_computed_again_from_the_prompt(llm: AsyncLLM) -> None:
    stream = llm.generate(PROMPT, params_of(600, output_kind=RequestOutputKind.FINAL_ONLY))
    await llm.start()
    journal = llm._engine._frontend._journal
    while not journal or len(next(iter(journal.values())).emitted) < 100:
        await anyio.sleep(0.001)
    os.kill(llm._engine.pids["scheduler"], signal.SIGKILL)
    (output,) = [output async for output in stream]
    assert output.outputs[0].token_ids == reference_stream(PROMPT, 1, 600, VOCAB)
    assert llm.health().num_recoveries == 1
    assert (await scheduler_of(llm))["num_output_tokens"] <= 500


@pytest.mark.parametrize("mode", ["wait", "keep"])
async def test_a_pause_outlives_the_scheduler(llm: AsyncLLM, mode: Any) -> None:
    if mode == "keep":
        running_on = llm.generate(PROMPT, endless())
        await running_on.__anext__()
    await llm.pause_generation(mode=mode)
    waiting = llm.generate(PROMPT, params_of(3))
    await kill(llm, "scheduler")
    assert await llm.is_paused()
    while (await scheduler_of(llm))["num_waiting"] < 1 + (mode == "keep"):
        await anyio.sleep(0.001)
    statistics = await scheduler_of(llm)
    assert (statistics["num_running"], statistics["num_output_tokens"]) == (0, 0)
    await llm.resume_generation()
    *_, last = [output async for output in waiting]
    assert len(last.outputs[0].token_ids) == 3
    assert not await llm.is_paused()


async def test_the_timeline_tells_of_it(llm: AsyncLLM) -> None:
    await llm.start()
    ask = llm._engine.ask_scheduler
    ask("start_timeline").result(10)
    for victim in ("scheduler", "worker0"):
        await tokens_of(llm, PROMPT, max_tokens=4)
        await kill(llm, victim)
    await tokens_of(llm, PROMPT, max_tokens=4)
    events = [event for event in ask("take_timeline").result(10) if event["ph"] == "i"]
    at = {event["name"]: event["ts"] for event in events}
    assert 0 < at["scheduler linked"] - at["scheduler lost"] < 60e6, "by one clock"
    marks = [event["name"] for event in events]
    assert marks[-1] == "workers linked"
    marks = [mark for mark in marks if mark != "workers linked"]  # those of the first time may be from before it began
    assert marks == ["scheduler lost", "scheduler linked", "workers lost"]


async def test_every_life_of_a_scheduler_has_a_recording(make_llm: Callable[..., AsyncLLM], tmp_path: Path) -> None:
    file = tmp_path / "recording"
    llm = make_llm(record=str(file))
    await tokens_of(llm, PROMPT, max_tokens=200)
    await kill(llm, "scheduler")
    await tokens_of(llm, PROMPT, max_tokens=200)
    llm.shutdown()
    assert sorted(os.listdir(tmp_path)) == ["recording", "recording.2"]
    assert next(iter(read_recording(file)))[0] == "submit 0", "up to where it was killed"
    assert sum(call == "update" for call, _, _ in read_recording(tmp_path / "recording.2")) == 200


async def test_a_parked_process_takes_the_place_of_a_dead_one(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm(standby_worker=True)
    expected = reference_stream(PROMPT, 1, 30, VOCAB)
    assert await tokens_of(llm, PROMPT) == expected
    standby = llm._engine._supervisor._standby  # type: ignore[union-attr]
    assert standby is not None
    for _ in range(2):
        while not standby.num_parked:
            await anyio.sleep(0.005)
        (parked,) = standby._parked
        await kill(llm, "worker0")
        assert await tokens_of(llm, PROMPT) == expected
        assert llm._engine.pids["worker0"] == parked.pid
    while not standby.num_parked:
        await anyio.sleep(0.005)
    (parked,) = standby._parked
    os.kill(parked.pid or 0, signal.SIGKILL)  # nobody notices, and another one is parked
    while not standby.num_parked or standby._parked[0] is parked:
        await anyio.sleep(0.005)
    llm.shutdown()
    assert standby.num_parked == 0
    assert llm._engine.pids == {}


# Requests that the workers die of -------------------------------------------------------------------------------------


async def test_a_deadly_request_fails_and_nobody_else(llm: AsyncLLM) -> None:
    await llm.start()
    results: dict[int, Any] = {}

    async def one(number: int) -> None:
        prompt = [5, DEADLY if number == 3 else 6, 7 + number]
        try:
            results[number] = await tokens_of(llm, prompt, seed=number)
        except RequestFailedError as error:
            results[number] = error

    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(one, number)
    error = results.pop(3)
    assert isinstance(error, RequestFailedError)
    assert str(error).startswith(
        "the workers died 2 times while they ran this request alone; the last time worker0 was"
    )
    for number, tokens in results.items():
        assert tokens == reference_stream([5, 6, 7 + number], number, 30, VOCAB)
    scheduler = (await llm.stats())["scheduler"]["scheduler"]
    assert scheduler["num_worker_losses"] <= 9
    assert scheduler["num_suspects"] == 0
    assert llm.health().state == "running"


async def test_several_deadly_requests_fail_and_nobody_else(llm: AsyncLLM) -> None:
    """Although it takes more deaths in a row than the engine would outlive otherwise."""
    bad = (0, 2, 3)
    await llm.start()
    ends: dict[int, Any] = {}

    async def one(number: int) -> None:
        try:
            ends[number] = await tokens_of(llm, [5, DEADLY if number in bad else 6, 7 + number], seed=number)
        except RequestFailedError as error:
            ends[number] = error

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(one, number)
    for number, end in ends.items():
        if number in bad:
            assert isinstance(end, RequestFailedError)
        else:
            assert end == reference_stream([5, 6, 7 + number], number, 30, VOCAB)
    assert len(ends) == 4
    assert llm.health().state == "running"


# Requests that schedulers die of ---------------------------------------------------------------------------------------


POLICIES = "tests.actors.deadly_policies"


@pytest.mark.parametrize("moment", ["WhenItComes", "WhenItStarts", "WhenItHasAToken"])
async def test_a_request_that_schedulers_die_of_fails_and_nobody_else(
    make_llm: Callable[..., AsyncLLM], moment: str
) -> None:
    llm = make_llm(scheduling_policy=f"{POLICIES}:{moment}")
    await llm.start()
    ends: dict[int, Any] = {}
    lengths = [60, 200, 30, 30, 400, 30]

    async def one(number: int) -> None:
        prompt = [5, deadly_policies.DEADLY if number == 3 else 6, 7 + number]
        try:
            ends[number] = await tokens_of(llm, prompt, number, lengths[number])
        except RequestFailedError as error:
            ends[number] = error

    async with anyio.create_task_group() as tasks:
        for number in range(6):
            tasks.start_soon(one, number)
    error = ends.pop(3)
    assert isinstance(error, RequestFailedError)
    assert str(error).startswith(
        "the scheduler died 2 times while it had this request alone; the last time scheduler was"
    )
    for number, tokens in ends.items():
        assert tokens == reference_stream([5, 6, 7 + number], number, lengths[number], VOCAB)
    assert llm.health().state == "running"
    assert llm.health().num_recoveries <= 8
    assert await tokens_of(llm, PROMPT) == reference_stream(PROMPT, 1, 30, VOCAB)
    assert (await llm.stats())["scheduler"]["num_held_requests"] == 0


async def test_a_scheduler_that_dies_of_everything_is_the_end_of_the_engine(make_llm: Callable[..., AsyncLLM]) -> None:
    """With the error of the process, and no request is blamed: a scheduler dies of one of its own before it tries others."""
    llm = make_llm(scheduling_policy=f"{POLICIES}:Always")
    await llm.start()
    errors: list[BaseException] = []

    async def one(number: int) -> None:
        try:
            await tokens_of(llm, [5, number])
        except Exception as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        for number in range(16):
            tasks.start_soon(one, number)
    assert len(errors) == 16
    assert all(isinstance(error, EngineDeadError) for error in errors)
    assert str(errors[0]) == "scheduler was killed by signal 9 (SIGKILL)"


def harmless_seed(prompt: list[int], num_tokens: int) -> int:
    """Of a stream whose tokens do nothing to scripted workers when they are computed again."""
    return next(s for s in range(100) if max(reference_stream(prompt, s, num_tokens, VOCAB)) < deadly_policies.DEADLY)


async def test_a_request_of_an_attached_program_that_schedulers_die_of_fails_and_nobody_else(
    make_llm: Callable[..., AsyncLLM],
) -> None:
    """While the owner has requests with tokens in every life. Its four sequences are one request, with one record."""
    llm = make_llm(scheduling_policy=f"{POLICIES}:WhenItStarts", name="custody")
    await llm.start()
    guest = AsyncLLM.attach("custody")
    try:
        await guest.start()
        ends: dict[int, list[int]] = {}
        are_running = anyio.Event()
        seeds = [harmless_seed([5, 6, 7 + number], 400) for number in range(6)]

        async def one(number: int) -> None:
            prompt, tokens = [5, 6, 7 + number], []
            params = params_of(400, seeds[number], output_kind=RequestOutputKind.DELTA)
            async for output in (llm, llm, guest)[number % 3].generate(prompt, params):
                tokens += output.outputs[0].token_ids
                are_running.set()
            ends[number] = tokens

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(one, number)
            await are_running.wait()
            with pytest.raises(RequestFailedError, match="died 2 times while it had this request alone"):
                await guest.complete([5, deadly_policies.DEADLY, 9], params_of(30, n=4))
        for number, tokens in ends.items():
            assert tokens == reference_stream([5, 6, 7 + number], seeds[number], 400, VOCAB)
        assert len(ends) == 6
        assert llm.health().num_recoveries <= 6
        assert await tokens_of(guest, PROMPT) == reference_stream(PROMPT, 1, 30, VOCAB)
    finally:
        guest.shutdown()


async def test_who_is_held_back_can_be_aborted() -> None:
    """While no worker is there, without which no suspect is tried."""
    async with running() as bench:
        bench.workers.lost = PeerRestartedError("killed")  # type: ignore[attr-defined]
        bench.actor.on_peer_lost(bench.workers)  # type: ignore[arg-type]
        bench.frontend = FakeLink("frontend")
        bench.frontend.generation = 2
        bench.actor.on_link(bench.frontend)  # type: ignore[arg-type]
        await bench.send(submit_of(1, num_deaths=1, is_resumed=True))
        await bench.send(submit_of(2, is_resumed=True))
        await bench.send(submit_of(3))
        assert len(bench.actor._probes) == 3, "there may be more suspects to come"
        await bench.send(Abort(rids=NO_I32))
        groups = [message for message in bench.frontend.sent if isinstance(message, ProbeGroup)]
        assert [(t.rids.tolist(), t.size, t.is_alone) for t in groups] == [([], 1, False)]
        assert len(bench.actor._probes) == 3
        bench.frontend.sent.clear()
        await bench.send(Abort(rids=np.array([2], np.int32)))
        assert bench.ends() == [[2, "abort", None, None]]
        bench.actor.answer("abort_all", {})
        await bench.settle()
        assert bench.actor.scheduler.is_idle
        assert sorted(int(rid) for message in bench.outputs for rid in message.rids) == [1, 2, 3]


async def test_nobody_begins_a_search_who_has_nothing_to_submit_again() -> None:
    """What an attached program says of its requests holds up no others."""
    async with running() as bench:
        bench.frontend = FakeLink("attached0")
        bench.actor.on_link(bench.frontend)  # type: ignore[arg-type]
        await bench.send(submit_of(1, num_deaths=3, is_resumed=True, max_tokens=6, detokenize=False))
        await bench.send(submit_of(2, max_tokens=6, detokenize=False))
        assert not bench.actor._probes
        await bench.work()
        told = [message for message in bench.outputs if isinstance(message, Outputs)]
        assert sorted(int(message.rids[end[0]]) for message in told for end in message.ends) == [1, 2]


async def test_a_suspect_that_cannot_run_holds_up_nobody() -> None:
    async with running() as bench:
        bench.frontend = FakeLink("frontend")
        bench.frontend.generation = 2
        bench.actor.on_link(bench.frontend)  # type: ignore[arg-type]
        await bench.send(submit_of(1, num_deaths=1, is_resumed=True, blocked_on="grammar"))
        await bench.send(submit_of(2, max_tokens=6, detokenize=False))
        await bench.send(Abort(rids=NO_I32))
        await bench.work()
        told = [message for message in bench.outputs if isinstance(message, Outputs)]
        assert [t for message in told for t in message.tokens.tolist()] == reference_stream([0, 502], 2, 6, 4096)


async def test_to_make_the_grammar_of_a_suspect_is_part_of_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may die of it: until it is made nobody else is tried, not even as one that would be alone."""
    async with running() as bench:
        may_begin = False
        queue: FairExecutor[Any] = FairExecutor("grammars", bool, has_room=lambda _: may_begin)
        bench.actor._constraints._queue = queue
        monkeypatch.setattr(bench.actor, "waker", lambda: bool)
        bench.frontend = FakeLink("frontend")
        bench.frontend.generation = 2
        bench.actor.on_link(bench.frontend)  # type: ignore[arg-type]
        grammar = {"kind": "regex", "text": "[a-z ]+", "source": "a test"}
        await bench.send(submit_of(1, num_deaths=1, probe_size=1, is_resumed=True, detokenize=False, grammar=grammar))
        await bench.send(submit_of(2, num_deaths=1, probe_size=1, is_resumed=True, detokenize=False))
        await bench.send(Abort(rids=NO_I32))
        assert queue.statistics().num_waiting == 1
        assert len(bench.actor._probes) == 1
        assert not bench.plans
        groups = [message for message in bench.frontend.sent if isinstance(message, ProbeGroup)]
        assert [(t.rids.tolist(), t.is_alone) for t in groups] == [([], False), ([1], True)]
        may_begin = True
        while queue.statistics().num_waiting or queue.statistics().num_running:
            with queue._changed:
                queue._changed.notify_all()
        bench.actor.wake()
        await bench.settle()
        assert len(bench.plans) > 0
        assert len(bench.actor._probes) == 1, "now it is in a step"


# A worker without a scheduler -----------------------------------------------------------------------------------------


async def test_a_worker_forgets_the_requests_of_a_dead_scheduler() -> None:
    worker, first, scheduler = make_worker(0)
    worker.on_link(first)  # type: ignore[arg-type]
    worker.on_message(first, plan_for(scheduler))  # type: ignore[arg-type]
    assert await worker.turn()
    assert len(first.sent) == 1
    worker.on_message(first, plan_for(scheduler))  # type: ignore[arg-type]
    first.is_open = False
    worker.on_peer_lost(first)  # type: ignore[arg-type]
    assert await worker.turn()
    assert len(first.sent) == 1, "nobody would hear it"
    assert worker.runner.worker.rows, "until somebody else has work for it, it does nothing"  # type: ignore[attr-defined]
    _, second, other = make_worker(0)
    worker.on_link(second)  # type: ignore[arg-type]
    worker.on_message(second, plan_for(other))  # type: ignore[arg-type]
    assert await worker.turn()
    (result,) = second.sent
    assert isinstance(result, StepResult)
    assert len(worker.runner.worker.rows) == 1  # type: ignore[attr-defined]
    assert worker._num_orphaned == 1


async def test_of_several_ranks_each_finishes_what_the_dead_scheduler_had_sent() -> None:
    worker, link, scheduler = make_worker(1)
    worker.is_alone = False
    worker.on_link(link)  # type: ignore[arg-type]
    worker.on_message(link, plan_for(scheduler))  # type: ignore[arg-type]
    link.is_open = False
    assert await worker.turn()
    assert worker.runner.worker.rows, "the others may wait for it in this step"  # type: ignore[attr-defined]
    assert link.sent == []


async def test_a_step_whose_late_inputs_never_come_is_left() -> None:
    worker, link, scheduler = make_worker(0)
    worker.on_link(link)  # type: ignore[arg-type]
    worker.on_message(link, plan_for(scheduler, needs_late_inputs=True))  # type: ignore[arg-type]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.turn)
        await anyio.wait_all_tasks_blocked()
        link.is_open = False
        worker.on_peer_lost(link)  # type: ignore[arg-type]
    assert link.sent == []
    _, second, other = make_worker(0)
    worker.on_link(second)  # type: ignore[arg-type]
    worker.on_message(second, plan_for(other, needs_late_inputs=True))  # type: ignore[arg-type]
    worker.on_message(second, LateInputs(step=1))  # type: ignore[arg-type]
    assert await worker.turn()
    assert len(second.sent) == 1


async def test_every_death_that_makes_the_search_narrower_is_progress() -> None:
    """The first death of a request proves nothing, the second one finds it at fault, however many came before."""

    def lose() -> None:
        bench.workers.lost = PeerRestartedError("killed")  # type: ignore[attr-defined]
        bench.actor.on_peer_lost(bench.workers)  # type: ignore[arg-type]
        bench.actor.on_link(bench.workers)  # type: ignore[arg-type]

    async with running() as bench:
        counts = []
        for number in range(1, 13):
            await bench.send(submit_of(number, detokenize=False))
            for _ in range(2):
                lose()
                await bench.settle()
            assert bench.ends()[-1][:2] == [number, "error"]
            counts.append(len(bench.progress))
        assert counts == list(range(1, 13))


# A scheduler without workers ------------------------------------------------------------------------------------------


async def test_a_scheduler_goes_on_with_the_next_workers() -> None:
    async with running() as bench:
        await bench.send(submit_of(1, max_tokens=6, detokenize=False))
        for plan in bench.plans[:2]:
            await bench.send(bench.model.run(plan), bench.ranks[0])
        assert bench.progress == [None], "once"
        num_plans = len(bench.plans)
        bench.workers.is_open = False
        bench.workers.lost = PeerRestartedError("killed")  # type: ignore[attr-defined]
        bench.actor.on_peer_lost(bench.workers)  # type: ignore[arg-type]
        await bench.send(submit_of(2, max_tokens=6, detokenize=False))
        assert len(bench.plans) == num_plans, "there is nobody to plan for"
        assert bench.actor.next_deadline() is None
        assert await bench.actor.answer("worker_statistics", {}) == []
        bench.model = type(bench.model)(16, 80, vocab=4096)
        bench.workers.is_open = True
        bench.actor.on_link(bench.workers)  # type: ignore[arg-type]
        await bench.settle()
        await bench.work_from(num_plans)
        assert bench.progress == [None, None]
        streams: dict[int, list[int]] = {1: [], 2: []}
        for outputs in bench.outputs:
            for rid, index, token in zip(outputs.rids, outputs.index, outputs.tokens, strict=True):
                assert index == len(streams[int(rid)])
                streams[int(rid)].append(int(token))
        for rid, stream in streams.items():
            assert stream == reference_stream([0, 500 + rid], rid, 6, 4096)


async def test_what_had_been_reported_counts() -> None:
    async with running(world_size=2) as bench:
        await bench.send(submit_of(1, max_tokens=6, detokenize=False))
        first, second = bench.plans
        result = bench.model.run(first)
        for rank in range(2):
            bench.actor.on_message(bench.ranks[rank], result)  # type: ignore[arg-type]
        bench.actor.on_message(bench.ranks[1], bench.model.run(second))  # type: ignore[arg-type]
        assert bench.tokens() == []
        bench.workers.lost = PeerRestartedError("killed")  # type: ignore[attr-defined]
        bench.actor.on_peer_lost(bench.workers)  # type: ignore[arg-type]
        assert bench.tokens() == result.tokens.tolist(), "of the first step; the second one had one answer of two"
        assert bench.actor.scheduler.num_in_flight == 0
        assert bench.actor._acknowledged == {}


# The journal ----------------------------------------------------------------------------------------------------------


class Caller:
    """A consumer that keeps what it is given."""

    host = None
    wakes_at_end = False

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.error: BaseException | None = None

    def note_version(self, num_tokens: int, version: str) -> None: ...

    def push(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def fail(self, error: BaseException) -> None:
        self.error = error

    def wake(self) -> None:
        pass


def submit(frontend: FrontendActor, caller: Caller, prompt: list[int], **columns: Any) -> int:
    rids: list[int] = []
    frontend.submit(
        lambda rid: Submit(rid=rid, arrival=0.0, prompt=np.array(prompt, np.int32), max_tokens=9, **columns),
        caller,
        rids.append,
    )
    return rids[0]


def outputs_of(rid: int, index: int, *tokens: int, **columns: Any) -> Outputs:
    counts = np.array([len(tokens)], np.int32)
    return Outputs(
        rids=np.array([rid], np.int32),
        index=np.array([index], np.int32),
        tokens=np.array(tokens, np.int32),
        counts=counts,
        **columns,
    )


END = [0, "length", None, None, 0.0, None, None, None, 0, 0, 0, 0, 0.0]


async def test_every_scheduler_gets_the_whole_journal() -> None:
    frontend, first, second = FrontendActor(), FakeLink("scheduler"), FakeLink("scheduler")
    callers = [Caller() for _ in range(4)]
    rids = [submit(frontend, caller, [1, number]) for number, caller in enumerate(callers)]
    frontend.on_link(first)  # type: ignore[arg-type]
    assert [message.rid for message in first.sent] == rids
    frontend.on_message(first, outputs_of(rids[0], 0, 7, emitted=3.0))  # type: ignore[arg-type]
    frontend.on_message(first, outputs_of(rids[0], 1, 8, emitted=4.0))  # type: ignore[arg-type]
    frontend.on_message(first, outputs_of(rids[1], 0, 5, ends=[END]))  # type: ignore[arg-type]
    frontend.abort(rids[2])
    first.is_open = False
    first.lost = PeerRestartedError("killed")  # type: ignore[attr-defined]
    frontend.on_peer_lost(first)  # type: ignore[arg-type]
    assert all(caller.error is None for caller in callers)
    late = Caller()
    rids.append(submit(frontend, late, [9]))
    frontend.abort(rids[3])
    num_sent = len(first.sent)
    frontend.on_link(second)  # type: ignore[arg-type]
    assert len(first.sent) == num_sent
    again = [(type(m), m.rid if isinstance(m, Submit) else m.rids.tolist()) for m in second.sent]
    assert again == [
        (Submit, rids[0]),
        (Submit, rids[2]),
        (Abort, [rids[2]]),
        (Submit, rids[3]),
        (Abort, [rids[3]]),
        (Submit, rids[4]),
    ]
    assert second.sent[0].output.tolist() == [7, 8]
    assert second.sent[0].prompt.tolist() == [1, 0]
    assert [m.first_token for m in second.sent if isinstance(m, Submit)] == [3.0, None, None, None]
    # It goes on where it was; what is repeated does not count twice, and what is left out is found.
    frontend.on_message(second, outputs_of(rids[0], 0, 7, 8))  # type: ignore[arg-type]
    frontend.on_message(second, outputs_of(rids[0], 2, 9))  # type: ignore[arg-type]
    frontend.on_message(second, outputs_of(rids[0], 3, 1, ends=[END]))  # type: ignore[arg-type]
    assert [t for delta in callers[0].deltas for t in delta.tokens] == [7, 8, 9, 1]
    end = callers[0].deltas[-1].end
    assert end is not None
    assert end.num_recoveries == 1
    assert end.recovery_s > 0
    assert frontend._num_resubmitted == 4


async def test_who_asks_while_the_scheduler_is_gone_asks_the_next_one() -> None:
    frontend = FrontendActor()
    frontend._wakeup = HostLoop.current().waiter()
    asked: list[str] = []

    async def ask(link: Any, verb: str, timeout: float = 1.0, **arguments: Any) -> Any:
        asked.append(link.name)
        if link.name == "first":
            raise PeerRestartedError("killed")
        return 42

    frontend.ask = ask  # type: ignore[method-assign]
    first, second = FakeLink("first"), FakeLink("second")
    frontend.on_link(first)  # type: ignore[arg-type]
    first.is_open = False
    first.lost = PeerRestartedError("killed")  # type: ignore[attr-defined]
    answers: list[Any] = []

    async def wait() -> None:
        answers.append(await frontend.ask_scheduler("statistics"))

    async with anyio.create_task_group() as tasks:
        frontend.on_peer_lost(first)  # type: ignore[arg-type]
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert answers == []
        frontend.on_link(second)  # type: ignore[arg-type]
    assert (answers, asked) == ([42], ["second"])


async def test_a_question_comes_after_what_was_submitted_before() -> None:
    """Else a pause would end what the scheduler has, and not what waits here for room."""
    frontend, link, caller = FrontendActor(), FakeLink("scheduler"), Caller()
    frontend._wakeup = HostLoop.current().waiter()
    answers: list[str] = []

    async def ask(link: Any, verb: str, timeout: float = 1.0, **arguments: Any) -> Any:
        link.send_nowait(verb)
        return verb

    async def wait(verb: str) -> None:
        answers.append(await frontend.ask_scheduler(verb))

    frontend.ask = ask  # type: ignore[method-assign]
    frontend.on_link(link)  # type: ignore[arg-type]
    link.is_full = True
    rid = submit(frontend, caller, [1])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, "is_paused")
        await anyio.wait_all_tasks_blocked()
        link.is_full = False  # from here on there would be room for the question
        await anyio.wait_all_tasks_blocked()
        assert (link.sent, answers) == ([], [])
        frontend._flush()
    assert [message.rid if isinstance(message, Submit) else message for message in link.sent] == [rid, "is_paused"]
    assert answers == ["is_paused"]


async def test_a_question_waits_for_room() -> None:
    frontend, link = FrontendActor(), FakeLink("scheduler")
    num_refused = 0

    async def ask(link: Any, verb: str, timeout: float = 1.0, **arguments: Any) -> Any:
        nonlocal num_refused
        if num_refused < 3:
            num_refused += 1
            raise WouldBlock("full")
        return 42

    frontend.ask = ask  # type: ignore[method-assign]
    frontend.on_link(link)  # type: ignore[arg-type]
    with anyio.fail_after(20):
        assert await frontend.ask_scheduler("statistics") == 42


@pytest.mark.parametrize("has_room", [False, True])
async def test_whoever_asks_when_the_engine_ends_hears_why(has_room: bool) -> None:
    """The same as every request, be it that he waits for room or for the answer."""
    frontend, link, caller = FrontendActor(), FakeLink("scheduler"), Caller()
    frontend._wakeup = HostLoop.current().waiter()
    is_asked = anyio.Event()

    async def ask(link: Any, verb: str, timeout: float = 1.0, **arguments: Any) -> Any:
        is_asked.set()
        frontend.fail_all(EngineDeadError("for good"))
        raise PeerLostError("scheduler is gone: for good")

    async def wait() -> None:
        with pytest.raises(EngineDeadError, match=r"^for good$"):
            await frontend.ask_scheduler("statistics")

    frontend.ask = ask  # type: ignore[method-assign]
    frontend.on_link(link)  # type: ignore[arg-type]
    link.is_full = not has_room
    submit(frontend, caller, [1])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert is_asked.is_set() == has_room
        frontend.fail_all(EngineDeadError("for good"))


async def test_every_request_waited_since_its_own_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is served between two deaths, and one that waits for a slot is not."""
    clock = 100.0
    monkeypatch.setattr(frontend_module, "now", lambda: clock)
    frontend, served, waiting = FrontendActor(), Caller(), Caller()
    rids = [submit(frontend, caller, [1]) for caller in (served, waiting)]
    for number in range(2):
        link = FakeLink("scheduler")
        frontend.on_link(link)  # type: ignore[arg-type]
        link.is_open = False
        link.lost = PeerRestartedError("killed")  # type: ignore[attr-defined]
        frontend.on_peer_lost(link)  # type: ignore[arg-type]
        clock += 1
        frontend.on_message(link, outputs_of(rids[0], number, 7))  # type: ignore[arg-type]
        clock += 30
    for rid, index in zip(rids, (2, 0), strict=True):
        frontend.on_message(link, outputs_of(rid, index, 7, ends=[END]))  # type: ignore[arg-type]
    ends = [caller.deltas[-1].end for caller in (served, waiting)]
    assert [(end.num_recoveries, end.recovery_s) for end in ends if end is not None] == [(2, 2.0), (1, 62.0)]
    assert frontend.max_recovery_s == 62.0


async def test_who_joins_while_the_scheduler_is_gone_asks_the_first_one_that_comes() -> None:
    frontend, link = FrontendActor(), FakeLink("scheduler")
    frontend._wakeup = HostLoop.current().waiter()

    async def ask(link: Any, verb: str, timeout: float = 1.0, **arguments: Any) -> Any:
        return link.name, verb

    frontend.ask = ask  # type: ignore[method-assign]
    with pytest.raises(EngineShutdownError, match="the engine is not running"):
        await frontend.ask_scheduler("statistics")
    frontend.is_running = True
    answers: list[Any] = []

    async def wait() -> None:
        answers.append(await frontend.ask_scheduler("statistics"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert answers == []
        frontend.on_link(link)  # type: ignore[arg-type]
    assert answers == [("scheduler", "statistics")]


async def test_an_engine_that_ends_after_all_ends_every_wait() -> None:
    frontend, link, caller = FrontendActor(), FakeLink("scheduler"), Caller()
    frontend.on_link(link)  # type: ignore[arg-type]
    submit(frontend, caller, [1])
    link.is_open = False
    link.lost = PeerRestartedError("killed")  # type: ignore[attr-defined]
    frontend.on_peer_lost(link)  # type: ignore[arg-type]

    async def wait() -> None:
        with pytest.raises(EngineDeadError, match="for good"):
            await frontend.ask_scheduler("statistics")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        frontend.fail_all(EngineDeadError("for good"))
    assert isinstance(caller.error, EngineDeadError)


def test_the_choice_is_checked(tmp_path: Path) -> None:
    assert EngineConfig.from_arguments("storyteller").on_failure == "restart"
    assert EngineConfig.from_arguments("storyteller", on_failure="raise").on_failure == "raise"
    with pytest.raises(ValueError, match="on_failure='ignore' must be one of 'restart', 'raise'"):
        EngineConfig.from_arguments("storyteller", on_failure="ignore")
