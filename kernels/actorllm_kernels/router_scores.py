"""Scores of a mixture's experts, in float32 whatever the type of the model (reference: `reference.router_scores`).

The scores decide which experts a token takes, so they are not rounded to 16 bits. A token's sums have no term of another token,
and one order whatever the number of tokens. So its choice does not depend on its batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.launcher import launch


@triton.jit(do_not_specialize=["num_tokens"])
def router_scores_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    scores_ptr,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    is_n, is_m = n < N, m < num_tokens
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = m.to(tl.int64)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, K, BLOCK_K):
        column = start + k
        is_k = column < K
        x = tl.load(x_ptr + token[None, :] * K + column[:, None], mask=is_m[None, :] & is_k[:, None], other=0.0)
        w = tl.load(weight_ptr + n[:, None] * K + column[None, :], mask=is_n[:, None] & is_k[None, :], other=0.0)
        acc = tl.dot(w, x.to(tl.float32), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=is_n, other=0.0)[:, None]
    tl.store(scores_ptr + token[None, :] * N + n[:, None], acc, mask=is_m[None, :] & is_n[:, None])


def router_scores(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scores: torch.Tensor, *, pdl: bool = False
) -> None:
    """scores = x @ weight.T + bias, in float32.

    x: [num_tokens, hidden_size], contiguous. weight: float32 [num_experts, hidden_size]. bias: float32 [num_experts].
    scores: float32 [num_tokens, num_experts].
    """
    num_tokens, size = x.shape
    config = lookup("router_scores", "*", x.device)
    launch(
        router_scores_kernel,
        (triton.cdiv(len(weight), config["BLOCK_N"]), triton.cdiv(num_tokens, config["BLOCK_M"])),
        (x, weight, weight if bias is None else bias, scores, num_tokens),
        N=len(weight),
        K=size,
        HAS_BIAS=bias is not None,
        **dependent(pdl, x.device),
        **config,
    )
