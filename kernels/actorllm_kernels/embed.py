"""Rows of the embedding table (reference: `reference.embed`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.launcher import launch


@triton.jit
def embed_kernel(
    ids_ptr,
    weight_ptr,
    y_ptr,
    vocab_size,
    scale,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    id = tl.load(ids_ptr + token).to(tl.int64)
    y = tl.zeros([BLOCK], tl.float32)
    if (id >= 0) & (id < vocab_size):
        y = tl.load(weight_ptr + id * SIZE + columns, mask=mask, other=0.0).to(tl.float32) * scale
    tl.store(y_ptr + token * SIZE + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


def embed(ids: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, scale: float = 1.0, *, pdl: bool = False) -> None:
    """y = weight[ids] * scale; zeros where an id is outside the table (a slice of the vocabulary, or a padding row).

    ids: [num_tokens] integers; weight: [vocab_size, hidden_size]; y: [num_tokens, hidden_size].
    """
    num_tokens, size = y.shape
    config = lookup("embed", "*", ids.device)
    launch(
        embed_kernel,
        (num_tokens, triton.cdiv(size, config["BLOCK"])),
        (ids, weight, y, weight.shape[0], scale),
        SIZE=size,
        **dependent(pdl, ids.device),
        **config,
    )
