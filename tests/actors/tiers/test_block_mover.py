"""The mover of KV blocks: a block that could not be read is zeros, whatever becomes of the scheduler that asked for it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorllm.actors.tiers import block_mover
from actorllm.actors.tiers.block_mover import BlockMover
from actorllm.actors.tiers.slot_file import SlotFile
from actorllm.actors.tiers.together import together
from tests.actors.tiers.slots import SLOT, block, content, empty, key, make


def test_a_corrupt_block_is_cleared_and_ends_the_load(tmp_path: Path) -> None:
    file = make(tmp_path / "a")
    for number in range(3):
        assert file.write(key(number), block(number))
    data = (tmp_path / "a").read_bytes()
    at = data.index(content(block(1))) + 500
    (tmp_path / "a").write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    blocks = [empty() for _ in range(3)]
    for views in blocks:
        for view in views:
            view[:] = b"\x7f" * len(view)
    mover = BlockMover([file], blocks.__getitem__)
    number, _ = mover.load(mover.era, np.stack([key(number) for number in range(3)]), [0, 1, 2])
    assert number == 1
    assert [content(views) for views in blocks] == [content(block(0)), bytes(SLOT), b"\x7f" * SLOT]
    mover.close()


def test_jobs_of_another_scheduler_are_not_begun() -> None:
    """They are dropped at once: the next scheduler gives their blocks to others before it sends a plan."""
    mover = BlockMover([], lambda block: empty())
    era = mover.era
    mover.drop()
    assert mover.pull(era, lambda: (7, 1.0)) == (0, 0.0)
    assert mover.pull(mover.era, lambda: (7, 1.0)) == (7, 1.0)
    mover.close()


def test_many_blocks_are_read_by_several_threads_up_to_the_first_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_mover, "BYTES_OF_A_THREAD", SLOT)
    monkeypatch.setattr(block_mover, "MAX_THREADS", 2)
    threads: set[int] = set()
    right, both = SlotFile.read, threading.Barrier(2)

    def read(self: SlotFile, *arguments: Any) -> bool:
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            both.wait(timeout=30)  # each reads a part
        return right(self, *arguments)

    monkeypatch.setattr(SlotFile, "read", read)
    file = make(tmp_path / "a")
    for number in range(30):
        assert number == 20 or file.write(key(number), block(number))
    blocks = [empty() for _ in range(30)]
    mover = BlockMover([file], blocks.__getitem__)
    assert mover.load(mover.era, np.stack([key(number) for number in range(30)]), list(range(30)))[0] == 20
    assert [content(views) for views in blocks[:21]] == [*(content(block(number)) for number in range(20)), bytes(SLOT)]
    for number, views in enumerate(blocks[21:], 21):
        assert content(views) in (content(block(number)), bytes(SLOT)), "nothing is half of one"
    assert len(threads) == 2
    assert all(thread.name != "kv-move" for thread in threading.enumerate())
    mover.close()


def test_what_fails_on_any_thread_is_told_when_all_are_through() -> None:
    numbers = iter(range(8))
    done: list[int] = []

    def work() -> None:
        for number in numbers:
            if number == 3:
                raise LookupError("not here")
            done.append(number)

    with pytest.raises(LookupError, match="not here"):
        together(work, 3)
    assert sorted(done) == [0, 1, 2, 4, 5, 6, 7]


def test_a_load_that_was_dropped_looks_at_no_block(tmp_path: Path) -> None:
    """The memory of the cache may be given back by then."""

    def views_of(block: int) -> list[memoryview]:
        raise ValueError("the memory was released")

    mover = BlockMover([make(tmp_path / "a")], views_of)
    era = mover.era
    mover.drop()
    assert mover.load(era, np.stack([key(1)]), [0])[0] == 0
    mover.close()
