"""One answer of the answers of several replicas, and what each replica is built with."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from actorllm import AsyncLLM
from actorllm.actors.frontend import FrontendActor
from actorllm.actors.load_board import LoadBoard
from actorllm.actors.memory_file import MemoryFile
from actorllm.client.engine import Engine
from actorllm.client.metric_families import vllm_families
from actorllm.client.stream import Mailbox
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.fleet.fleet_engine import FleetEngine, new_engine
from actorllm.fleet.merging import by_this_clock, merged
from actorllm.fleet.replica import replica_config
from actorllm.messages import Outputs, Submit
from actorllm.model.threads import num_threads, visible_devices, worker_environment
from actorllm.scheduling.router import steps_alike
from actorllm.scheduling.step_time import StepTime
from tests.actors.scheduler_bench import FakeLink


def test_statistics_are_added_up_and_each_is_kept() -> None:
    one = {
        "num": 1,
        "kv": {"usage": 0.2, "block_size": 32},
        "counts": [1, 2],
        "state": "running",
        "cache": None,
        "on": True,
    }
    two = {
        "num": 4,
        "kv": {"usage": 0.4, "block_size": 32},
        "counts": [5],
        "state": "paused",
        "cache": {"hits": 3},
        "on": False,
    }
    total = merged("statistics", {0: one, 3: two})
    assert total.pop("replicas") == {0: one, 3: two}
    kv = total.pop("kv")
    assert kv["usage"] == pytest.approx(0.3)
    assert kv["block_size"] == 32
    assert total == {"num": 5, "counts": [6, 2], "state": "running", "cache": {"hits": 3}, "on": True}


def test_a_control_is_done_when_every_replica_has_done_it() -> None:
    assert merged("is_paused", {0: True, 1: True}) is True
    assert merged("reset_prefix_cache", {0: True, 1: False}) is False
    assert merged("resume_generation", {0: None, 1: None}) is None
    assert merged("stop_profile", {0: ["a"], 1: ["b", "c"]}) == ["a", "b", "c"]
    assert merged("worker_statistics", {0: [{"rank": 0}], 1: [{"rank": 0}]}) == [
        {"rank": 0, "replica": 0},
        {"rank": 0, "replica": 1},
    ]
    assert merged("list_adapters", {0: ["a", "b"], 1: ["b", "c"]}) == ["a", "b", "c"]
    assert merged("remove_adapter", {0: False, 1: True}) is True
    assert merged("remove_adapter", {0: False, 1: False}) is False
    name = {"ph": "M", "pid": 1, "tid": 1, "name": "process_name", "args": {"name": "scheduler"}}
    told = merged("take_timeline", {0: [name], 2: [name, {"ph": "X", "pid": 2, "tid": 2, "name": "step 7"}]})
    assert [(one["pid"], one["tid"], one["name"]) for one in told] == [
        *[(1, 1, "process_name"), (201, 201, "process_name")],
        (202, 202, "step 7"),
    ]
    assert [one["args"]["name"] for one in told[:2]] == ["replica 0 scheduler", "replica 2 scheduler"]


def test_what_is_shown_side_by_side_is_by_one_clock() -> None:
    """A node has a clock of its own, here 5000 s ahead."""
    event = {"ph": "X", "pid": 2, "tid": 2, "name": "step 7", "ts": 5_000_000_250.0, "dur": 40.0}
    name = {"ph": "M", "pid": 1, "tid": 1, "name": "process_name", "args": {"name": "scheduler"}}
    assert by_this_clock("take_timeline", [name, event], 5000.0) == [name, {**event, "ts": 250.0}]
    told = {"now": 5003.0, "steps": [[7, 5001.0, 5001.25, 5001.5, 5002.0, 3, 9]], "kv_usage": 0.5}
    moved = by_this_clock("live", told, 5000.0)
    assert moved == {"now": 3.0, "steps": [[7, 1.0, 1.25, 1.5, 2.0, 3, 9]], "kv_usage": 0.5}
    assert by_this_clock("statistics", told, 5000.0) is told
    assert by_this_clock("live", told, 0.0) is told


def config_of(**options: object) -> EngineConfig:
    return EngineConfig.from_arguments("storyteller", **options)  # type: ignore[arg-type]


def test_replicas_share_cores_memory_and_gpus(tmp_path: Path) -> None:
    given = config_of(data_parallel_size=2, gpu_memory_utilization=0.6, record=tmp_path / "run.rec")
    parts = [replica_config(given, number, 2, "/nowhere") for number in range(2)]
    assert [part.cache.memory_utilization for part in parts] == [0.3, 0.3]
    assert [part.record for part in parts] == [str(tmp_path / f"run-{number}.rec") for number in range(2)]
    assert sum(num_threads(part) for part in parts) <= max(2, len(os.sched_getaffinity(0)))
    own = replica_config(
        config_of(data_parallel_size=2, num_threads=3, kv_cache_memory_bytes=1 << 20), 1, 2, "/nowhere"
    )
    assert (num_threads(own), own.cache.kv_cache_memory_bytes) == (3, 1 << 20)
    assert EngineConfig.from_json(own.to_json()) == own


def test_replicas_are_here_first_and_then_on_one_node_after_the_other() -> None:
    """Those of a node share its cores and its memory, as those of this machine do."""
    given = {"nodes": ["a:1", "b:1"], "node_key_file": "k", "gpu_memory_utilization": 0.6}
    config = config_of(data_parallel_size=5, data_parallel_size_local=1, data_parallel_address="10.0.0.1", **given)
    parts = [replica_config(config, number, 5, "/nowhere") for number in range(5)]
    assert [part.node for part in parts] == [None, "a:1", "b:1", "a:1", "b:1"]
    assert [part.cpu_share for part in parts] == [1.0, 0.5, 0.5, 0.5, 0.5]
    assert [part.cache.memory_utilization for part in parts] == [0.6, 0.3, 0.3, 0.3, 0.3]
    assert [part.first_device for part in parts] == [0, 0, 0, 1, 1]
    assert config_of(nnodes=3, **given).data_parallel_size == 2, "each node has one, unless it is said"


@pytest.mark.parametrize(
    ("first", "known", "wanted"), [(0, None, "0,1"), (2, None, "2,3"), (2, "7,5,GPU-a,3", "GPU-a,3"), (0, "4,6", "4,6")]
)
def test_a_replica_sees_its_own_gpus(first: int, known: str | None, wanted: str) -> None:
    config = dataclasses.replace(config_of(data_parallel_size=2), device="cuda", world_size=2, first_device=first)
    assert visible_devices(config, known) == wanted
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(config_of())
    with pytest.raises(ConfigError, match="needs 4 GPUs, and CUDA_VISIBLE_DEVICES='0,1' names 2"):
        visible_devices(dataclasses.replace(config, first_device=2), "0,1")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size=0"),
        ({"data_parallel_size": 65}, "data_parallel_size=65 is more than the 64 replicas"),
        ({"data_parallel_size": 2, "ready_replicas": 3}, "ready_replicas=3 is more than data_parallel_size=2"),
        ({"data_parallel_size": 2, "topology": "inline"}, "topology='inline' computes in this one"),
        ({"data_parallel_size": 2, "router": "rounds"}, "router='rounds' is none of 'seconds', 'round-robin'"),
        ({"router": 3}, "router=3 must be"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        AsyncLLM("storyteller", **options)  # type: ignore[arg-type]


def test_a_board_tells_what_steps_take_once_enough_were_seen() -> None:
    file = MemoryFile("loads", LoadBoard.NUM_BYTES)
    board, other = LoadBoard(file.path), LoadBoard(file.path)
    times = StepTime()
    assert board.read(3) is None
    for step in range(1, 60):
        prompt, rows, context = step * 7 % 300, step % 16, step * 31 % 4000
        times.observe(prompt, rows, context, 0.004 + 0.0001 * prompt + 0.0002 * rows + 1e-7 * context)
        other.write(3, 77, times)
    known = board.read(3)
    assert known is not None
    free, learnt = known
    assert free == 77
    assert learnt.weights == pytest.approx((0.004, 0.0001, 0.0002, 1e-7), rel=0.05)
    (steps,) = steps_alike([learnt])
    assert steps(100, 8, 2000) == pytest.approx(0.0158, rel=0.05)
    quick = StepTime()
    for _ in range(20):
        quick.observe(0, 500, 1e7, 0.005)  # a small cache, or sliding windows: 2 * 10^9 tokens of context in a second
    other.write(2, 77, quick)
    assert board.read(2) is not None
    board.clear(2)
    assert board.read(2) is None
    board.clear(3)
    assert board.read(3) is None
    path = file.path
    file.close()
    with pytest.raises(OSError, match="No such file"):
        LoadBoard(path)


def test_an_engine_that_tells_nothing_yet_has_no_metrics_of_vllm() -> None:
    assert vllm_families({"supervisor": {}, "scheduler": None, "workers": None}, 100) == []


def test_one_replica_needs_no_fleet() -> None:
    """Nothing stands between the engine and its only frontend, and its scheduler tells no router of its load.

    A request takes the very calls that it takes in an engine which knows of no fleet.
    """
    engine = new_engine(config_of())
    assert isinstance(engine, FleetEngine)
    assert engine._fleet is None
    assert type(engine._frontend) is FrontendActor
    assert engine.config.load_board is None
    assert [replica.state for replica in engine.health().replicas] == ["new"]
    plain = Engine(config_of())
    counts = [calls_of_a_request(plain), calls_of_a_request(engine)]
    assert counts[0] == counts[1]
    assert sum(counts[1].values()) > 10
    assert not any("actorllm.fleet" in name for name in counts[1])
    engine.shutdown()
    plain.shutdown()


def calls_of_a_request(engine: Engine) -> Counter[str]:
    """Of its way to the scheduler and back on the engine's thread: how often each function is called."""
    called: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            called[f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"] += 1

    def make(rid: int) -> Submit:
        return Submit(rid=rid, arrival=0.0, prompt=np.array([1, 2], np.int32), max_tokens=9)

    link = FakeLink("scheduler")
    engine._frontend.on_link(link)  # type: ignore[arg-type]
    for _ in range(2):  # the second one is counted: some things are done once
        mailbox = Mailbox()
        called.clear()
        sys.setprofile(note)
        try:
            engine._submit_on_loop(make, mailbox, 1)
            one = np.array(mailbox.rids, np.int32)
            engine._frontend.on_message(link, Outputs(rids=one, index=one * 0, tokens=one, emitted=1.0))  # type: ignore[arg-type]
            engine._frontend.on_batch()
            engine._abort_on_loop(mailbox)
        finally:
            sys.setprofile(None)
        assert len(mailbox.deltas) == 1
    return called
