"""The mover of KV blocks: a block that could not be read is zeros, whatever becomes of the scheduler that asked for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from actorllm.actors.tiers.block_mover import BlockMover
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
