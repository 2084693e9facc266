"""Bands: how often they hold what they should, and what they are when nothing went wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest

from actorllm.slo.experiments.bands import (
    _draws,
    attainment_band,
    attainment_of,
    band_of,
    crossing,
    crossing_bounds,
    drawn,
    wilson,
)


def point(rng: np.random.Generator, shares: tuple[float, ...], *, burst: float = 0.0) -> dict[str, list[list[int]]]:
    """20 blocks of 50 requests of each class; with bursts, blocks differ in how good their requests are."""
    num = np.full((20, len(shares)), 50)
    wobble = rng.normal(0, burst, (20, 1))
    good = rng.binomial(num, np.clip(np.array(shares) + wobble, 0, 1))
    return {"n": num.tolist(), "tpot": good.tolist(), "deadline": num.tolist()}


@pytest.mark.parametrize(("shares", "burst"), [((0.9,), 0.0), ((0.9,), 0.08), ((0.8, 0.97), 0.05)])
def test_bands_cover_the_truth(shares: tuple[float, ...], burst: float) -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(100):
        band = attainment_band([point(rng, shares, burst=burst) for _ in range(4)], "tpot", "worst")
        assert band.low <= band.value <= band.high
        hits += band.low <= min(shares) <= band.high
    assert hits >= 90, "95 % of them should; four seeds are few"


def test_bands_are_no_wider_than_need_be() -> None:
    rng = np.random.default_rng(6)
    band = attainment_band([point(rng, (0.9,)) for _ in range(4)], "tpot", "worst")
    assert band.high - band.low < 3 * 2 * 1.96 * np.sqrt(0.9 * 0.1 / 4000)


def test_all_good_is_not_certain() -> None:
    rng = np.random.default_rng(7)
    band = attainment_band([point(rng, (0.9,))], "deadline", "overall")
    assert (band.value, band.high) == (1.0, 1.0)
    assert band.low == pytest.approx(wilson(1.0, 1000)[0])
    assert 0.99 < band.low < 1.0


def test_the_worst_class_is_that_of_each_draw() -> None:
    rng = np.random.default_rng(8)
    points = [point(rng, (0.7, 0.95)) for _ in range(3)]
    assert attainment_band(points, "tpot", "worst").value < 0.75
    assert attainment_band(points, "tpot", "overall").value > 0.8


def test_where_a_curve_crosses_a_target() -> None:
    rates = np.array([1.0, 2.0, 4.0])
    curves = np.array([[1.0, 0.9, 0.5], [0.8, 0.7, 0.6], [1.0, 1.0, 1.0], [1.0, 0.5, 0.95]])
    assert crossing(rates, curves, 0.9).tolist() == pytest.approx([2.0, 0.0, 4.0, 1.2])
    assert crossing(rates, curves[:1], 0.7).tolist() == pytest.approx([3.0])


def test_what_a_highest_rate_is_at_least_and_at_most() -> None:
    rates = np.array([1.0, 2.0, 4.0])
    curves = np.array([[1.0, 0.9, 0.5], [0.8, 0.7, 0.6], [1.0, 1.0, 1.0], [0.95, 0.5, 0.95]])
    least, most = crossing_bounds(rates, curves, 0.9)
    assert least.tolist() == pytest.approx([2.0, 0.0, 4.0, 1 + 0.05 / 0.45])
    assert most.tolist() == pytest.approx([2.0, 1.0, math.inf, 1 + 0.05 / 0.45])


def test_an_end_that_nothing_bounds_is_open() -> None:
    draws = np.linspace(2.0, 3.0, 100)
    assert band_of(2.5, draws, draws).ends() == ("2.02", "2.98")
    below, above = np.where(draws < 2.1, 0.0, draws), np.where(draws < 2.1, 1.5, draws)
    assert band_of(2.5, below, above).ends() == ("< 1.50", "2.98")
    assert band_of(2.5, draws, np.where(draws > 2.9, math.inf, draws)).ends() == ("2.02", "> 2.98")
    few = np.where(draws > 2.99, math.inf, draws)
    assert band_of(2.5, draws, few).ends()[1] == "2.98", "one draw in a hundred is not in the band"
    assert band_of(2.5, np.zeros(100), np.full(100, math.inf)).ends() == ("< 2.50", "> 2.50")


def test_copies_of_a_request_count_once() -> None:
    rng = np.random.default_rng(7)
    points = [point(rng, (0.9,))]
    plain, copied = (attainment_band(points, "deadline", "overall", distinct=share) for share in (1.0, 0.1))
    assert plain.low == pytest.approx(wilson(1.0, 1000)[0])
    assert copied.low == pytest.approx(wilson(1.0, 100)[0])


def test_draws_are_of_seeds_and_of_blocks_within_them() -> None:
    """Counted one by one: each draw has as many seeds, and of each as many blocks, as there are."""
    rng = np.random.default_rng(9)
    points = [point(rng, (0.7, 0.95), burst=0.1) for _ in range(3)]
    num, good = (np.array([one[key] for one in points], float) for key in ("n", "tpot"))
    found = drawn(points, "tpot", "worst", 50)
    for draw, (seeds, blocks) in enumerate(zip(*_draws(3, 20, 50), strict=True)):
        assert blocks.shape == (3, 20)
        mine = [(int(seed), int(block)) for seed, own in zip(seeds, blocks, strict=True) for block in own]
        sums = [sum(counts[one] for one in mine) for counts in (num, good)]
        assert found[draw] == attainment_of(sums[0], sums[1], "worst")
    assert found.std() > 0
