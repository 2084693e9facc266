"""A live engine whose number of replicas follows the demand: streams stay the same while it grows and shrinks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

import actorllm.fleet.fleet
from actorllm import SLO, AsyncLLM, EngineConfig
from actorllm.client.metric_families import families_of
from actorllm.client.stream import Mailbox
from actorllm.errors import ConfigError, EngineDeadError, EngineShutdownError, InvalidParameterError
from actorllm.fleet.fleet import Fleet
from actorllm.fleet.replica import ReplicaEvents
from actorllm.messages import Submit
from actorllm.model.cpu import measured_once
from tests.fleet.streams import PROMPTS, all_run, params, until


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_num_seqs": 4,
    "max_replicas": 2,
    "standby_worker": False,
    "autoscaling": {"period_s": 0.1, "window_s": 1.0, "shrink_pause_s": 0.2, "grow_after_s": 0.2, "lead_s": 0.2},
}


def numbers(llm: AsyncLLM) -> list[int]:
    return [replica.number for replica in llm.health().replicas]


@pytest.mark.timeout(200)
@pytest.mark.anyio
async def test_replicas_that_come_later_compute_what_the_first_ones_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever is measured, or was measured for others, by then."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = {name: value for name, value in OPTIONS.items() if name not in ("max_replicas", "autoscaling", "dtype")}
    async with AsyncLLM("storyteller", dtype="bfloat16", data_parallel_size=2, **options) as llm:
        await llm.start()
        await all_run(llm)
        first, second = (worker.get("scheme") for worker in (await llm.stats())["workers"])
        assert first == second
        if first is not None:  # bfloat16 is not always computed in float32 here
            file = measured_once.path()
            known = json.loads(file.read_text())
            file.write_text(json.dumps(dict.fromkeys(known, "float32" if first != "float32" else "bfloat16")))
        assert llm._engine.config.model.scheme == first
        await llm.scale(3)
        await until(lambda: numbers(llm) == [0, 1, 2])
        await all_run(llm)
        assert [worker.get("scheme") for worker in (await llm.stats())["workers"]] == [first] * 3


@pytest.mark.timeout(200)
@pytest.mark.anyio
async def test_the_number_of_replicas_follows_the_demand_and_the_streams_stay_the_same() -> None:
    async with AsyncLLM("storyteller", **OPTIONS) as llm:
        await llm.start()
        alone = await llm.complete(PROMPTS[0], params(1))
        assert numbers(llm) == [0]
        found: list[list[int]] = []

        async def ask(count: int) -> None:
            for _ in range(count):
                output = await llm.complete(PROMPTS[0], params(1), slo=SLO(ttft=5.0))
                found.append(list(output.outputs[0].token_ids))

        # More rows than one replica may have at a time: a second one is wanted, starts, and takes its part.
        is_larger = anyio.Event()

        async def keep_asking() -> None:
            while not is_larger.is_set():
                await ask(1)

        with anyio.fail_after(150):
            async with anyio.create_task_group() as group:
                for _ in range(12):
                    group.start_soon(keep_asking)
                await until(lambda: numbers(llm) == [0, 1])
                await all_run(llm)
                told = await llm.stats()
                is_larger.set()
            assert told["supervisor"]["scaling"]["num_wanted"] == 2
            samples = {family.name: family.samples for family in families_of(told, 100)}
            assert samples["replicas_wanted"] == [("", {}, 2)]
            # One stream is what one replica can do. It may be on the other one when that goes.
            async with anyio.create_task_group() as group:
                group.start_soon(ask, 2)
                await until(lambda: numbers(llm) == [0])
        assert all(tokens == list(alone.outputs[0].token_ids) for tokens in found)
        with pytest.raises(InvalidParameterError, match="num_replicas=3 must be from min_replicas=1 to max_replicas=2"):
            await llm.scale(3)


@pytest.mark.timeout(200)
@pytest.mark.anyio
async def test_a_replica_with_requests_that_are_pinned_to_it_stays() -> None:
    policy = {**OPTIONS["autoscaling"], "shrink_pause_s": 0.1}
    async with AsyncLLM("storyteller", data_parallel_size=2, **{**OPTIONS, "autoscaling": policy}) as llm:
        await llm.start()
        stream = llm.generate(PROMPTS[0], params(1, max_tokens=600), data_parallel_rank=1)
        last = None
        with anyio.fail_after(150):
            async for last in stream:
                assert 1 in numbers(llm) or last.finished
            assert last is not None
            assert last.outputs[0].finish_reason == "length"
            await until(lambda: numbers(llm) == [0])


@pytest.mark.anyio
async def test_a_number_is_set_again_if_setting_it_failed_and_a_defect_costs_one_decision() -> None:
    fleet = Fleet(EngineConfig.from_arguments("storyteller", **OPTIONS), 0, lambda error: None)
    scaling = fleet._scaling
    assert scaling is not None
    asked: list[int] = []

    async def resize(number: int) -> None:
        asked.append(number)
        if len(asked) == 1:
            raise EngineShutdownError("not now")

    scaling._resize = resize
    answers = iter([2, 2])
    scaler = SimpleNamespace(wanted=1, needed=2.0, note_ends=lambda *_: None)
    scaler.decide = lambda *_, **__: next(answers)
    scaling.autoscaler = scaler  # type: ignore[assignment]
    await scaling.look()
    scaler.wanted = 2
    await scaling.look()
    assert asked == [2, 2]
    await scaling.look()  # the decision raises
    assert asked == [2, 2]
    fleet._board_file.close()


@pytest.mark.anyio
async def test_nothing_starts_after_a_stop_that_came_while_another_number_was_set() -> None:
    fleet = Fleet(EngineConfig.from_arguments("storyteller", **OPTIONS), 0, lambda error: None)
    fleet._over, fleet._resizing, refused = anyio.Event(), anyio.Lock(), []

    async def grow() -> None:
        try:
            await fleet._resize(2)
        except EngineShutdownError as error:
            refused.append(error)

    async with anyio.create_task_group() as fleet._tasks, fleet._resizing:
        fleet._tasks.start_soon(grow)
        await anyio.wait_all_tasks_blocked()
        fleet.request_stop()
    assert len(refused) == len(fleet.replicas) == 1
    fleet._board_file.close()


@pytest.mark.anyio
async def test_a_caller_that_waits_no_more_leaves_no_replica_half_removed() -> None:
    """Else it would count as one of the replicas, and fail every call that asks all schedulers."""
    fleet = Fleet(EngineConfig.from_arguments("storyteller", data_parallel_size=2, **OPTIONS), 0, lambda error: None)
    fleet._over, fleet._resizing = anyio.Event(), anyio.Lock()
    events = fleet.replicas[1].events = ReplicaEvents()
    async with anyio.create_task_group() as fleet._tasks:
        async with anyio.create_task_group() as caller:
            caller.start_soon(fleet._resize, 1)
            await anyio.wait_all_tasks_blocked()
            assert fleet.replicas[1].is_removed
            caller.cancel_scope.cancel()
            fleet._tasks.start_soon(checkpoint_then, events.has_ended.set)
        assert list(fleet.replicas) == [0]
    fleet._board_file.close()


@pytest.mark.anyio
async def test_a_replica_whose_node_is_told_to_end_while_it_starts_takes_requests_for_its_next_life() -> None:
    fleet = Fleet(EngineConfig.from_arguments("storyteller", data_parallel_size=2, **OPTIONS), 0, lambda error: None)
    fleet._over, fleet._is_ready = anyio.Event(), anyio.Event()
    fleet._is_ready.set()
    fleet.replicas[1].events = ReplicaEvents()  # so the engine goes on
    replica, mailbox = fleet.replicas[0], Mailbox()

    def request(rid: int) -> Submit:
        return Submit(rid=rid, arrival=0.0, prompt=np.zeros(1, np.int32), max_tokens=1)

    async def run(on_ready: object) -> None:
        raise EngineShutdownError("node 127.0.0.1:1: the engine was shut down while it started")

    replica.supervisor = SimpleNamespace(run=run, state="stopped", failure=None)  # type: ignore[assignment]
    async with anyio.create_task_group() as fleet._tasks:
        fleet._spawn(replica)
        await anyio.wait_all_tasks_blocked()
        assert replica.state == "lost"
        replica.frontend.submit(request, mailbox, lambda rid: None)
        assert mailbox.error is None
        assert replica.frontend.num_open == 1
        replica.frontend.surrender()
        fleet._over.set()
        replica.request_stop(0.0)
    fleet._board_file.close()


async def checkpoint_then(function: Callable[[], object]) -> None:
    await anyio.wait_all_tasks_blocked()
    function()


@pytest.mark.anyio
async def test_a_replica_that_does_not_start_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """With on_failure="raise" a death ends the engine; what has never run has lost nothing."""
    config_of = actorllm.fleet.fleet.replica_config

    def wrong(config: EngineConfig, number: int, *more: Any) -> EngineConfig:
        made = config_of(config, number, *more)
        return replace(made, model=replace(config.model, path="/nowhere")) if number else made

    monkeypatch.setattr(actorllm.fleet.fleet, "replica_config", wrong)
    async with AsyncLLM("storyteller", on_failure="raise", **OPTIONS) as llm:
        with pytest.raises(EngineDeadError, match=r"replica 1 did not start.*nowhere"):
            await llm.scale(2)
        assert (await llm.complete(PROMPTS[0], params(1, max_tokens=3))).finished
        assert llm.health().state == "running"
        waiting = llm.generate(PROMPTS[0], params(1, max_tokens=3), data_parallel_rank=1)
        model = llm.config.model
        llm._engine._fleet.replicas[1].change_config(lambda config: replace(config, model=model))  # type: ignore[attr-defined]
        assert [output async for output in waiting][-1].finished, "it waited for the start that does not fail"


@pytest.mark.anyio
async def test_ray_is_asked_for_room_whoever_sets_the_number() -> None:
    fleet = Fleet(EngineConfig.from_arguments("storyteller", **OPTIONS), 0, lambda error: None)
    done: list[tuple[str, int]] = []
    fleet._placement = SimpleNamespace(want=lambda number: done.append(("want", number)))  # type: ignore[assignment]

    async def resize(number: int) -> list[Any]:
        done.append(("resize", number))
        return []

    fleet._resize = resize  # type: ignore[method-assign]
    await fleet.scale(2)
    await fleet._resize_for_demand(2)
    assert done == [("want", 2), ("resize", 2)] * 2
    fleet._board_file.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_replicas": 2}, "min_replicas and autoscaling need max_replicas"),
        ({"max_replicas": 2, "min_replicas": 3}, "max_replicas=2 must be from min_replicas=3 to 64"),
        ({"max_replicas": 65}, "max_replicas=65 must be from min_replicas=1 to 64"),
        (
            {"max_replicas": 2, "data_parallel_size": 3},
            "data_parallel_size=3 must be from min_replicas=1 to max_replicas=2",
        ),
        ({"max_replicas": 2, "target_attainment": 1}, "target_attainment=1 must be a share of requests"),
        (
            {"max_replicas": 2, "autoscaling": {"windows_s": 3}},
            "'windows_s' is none of period_s.*did you mean 'window_s'",
        ),
        ({"max_replicas": 2, "autoscaling": "{"}, "autoscaling='{' is no JSON"),
        ({"max_replicas": 2, "autoscaling": {"margin": "x"}}, "autoscaling: margin='x' must be a number"),
        ({"max_replicas": 2, "autoscaling": {"window_s": 10**400}}, "autoscaling: window_s=1000"),
        ({"max_replicas": 2, "topology": "inline"}, "max_replicas=2 needs processes"),
    ],
)
def test_bounds_that_are_none(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        AsyncLLM("storyteller", **given)
