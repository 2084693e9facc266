from __future__ import annotations

import pytest
import torch

from actorllm_kernels import reference
from actorllm_kernels.lm_head_sample import lm_head_sample
from actorllm_kernels.sample_pick import Offers, SamplingState, sample_pick
from tests.effort import each_value
from tests.kernels.closeness import DTYPES
from tests.kernels.sampling import make_state, on_the_cpu


def draw(
    x: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, state: SamplingState, **norm: torch.Tensor
) -> list[int]:
    offers = Offers.empty(len(rows), len(weight), x.device)
    tokens, is_finite = torch.full((len(rows),), -7, dtype=torch.int32), torch.full((len(rows),), -7, dtype=torch.int32)
    lm_head_sample(x, weight, rows, state, offers, **norm)
    sample_pick(offers, rows, state, tokens, is_finite)
    assert is_finite.tolist() == [1] * len(rows)
    return tokens.tolist()


@pytest.mark.parametrize(("dtype", "vocab_size"), each_value(DTYPES, [100, 256, 1000]))
def test_the_choice_is_that_of_the_cpu(vocab_size: int, dtype: torch.dtype) -> None:
    x, weight, norm = torch.randn(9, 64).to(dtype), torch.randn(vocab_size, 64).to(dtype), torch.rand(64).to(dtype)
    state, rows = make_state(12, greedy=(3, 7)), torch.randperm(12)[:9].int()
    scaled = (x.float() * norm.float()).to(dtype).double()  # the product is rounded before the matrix units see it
    logits = scaled @ weight.double().T * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-6)
    expected, is_clear = on_the_cpu(logits.float(), state, rows)
    before = state.token_index.clone()
    tokens = draw(x, weight, rows, state, norm=norm)
    assert is_clear.sum() >= 8
    assert [t for t, clear in zip(tokens, is_clear, strict=True) if clear] == expected[is_clear].tolist()
    assert state.last_token[rows.long()].tolist() == tokens
    advanced = torch.zeros(12, dtype=torch.int32)
    advanced[rows.long()] = 1
    assert torch.equal(state.token_index, before + advanced)


def test_every_row_count_and_padding() -> None:
    weight, state = torch.randn(300, 32), make_state(70, greedy=(0,))
    x = torch.randn(33, 32)
    rows = torch.arange(33, dtype=torch.int32)
    together = draw(x, weight, rows, state)
    assert together[0] == int((x[0] @ weight.T).argmax())
    state = make_state(70, greedy=(0,))
    rows[5] = -1
    padded = draw(x, weight, rows, state)
    assert padded == [0 if i == 5 else token for i, token in enumerate(together)]
    state = make_state(70, greedy=(0,))
    assert draw(x[7:8], weight, rows[7:8], state) == together[7:8]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_reported_and_concern_their_row_only(bad: float) -> None:
    weight, x, rows = torch.randn(300, 32), torch.randn(3, 32), torch.arange(3, dtype=torch.int32)
    expected = draw(x, weight, rows, make_state(3))
    x[1, 0] = bad
    offers = Offers.empty(3, 300, x.device)
    tokens, is_finite = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    state = make_state(3)
    lm_head_sample(x, weight, rows, state, offers)
    sample_pick(offers, rows, state, tokens, is_finite)
    assert is_finite.tolist() == [1, 0, 1]
    assert 0 <= tokens[1] < 300
    assert [tokens[0], tokens[2]] == [expected[0], expected[2]]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "num_steps",
    [12, pytest.param(320, marks=pytest.mark.slow(reason="320 steps in the interpreter; twelve show the same"))],
)
def test_ids_are_drawn_as_often_as_the_softmax_says(num_steps: int) -> None:
    """Chi-square over 300 ids in two tiles, for some token indices of 32 rows with different seeds."""
    vocab_size, num_rows = 300, 32
    weight = torch.randn(vocab_size, 16)
    x = torch.randn(1, 16).expand(num_rows, 16).contiguous() / 2
    state, rows = make_state(num_rows), torch.arange(num_rows, dtype=torch.int32)
    state.temperature.fill_(1.0)
    state.token_index.zero_()
    counts = torch.zeros(vocab_size)
    for _ in range(num_steps):
        counts += torch.bincount(torch.tensor(draw(x, weight, rows, state)), minlength=vocab_size)
    expected = torch.softmax(x[0] @ weight.T, 0) * num_rows * num_steps
    large = expected >= 5
    cells = torch.cat((counts[large], counts[~large].sum(0, keepdim=True)))
    wanted = torch.cat((expected[large], expected[~large].sum(0, keepdim=True)))
    statistic, freedom = float(((cells - wanted).square() / wanted).sum()), len(cells) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_a_single_row_against_the_plain_statement() -> None:
    x, weight, state = torch.randn(1, 32), torch.randn(600, 32), make_state(1, seed=3)
    choice = reference.sample(
        (x.double() @ weight.double().T)[0],
        temperature=float(state.temperature[0]),
        seed=int(state.seed[0]) % 2**64,
        sample_index=int(state.sample_index[0]),
        token_index=int(state.token_index[0]),
    )
    assert choice.margin > 1e-4
    assert draw(x, weight, torch.zeros(1, dtype=torch.int32), state) == [choice.token]


def test_too_many_rows_are_refused() -> None:
    x, state = torch.zeros(65, 16), make_state(1)
    with pytest.raises(ValueError, match="65 rows are too many for lm_head_sample"):
        lm_head_sample(x, x, torch.zeros(65, dtype=torch.int32), state, Offers.empty(65, 65, x.device))
