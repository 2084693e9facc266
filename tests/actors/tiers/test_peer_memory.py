"""Blocks that are copied out of the memory of another replica: all as they were leased, or none."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorllm.actors.memory_file import MemoryFile
from actorllm.actors.tiers import peer_memory
from actorllm.actors.tiers.lease_board import LeaseBoard, num_bytes
from actorllm.actors.tiers.peer_memory import PeerMemory
from actorllm.model.cpu.attention import KVCache, shared_pages
from actorllm.model.cpu.int8_cache import Int8KVCache

LAYERS, BLOCK = 3, 8
DIGEST = bytes(range(32))


class Two:
    """Caches of different sizes: the first lends, the second borrows."""

    def __init__(self, make: Any) -> None:
        self.board_file = MemoryFile("leases", num_bytes(16))
        self.board = LeaseBoard(self.board_file.path, 16)
        self.pool = MemoryFile("kv-cache")
        self.make = make
        self.era = self.board.begin_era(0)
        self.lender = make(12, pages=shared_pages(self.pool.path))
        self.borrower = make(20)
        self.table = self.board.lender(0, 12)
        self.peers = PeerMemory([self.pool.path, ""], self.board, self.borrower.block_regions)

    def fill(self, seed: int = 0) -> None:
        for region in self.lender.block_regions():
            region[:] = np.random.default_rng(seed).integers(1, 255, region.shape, np.uint8)

    def lease(self, *blocks: int) -> Any:
        granted = self.table.grant(np.array(blocks, np.int32), DIGEST, self.era)
        assert granted is not None
        return granted

    def pull(self, lease: Any, first: int, blocks: list[int], digest: bytes = DIGEST) -> int:
        return self.peers.pull(lease.tolist()[:3], digest, first, blocks)[0]

    def has(self, block: int, source: int) -> bool:
        pairs = zip(self.borrower.block_regions(), self.lender.block_regions(), strict=True)
        return all((mine[:, block] == theirs[:, source]).all() for mine, theirs in pairs)

    def is_empty(self, block: int) -> bool:
        return not any(region[:, block].any() for region in self.borrower.block_regions())


def plain(number: int, **more: Any) -> KVCache:
    return KVCache(LAYERS, 2, 4, number, BLOCK, torch.float32, **more)


def rounded(number: int, **more: Any) -> Int8KVCache:
    return Int8KVCache(LAYERS, 2, 4, number, BLOCK, torch.float32, num_slots=4, **more)


@pytest.fixture(params=[plain, rounded], ids=["plain", "int8"])
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    found = Two(request.param)
    found.fill()
    yield found
    found.board_file.close()
    found.pool.close()
    vars(found).clear()  # a mapping has a descriptor
    gc.collect()


def test_blocks_are_copied_wherever_they_stand(two: Two) -> None:
    lease = two.lease(3, 4, 5, 9, 1)
    assert two.pull(lease, 1, [10, 11, 2, 19]) == 4
    assert all(two.has(block, source) for block, source in ((10, 4), (11, 5), (2, 9), (19, 1)))
    assert two.is_empty(9)
    assert two.is_empty(12)


def test_what_is_not_leased_is_not_copied(two: Two) -> None:
    lease = two.lease(3, 4)
    assert two.pull(lease, 0, [1, 2, 3]) == 0, "more than the lease has"
    assert two.pull(lease, 0, [1, 2], digest=bytes(32)) == 0, "of other tokens"
    two.table.end(lease)
    assert two.pull(lease, 0, [1, 2]) == 0, "over"
    assert two.is_empty(1)


@pytest.mark.parametrize("fails_beside", [False, True])
def test_a_copy_that_fails_on_either_thread_leaves_zeros(
    two: Two, fails_beside: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And not before both have ended: what the other one wrote after that would be found by other tokens."""
    monkeypatch.setattr(peer_memory, "BYTES_FOR_TWO", 1)
    right, is_over = np.copyto, threading.Event()

    def copy(to: Any, source: Any) -> None:
        is_beside = threading.current_thread().name == "kv-copy"
        if is_beside is fails_beside:
            raise MemoryError("no memory")
        if is_beside:
            is_over.wait(0.05)
        right(to, source)

    monkeypatch.setattr(peer_memory.np, "copyto", copy)
    assert two.pull(two.lease(3, 4), 0, [1, 2]) == 0
    assert all(thread.name != "kv-copy" for thread in threading.enumerate())
    assert two.is_empty(1)
    assert two.is_empty(2)
    assert "a copy of KV blocks of replica 0 failed" in caplog.text


def test_a_lease_that_ends_during_the_copy_leaves_zeros(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = two.lease(3, 4)
    looks = iter([True, False])
    monkeypatch.setattr(LeaseBoard, "is_valid", lambda self, lent: next(looks))
    assert two.pull(lease, 0, [1, 2]) == 0
    assert two.is_empty(1)


def test_the_next_worker_ends_what_the_last_one_lent_and_clears_its_memory(two: Two) -> None:
    lease = two.lease(3, 4)
    assert two.pull(lease, 0, [1, 2]) == 2
    before = two.lender
    two.board.begin_era(0)
    assert two.pull(lease, 0, [3, 4]) == 0
    two.lender = two.make(12, pages=shared_pages(two.pool.path))
    assert not any(region.any() for region in [*two.lender.block_regions(), *before.block_regions()])


def test_memory_that_grew_is_mapped_again(two: Two) -> None:
    assert two.pull(two.lease(3, 4), 0, [1, 2]) == 2
    two.era = two.board.begin_era(0)
    two.lender = two.make(300, pages=shared_pages(two.pool.path))
    two.table = two.board.lender(0, 300)
    two.fill(seed=1)
    assert two.pull(two.lease(250, 251), 0, [1, 2]) == 2
    assert two.has(1, 250)


def test_an_owner_that_has_ended_lends_nothing(two: Two, tmp_path: Path) -> None:
    two.peers = PeerMemory([str(tmp_path / "gone")], two.board, two.borrower.block_regions)
    assert two.pull(two.lease(3, 4), 0, [1, 2]) == 0


def test_a_cache_that_is_released_takes_no_memory(two: Two) -> None:
    two.lender.release()
    assert not any(region.any() for region in two.lender.block_regions())
