"""The sampler: against the document's golden vectors, the plain reference, brute force and its distribution."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from actorllm.model.sampler import Sampler, SamplingColumns
from actorllm_kernels import reference
from tests.effort import examples

DOCUMENT = Path(__file__).parents[2] / "docs" / "sampling.md"
MARGIN = 1e-4
"""Below this the choice may depend on rounding (docs/sampling.md, 'What may differ')."""

DTYPES: dict[str, Any] = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seeds": np.uint64,
    "sample_index": np.int32,
    "token_index": np.int32,
}
DEFAULTS: dict[str, float] = {"temperature": 1.0, "top_p": 1.0}


def columns(num_rows: int, **batch: Any) -> SamplingColumns:
    """Columns of a number or of one value per row."""
    unknown = set(batch) - set(DTYPES)
    assert not unknown, unknown
    built = {}
    for name, dtype in DTYPES.items():
        value = batch.get(name, DEFAULTS.get(name, 0))
        built[name] = np.array(np.broadcast_to(np.array(value, dtype), num_rows))
    return SamplingColumns(**built)


def take(batch: SamplingColumns, rows: NDArray[Any]) -> SamplingColumns:
    return SamplingColumns(**{name: getattr(batch, name)[rows] for name in DTYPES})


def by_reference(logits: torch.Tensor, batch: SamplingColumns, row: int, dtype: torch.dtype) -> reference.Choice:
    return reference.sample(
        logits[row],
        temperature=float(batch.temperature[row]),
        top_k=int(batch.top_k[row]),
        top_p=float(batch.top_p[row]),
        min_p=float(batch.min_p[row]),
        seed=int(batch.seeds[row]),
        sample_index=int(batch.sample_index[row]),
        token_index=int(batch.token_index[row]),
        dtype=dtype,
    )


def random_logits(num_rows: int, vocab_size: int, seed: int, scale: float = 4.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def mixed_columns(num_rows: int, seed: int) -> SamplingColumns:
    """Every filter on and off, alone and together, beside greedy rows."""
    rng = np.random.default_rng(seed)
    return columns(
        num_rows,
        temperature=rng.choice([0.0, 0.3, 0.8, 1.0, 1.7], num_rows),
        top_k=rng.choice([0, 1, 2, 7, 50, 1000, 10**6], num_rows),
        top_p=rng.choice([1.0, 1.0, 0.999, 0.95, 0.5, 0.01], num_rows),
        min_p=rng.choice([0.0, 0.0, 0.001, 0.2, 1.0], num_rows),
        seeds=rng.integers(0, 2**64, num_rows, dtype=np.uint64),
        sample_index=rng.integers(0, 4, num_rows),
        token_index=rng.integers(0, 2**31, num_rows),
    )


# The document ---------------------------------------------------------------------------------------------------------


def golden(heading: str) -> list[dict[str, str]]:
    section = DOCUMENT.read_text().split(f"## Golden vectors: {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[c.strip().strip("`") for c in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def test_golden_noise() -> None:
    rows = golden("noise")
    assert len(rows) >= 16
    for row in rows:
        place = (
            int(row["seed"]),
            int(row["sample index"]),
            int(row["token index"]),
            int(row["id"]),
            int(row["domain"]),
        )
        word = reference.noise_word(*place)
        assert f"{word:08x}" == row["word"], row
        assert math.isclose(float(reference.gumbel([word])[0]), float(row["noise"]), abs_tol=1e-5), row


@pytest.mark.parametrize("row", golden("tokens"), ids=lambda row: "-".join(row.values()))
def test_golden_tokens(row: dict[str, str]) -> None:
    vocab_size, scale = int(row["vocabulary"]), float(row["scale"])
    ids = torch.arange(vocab_size, dtype=torch.int64)
    logits = (scale * ((ids * 2654435761) % 2**32).double() / 2**32).float()[None]
    batch = columns(
        1,
        temperature=float(row["temperature"]),
        top_k=int(row["top_k"]),
        top_p=float(row["top_p"]),
        min_p=float(row["min_p"]),
        seeds=int(row["seed"]),
        sample_index=int(row["sample index"]),
        token_index=int(row["token index"]),
    )
    plain = by_reference(logits, batch, 0, torch.float64)
    assert plain.token == int(row["token"])
    assert math.isclose(plain.margin, float(row["margin"]), abs_tol=1e-4)
    assert float(row["margin"]) > 10 * MARGIN, "too close for a golden vector"
    token, margin = Sampler(vocab_size).sample_with_margin(logits, batch)
    assert token[0] == plain.token
    assert math.isclose(margin[0], plain.margin, abs_tol=2e-4)


def test_the_document_names_the_constants_in_use() -> None:
    text = DOCUMENT.read_text()
    assert re.search(r"tiles of 256", text)
    assert reference.TILE == 256


# The reference --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 1000, 4096, 5000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equal_to_the_reference(vocab_size: int, dtype: torch.dtype) -> None:
    num_rows = 60
    for seed in range(3):
        logits = random_logits(num_rows, vocab_size, seed, scale=(0.1, 4.0, 20.0)[seed])
        batch = mixed_columns(num_rows, seed + vocab_size)
        tokens, margins = Sampler(vocab_size).sample_with_margin(logits.clone(), batch)
        assert tokens.dtype == np.int32
        assert margins.dtype == np.float32
        close = 0
        for row in range(num_rows):
            plain = by_reference(logits, batch, row, dtype)
            if plain.margin < MARGIN:
                close += 1
                continue
            assert tokens[row] == plain.token, (row, plain)
            assert math.isclose(margins[row], plain.margin, rel_tol=1e-4, abs_tol=MARGIN)
        assert close <= 2


def test_equal_to_the_reference_on_a_large_vocabulary() -> None:
    logits = random_logits(6, 151_936, 1)
    batch = columns(6, top_k=[0, 50, 0, 0, 20_000, 0], top_p=[1, 1, 0.9, 0.999, 0.5, 1], seeds=np.arange(6))
    tokens, margins = Sampler(151_936).sample_with_margin(logits.clone(), batch)
    for row in range(6):
        plain = by_reference(logits, batch, row, torch.float64)
        assert margins[row] > MARGIN
        assert tokens[row] == plain.token


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_of_64_bits(seed: int) -> None:
    logits = random_logits(1, 4096, 9)
    batch = columns(1, seeds=np.uint64(seed))
    token = Sampler(4096).sample(logits.clone(), batch)
    assert token[0] == by_reference(logits, batch, 0, torch.float64).token


def test_a_shift_of_the_logits_changes_nothing() -> None:
    logits = torch.round(random_logits(40, 4096, 3) * 64) / 64
    batch = mixed_columns(40, 3)
    sampler = Sampler(4096)
    np.testing.assert_array_equal(sampler.sample(logits.clone(), batch), sampler.sample(logits + 1024, batch))


@pytest.mark.parametrize("offset", [0.0, 8192.0, -8192.0])
def test_tiny_temperatures_of_large_logits(offset: float) -> None:
    """Quotients that float32 can hold only coarsely, or not at all."""
    num_rows = 40
    logits = torch.round(random_logits(num_rows, 700, 6)) / 1024 + offset
    batch = columns(num_rows, temperature=[1e-38, 1e-6, 1e-3, 0.01] * 10, seeds=np.arange(num_rows))
    tokens, margins = Sampler(700).sample_with_margin(logits.clone(), batch)
    assert not np.isnan(margins).any()
    plain = [by_reference(logits, batch, row, torch.float64) for row in range(num_rows)]
    assert tokens.tolist() == [p.token for p in plain]
    assert min(p.margin for p in plain) > MARGIN


# Batches --------------------------------------------------------------------------------------------------------------


def test_a_row_does_not_depend_on_the_batch() -> None:
    num_rows, vocab_size = 150, 4096
    logits, batch = random_logits(num_rows, vocab_size, 5), mixed_columns(num_rows, 5)
    sampler = Sampler(vocab_size)
    tokens, margins = sampler.sample_with_margin(logits.clone(), batch)
    rng = np.random.default_rng(0)
    for size in (1, 2, 15, 16, 17, 150):
        rows = rng.permutation(num_rows)[:size]
        again = sampler.sample(logits[rows].clone(), take(batch, rows))
        is_clear = margins[rows] >= MARGIN
        np.testing.assert_array_equal(again[is_clear], tokens[rows][is_clear])
        assert is_clear.sum() >= size - 1


def test_the_same_columns_serve_every_step() -> None:
    vocab_size = 512
    sampler, batch = Sampler(vocab_size), mixed_columns(20, 1)
    batch.token_index[:] = np.arange(20)
    for step in range(4):
        logits = random_logits(20, vocab_size, 100 + step)
        fresh = dataclasses.replace(batch, token_index=np.arange(20, dtype=np.int32) + step)
        np.testing.assert_array_equal(sampler.sample(logits.clone(), batch), sampler.sample(logits, fresh))
        batch.token_index += 1


@pytest.mark.parametrize("changed", ["token_index", "sample_index", "seeds"])
def test_an_off_by_one_changes_the_stream(changed: str) -> None:
    """Or the tests of equality would have no teeth."""
    num_rows = 50
    logits = random_logits(1, 4096, 8).repeat(num_rows, 1)
    sampler = Sampler(4096)
    base = {"token_index": np.arange(num_rows), "sample_index": 0, "seeds": 7}
    tokens = sampler.sample(logits.clone(), columns(num_rows, **base))
    other = sampler.sample(logits.clone(), columns(num_rows, **{**base, changed: base[changed] + 1}))  # type: ignore[operator]
    assert (tokens != other).sum() > num_rows // 2


def test_greedy_rows_take_the_first_largest_logit() -> None:
    logits = torch.zeros(3, 600)
    logits[1, [77, 300]] = 2.0
    logits[2, 599] = 1.0
    for batch in (SamplingColumns.greedy(3), columns(3, temperature=0.0, top_k=2, top_p=0.1, min_p=0.5)):
        tokens, margins = Sampler(600).sample_with_margin(logits.clone(), batch)
        assert tokens.tolist() == [0, 77, 599]
        assert margins.tolist() == [0.0, 0.0, 1.0]
    mixed = columns(3, temperature=[0.0, 1.0, 0.0])
    tokens, margins = Sampler(600).sample_with_margin(logits.clone(), mixed)
    assert tokens[0] == 0
    assert tokens[2] == 599
    assert margins[2] == 1.0


def test_no_rows() -> None:
    tokens, margins = Sampler(600).sample_with_margin(torch.zeros(0, 600), SamplingColumns.greedy(0))
    assert tokens.shape == margins.shape == (0,)
    assert Sampler(600).sample(torch.zeros(0, 600), columns(0)).shape == (0,)


def test_bad_rows_disturb_nobody() -> None:
    num_rows, vocab_size = 64, 1000
    logits, batch = random_logits(num_rows, vocab_size, 2), mixed_columns(num_rows, 2)
    sampler = Sampler(vocab_size)
    tokens, margins = sampler.sample_with_margin(logits.clone(), batch)
    bad = logits.clone()
    bad[::4] = math.nan
    bad[1::8, 5] = math.nan
    bad[2::8, 999] = math.inf
    bad[6::8] = -math.inf
    good = ~(torch.isnan(bad).any(1) | torch.isposinf(bad).any(1) | torch.isneginf(bad).all(1)).numpy()
    assert good.sum() == 24
    again = sampler.sample(bad.clone(), batch)
    is_clear = good & (margins >= MARGIN)
    np.testing.assert_array_equal(again[is_clear], tokens[is_clear])
    assert ((again >= 0) & (again < vocab_size)).all()
    sampler.sample_with_margin(bad, batch)
    # and nothing of the bad rows stays behind
    np.testing.assert_array_equal(sampler.sample(logits.clone(), batch), tokens)


def test_masked_ids_are_never_chosen() -> None:
    logits = torch.full((30, 1000), -math.inf)
    allowed = torch.arange(3, 1000, 97)
    logits[:, allowed] = torch.randn(30, len(allowed), generator=torch.Generator().manual_seed(0))
    tokens = Sampler(1000).sample(logits, mixed_columns(30, 8))
    assert set(tokens.tolist()) <= set(allowed.tolist())


def test_other_layouts_and_types_of_logits() -> None:
    logits, batch = random_logits(8, 512, 4), columns(8, seeds=np.arange(8))
    sampler = Sampler(512)
    tokens = sampler.sample(logits.clone(), batch)
    np.testing.assert_array_equal(sampler.sample(logits.t().contiguous().t(), batch), tokens)
    half = logits.bfloat16()
    np.testing.assert_array_equal(sampler.sample(half, batch), sampler.sample(half.float(), batch))
    leaf = logits.clone().requires_grad_()
    np.testing.assert_array_equal(sampler.sample(leaf, batch), tokens)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="logits of shape"):
        Sampler(512).sample(torch.zeros(2, 511), SamplingColumns.greedy(2))
    with pytest.raises(ValueError, match="logits of shape"):
        Sampler(512).sample(torch.zeros(3, 512), SamplingColumns.greedy(2))
    with pytest.raises(ValueError, match="differ in length"):
        dataclasses.replace(SamplingColumns.greedy(2), seeds=np.zeros(3, np.uint64))
    with pytest.raises(ValueError, match="must be positive"):
        Sampler(0)


# Filters --------------------------------------------------------------------------------------------------------------


def brute_force(logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float) -> set[int]:
    """Which ids are kept, from probabilities, id by id."""
    best = max(logits)
    weight = {i: math.exp((x - best) / temperature) for i, x in enumerate(logits)}
    kept = {i for i, w in weight.items() if w >= min_p * (1 - 1e-12)}
    if top_k:
        kept = {i for i in kept if sum(weight[j] > weight[i] for j in kept) < top_k}
    if top_p < 1:
        total = sum(weight[j] for j in kept)
        kept = {i for i in kept if sum(weight[j] for j in kept if weight[j] > weight[i]) < top_p * total * (1 - 1e-9)}
    return kept


def drawn(logits: torch.Tensor, num_draws: int, **batch: Any) -> NDArray[np.int32]:
    """Many draws from one row of logits."""
    sampler = Sampler(logits.shape[-1])
    return sampler.sample(logits.repeat(num_draws, 1), columns(num_draws, token_index=np.arange(num_draws), **batch))


@settings(max_examples=examples(20, 60), deadline=None)
@given(
    levels=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.97, 0.6, 0.2, 0.001]),
)
def test_filters_keep_what_brute_force_keeps(
    levels: list[int], temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    """Few levels, so that there are ties; the same set three times over the vocabulary, so that there are tiles."""
    logits = [level / 3 for level in levels]
    y = reference.scaled(torch.tensor(logits, dtype=torch.float64), temperature)
    stated = torch.nonzero(reference.kept(y, top_k=top_k, top_p=top_p, min_p=min_p)).ravel().tolist()
    expected = brute_force(logits, temperature, min_p, top_k, top_p)
    assert set(stated) == expected

    row = torch.full((600,), -200.0)
    row[: len(logits)] = torch.tensor(logits)
    # The weights of the padding are 0, so the sets are the same; two hundred draws see most of a small set.
    tokens = drawn(row, 200, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    assert set(tokens.tolist()) <= expected
    if len(expected) == 1:
        assert (tokens == expected.pop()).all()


@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.99999, 1 - 2.0**-24])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 8.0])
def test_a_nucleus_of_any_size(top_p: float, scale: float) -> None:
    """Flat rows have a nucleus that is larger than what is sorted at first."""
    vocab_size = 4096
    logits = random_logits(4, vocab_size, 6, scale=scale)
    batch = columns(4, top_p=top_p, top_k=[0, 3000, 0, 10], min_p=[0, 0, 0.01, 0], seeds=np.arange(4))
    tokens, margins = Sampler(vocab_size).sample_with_margin(logits.clone(), batch)
    for row in range(4):
        plain = by_reference(logits, batch, row, torch.float64)
        assert plain.margin < MARGIN or tokens[row] == plain.token
        assert margins[row] >= 0


def test_ties_at_the_border_are_kept_together() -> None:
    logits = torch.full((512,), -50.0)
    logits[[1, 100, 300, 511]] = 1.0
    assert set(drawn(logits, 300, top_k=1).tolist()) == {1, 100, 300, 511}
    assert set(drawn(logits, 300, top_p=0.01).tolist()) == {1, 100, 300, 511}
    assert set(drawn(logits, 300, min_p=1.0).tolist()) == {1, 100, 300, 511}


# Distribution ---------------------------------------------------------------------------------------------------------


def chi_square(tokens: NDArray[np.int32], probability: NDArray[np.float64]) -> tuple[float, float]:
    """The statistic, and what it may reach (about six standard deviations); ids expected less than 10 times are one cell."""
    count = np.bincount(tokens, minlength=len(probability)).astype(np.float64)
    expected = probability * len(tokens)
    rare = expected < 10
    count = np.append(count[~rare], count[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    freedom = max(len(count) - 1, 1)
    return float(((count - expected) ** 2 / expected).sum()), freedom + 6 * math.sqrt(2 * freedom) + 6


def softmax(logits: torch.Tensor, temperature: float, **filters: Any) -> NDArray[np.float64]:
    y = reference.scaled(logits.double(), temperature)
    y = torch.where(reference.kept(y, **filters), y, -math.inf)
    probability: NDArray[np.float64] = torch.softmax(y, 0).numpy()
    return probability


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 300, "top_p": 0.8, "min_p": 0.002}],
    ids=str,
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_draw_has_the_distribution_of_the_softmax(filters: dict[str, Any], temperature: float) -> None:
    logits = random_logits(1, 1100, 12, scale=2.5)[0]
    tokens = drawn(logits, 20_000, temperature=temperature, seeds=2026, **filters)
    statistic, limit = chi_square(tokens, softmax(logits, temperature, **filters))
    assert statistic < limit
    # the same draws are not taken for those of a slightly different distribution
    statistic, limit = chi_square(tokens, softmax(logits, temperature * 1.15, **filters))
    assert statistic > limit


@pytest.mark.parametrize("varied", ["seeds", "sample_index", "token_index"])
def test_streams_are_independent_samples(varied: str) -> None:
    """Rows that differ in one coordinate only are independent draws: the pairs have the product distribution."""
    logits = torch.randn(600, generator=torch.Generator().manual_seed(1))
    logits[[3, 280, 590]] += 7
    num_draws = 20_000
    batch: dict[str, Any] = {"token_index": 0, "seeds": 11, varied: np.arange(num_draws)}
    tokens = Sampler(600).sample(logits.repeat(num_draws, 1), columns(num_draws, **batch))
    cell = np.select([tokens == 3, tokens == 280, tokens == 590], [0, 1, 2], 3)
    p = softmax(logits, 1.0)
    single = np.array([p[3], p[280], p[590]])
    single = np.append(single, 1 - single.sum())
    pairs = (cell[:-1:2] * 4 + cell[1::2]).astype(np.int32)
    statistic, limit = chi_square(pairs, np.outer(single, single).ravel())
    assert statistic < limit


def test_the_margin_tells_which_changes_of_the_logits_are_harmless() -> None:
    num_rows, vocab_size = 200, 1000
    logits, batch = random_logits(num_rows, vocab_size, 21), columns(num_rows, seeds=np.arange(num_rows))
    sampler = Sampler(vocab_size)
    tokens, margins = sampler.sample_with_margin(logits.clone(), batch)
    assert (margins > 0).all()
    # no change of up to 0.49 margins in any direction can change the choice: of the two scores each moves by less than half
    push = torch.sign(torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(3)))
    changed = logits + push * torch.from_numpy(margins)[:, None] * 0.49
    np.testing.assert_array_equal(sampler.sample(changed, batch), tokens)
    # and the winner pushed down by more than the margin loses
    pushed = logits.clone()
    pushed[torch.arange(num_rows), torch.from_numpy(tokens).long()] = -math.inf
    assert (sampler.sample(pushed, batch) != tokens).all()
