"""The cache with two groups of blocks: what becomes of partners, and what a plan may not say of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from actorllm.messages import I32, StepPlan
from actorllm.model.cpu.grouped_cache import GroupedKVCache
from tests.model.families.loaded import cpu_driver
from tests.model.hf.decoders import save


def ids(*numbers: int) -> I32:
    return np.array(numbers, np.int32)


def grouped() -> GroupedKVCache:
    cache = GroupedKVCache(
        (None, 8, None, 8), 2, 4, num_blocks=6, num_window_blocks=3, block_size=4, dtype=torch.float32
    )
    whole(cache).fill_(1.0)
    cache.windowed.pool[:, :3].fill_(2.0)
    return cache


def whole(cache: GroupedKVCache) -> torch.Tensor:
    assert cache.whole is not None
    return cache.whole.pool


def test_a_partner_belongs_to_its_last_block_and_holds_nothing_of_the_one_before() -> None:
    cache = grouped()
    cache.pair(ids(5, 1, 0, 2))
    assert not cache.windowed.pool[:, 1:3].any()
    assert cache.windowed.pool[:, 0].all()
    cache.windowed.pool[:, 1:3].fill_(3.0)
    cache.pair(ids(4, 1))
    assert not cache.windowed.pool[:, 1].any()
    cache.zero(ids(5))
    assert not whole(cache)[:, 5].any()
    assert cache.windowed.pool[:, 2].all(), "block 5 has no partner any more, and that of block 0 is another"
    cache.zero(ids(0))
    assert not cache.windowed.pool[:, 2].any()


def test_copies_are_made_in_both_groups() -> None:
    cache = grouped()
    cache.pair(ids(1, 0, 2, 1))
    cache.windowed.pool[:, 0].fill_(7.0)
    whole(cache)[:, 1].fill_(5.0)
    cache.copy(ids(1), ids(2))
    assert (whole(cache)[:, 2] == 5.0).all()
    assert (cache.windowed.pool[:, 1] == 7.0).all()
    cache.copy(ids(1), ids(3))  # has no partner: no layer looks there
    assert (whole(cache)[:, 3] == 5.0).all()


@pytest.mark.parametrize("pairs", [(6, 0), (0, 3), (-1, 0), (0, -1)])
def test_blocks_that_there_are_not(pairs: tuple[int, int]) -> None:
    cache = grouped()
    with pytest.raises(ValueError, match=r"must be below \[6, 3\]"):
        cache.pair(ids(*pairs))


def test_a_cache_of_one_group_knows_no_partners(tmp_path: Path) -> None:
    save("gemma3", tmp_path)
    runner = cpu_driver(tmp_path).runner
    with pytest.raises(ValueError, match="step 3: the cache has one group"):
        runner.execute(StepPlan(step=3, partners=ids(0, 0)))
