"""Streams that outlive a replica: killed, drained or stopped, their tokens are those of an undisturbed run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import actorllm.client.engine_supervisor
import actorllm.fleet.dispatcher
import actorllm.fleet.fleet
from actorllm import LLM, SLO, AsyncLLM, LoRARequest, RequestOutput
from actorllm.errors import EngineDeadError, EngineShutdownError, InvalidParameterError, ReplicaLostError
from actorllm.fleet.replica import Replica, ReplicaFrontend
from actorllm.supervision.restart import RestartLimits
from tests.effort import each_value
from tests.fleet.streams import (
    PROMPTS,
    REQUESTS,
    Told,
    all_run,
    assert_same,
    kill,
    moved,
    params,
    run_all,
    until,
)
from tests.model.adapters.lora_folders import write_adapter

pytestmark = pytest.mark.leaks_by_module


@pytest.fixture(scope="module")
async def fleet() -> AsyncIterator[AsyncLLM]:
    """Restarts are expected to take long and trials are short: else streams may rightly stay where they are."""
    patch = pytest.MonkeyPatch()
    patch.setattr(actorllm.fleet.dispatcher, "TRIAL_S", 0.2)
    patch.setattr(Replica, "expected_restart_s", lambda self, start_s: 600.0)
    llm = AsyncLLM(
        "storyteller",
        dtype="float32",
        data_parallel_size=2,
        num_threads=1,
        enable_prompt_embeds=True,
        standby_worker=False,
        router="round-robin",
    )
    await llm.start()
    await all_run(llm)
    yield llm
    llm.shutdown()
    patch.undo()


@pytest.fixture(scope="module")
async def undisturbed(fleet: AsyncLLM) -> dict[str, Told]:
    return await run_all(fleet)


@pytest.mark.anyio
@pytest.mark.parametrize(("victims", "at_token"), each_value(["scheduler", "worker0", "scheduler+worker0"], [1, 30]))
async def test_streams_of_a_killed_replica_go_on_with_the_same_tokens(
    fleet: AsyncLLM, undisturbed: dict[str, Told], victims: str, at_token: int
) -> None:
    await all_run(fleet)
    before = moved(fleet)

    async def strike() -> None:
        busiest = max(fleet.health().replicas, key=lambda replica: replica.num_requests)
        assert busiest.num_requests
        kill(busiest.pids[name] for name in victims.split("+"))

    assert_same(await run_all(fleet, at_token, strike), undisturbed)
    assert moved(fleet) > before


@pytest.mark.anyio
async def test_streams_that_are_sent_on_bit_by_bit_keep_their_tokens(
    fleet: AsyncLLM, undisturbed: dict[str, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a promise that leaves no room beside it. Also one whose tokens come at its end."""
    await all_run(fleet)
    await run_all(fleet)  # from here on schedulers know what their steps take, also those that were killed before
    num_held: list[int] = []
    adopt_paced = ReplicaFrontend.adopt_paced

    def noted(self: ReplicaFrontend, *arguments: Any) -> None:
        adopt_paced(self, *arguments)
        num_held.append(len(self._held))

    monkeypatch.setattr(ReplicaFrontend, "adopt_paced", noted)

    async def strike() -> None:
        kill(fleet.health().replicas[0].pids.values())

    assert_same(await run_all(fleet, 10, strike, slo=SLO(tpot=0.0005)), undisturbed)
    assert sum(num_held) > 0


@pytest.mark.anyio
async def test_streams_outlive_the_replica_that_adopted_them(fleet: AsyncLLM, undisturbed: dict[str, Told]) -> None:
    await all_run(fleet)
    before = moved(fleet)

    async def strike() -> None:
        first, second = fleet.health().replicas
        kill(first.pids.values())
        await until(lambda: moved(fleet) > before)
        kill(second.pids.values())

    assert_same(await run_all(fleet, 5, strike), undisturbed)


@pytest.mark.anyio
async def test_streams_outlive_a_replica_that_dies_while_they_leave_it(
    fleet: AsyncLLM, undisturbed: dict[str, Told]
) -> None:
    await all_run(fleet)

    async def strike() -> None:
        await fleet.drain_replica(0)
        kill(fleet.health().replicas[0].pids.values())
        await fleet.drain_replica(0, is_draining=False)

    assert_same(await run_all(fleet, 5, strike), undisturbed)


@pytest.mark.anyio
async def test_requests_end_as_asked_while_their_replica_is_dead(fleet: AsyncLLM) -> None:
    """By an abort or a deadline, wherever they are."""
    await all_run(fleet)
    long = params(1, max_tokens=1500)
    pinned = [fleet.generate(PROMPTS[0], long, data_parallel_rank=0) for _ in range(2)]
    pinned.append(fleet.generate(PROMPTS[0], long, data_parallel_rank=0, timeout=0.5))
    moving = [fleet.generate(PROMPTS[0], long, timeout=0.5) for _ in range(2)]
    for stream in (*pinned, *moving):
        await anext(stream)
    kill(fleet.health().replicas[0].pids.values())
    fleet._engine.abort([pinned[0].request_id])
    last: dict[int, RequestOutput] = {}

    async def read(number: int, stream: Any) -> None:
        async for output in stream:
            last[number] = output
            if number == 1 and len(output.outputs[0].token_ids) > 100:
                stream.abort()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for number, stream in enumerate((*pinned, *moving)):
                group.start_soon(read, number, stream)
    ends = [last[number].outputs[0] for number in range(5)]
    assert [end.finish_reason for end in ends] == ["abort"] * 5
    assert [end.stop_reason for end in ends] == [None, None, "deadline", "deadline", "deadline"]


@pytest.mark.anyio
async def test_vectors_come_from_another_replica() -> None:
    texts = [f"Once upon a time, number {number}, there was a king" * 3 for number in range(40)]
    with LLM("storyteller", runner="pooling", dtype="float32", num_threads=1) as one:
        wanted = [output.outputs.data for output in one.encode(texts, pooling_task="embed", use_tqdm=False)]
    options: dict[str, Any] = {"runner": "pooling", "dtype": "float32", "num_threads": 1, "data_parallel_size": 2}
    async with AsyncLLM("storyteller", **options, standby_worker=False, max_num_seqs=4) as llm:
        await all_run(llm)
        found: dict[int, Any] = {}

        async def encode(number: int) -> None:
            async for output in llm.encode(texts[number]):
                found[number] = output.outputs.data
            if len(found) == 5:
                kill(llm.health().replicas[0].pids.values())

        async with anyio.create_task_group() as group:
            for number in range(len(texts)):
                group.start_soon(encode, number)
        assert moved(llm)
    for number, vector in enumerate(wanted):
        assert np.allclose(found[number], vector, atol=1e-4)


@pytest.mark.anyio
async def test_a_drained_replica_gives_its_streams_away_and_takes_no_new_ones(
    fleet: AsyncLLM, undisturbed: dict[str, Told]
) -> None:
    await all_run(fleet)
    assert_same(await run_all(fleet, 10, lambda: fleet.drain_replica(0)), undisturbed)
    first = fleet.health().replicas[0]
    assert (first.state, first.num_requests) == ("draining", 0)
    before = fleet._engine.statistics()["frontend"]["num_routed"][0]
    assert_same(await run_all(fleet), undisturbed)
    assert fleet._engine.statistics()["frontend"]["num_routed"][0] == before
    with pytest.raises(InvalidParameterError, match="replica 1 is the only one that takes requests"):
        await fleet.drain_replica(1)
    await fleet.drain_replica(0, is_draining=False)
    assert fleet.health().replicas[0].state == "running"
    with pytest.raises(InvalidParameterError, match="there is no replica 7; there are 0, 1"):
        await fleet.drain_replica(7)


@pytest.mark.anyio
async def test_the_number_of_replicas_changes_under_streams(fleet: AsyncLLM, undisturbed: dict[str, Told]) -> None:
    await all_run(fleet)
    assert_same(await run_all(fleet, 10, lambda: fleet.scale(1)), undisturbed)
    assert [replica.number for replica in fleet.health().replicas] == [0]
    assert_same(await run_all(fleet, 10, lambda: fleet.scale(2)), undisturbed)
    assert [replica.state for replica in fleet.health().replicas] == ["running", "running"]
    with pytest.raises(InvalidParameterError, match="num_replicas=0 must be from 1 to 64"):
        await fleet.scale(0)


@pytest.mark.anyio
async def test_a_replica_may_die_while_it_starts(fleet: AsyncLLM, undisturbed: dict[str, Told]) -> None:
    """Streams of the others go on, and it starts in the end."""
    await fleet.scale(1)

    def new_pids() -> list[int]:
        return [pid for one in fleet.health().replicas if one.number == 1 for pid in one.pids.values()]

    async def strike() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(fleet.scale, 2)
            await until(lambda: len(new_pids()) == 2)
            kill(new_pids())

    assert_same(await run_all(fleet, 5, strike), undisturbed)
    assert [replica.state for replica in fleet.health().replicas] == ["running", "running"]


@pytest.mark.anyio
async def test_a_pinned_request_stays_and_waits_for_its_replica(fleet: AsyncLLM, undisturbed: dict[str, Told]) -> None:
    await all_run(fleet)
    before = moved(fleet)

    async def strike() -> None:
        first = fleet.health().replicas[0]
        assert first.num_requests == len(REQUESTS) + 1, "all sequences of the requests, or those that have not ended"
        kill(first.pids.values())

    assert_same(await run_all(fleet, 1, strike, data_parallel_rank=0), undisturbed)
    assert moved(fleet) == before
    with pytest.raises(InvalidParameterError, match="data_parallel_rank=2 is no replica of this engine"):
        fleet.generate("x", data_parallel_rank=2)


@pytest.mark.anyio
async def test_a_pinned_request_waits_for_a_replica_that_is_lost(
    undisturbed: dict[str, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that comes before the replica is made anew; the end of the engine is its end."""
    monkeypatch.setattr(actorllm.client.engine_supervisor, "RestartLimits", lambda: RestartLimits(max_deaths=1))
    async with AsyncLLM("storyteller", dtype="float32", data_parallel_size=2, num_threads=1) as llm:
        await all_run(llm)
        first = llm.health().replicas[0]
        kill([first.pids["scheduler"]])
        await until(lambda: llm.health().replicas[0].state == "lost")
        stream = llm.generate(*REQUESTS["plain"], data_parallel_rank=0)
        found = [Told.of(output) async for output in stream]
        assert found[-1].sequences == undisturbed["plain"].sequences
        kill([llm.health().replicas[0].pids["scheduler"]])
        await until(lambda: llm.health().replicas[0].state == "lost")
        waiting = llm.generate(*REQUESTS["plain"], data_parallel_rank=0)
        llm.shutdown()
        with pytest.raises(EngineShutdownError):
            await anext(waiting)


@pytest.mark.anyio
async def test_a_pinned_request_fails_with_a_replica_that_is_stopped_for_good(fleet: AsyncLLM) -> None:
    await all_run(fleet)
    stream = fleet.generate(PROMPTS[0], params(1, max_tokens=1000), data_parallel_rank=1)
    await anext(stream)
    await fleet.scale(1)
    with pytest.raises(ReplicaLostError, match="data_parallel_rank=1: this replica is lost for good"):
        async for _ in stream:
            pass
    await fleet.scale(2)


@pytest.mark.anyio
async def test_controls_reach_every_replica(fleet: AsyncLLM) -> None:
    await all_run(fleet)
    streams = [fleet.generate(PROMPTS[0], params(seed), data_parallel_rank=rank) for rank in (0, 1) for seed in (1, 2)]
    for stream in streams:
        await anext(stream)
    await fleet.pause_generation(mode="keep")
    assert await fleet.is_paused()
    await fleet.scale(1)
    await fleet.scale(2)
    assert await fleet.is_paused(), "a replica that starts meanwhile is paused as well"
    await fleet.resume_generation()
    stats = await fleet.stats()
    assert set(stats["scheduler"]["replicas"]) == {0, 1}
    total = sum(one["scheduler"]["num_steps"] for one in stats["scheduler"]["replicas"].values())
    assert stats["scheduler"]["scheduler"]["num_steps"] == total
    assert [worker["replica"] for worker in stats["workers"]] == [0, 1]
    fleet._engine.abort([stream.request_id for stream in streams])
    for stream in streams[:2]:
        async for output in stream:
            assert output.outputs[0].finish_reason in (None, "abort")
    for stream in streams[2:]:
        with pytest.raises(ReplicaLostError):
            async for _ in stream:
                pass
    assert await fleet.reset_prefix_cache()


@pytest.mark.anyio
async def test_adapters_and_drafts_go_along(tmp_path: Path) -> None:
    """A stream that has an adapter and drafts goes on with both on a replica that had neither for it."""
    layers = {f"model.layers.{layer}.self_attn.{name}": (256, 256) for layer in (0, 1) for name in ("q_proj", "o_proj")}
    write_adapter(tmp_path / "tales", layers, size=1.0)
    adapter = LoRARequest("tales", 1, str(tmp_path / "tales"))
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "enable_lora": True, "speculative_config": drafts}

    async def run(llm: AsyncLLM, do: Any = None) -> list[list[int]]:
        found: dict[int, list[int]] = {}

        async def one(seed: int) -> None:
            lora = {"lora_request": adapter} if seed % 2 else {}
            async for output in llm.generate(PROMPTS[0], params(seed, max_tokens=60), **lora):
                found[seed] = list(output.outputs[0].token_ids)

        async with anyio.create_task_group() as group:
            for seed in range(6):
                group.start_soon(one, seed)
            if do is not None:
                await until(lambda: len(found) == 6)
                do()
        return [found[seed] for seed in range(6)]

    async with AsyncLLM(
        "storyteller", data_parallel_size=2, router="round-robin", standby_worker=False, **options
    ) as llm:
        await all_run(llm)
        wanted = await run(llm)
        assert wanted[0] != wanted[1]
        assert await run(llm, lambda: kill(llm.health().replicas[1].pids.values())) == wanted
        assert moved(llm)


async def check_it_has_ended(llm: AsyncLLM, streams: Sequence[AsyncIterator[RequestOutput]]) -> None:
    """With the error of its last replica, which its streams have."""
    for stream in streams:
        with pytest.raises(EngineDeadError, match="scheduler was killed by signal 9"):
            async for _ in stream:
                pass
    with pytest.raises(EngineDeadError):
        llm.generate("x")
    assert llm.health().state == "dead"
    llm.shutdown()


@pytest.mark.anyio
async def test_the_loss_of_the_last_replica_is_the_end_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its error, which is also that of what waits for another one."""
    monkeypatch.setattr(actorllm.client.engine_supervisor, "RestartLimits", lambda: RestartLimits(max_deaths=1))
    monkeypatch.setattr(actorllm.fleet.fleet, "FIRST_PAUSE_S", 600.0)
    llm = AsyncLLM("storyteller", data_parallel_size=2, num_threads=1)
    await llm.start()
    await all_run(llm)
    waiting = llm.generate(PROMPTS[0], params(1, max_tokens=1000), data_parallel_rank=0)
    await anext(waiting)
    kill([llm.health().replicas[0].pids["scheduler"]])
    await until(lambda: llm.health().replicas[0].state == "lost")
    assert (await llm.complete(PROMPTS[0], params(1, max_tokens=3))).finished
    assert llm.health().state == "running"
    running = llm.generate(PROMPTS[0], params(1, max_tokens=1000))
    await anext(running)
    kill([llm.health().replicas[1].pids["scheduler"]])
    await check_it_has_ended(llm, [waiting, running])


@pytest.mark.anyio
async def test_the_first_death_is_the_end_of_an_engine_that_is_to_raise_it() -> None:
    llm = AsyncLLM("storyteller", data_parallel_size=2, on_failure="raise", num_threads=1)
    await llm.start()
    await all_run(llm)
    streams = [llm.generate(PROMPTS[0], params(1, max_tokens=1000), data_parallel_rank=rank) for rank in (0, 1)]
    for stream in streams:
        await anext(stream)
    kill([llm.health().replicas[0].pids["scheduler"]])
    await check_it_has_ended(llm, streams)
