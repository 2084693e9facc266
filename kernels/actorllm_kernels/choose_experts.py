"""From scores of experts to those that each token takes, and their weights (reference: `reference.chosen_experts`).

A program chooses for one token, the highest score first, and of equal ones the first. Tokens without a place in the cache are
padding: they take none, so that no weights are read for them.

Experts may stand in groups, of which a token takes the best few: its experts are of these. A group counts as its best expert does.
Where sigmoids score (DeepSeek-V3, arXiv:2412.19437), a tensor corrects what is compared and not the weights, and a group counts as
its best two experts together.
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
LEAST_SUM = tl.constexpr(1e-20)
"""What is added to a sum of sigmoids, so that nothing is divided by 0."""


@triton.jit
def within_groups(
    left,
    expert,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PLACES: tl.constexpr,
    ACTIVE_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
):
    """The scores of the experts of the best groups, and -inf in the place of the others."""
    group = expert // (EXPERTS // GROUPS)
    number = tl.arange(0, PLACES)
    best = tl.full([PLACES], -float("inf"), tl.float32)
    for i in tl.static_range(GROUPS):
        own = tl.where(group == i, left, -float("inf"))
        score = tl.max(own, 0)
        if BEST_TWO:
            score += tl.max(tl.where(expert == tl.argmax(own, 0).to(tl.int32), -float("inf"), own), 0)
        best = tl.where(number == i, score, best)
    is_left = expert < 0
    for _ in tl.static_range(ACTIVE_GROUPS):
        chosen = tl.argmax(best, 0).to(tl.int32)
        is_left = is_left | (group == chosen)
        best = tl.where(number == chosen, -float("inf"), best)
    return tl.where(is_left, left, -float("inf"))


@triton.jit
def choose_experts_kernel(
    scores_ptr,
    kv_slots_ptr,
    bias_ptr,
    numbers_ptr,
    weights_ptr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    ACTIVE: tl.constexpr,
    PLACES: tl.constexpr,
    NORMALIZES: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_PLACES: tl.constexpr,
    ACTIVE_GROUPS: tl.constexpr,
    SCALE: tl.constexpr,
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
    if IS_SIGMOID:
        wide = 1.0 / (1.0 + tl.exp(-left))
        bias = tl.load(bias_ptr + expert, mask=expert < EXPERTS, other=0.0)
        left = tl.where(left > -float("inf"), wide + bias, -float("inf"))
    else:
        wide = tl.exp(left - highest)
        total = tl.sum(wide, 0)
    if GROUPS > 1:
        left = within_groups(left, expert, EXPERTS, GROUPS, GROUP_PLACES, ACTIVE_GROUPS, IS_SIGMOID)
    numbers = tl.full([PLACES], NONE, tl.int32)
    weights = tl.zeros([PLACES], tl.float32)
    for i in tl.static_range(ACTIVE):
        best = tl.argmax(left, 0).to(tl.int32)
        weight = tl.sum(tl.where(expert == best, wide, 0.0), 0)
        numbers = tl.where((place == i) & is_there, best, numbers)
        weights = tl.where(place == i, weight, weights)
        left = tl.where(expert == best, -float("inf"), left)
    if NORMALIZES:
        total = tl.sum(weights, 0)
        if IS_SIGMOID:
            total += LEAST_SUM
    elif IS_SIGMOID:
        total = 1.0
    is_place = place < ACTIVE
    tl.store(numbers_ptr + token * ACTIVE + place, numbers, mask=is_place)
    tl.store(weights_ptr + token * ACTIVE + place, weights / total * SCALE, mask=is_place)


def choose_experts(
    scores: torch.Tensor,
    kv_slots: torch.Tensor,
    numbers: torch.Tensor,
    weights: torch.Tensor,
    normalizes: bool,
    *,
    correction: torch.Tensor | None = None,
    num_groups: int = 1,
    num_active_groups: int = 1,
    scale: float = 1.0,
    pdl: bool = False,
) -> None:
    """The experts of each token and their weights.

    Arguments:
        scores: float32 [num_tokens, num_experts].
        kv_slots: int64 [num_tokens]; less than 0: padding, whose numbers become -1.
        numbers, weights: int32 and float32 [num_tokens, num_active].
        normalizes: the weights of a token sum to 1; else they are those of a softmax over all experts, or sigmoids.
        correction: float32 [num_experts]: sigmoids of scores are the weights, and with this added they are compared; None: the
            weights are those of a softmax.
        num_groups: of neighbouring experts, equally many in each; at least two where there is a correction.
        num_active_groups: that a token takes its experts of.
        scale: of the weights.
    """
    num_tokens, num_experts = scores.shape
    num_active = numbers.shape[1]
    launch(
        choose_experts_kernel,
        (num_tokens,),
        (scores, kv_slots, scores if correction is None else correction, numbers, weights),
        EXPERTS=num_experts,
        PADDED=triton.next_power_of_2(num_experts),
        ACTIVE=num_active,
        PLACES=triton.next_power_of_2(num_active),
        NORMALIZES=normalizes,
        IS_SIGMOID=correction is not None,
        GROUPS=num_groups,
        GROUP_PLACES=triton.next_power_of_2(num_groups),
        ACTIVE_GROUPS=num_active_groups,
        SCALE=scale,
        **dependent(pdl, scores.device),
        **lookup("choose_experts", "*", scores.device),
    )
