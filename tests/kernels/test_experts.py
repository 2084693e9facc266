"""The kernels of a mixture of experts in the interpreter, each against its plain statement."""

from __future__ import annotations

import pytest
import torch

from actorllm_kernels import reference
from actorllm_kernels.choose_experts import choose_experts
from actorllm_kernels.group_pairs import group_pairs
from actorllm_kernels.grouped_gemm import FEW_TOKENS, grouped_gemm
from actorllm_kernels.quantized_gemm import packed
from actorllm_kernels.router_scores import router_scores
from actorllm_kernels.sum_experts import sum_experts
from tests.effort import each_value
from tests.kernels.closeness import DTYPES, assert_close


def numbers_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chosen(num_tokens: int, num_experts: int, num_active: int, seed: int = 0) -> torch.Tensor:
    """Experts of each token, all different; those of the second token are no token's."""
    scores = numbers_of(num_tokens, num_experts, seed=seed)
    numbers = scores.topk(num_active)[1].int()
    numbers[1:2] = -1
    return numbers


def grouped(numbers: torch.Tensor, first: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    order, starts = (
        torch.full((numbers.numel(),), -7, dtype=torch.int32),
        torch.zeros(num_experts + 1, dtype=torch.int32),
    )
    group_pairs(numbers, order, starts, first)
    return order, starts


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_are_those_of_float32(dtype: torch.dtype) -> None:
    x, weight, bias = numbers_of(19, 130).to(dtype), numbers_of(21, 130, seed=1) / 130**0.5, numbers_of(21, seed=2)
    scores = torch.zeros(19, 21)
    router_scores(x, weight, bias, scores)
    assert_close(scores, reference.router_scores(x.double(), weight.double(), bias.double()))
    alone = torch.zeros(1, 21)
    router_scores(x[3:4], weight, bias, alone)
    assert torch.equal(alone[0], scores[3]), "the others of a step change no bit"


@pytest.mark.parametrize("normalizes", [True, False])
def test_a_token_takes_the_experts_with_the_highest_scores(normalizes: bool) -> None:
    scores = numbers_of(6, 11)
    scores[2, 3] = scores[2, 7] = 5.0  # of equal ones the first
    scores[5, 4] = torch.nan
    slots = torch.tensor([0, -1, 3, 4, 5, 6])
    numbers, weights = torch.zeros(6, 3, dtype=torch.int32), torch.zeros(6, 3)
    choose_experts(scores, slots, numbers, weights, normalizes)
    assert numbers[1].tolist() == [-1, -1, -1], "padding takes none"
    for token in (0, 2, 3, 4):
        expected, of_expected = reference.chosen_experts(scores[token].tolist(), 3, normalizes)
        assert numbers[token].tolist() == expected
        assert_close(weights[token], torch.tensor(of_expected))
    assert numbers[2].tolist()[:2] == [3, 7]
    assert all(0 <= number < 11 for number in numbers[5].tolist()), (
        "no number is out of bounds, whatever the states are"
    )


@pytest.mark.parametrize(
    ("normalizes", "is_corrected", "num_groups", "num_active_groups"),
    each_value([True, False], [True, False], [(1, 1), (4, 2), (3, 1)]),
)
def test_experts_in_groups(num_groups: int, num_active_groups: int, is_corrected: bool, normalizes: bool) -> None:
    """Of softmax and of sigmoids, whose correction decides who is chosen and not with what weight."""
    scores = 2 * numbers_of(9, 12)
    scores[3] = torch.nan
    correction = numbers_of(12, seed=7) if is_corrected else None
    numbers, weights = torch.zeros(9, 3, dtype=torch.int32), torch.zeros(9, 3)
    slots = torch.arange(9)
    slots[1] = -1
    choose_experts(
        scores,
        slots,
        numbers,
        weights,
        normalizes,
        correction=correction,
        num_groups=num_groups,
        num_active_groups=num_active_groups,
        scale=2.5,
    )
    assert numbers[1].tolist() == [-1, -1, -1], "padding takes none"
    assert all(0 <= number < 12 for number in numbers[3].tolist())
    for token in (0, 2, *range(4, 9)):
        expected, of_expected = reference.chosen_experts(
            scores[token].tolist(),
            3,
            normalizes,
            correction=None if correction is None else correction.tolist(),
            num_groups=num_groups,
            num_active_groups=num_active_groups,
            scale=2.5,
        )
        assert numbers[token].tolist() == expected
        assert_close(weights[token], torch.tensor(of_expected))


@pytest.mark.parametrize(("num_tokens", "first", "here"), [(1, 0, 8), (40, 0, 8), (700, 3, 4), (3, 2, 1)])
def test_pairs_are_in_the_order_of_their_experts(num_tokens: int, first: int, here: int) -> None:
    numbers = chosen(num_tokens, 8, 2)
    order, starts = grouped(numbers, first, here)
    expected, begins = reference.grouped_pairs(numbers, first, here)
    assert starts.tolist() == begins
    assert order[: len(expected)].tolist() == expected


def products(
    num_tokens: int, size: int, inner: int, activation: str, dtype: torch.dtype, *, experts: int = 5, active: int = 2
) -> torch.Tensor:
    """Checked against the reference; pairs of experts that are not here stay as they were."""
    swiglu = (1.702, 0.5) if activation == "swiglu" else None
    rows = inner * 2 if activation else inner
    of_token = numbers_of(num_tokens, size, seed=3).to(dtype)
    weight = (numbers_of(experts, rows, size, seed=4) / size**0.5).to(dtype)
    bias = numbers_of(experts, rows, seed=5).to(dtype)
    numbers = chosen(num_tokens, experts + 2, active)
    order, starts = grouped(numbers, 1, experts)
    y = torch.full((num_tokens * active, inner), 77.0, dtype=dtype)
    grouped_gemm(of_token, weight, None, bias, order, starts, y, num_tokens, activation=activation, swiglu=swiglu)
    flat = (numbers.flatten() - 1).tolist()
    wide = reference.grouped_linear(
        of_token.double(),
        weight.double(),
        bias.double(),
        [min(max(number, 0), experts - 1) for number in flat],
        activation=activation,
        swiglu=swiglu,
    )
    is_here = torch.tensor([0 <= number < experts for number in flat])
    assert is_here.any()
    assert_close(y[is_here], wide[is_here])
    assert (y[~is_here] == 77).all()
    return y


@pytest.mark.parametrize(("dtype", "activation"), each_value(DTYPES, ["", "silu", "swiglu"]))
def test_each_pair_is_multiplied_with_the_weight_of_its_expert(dtype: torch.dtype, activation: str) -> None:
    products(9, 72, 40, activation, dtype)


@pytest.mark.parametrize(("num_tokens", "size", "inner"), [(FEW_TOKENS + 90, 130, 20), (40, 128, 33), (3, 300, 16)])
def test_shapes(num_tokens: int, size: int, inner: int) -> None:
    """Several tiles of one expert, and sizes that fill no tile."""
    products(num_tokens, size, inner, "silu", torch.float32)


def test_the_tokens_beside_it_change_no_bit_of_a_token() -> None:
    def first_of(num_tokens: int) -> torch.Tensor:
        numbers = chosen(40, 4, 2)[:num_tokens].contiguous()
        order, starts = grouped(numbers, 0, 4)
        y = torch.zeros(num_tokens * 2, 24)
        weight = numbers_of(4, 48, 96, seed=4)
        grouped_gemm(
            numbers_of(40, 96)[:num_tokens], weight, None, None, order, starts, y, num_tokens, activation="silu"
        )
        return y[:2]

    assert torch.equal(first_of(1), first_of(40))


@pytest.mark.parametrize(("num_tokens", "kind"), each_value([3, FEW_TOKENS + 1], ["int8", "fp8", "int4"]))
def test_codes_of_experts(kind: str, num_tokens: int) -> None:
    size, inner, generator = 160, 24, torch.Generator().manual_seed(0)
    if kind == "int4":
        codes = torch.randint(0, 16, (3, 2 * inner, size), dtype=torch.uint8, generator=generator)
        scales = torch.rand(3, 2 * inner, size // 32, generator=generator).bfloat16() / 50
        pairs = [packed(code, scale, scale) for code, scale in zip(codes, scales, strict=True)]
    else:
        of_floats = torch.randint(-127, 128, (3, 2 * inner, size), generator=generator)
        codes = of_floats.to(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
        pairs = [(code, torch.full((2 * inner,), 0.01 if kind == "int8" else 0.5)) for code in codes]
    stacked, of_all = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    weight = torch.stack([reference.dequantized(*pair, size) for pair in pairs])
    numbers = chosen(num_tokens, 3, 2)
    order, starts = grouped(numbers, 0, 3)
    x, y = numbers_of(num_tokens, size) / size**0.5, torch.zeros(num_tokens * 2, inner)
    grouped_gemm(x, stacked, of_all, None, order, starts, y, num_tokens, activation="silu")
    expected = reference.grouped_linear(
        x.double(), weight.double(), None, numbers.flatten().clamp_min(0).tolist(), activation="silu"
    )
    is_here = numbers.flatten() >= 0
    assert_close(y[is_here], expected[is_here])


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_weighted_and_added_up(dtype: torch.dtype) -> None:
    found, weights = numbers_of(5 * 3, 1100).to(dtype), numbers_of(5, 3, seed=1)
    numbers = torch.randint(0, 6, (5, 3), generator=torch.Generator().manual_seed(2)).int()
    is_here = (numbers >= 1) & (numbers < 4)
    found[~is_here.flatten()] = torch.nan  # of experts elsewhere nothing is read
    y = torch.zeros(5, 1100, dtype=dtype)
    sum_experts(found, numbers, weights, y, 1, 4)
    assert_close(y, reference.summed_experts(found.view(5, 3, -1).double(), weights.double(), is_here))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_every_token_takes_is_added_as_it_is(dtype: torch.dtype) -> None:
    found, weights, beside = (
        numbers_of(4, 1100).to(dtype),
        numbers_of(2, 2, seed=1),
        numbers_of(2, 1100, seed=2).to(dtype),
    )
    y = torch.zeros(2, 1100, dtype=dtype)
    sum_experts(found, torch.zeros(2, 2, dtype=torch.int32), weights, y, 0, 1, beside)
    here = torch.ones(2, 2, dtype=torch.bool)
    expected = reference.summed_experts(found.view(2, 2, -1).double(), weights.double(), here) + beside.double()
    assert_close(y, expected)


def test_what_cannot_be_is_refused() -> None:
    numbers = chosen(2, 3, 1)
    order, starts = grouped(numbers, 0, 3)
    x, weight, y = numbers_of(2, 16), numbers_of(3, 8, 16), torch.zeros(2, 4)
    with pytest.raises(ValueError, match="activation 'tanh' is none of silu, gelu, gelu_tanh, swiglu"):
        grouped_gemm(x, weight, None, None, order, starts, y, 2, activation="tanh")
    with pytest.raises(ValueError, match="alpha and limit belong to the activation swiglu"):
        grouped_gemm(x, weight, None, None, order, starts, y, 2, activation="swiglu")
