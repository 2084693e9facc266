"""From scores of experts to those that each token takes, and their weights (reference: `reference.chosen_experts`).

A program chooses for one token, the highest score first, and of equal ones the first. Tokens without a place in the cache are
padding: they take none, so that no weights are read for them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.launcher import launch

NONE = tl.constexpr(-1)
"""In the place of an expert's number."""


@triton.jit
def choose_experts_kernel(
    scores_ptr,
    kv_slots_ptr,
    numbers_ptr,
    weights_ptr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    ACTIVE: tl.constexpr,
    PLACES: tl.constexpr,
    NORMALIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    place = tl.arange(0, PLACES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    left = tl.load(scores_ptr + token * EXPERTS + expert, mask=expert < EXPERTS, other=-float("inf"))
    is_there = tl.load(kv_slots_ptr + token) >= 0
    left = tl.where(left == left, left, -float("inf"))  # a number in its bounds, also where the states are no numbers
    highest = tl.max(left, 0)
    total = tl.sum(tl.exp(left - highest), 0)
    numbers = tl.full([PLACES], NONE, tl.int32)
    weights = tl.zeros([PLACES], tl.float32)
    for i in tl.static_range(ACTIVE):
        best = tl.argmax(left, 0).to(tl.int32)
        weight = tl.exp(tl.max(left, 0) - highest)
        numbers = tl.where((place == i) & is_there, best, numbers)
        weights = tl.where(place == i, weight, weights)
        left = tl.where(expert == best, -float("inf"), left)
    if NORMALIZES:
        total = tl.sum(weights, 0)
    is_place = place < ACTIVE
    tl.store(numbers_ptr + token * ACTIVE + place, numbers, mask=is_place)
    tl.store(weights_ptr + token * ACTIVE + place, weights / total, mask=is_place)


def choose_experts(
    scores: torch.Tensor,
    kv_slots: torch.Tensor,
    numbers: torch.Tensor,
    weights: torch.Tensor,
    normalizes: bool,
    *,
    pdl: bool = False,
) -> None:
    """The experts of each token and their weights.

    Arguments:
        scores: float32 [num_tokens, num_experts].
        kv_slots: int64 [num_tokens]; less than 0: padding, whose numbers become -1.
        numbers, weights: int32 and float32 [num_tokens, num_active].
        normalizes: the weights of a token sum to 1; else they are those of a softmax over all experts.
    """
    num_tokens, num_experts = scores.shape
    num_active = numbers.shape[1]
    launch(
        choose_experts_kernel,
        (num_tokens,),
        (scores, kv_slots, numbers, weights),
        EXPERTS=num_experts,
        PADDED=triton.next_power_of_2(num_experts),
        ACTIVE=num_active,
        PLACES=triton.next_power_of_2(num_active),
        NORMALIZES=normalizes,
        **dependent(pdl, scores.device),
        **lookup("choose_experts", "*", scores.device),
    )
