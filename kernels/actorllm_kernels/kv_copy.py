"""Copies whole blocks of the paged cache (reference: `reference.copy_pages`): copy-on-write, compaction, swapping."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from actorllm_kernels.configs import lookup
from actorllm_kernels.launcher import launch


@triton.jit
def kv_copy_kernel(pool_ptr, pairs_ptr, layer_stride: tl.int64, block_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    pair = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(pairs_ptr + 2 * pair).to(tl.int64)
    to = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64)
    first = pool_ptr + layer * layer_stride
    x = tl.load(first + source * block_stride + element, mask=element < SIZE)
    tl.store(first + to * block_stride + element, x, mask=element < SIZE)


def kv_copy(pool: torch.Tensor, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
    """pool[:, targets] = pool[:, sources]. pool: [num_layers, num_blocks, ...], contiguous within a block.

    Copies run at the same time: raises ValueError if a block is written that is also read, or is written twice.
    """
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources and {len(targets)} targets")
    if len(np.unique(targets)) != len(targets) or np.isin(targets, sources).any():
        raise ValueError(f"blocks {sources.tolist()} cannot be copied to {targets.tolist()} all at once")
    if not len(sources):
        return
    pairs = torch.from_numpy(np.stack((sources, targets), 1).astype(np.int32)).to(pool.device)
    launch_kv_copy(pool, pairs)


def launch_kv_copy(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """As `kv_copy`, with pairs of source and target on the device, int32 [num_pairs, 2], not checked."""
    size = pool[0, 0].numel()
    config = lookup("kv_copy", "*", pool.device)
    grid = (pairs.shape[0], pool.shape[0], triton.cdiv(size, config["BLOCK"]))
    launch(
        kv_copy_kernel,
        grid,
        (pool, pairs, pool.stride(0), pool.stride(1)),
        SIZE=size,
        **config,
    )
