"""What the KV caches of several engines may take together."""

from __future__ import annotations

from typing import Any

import pytest

from actorllm.client.cache_memory import CacheMemory
from actorllm.config import EngineConfig
from actorllm.model import memory

GB = 1 << 30
BLOCK = 1 << 20


class Owner:
    """An engine, with one worker."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """10 GB are available; of processes it holds what they hold."""
    state: dict[str, Any] = {"available": 10 * GB}
    monkeypatch.setattr(memory, "available_bytes", lambda: state["available"])
    monkeypatch.setattr(memory, "resident_bytes", lambda pid=None: state[pid])
    return state


def fitted(shared: CacheMemory, owner: Owner, wanted: int, **arguments: Any) -> int:
    """Bytes of the cache of an engine, which by itself wants so many."""
    config = EngineConfig.from_arguments("storyteller", **arguments)
    facts = {"worker0": {"num_blocks": wanted // BLOCK, "block_bytes": BLOCK}, "scheduler": {}}
    pids = owner.pids
    return shared.fit(owner, config, facts, lambda: pids) * BLOCK


def test_each_gets_a_part_of_what_the_others_leave(machine: dict[str, Any]) -> None:
    machine |= {1: GB, 2: GB, 3: GB}
    shared, owners = CacheMemory(), [Owner([1]), Owner([2]), Owner([3])]
    assert fitted(shared, owners[0], 4 * GB) == 4 * GB
    assert fitted(shared, owners[1], 4 * GB) == pytest.approx(2.4 * GB, abs=BLOCK)
    machine["available"] = 6 * GB
    machine[1] = 5 * GB
    assert fitted(shared, owners[2], 4 * GB) == pytest.approx(0.4 * 3.6 * GB, abs=2 * BLOCK), (
        "what is written counts once"
    )
    shared.release(owners[1])
    shared.release(owners[1])
    assert fitted(shared, owners[2], 2 * GB) == 2 * GB, "and its own reservation before does not count"


def test_a_cache_in_this_process_counts_as_unwritten(machine: dict[str, Any]) -> None:
    shared, owners = CacheMemory(), [Owner([]), Owner([])]
    assert fitted(shared, owners[0], 4 * GB) == 4 * GB
    assert fitted(shared, owners[1], 4 * GB) == pytest.approx(2.4 * GB, abs=BLOCK)
    del owners[0]  # the second is the first now
    assert fitted(shared, owners[0], 4 * GB) == 4 * GB, "an engine that was dropped has nothing"


def test_what_is_an_argument_counts_as_it_is(machine: dict[str, Any]) -> None:
    machine |= {1: GB, 2: GB, 3: GB}
    shared, owners = CacheMemory(), [Owner([1]), Owner([2]), Owner([3])]
    assert fitted(shared, owners[0], 8 * GB, kv_cache_memory_bytes=GB) == 8 * GB, "a size is taken at its word"
    assert fitted(shared, owners[1], 9 * GB, gpu_memory_utilization=0.9) == 2 * GB, "a share is of what is there"
    assert fitted(shared, owners[2], 9 * GB, gpu_memory_utilization=0.9) == 0


def test_ranks_of_other_machines_take_nothing_of_this_one(machine: dict[str, Any]) -> None:
    machine |= {1: GB, 2: GB}
    shared, first, second = CacheMemory(), Owner([1]), Owner([2])
    given = {"nnodes": 2, "nodes": ["a:1"], "node_key_file": "k", "pipeline_parallel_size": 2}
    config = EngineConfig.from_arguments("storyteller", **given)
    facts = {name: {"num_blocks": 4 * GB // BLOCK, "block_bytes": BLOCK} for name in ("worker1", "worker0")}
    assert shared.fit(first, config, facts, lambda: [1]) == 4 * GB // BLOCK
    assert fitted(shared, second, 4 * GB) == pytest.approx(0.4 * 6 * GB, abs=BLOCK)


def test_a_worker_that_takes_the_place_of_another_measures_nothing(machine: dict[str, Any]) -> None:
    machine |= {1: GB, 2: GB}
    shared, first, second = CacheMemory(), Owner([1]), Owner([2])
    fitted(shared, first, 9 * GB)
    config = EngineConfig.from_arguments("storyteller")
    assert shared.fit(second, config, {"worker0": {"num_blocks": 7}}, lambda: [2]) == 7
