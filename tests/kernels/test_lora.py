"""Products of adapters, each token with its own, against the statement of one token."""

from __future__ import annotations

import pytest
import torch

from actorllm_kernels import reference
from actorllm_kernels.lora_expand import lora_expand
from actorllm_kernels.lora_shrink import FEW_TOKENS, lora_shrink, num_parts
from tests.kernels.closeness import DTYPES, assert_close

ADAPTERS = torch.tensor([2, 0, 3, 1, 2], dtype=torch.int32)
"""By row of the state table."""


def run(
    token_rows: list[int], in_features: int, outputs: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """What tokens of these rows get; checked against the reference."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    num_tokens, width, out_features = len(token_rows), len(outputs) * rank, sum(outputs)
    down = (numbers(3, width, in_features) / in_features**0.5).to(dtype)
    up = (numbers(3, out_features, rank) / rank**0.5).to(dtype)
    of_row = numbers(len(ADAPTERS) + 1, in_features).to(dtype)  # tokens of a row are alike, wherever they stand
    x, base = of_row[token_rows], numbers(len(ADAPTERS) + 1, out_features).to(dtype)[token_rows]
    rows = torch.tensor(token_rows, dtype=torch.int32)
    starts = [0]
    for size in outputs:
        starts.append(starts[-1] + size)
    slots = torch.where(rows >= 0, ADAPTERS[rows.clamp_min(0).long()], 0)
    hidden = torch.full((num_tokens * num_parts(num_tokens, in_features) * width,), torch.nan)
    lora_shrink(x, down, rows, ADAPTERS, hidden)
    parts = hidden.view(num_tokens, -1, width)
    wide = reference.lora_shrink(x.double(), down.double(), slots)
    has_one = slots > 0
    if bool(has_one.any()):
        assert_close(parts[has_one].sum(1).to(dtype), wide[has_one])
    assert parts[~has_one].isnan().all(), "of tokens without adapters nothing is computed"
    y = base.clone()
    lora_expand(hidden, up, torch.tensor(starts, dtype=torch.int32), rows, ADAPTERS, y, in_features, max(outputs))
    assert_close(y, base.double() + reference.lora_expand(wide, up.double(), starts, slots))
    assert torch.equal(y[~has_one], base[~has_one])
    return y


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_token_gets_what_its_adapter_adds(dtype: torch.dtype) -> None:
    run([0, 1, 2, 3, -1, 4, 0], 96, (40, 24, 24), 16, dtype)


@pytest.mark.parametrize(
    ("num_tokens", "in_features", "outputs", "rank"),
    [(1, 130, (33,), 16), (17, 1100, (70, 70), 32), (FEW_TOKENS + 3, 600, (24,), 16), (3, 64, (20,), 128)],
)
def test_shapes(num_tokens: int, in_features: int, outputs: tuple[int, ...], rank: int) -> None:
    """More tokens than a program takes, K in one part and in several, ranks in one piece and in several."""
    run([i % 5 for i in range(num_tokens)], in_features, outputs, rank)


def test_the_adapters_of_others_change_no_bit_of_a_token() -> None:
    alone = run([0], 600, (24, 8), 16)[0]
    for rows in ([0, 1, -1], [3, 2, 0, 4], [0] * 18):
        assert torch.equal(run(rows, 600, (24, 8), 16)[rows.index(0)], alone)


def test_steps_without_adapters_are_left_alone() -> None:
    y = run([1, -1, 1], 64, (16,), 16)
    assert y.isfinite().all()


def test_what_cannot_be_is_refused() -> None:
    x, rows, hidden = torch.zeros(2, 64), torch.zeros(2, dtype=torch.int32), torch.zeros(63)
    with pytest.raises(ValueError, match="hidden has 63 numbers, and 64 are needed"):
        lora_shrink(x, torch.zeros(1, 32, 64), rows, ADAPTERS, hidden)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="rank 24 must be a power of two"):
        lora_expand(hidden, torch.zeros(1, 8, 24), starts, rows, ADAPTERS, torch.zeros(2, 8), 64, 8)
