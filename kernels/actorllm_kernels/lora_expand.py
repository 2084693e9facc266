"""What the adapter of each token adds to the outputs of a product (reference: `reference.lora_expand`).

The second half of `lora_shrink`, where slots and rows are explained. `up` has the B matrices of all slots, scaled. The outputs of
a product belong to one target or to several, side by side, each with ranks of its own. A program adds to BLOCK_M tokens and
BLOCK_N outputs of one target what one slot gives them. Tokens of other slots are not touched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.launcher import launch
from actorllm_kernels.lora_shrink import FEW_TOKENS, has_adapter, num_parts


@triton.jit(do_not_specialize=["num_tokens"])
def lora_expand_kernel(
    hidden_ptr,
    up_ptr,
    starts_ptr,
    token_rows_ptr,
    adapters_ptr,
    y_ptr,
    num_tokens,
    N: tl.constexpr,
    RANK: tl.constexpr,
    TARGETS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.program_id(2) // TARGETS
    of_target = tl.program_id(2) % TARGETS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.load(starts_ptr + of_target) + tl.program_id(1) * BLOCK_N
    end = tl.load(starts_ptr + of_target + 1)
    is_m = has_adapter(token_rows_ptr, adapters_ptr, m, num_tokens, slot + 1)
    if (tl.max(is_m.to(tl.int32), 0) > 0) & (first < end):
        n = first + tl.arange(0, BLOCK_N)
        is_n = n < end
        wide_m = m.to(tl.int64)
        rows = slot.to(tl.int64) * N + tl.where(is_n, n, 0)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.static_range(0, RANK, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            at = hidden_ptr + wide_m[:, None] * (PARTS * TARGETS * RANK) + of_target * RANK + r[None, :]
            hidden = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for part in range(PARTS):
                hidden += tl.load(at + part * (TARGETS * RANK), mask=is_m[:, None], other=0.0)
            up = tl.load(up_ptr + rows[None, :] * RANK + r[:, None])
            hidden = hidden.to(up.dtype)
            if UPCAST:
                hidden, up = hidden.to(tl.float32), up.to(tl.float32)
            acc = tl.dot(hidden, up, acc, input_precision="ieee")
        at_y = y_ptr + wide_m[:, None] * N + n[None, :]
        mask = is_m[:, None] & is_n[None, :]
        y = tl.load(at_y, mask=mask, other=0.0).to(tl.float32) + acc
        tl.store(at_y, y.to(y_ptr.dtype.element_ty), mask=mask)


def lora_expand(
    hidden: torch.Tensor,
    up: torch.Tensor,
    starts: torch.Tensor,
    token_rows: torch.Tensor,
    adapters: torch.Tensor,
    y: torch.Tensor,
    in_features: int,
    widest: int,
    *,
    pdl: bool = False,
) -> None:
    """y += what the adapters of the tokens give, from what `lora_shrink` has left in `hidden`.

    Arguments:
        hidden: float32, as `lora_shrink` has left it.
        up: [num_slots, out_features, rank], of the type of the products; rank: a power of two, 16 or more.
        starts: int32 [num_targets + 1], at which output each target begins, and the end of the last.
        token_rows, adapters: as of `lora_shrink`.
        y: [num_tokens, out_features], contiguous.
        in_features: of the product. widest: outputs of the widest target.
    """
    num_tokens, out_features = y.shape
    num_slots, _, rank = up.shape
    num_targets = len(starts) - 1
    if rank < 16 or rank & (rank - 1):
        raise ValueError(f"rank {rank} must be a power of two, 16 or more: fill the matrices up with zeros")
    config = dict(lookup("lora_expand", "few" if num_tokens <= FEW_TOKENS else "many", y.device))
    launch(
        lora_expand_kernel,
        (
            triton.cdiv(num_tokens, config["BLOCK_M"]),
            triton.cdiv(widest, config["BLOCK_N"]),
            num_slots * num_targets,
        ),
        (hidden, up, starts, token_rows, adapters, y, num_tokens),
        N=out_features,
        RANK=rank,
        TARGETS=num_targets,
        PARTS=num_parts(num_tokens, in_features),
        BLOCK_R=min(rank, 64),
        UPCAST=y.device.type == "cpu",
        **dependent(pdl, y.device),
        **config,
    )
