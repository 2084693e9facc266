"""Caches with more numbers than 32 bits can count: as on a GPU with much memory, in memory of which little is touched."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from actorllm_kernels import reference
from actorllm_kernels.kv_clear import kv_clear
from actorllm_kernels.kv_copy import kv_copy
from actorllm_kernels.qknorm_rope_kv import qknorm_rope_kv
from tests.kernels.cases import run_decode, run_prefill
from tests.kernels.paged import Paged

BEYOND = 1 << 31
MAP_NORESERVE = 0x4000
"""Linux: no swap is set aside. Python has a name for it since 3.13."""


def untouched(*shape: int) -> torch.Tensor:
    """float16 zeros, which take no memory before something is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    count = int(np.prod(shape, dtype=np.int64))
    return torch.frombuffer(mmap.mmap(-1, 2 * count, flags=flags), dtype=torch.float16).view(shape)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences have their blocks behind the first 2**31 numbers."""
    make = Paged.make

    def make_far(
        seq_lens: list[int], num_kv_heads: int, dim: int, page: int, dtype: torch.dtype, is_float8: bool = False
    ) -> Paged:
        assert not is_float8
        near = make(seq_lens, num_kv_heads, dim, page, torch.float16)
        size = near.keys.stride(0)
        first = BEYOND // size + 1
        pool = untouched(first + len(near.keys), 2, num_kv_heads, page, dim)
        pool[first:, 0], pool[first:, 1] = near.keys, near.values
        return Paged(pool[:, 0], pool[:, 1], near.table + first, near.rows, near.seq_lens)

    monkeypatch.setattr(Paged, "make", make_far)


@pytest.mark.usefixtures("far")
def test_attention_of_few_tokens() -> None:
    run_decode([1, 130, 0, 64], 7, dtype=torch.float16, page=64, tile=64)


@pytest.mark.usefixtures("far")
def test_attention_of_prompts() -> None:
    run_prefill([(65, 193), (1, 1)], dtype=torch.float16, page=64, tile=64)


def test_keys_are_written_there() -> None:
    page, dim = 64, 64
    first = BEYOND // (2 * page * dim) + 1
    pool = untouched(first + 2, 2, 1, page, dim)
    qkv, position = torch.randn(2, 3 * dim).half(), torch.zeros(2, dtype=torch.int32)
    turned = torch.ones(1, dim // 2), torch.zeros(1, dim // 2)  # by no angle
    slots = torch.tensor([first * page + 3, (first + 1) * page])
    qknorm_rope_kv(qkv, position, slots, *turned, torch.empty(2, 1, dim).half(), pool[:, 0], pool[:, 1])
    for row, (block, place) in enumerate(((first, 3), (first + 1, 0))):
        assert torch.equal(pool[block, 0, 0, place], qkv[row, dim : 2 * dim])
        assert torch.equal(pool[block, 1, 0, place], qkv[row, 2 * dim :])


def test_layers_that_are_far_apart() -> None:
    """The second layer begins behind the first 2**31 numbers."""
    page, dim = 8, 16
    num_blocks = BEYOND // (2 * page * dim) + 1
    pool = untouched(2, num_blocks, 2, 1, page, dim)
    blocks = [0, 3, num_blocks - 1]
    near = torch.randn(2, 3, 2, 1, page, dim).half()
    pool[:, blocks] = near
    kv_copy(pool, np.array([blocks[2]], np.int32), np.array([3], np.int32))
    near = reference.copy_pages(near, [2], [1])
    assert torch.equal(pool[:, blocks], near)
    kv_clear(pool, torch.tensor([5, 3 * page + 1, blocks[2] * page + 2]), torch.tensor([0, 1, 0]).int())
    assert torch.equal(pool[:, blocks], reference.clear_pages(near, [5, page + 1, 2 * page + 2], [False, True, False]))
