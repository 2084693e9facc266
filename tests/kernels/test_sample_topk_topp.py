from __future__ import annotations

import numpy as np
import pytest
import torch

from actorllm_kernels import reference
from actorllm_kernels.sample_topk_topp import FilterScratch, FilterState, find_cutoffs, tile_maxima
from tests.kernels.cases import Columns
from tests.kernels.cases import draw_filtered as draw
from tests.kernels.sampling import make_state, on_the_cpu


def filters(num_rows: int, top_k: float = 0, top_p: float = 1, min_p: float = 0) -> Columns:
    return (
        np.full(num_rows, top_k, np.int32),
        np.full(num_rows, top_p, np.float32),
        np.full(num_rows, min_p, np.float32),
    )


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [
    (0, 1, 0), (1, 1, 0), (5, 1, 0), (40, 1, 0), (1899, 1, 0), (5000, 1, 0),
    (0, 0.001, 0), (0, 0.5, 0), (0, 0.95, 0), (0, 0.99999, 0), (0, 1, 0.3), (0, 1, 1), (20, 0.9, 0.05), (3, 0.99, 0.0001),
])  # fmt: skip
def test_the_choice_is_that_of_the_cpu(top_k: int, top_p: float, min_p: float) -> None:
    logits, state, rows = 3 * torch.randn(4, 1900), make_state(6, greedy=(2,)), torch.tensor([5, 2, 0, 3]).int()
    columns = filters(4, top_k, top_p, min_p)
    expected, is_clear = on_the_cpu(logits, state, rows, *columns)
    tokens, is_finite = draw(logits, rows, state, columns)
    assert is_finite == [1] * 4
    assert is_clear.sum() >= 3
    assert [t for t, clear in zip(tokens, is_clear, strict=True) if clear] == expected[is_clear].tolist()


# Seconds each in the interpreter; the second seed draws other filters for the same kinds of rows.
@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow(reason="a second seed of the same draws, in the interpreter"))]
)
@pytest.mark.parametrize("kind", ["ties", "flat", "steep", "short"])
def test_hard_logits(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab_size = 130 if kind == "short" else 1100
    logits = torch.from_numpy(rng.normal(size=(6, vocab_size)).astype(np.float32))
    if kind == "ties":
        logits = (logits * 2).round() / 2
    elif kind == "flat":
        logits = 100 + logits / 1000
    elif kind == "steep":
        logits = logits * 100
        logits[:, ::7] = -torch.inf
    columns = (
        rng.choice([0, 1, 2, 30, 500], 6).astype(np.int32),
        rng.choice([0.1, 0.8, 1.0], 6).astype(np.float32),
        rng.choice([0, 0.01], 6).astype(np.float32),
    )
    state, rows = make_state(6, seed=seed), torch.arange(6, dtype=torch.int32)
    expected, is_clear = on_the_cpu(logits, state, rows, *columns)
    tokens, _ = draw(logits, rows, state, columns)
    assert [t for t, clear in zip(tokens, is_clear, strict=True) if clear] == expected[is_clear].tolist()


def test_masks() -> None:
    logits, state, rows = torch.randn(4, 700), make_state(4, greedy=(1,)), torch.arange(4, dtype=torch.int32)
    is_allowed = torch.rand(2, 700) < 0.1
    bits = np.packbits(is_allowed.numpy(), axis=1, bitorder="little")
    words = np.zeros((2, 22 * 4), np.uint8)
    words[:, : bits.shape[1]] = bits
    masks, mask_rows = torch.from_numpy(words.view(np.int32)), torch.tensor([1, 0, -1, 1], dtype=torch.int32)
    allowed = logits.clone()
    for row, mask in enumerate(mask_rows.tolist()):
        if mask >= 0:
            allowed[row, ~is_allowed[mask]] = -torch.inf
    columns = filters(4, 30)
    expected, is_clear = on_the_cpu(allowed, state, rows, *columns)
    tokens, is_finite = draw(logits, rows, state, columns, masks, mask_rows)
    assert is_finite == [1] * 4
    assert is_clear.all()
    assert tokens == expected.tolist()
    assert torch.equal(logits, allowed)


def test_rows_with_nothing_left_or_bad_logits_are_reported_and_padding_is_not() -> None:
    logits, state = torch.randn(5, 300), make_state(5)
    rows = torch.tensor([0, -1, 2, 3, 4], dtype=torch.int32)
    logits[2] = -torch.inf
    logits[3, 17] = torch.nan
    logits[1] = torch.nan
    columns = filters(5, 10, 0.9)
    expected, _ = on_the_cpu(logits[[0, 4]], state, torch.tensor([0, 4]), *filters(2, 10, 0.9))
    tokens, is_finite = draw(logits, rows, state, columns)
    assert is_finite == [1, 1, 0, 0, 1]
    assert [tokens[0], tokens[4]] == expected.tolist()
    assert all(0 <= token < 300 for token in tokens)


@pytest.mark.parametrize(
    ("kind", "is_walked", "bins"),
    [("usual", False, 0), ("peaked", False, 0), ("flat", True, 0), ("usual", True, 1 << 40)],
)
def test_top_p_alone_is_decided_from_few_ids_where_it_can_be(kind: str, is_walked: bool, bins: int) -> None:
    """And rightly where it cannot, or where the choice of these ids was wrong. bins: what was there before, normally 0."""
    torch.manual_seed(0)
    logits = {"usual": 2.0, "peaked": 20.0, "flat": 0.001}[kind] * torch.randn(2, 9_000)
    state, rows = make_state(2), torch.arange(2, dtype=torch.int32)
    top_k, top_p, min_p = map(torch.from_numpy, filters(2, 0, 0.9, 0))
    scratch = FilterScratch.empty(2, 9_000, logits.device)
    tile_maxima(logits, scratch)
    scratch.order.fill_(-1)
    scratch.nucleus.bins.fill_(bins)
    find_cutoffs(logits, rows, state, FilterState(top_k, top_p, min_p), scratch)
    for row in range(2):
        y = reference.scaled(logits[row].double(), float(state.temperature[row]))
        right = int(reference.kept(y, top_p=float(top_p[row])).sum())
        key = (0.0 - (logits[row] - logits[row].max()) / state.temperature[row]).view(torch.int32)
        assert abs(int((key <= scratch.cutoff[row]).sum()) - right) <= 1
    assert scratch.nucleus.bins.count_nonzero() == 0
    assert bool((scratch.order != -1).any()) == is_walked
