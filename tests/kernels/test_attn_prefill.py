from __future__ import annotations

import numpy as np
import pytest
import torch

from actorllm_kernels.attn_prefill import attn_prefill, query_tiles
from actorllm_kernels.configs import table
from tests.effort import each_value
from tests.kernels.cases import run_prefill as run
from tests.kernels.closeness import DTYPES

PAGE, TILE, BLOCK_M = 32, 16, 32
CHUNKS = [(1, 1), (5, 5), (33, 33), (16, 48), (7, 71), (40, 41)]
"""Tokens of the chunk, tokens of the sequence with it."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_with_and_without_history(dtype: torch.dtype) -> None:
    run(CHUNKS, dtype=dtype)


@pytest.mark.parametrize("group", [1, 3, 5, 7, 8])
def test_groups(group: int) -> None:
    run([(9, 40), (3, 3)], group=group, num_kv_heads=2)


@pytest.mark.parametrize("dim", [80, 96, 128, 256])
def test_head_sizes(dim: int) -> None:
    run([(9, 40), (3, 3)], dim=dim)


@pytest.mark.parametrize(("window", "softcap", "has_sinks"), [
    (0, 0.0, True), (0, 5.0, False), (1, 0.0, False), (7, 0.0, True), (16, 0.0, False), (33, 3.0, True), (500, 0.0, False),
])  # fmt: skip
def test_variants(window: int, softcap: float, has_sinks: bool) -> None:
    run(CHUNKS, window=window, softcap=softcap, has_sinks=has_sinks)


@pytest.mark.parametrize("window", [0, 20])
def test_the_first_keys_are_skipped(window: int) -> None:
    run([(4, 5), (32, 33), (16, 48), (7, 71), (40, 41), (1, 2)], skipped=1, window=window)


@pytest.mark.parametrize(("dtype", "dim", "window", "has_sinks"), each_value(DTYPES, [(64, 0, False), (80, 20, True)]))
def test_a_cache_of_floats_of_8_bits(dtype: torch.dtype, dim: int, window: int, has_sinks: bool) -> None:
    run(CHUNKS, dtype=dtype, dim=dim, window=window, has_sinks=has_sinks, is_float8=True)


def test_as_many_tokens_go_through_for_floats_of_8_bits() -> None:
    for of in table()["attn_prefill"].values():
        if "d256-float8" in of:
            assert of["d256-float8"]["BLOCK_M"] == of["d256"]["BLOCK_M"]


def test_descriptors_read_no_codes() -> None:
    with pytest.raises(ValueError, match="must be in the type of q"):
        run([(3, 3)], by_tma=True, is_float8=True)


@pytest.mark.parametrize(("dim", "group", "window", "has_sinks"), [
    (64, 2, 0, False), (128, 7, 0, True), (64, 4, 20, False),
])  # fmt: skip
def test_by_descriptors(dim: int, group: int, window: int, has_sinks: bool) -> None:
    run(CHUNKS, dim=dim, group=group, num_kv_heads=2, window=window, has_sinks=has_sinks, by_tma=True)


def test_tiles_cover_every_token_once_and_the_longest_come_first() -> None:
    counts, seq_lens = np.array([1, 10, 0, 8], np.int32), np.array([100, 10, 5, 9], np.int32)
    tiles = query_tiles(counts, seq_lens, 4)
    assert sorted(map(tuple, tiles.tolist())) == [(0, 0), (1, 0), (1, 4), (1, 8), (3, 0), (3, 4)]
    assert tiles[0].tolist() == [0, 0]
    assert tiles[1].tolist() == [1, 8]


def test_a_block_must_be_whole_tiles() -> None:
    q, pages = torch.zeros(1, 2, 64), torch.zeros(2, 1, 40, 64)
    ids = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="block_size=40 is no multiple of the tile of 64 keys"):
        attn_prefill(q, pages, pages, ids[0], ids, ids[0], ids[0], ids, q, 1.0)
