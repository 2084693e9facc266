"""The inputs of a decode step from the state table on the device (reference: `reference.step_prep`).

The table has a row per slot; a step names the slots it decodes, and everything else is read and advanced here. So the
next step can be launched before the tokens of this one have reached the CPU. A row of a step whose slot is -1 is padding:
it gets token 0 at position 0, writes nothing and attends to nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.launcher import launch


@triton.jit(do_not_specialize=["num_rows"])
def step_prep_kernel(
    rows_ptr,
    last_token_ptr,
    num_computed_ptr,
    block_table_ptr,
    table_stride,
    ids_ptr,
    positions_ptr,
    kv_slots_ptr,
    seq_lens_ptr,
    num_rows,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEPS_PADDING: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_rows
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(rows_ptr + i, mask=mask, other=-1).to(tl.int64)
    is_live = row >= 0
    position = tl.load(num_computed_ptr + row, mask=is_live, other=0)
    token = tl.load(last_token_ptr + row, mask=is_live, other=0)
    block = tl.load(block_table_ptr + row * table_stride + position // PAGE, mask=is_live, other=0).to(tl.int64)
    is_written = mask
    if KEEPS_PADDING:
        is_written = is_live
    tl.store(ids_ptr + i, token, mask=is_written)
    tl.store(positions_ptr + i, position, mask=is_written)
    tl.store(kv_slots_ptr + i, tl.where(is_live, block * PAGE + position % PAGE, -1), mask=is_written)
    tl.store(seq_lens_ptr + i, tl.where(is_live, position + 1, 0), mask=mask)
    tl.store(num_computed_ptr + row, position + 1, mask=is_live)


def step_prep(
    rows: torch.Tensor,
    last_token: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
    page: int,
    ids: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    keeps_padding: bool = False,
    pdl: bool = False,
) -> None:
    """One more token for each of `rows`; num_computed grows by one for them.

    rows: int32 [num_rows] slots, or -1. The table: last_token, num_computed int32 [num_slots], block_table int32 [num_slots,
    max_blocks]. Outputs: ids, positions, seq_lens int32 [num_rows]; kv_slots int64 [num_rows].
    keeps_padding: ids, positions and kv_slots of padding stay as they are: tokens of prompts are there.
    """
    num_rows = rows.shape[0]
    config = lookup("step_prep", "*", rows.device)
    launch(
        step_prep_kernel,
        (triton.cdiv(num_rows, config["BLOCK"]),),
        (
            rows,
            last_token,
            num_computed,
            block_table,
            block_table.stride(0),
            ids,
            positions,
            kv_slots,
            seq_lens,
            num_rows,
        ),
        PAGE=page,
        KEEPS_PADDING=keeps_padding,
        **dependent(pdl, rows.device),
        **config,
    )
