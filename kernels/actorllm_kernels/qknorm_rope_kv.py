"""Between the projections and attention: norm of query and key heads, rotation, and the write to the paged cache
(reference: `reference.qknorm_rope` and `reference.write_pages`).

One program takes some heads of one token, whichever they are. Query heads go to their own tensor, key and value heads to the
token's slot of the cache. Everything is computed in float32 and rounded once. Pairs of a rotation are half a head apart,
as in the checkpoints.

A cache of one layer is [num_blocks, num_kv_heads, block_size, head_dim], one tensor for keys and one for values. They may be
views of one pool: only the last three dimensions are contiguous. So the keys of a block and a head are one contiguous tile,
which is what attention reads at a time. A cache of uint8 holds codes of float8_e4m3fn (`float8`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.float8 import narrowed
from actorllm_kernels.launcher import launch


@triton.jit
def qknorm_rope_kv_kernel(
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    weight_q_ptr,
    weight_k_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    key_stride,
    value_stride,
    eps,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BY_HEAD: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = DIM // 2
    TOTAL: tl.constexpr = NUM_Q + 2 * NUM_KV
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF_BLOCK)
    is_query = (head < NUM_Q)[:, None]
    is_key = ((head >= NUM_Q) & (head < NUM_Q + NUM_KV))[:, None]
    is_value = ((head >= NUM_Q + NUM_KV) & (head < TOTAL))[:, None]
    in_head = (pair < HALF)[None, :]
    mask = (head < TOTAL)[:, None] & in_head
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    at = token * (TOTAL * DIM) + head[:, None] * DIM + pair[None, :]
    first = tl.load(qkv_ptr + at, mask=mask, other=0.0).to(tl.float32)  # [HEADS, HALF_BLOCK]
    second = tl.load(qkv_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(first * first + second * second, 1) / DIM + eps)
        q1 = tl.load(weight_q_ptr + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        q2 = tl.load(weight_q_ptr + pair + HALF, mask=pair < HALF, other=0.0).to(tl.float32)
        k1 = tl.load(weight_k_ptr + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        k2 = tl.load(weight_k_ptr + pair + HALF, mask=pair < HALF, other=0.0).to(tl.float32)
        weight1 = tl.where(is_query, q1[None, :], k1[None, :])
        weight2 = tl.where(is_query, q2[None, :], k2[None, :])
        first = tl.where(is_value, first, first * scale[:, None] * weight1)
        second = tl.where(is_value, second, second * scale[:, None] * weight2)

    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + pair, mask=pair < HALF, other=1.0)
    sin = tl.load(sin_ptr + position * HALF + pair, mask=pair < HALF, other=0.0)
    cos = tl.where(is_value, 1.0, cos[None, :])
    sin = tl.where(is_value, 0.0, sin[None, :])
    turned1 = (first * cos - second * sin).to(q_ptr.dtype.element_ty)
    turned2 = (second * cos + first * sin).to(q_ptr.dtype.element_ty)

    if BY_HEAD:
        GROUP: tl.constexpr = NUM_Q // NUM_KV
        q_row = ((head // GROUP) * tl.num_programs(0) + token) * GROUP + head % GROUP
        out = q_ptr + q_row[:, None] * DIM + pair[None, :]
    else:
        out = q_ptr + token * (NUM_Q * DIM) + head[:, None] * DIM + pair[None, :]
    tl.store(out, turned1, mask=is_query & in_head)
    tl.store(out + HALF, turned2, mask=is_query & in_head)

    if IS_FLOAT8:  # of what was rounded to the type of the model
        turned1 = narrowed(turned1.to(tl.float32))
        turned2 = narrowed(turned2.to(tl.float32))
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        block = slot // PAGE
        row = (slot % PAGE) * DIM
        key = keys_ptr + block * key_stride + (head - NUM_Q)[:, None] * (PAGE * DIM) + row + pair[None, :]
        tl.store(key, turned1, mask=is_key & in_head)
        tl.store(key + HALF, turned2, mask=is_key & in_head)
        first_value = NUM_Q + NUM_KV
        value = values_ptr + block * value_stride + (head - first_value)[:, None] * (PAGE * DIM) + row + pair[None, :]
        tl.store(value, turned1, mask=is_value & in_head)
        tl.store(value + HALF, turned2, mask=is_value & in_head)


def qknorm_rope_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 1e-6,
    *,
    pdl: bool = False,
) -> None:
    """Writes the queries to q and the keys and values to the cache.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]. positions, slots: [num_tokens] integers; a slot is
    block * block_size + offset, or -1 for a token that is not written. cos, sin: float32 [max_positions, head_dim / 2].
    q: [num_tokens, num_heads, head_dim], or [num_kv_heads, num_tokens, group, head_dim] (see `attn_prefill`). keys, values: see
    the module. norms: weights [head_dim] for query and key heads.
    """
    num_tokens, dim = positions.shape[0], q.shape[-1]
    _, num_kv_heads, page, _ = keys.shape
    num_heads = qkv.shape[-1] // dim - 2 * num_kv_heads
    weight_q, weight_k = norms if norms is not None else (cos, cos)
    config = lookup("qknorm_rope_kv", "few" if num_tokens <= 32 else "many", qkv.device)
    grid = (num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, config["HEADS"]))
    launch(
        qknorm_rope_kv_kernel,
        grid,
        (qkv, positions, slots, cos, sin, weight_q, weight_k, q, keys, values, keys.stride(0), values.stride(0), eps),
        NUM_Q=num_heads,
        NUM_KV=num_kv_heads,
        DIM=dim,
        HALF_BLOCK=triton.next_power_of_2(dim // 2),
        PAGE=page,
        HAS_NORM=norms is not None,
        BY_HEAD=q.dim() == 4,
        IS_FLOAT8=keys.dtype == torch.uint8,
        **dependent(pdl, qkv.device),
        **config,
    )
