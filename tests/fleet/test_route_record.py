"""Decisions of a live router replay exactly."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import anyio
import numpy as np
import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.actors.record_file import fresh_scheduler, read_recording
from actorllm.errors import ConfigError
from actorllm.fleet.route_record import RecordedRouter, record_path, replay_routes
from actorllm.scheduling.router import ReplicaView, Routable, make_router
from actorllm.scheduling.telemetry.recording import replay


@pytest.mark.anyio
@pytest.mark.parametrize("router", ["seconds", "prefix-aware"])
async def test_what_a_router_decided_it_decides_again(tmp_path: Path, router: str) -> None:
    record = tmp_path / "run.rec"
    options = {"data_parallel_size": 2, "ready_replicas": 2, "num_threads": 1, "standby_worker": False}
    async with AsyncLLM("storyteller", router=router, record=record, **options) as llm:  # type: ignore[arg-type]
        await llm.start()

        async def ask(number: int) -> None:
            prompt = {"prompt_token_ids": [5 + number % 3] * 70 + [number] * 10}
            await llm.complete(prompt, SamplingParams(max_tokens=4 + number % 9, seed=number), slo=5.0)

        for burst in range(4):
            async with anyio.create_task_group() as group:
                for number in range(8):
                    group.start_soon(ask, 8 * burst + number)
        routed = llm._engine.statistics()["frontend"]["num_routed"]
    path = record_path(record)
    assert path.stat().st_mode & 0o777 == 0o600
    assert replay_routes(path) == (sum(routed.values()), [])
    assert sorted(os.listdir(tmp_path)) == ["run-0.rec", "run-1.rec", "run-router.rec"]
    for number in (0, 1):  # each replica's steps are planned again as they were
        file = tmp_path / f"run-{number}.rec"
        plans = list(replay(read_recording(file), fresh_scheduler(file)))
        assert len(plans) == sum(call == "update" for call, _, _ in read_recording(file))
    # A decision that was another one is told.
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b'"chosen":0', b'"chosen":7').replace(b'"chosen":1', b'"chosen":7')
    path.write_bytes(b"".join(lines))
    assert replay_routes(path).differing == [2]


class Moody:
    """A router of an application that fails at each third request."""

    def __init__(self) -> None:
        self.num_asked = 0

    def route(self, request: Routable, views: Sequence[ReplicaView]) -> int:
        self.num_asked += 1
        if self.num_asked % 3 == 0:
            raise ValueError("not now")
        return self.num_asked % 2


def test_a_decision_that_failed_fails_again(tmp_path: Path) -> None:
    """A router that keeps something has changed by then, so it is asked in the replay as well."""
    name, record = "tests.fleet.test_route_record:Moody", tmp_path / "run.rec"
    router = RecordedRouter(make_router(name), name, record)
    views = [ReplicaView(0), ReplicaView(1)]
    for number in range(1, 9):
        if number % 3:
            assert router.route(Routable(number), views) == number % 2
        else:
            with pytest.raises(ValueError, match="not now"):
                router.route(Routable(number), views)
    router.close()
    path = record_path(record)
    assert replay_routes(path) == (8, [])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[4:]))
    assert replay_routes(path).differing == [2, 3, 4, 5, 6]


class OfNumPy:
    """As of a router that looks for the least in an array."""

    def route(self, request: Routable, views: Sequence[ReplicaView]) -> int:
        return np.argmin([request.num_prompt % 2, 1 - request.num_prompt % 2])  # type: ignore[return-value]


def test_a_decision_may_be_a_number_of_numpy(tmp_path: Path) -> None:
    name, record = "tests.fleet.test_route_record:OfNumPy", tmp_path / "run.rec"
    router = RecordedRouter(make_router(name), name, record)
    assert [router.route(Routable(number), [ReplicaView(0), ReplicaView(1)]) for number in range(4)] == [0, 1, 0, 1]
    router.close()
    assert replay_routes(record_path(record)) == (4, [])


class Loose:
    """A router of an application that answers with an integer of NumPy, then with what is no replica."""

    def __init__(self) -> None:
        self.answers = iter([np.int64(1), "1", {1}, np.int64(0)])

    def route(self, request: Routable, views: Sequence[ReplicaView]) -> int:
        return next(self.answers)  # type: ignore[return-value]


def test_what_a_router_answers_is_recorded_whatever_its_type(tmp_path: Path) -> None:
    name, record = "tests.fleet.test_route_record:Loose", tmp_path / "run.rec"
    router = RecordedRouter(make_router(name), name, record)
    views = [ReplicaView(0), ReplicaView(1)]
    for answer in (1, "'1'", "{1}", 0):
        if isinstance(answer, int):
            assert router.route(Routable(4), views) == answer
        else:
            with pytest.raises(
                ValueError, match=rf"returned {re.escape(answer)}; return the number of a replica in views: 0, 1"
            ):
                router.route(Routable(4), views)
    router.close()
    assert replay_routes(record_path(record)) == (4, [])


def test_of_a_program_that_was_killed_what_was_written_is_replayed(tmp_path: Path) -> None:
    record = tmp_path / "run.rec"
    router = RecordedRouter(make_router("round-robin"), "round-robin", record)
    for _ in range(3):
        router.route(Routable(4), [ReplicaView(0), ReplicaView(1)])
    router.close()
    path = record_path(record)
    path.write_bytes(path.read_bytes()[:-9])
    assert replay_routes(path) == (2, [])


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "is empty"),
        (b"hello\n", "line 1: no line of a recording of routes"),
        (b"hello", "line 1: no line of a recording of routes"),
        (b'{"version": 9, "router": "seconds"}\n', "a recording of version 9"),
        (b'{"version": 1, "router": "second"}\n', "router='second' is none of"),
        (b'{"version": 1, "router": "seconds"}\n{"chosen": 1}\n', "line 2: no line of a recording of routes"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes, error: str) -> None:
    path = tmp_path / "run-router.rec"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=error):
        replay_routes(path)
