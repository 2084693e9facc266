"""Changes single logits of some rows before sampling: ids taken out, biases and penalties (reference: `reference.edit_logits`).

What to change comes as one list for the whole batch. It has at most one entry for each row and id, since a row's rules touch few
ids (actorllm/model/logits.py keeps them so). The list has a fixed length in a graph; entries of row -1 do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from actorllm_kernels.configs import lookup
from actorllm_kernels.launcher import launch


@dataclass(frozen=True, slots=True)
class Edits:
    """One entry per id that is changed, [num_edits] each."""

    row: torch.Tensor
    """int32: of the batch; -1: no entry"""
    id: torch.Tensor
    """int32"""
    bias: torch.Tensor
    """float32: added; -inf takes the id out"""
    count: torch.Tensor
    """int32: how often the id is in the output; -1 if it is not penalized, 0 if it is in the prompt only"""


@dataclass(frozen=True, slots=True)
class Penalties:
    """float32, [num_rows] each, by row of the batch."""

    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor


@triton.jit(do_not_specialize=["num_edits"])
def edit_logits_kernel(
    logits_ptr,
    row_ptr,
    id_ptr,
    bias_ptr,
    count_ptr,
    presence_ptr,
    frequency_ptr,
    repetition_ptr,
    num_edits,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    LARGEST: tl.constexpr = 1.0e30  # so that no temperature makes an infinity of a logit that was changed
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + j, mask=j < num_edits, other=-1).to(tl.int64)
    is_edit = row >= 0
    id = tl.load(id_ptr + j, mask=is_edit, other=0)
    bias = tl.load(bias_ptr + j, mask=is_edit, other=0.0)
    count = tl.load(count_ptr + j, mask=is_edit, other=-1)
    at = logits_ptr + row * VOCAB + id
    x = tl.load(at, mask=is_edit, other=0.0).to(tl.float32)
    x = tl.where(bias != 0.0, tl.minimum(x + bias, LARGEST), x)
    is_penalized = is_edit & (count >= 0)
    repetition = tl.load(repetition_ptr + row, mask=is_penalized, other=1.0)
    presence = tl.load(presence_ptr + row, mask=is_penalized, other=0.0)
    frequency = tl.load(frequency_ptr + row, mask=is_penalized, other=0.0)
    y = tl.minimum(tl.where(x > 0, x / repetition, x * repetition), LARGEST)
    y = y - frequency * count.to(tl.float32) - tl.where(count > 0, presence, 0.0)
    tl.store(at, tl.where(is_penalized, y, x).to(logits_ptr.dtype.element_ty), mask=is_edit)


def edit_logits(logits: torch.Tensor, edits: Edits, penalties: Penalties) -> None:
    """In place. logits: [num_rows, vocab_size], contiguous. First the bias is added, then come the penalties, as in vLLM."""
    num_edits = edits.row.shape[0]
    config = lookup("edit_logits", "*", logits.device)
    launch(
        edit_logits_kernel,
        (triton.cdiv(num_edits, config["BLOCK"]),),
        (
            logits,
            edits.row,
            edits.id,
            edits.bias,
            edits.count,
            penalties.presence,
            penalties.frequency,
            penalties.repetition,
            num_edits,
        ),
        VOCAB=logits.shape[1],
        **config,
    )
