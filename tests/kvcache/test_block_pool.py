"""The block pool against a model of sets and counts, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from actorllm.kvcache.block_pool import BlockPool
from actorllm.kvcache.manager import KVCacheManager
from tests.effort import examples


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.references: dict[int, int] = dict.fromkeys(range(num_blocks), 0)

    @rule(count=st.integers(0, 13))
    def allocate(self, count: int) -> None:
        free = [b for b, n in self.references.items() if n == 0]
        if count > len(free):
            with pytest.raises(IndexError, match=f"{count} blocks asked for, {len(free)} free"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count).tolist()
        assert len(set(blocks)) == count
        for block in blocks:
            assert self.references[block] == 0, "a block in use was handed out"
            self.references[block] = 1

    @precondition(lambda self: any(self.references.values()))
    @rule(data=st.data())
    def share(self, data: Any) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self._used()), min_size=1, unique=True))
        self.pool.share(np.array(blocks, np.int32))
        for block in blocks:
            self.references[block] += 1
            assert self.pool.is_shared(block)

    @precondition(lambda self: any(self.references.values()))
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self._used()), min_size=1, unique=True))
        freed = self.pool.release(np.array(blocks, np.int32)).tolist()
        for block in blocks:
            self.references[block] -= 1
        assert freed == [b for b in blocks if self.references[b] == 0]

    @precondition(lambda self: not all(self.references.values()))
    @rule()
    def refuse_what_is_free(self) -> None:
        free = np.array([b for b, n in self.references.items() if n == 0][:1], np.int32)
        with pytest.raises(ValueError, match="released more often"):
            self.pool.release(free)
        with pytest.raises(ValueError, match="are free"):
            self.pool.share(free)

    def _used(self) -> list[int]:
        return [b for b, n in self.references.items() if n]

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            statistics = self.pool.statistics()
            assert statistics.num_free == sum(n == 0 for n in self.references.values())
            assert statistics.num_shared == sum(n > 1 for n in self.references.values())


PoolMachine.TestCase.settings = settings(max_examples=examples(33, 100), stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def _release_shared(right: Any, pool: BlockPool, blocks: Any) -> Any:
    freed = right(pool, blocks)
    pool._references[freed] = 0
    return blocks


def _allocate_without_reference(right: Any, pool: BlockPool, count: int) -> Any:
    blocks = right(pool, count)
    pool._references[blocks[1:]] = 0
    return blocks


def _share_once_only(right: Any, pool: BlockPool, blocks: Any) -> None:
    right(pool, blocks[:1])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("release", _release_shared), ("allocate", _allocate_without_reference), ("share", _share_once_only)],
)
def test_the_machine_finds_planted_mistakes(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., Any]
) -> None:
    right = getattr(BlockPool, name)
    monkeypatch.setattr(BlockPool, name, lambda *a: wrong(right, *a))
    quick = settings(
        max_examples=100,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=[p for p in settings().phases if p.name in ("explicit", "generate")],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, ValueError, ExceptionGroup)):
        run_state_machine_as_test(PoolMachine, settings=quick)


def test_one_allocation_equals_several() -> None:
    one, several = BlockPool(20), BlockPool(20)
    for pool in (one, several):
        pool.release(pool.allocate(9)[[3, 1, 7]])
    assert one.allocate(8).tolist() == [*several.allocate(3), *several.allocate(1), *several.allocate(4)]


def test_extending_in_order_equals_extending_one_by_one() -> None:
    rng = np.random.default_rng(0)
    one, other = (KVCacheManager(60, 4, 5, 60) for _ in range(2))
    for kv in (one, other):
        for slot in range(5):
            kv.fill([(slot, kv.blocks_for(3 * slot))])
    entries = rng.integers(0, 5, 25).astype(np.int32)
    for slot in entries:
        one.extend(np.array([slot], np.int32))
    other.extend_in_order(entries)
    other.check_integrity()
    assert np.array_equal(one.tables, other.tables)
    assert np.array_equal(one.capacity, other.capacity)


def test_token_ids_are_read_back_across_blocks() -> None:
    kv = KVCacheManager(10, 4, 2, 32)
    kv.fill([(1, 3)])
    for position in range(3, 11):
        kv.token_ids[kv.tables[0, 1, position // 4], position % 4] = 100 + position
    assert kv.read_token_ids(1, 3, 11).tolist() == list(range(103, 111))
    assert kv.read_token_ids(1, 5, 6).tolist() == [105]
    assert kv.read_token_ids(1, 5, 5).size == 0


@pytest.mark.parametrize("block_size", [3, 4])
def test_runs_of_token_ids_are_where_one_by_one_would_put_them(block_size: int) -> None:
    rng = np.random.default_rng(block_size)
    one, runs = (KVCacheManager(60, block_size, 5, 36) for _ in range(2))
    for kv in (one, runs):
        for slot in (3, 0, 4, 1, 2):
            kv.fill([(slot, kv.blocks_for(36))])
    known = rng.integers(0, 8, 5).astype(np.int32)
    for slots in (np.array([4, 0, 3], np.int32), np.array([1, 0, 2, 4], np.int32)):
        for _ in range(3):
            counts = rng.integers(0, 5, slots.size).astype(np.int32)
            tokens = rng.integers(1, 1000, counts.sum()).astype(np.int32)
            ends = counts.cumsum(dtype=np.int32)
            runs.write_runs(slots, counts, ends, known[slots] + counts, tokens)
            for slot, count, end in zip(slots.tolist(), counts.tolist(), ends.tolist(), strict=True):
                for token in tokens[end - count : end].tolist():
                    one.write_token_id(slot, int(known[slot]), token)
                    known[slot] += 1
    assert one.token_ids.any()
    assert np.array_equal(one.token_ids, runs.token_ids)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0)
