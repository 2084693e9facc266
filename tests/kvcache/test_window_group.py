"""The group of layers with a sliding window has as many blocks as all slots may have together, and not many more."""

from __future__ import annotations

import random

import numpy as np
import pytest

from actorllm.kvcache.window_group import WindowGroup
from actorllm.types.kv_groups import num_window_blocks

MOST_TOKENS = 400


class Slots:
    """Slots that decode or have chunks of prompts, with blocks of the other group as the scheduler gives them."""

    def __init__(self, *, window: int, block_size: int, num_slots: int, batched: int, spare: int) -> None:
        self.block_size, self.batched, self.spare = block_size, batched, spare
        width = -(-(MOST_TOKENS + 2 + spare) // block_size)
        tables = np.arange(num_slots * width, dtype=np.int32).reshape(num_slots, width)
        self.bound = num_window_blocks(
            tables.size,
            window=window,
            block_size=block_size,
            max_num_seqs=num_slots,
            max_num_batched_tokens=batched,
            spare=spare,
        )
        assert self.bound < tables.size, "the case says nothing"
        self.group = WindowGroup(window, tables.size, self.bound, block_size, tables, keeps=True)
        self.computed = [0] * num_slots
        self.num_blocks = [0] * num_slots
        self.most = 0

    def step(self, dice: random.Random) -> None:
        """Some slots compute one token, the others chunks, as many as fit into the step."""
        self.group.begin()
        left, slots = self.batched, list(range(len(self.computed)))
        dice.shuffle(slots)
        for slot in slots:
            start = self.computed[slot]
            is_chunk = not start or dice.random() < 0.4
            count = min(left, dice.choice([1, 2, 3, self.block_size, self.batched]) if is_chunk else 1)
            if not count:
                break
            end, left = start + count, left - count
            if end >= MOST_TOKENS or dice.random() < 0.01:
                self.group.empty(slot)
                self.computed[slot] = self.num_blocks[slot] = 0
                continue
            needed = end + 1 + self.spare  # of the token that the step samples, and of those beyond it
            if is_chunk or needed > self.num_blocks[slot] * self.block_size:
                self.num_blocks[slot] = max(self.num_blocks[slot], -(-needed // self.block_size))
                self.group.cover(slot, start, end, self.num_blocks[slot])
            self.computed[slot] = end
        pool = self.group.pool
        self.most = max(self.most, pool.num_blocks - pool.num_free)


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize(("window", "block_size"), [(1, 4), (16, 4), (17, 4), (30, 8), (32, 32), (50, 16)])
def test_it_is_never_empty_and_has_hardly_more_than_slots_take(window: int, block_size: int, spare: int) -> None:
    num_slots, most = 3, 0
    for seed in range(12):
        slots = Slots(window=window, block_size=block_size, num_slots=num_slots, batched=40, spare=spare)
        dice = random.Random(seed)
        for _ in range(250):
            slots.step(dice)  # raises where there is no block left
        most = max(most, slots.most)
    assert most >= slots.bound - 2 * num_slots, "a bound that nothing comes near wastes memory"
