"""Workloads: seeded, independent parts, and what they promise of rates, shares and prefixes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actorllm.errors import InvalidParameterError
from actorllm.kvcache.prefix_index import HASH_BYTES
from actorllm.slo.workload import (
    Workload,
    assign_classes,
    assign_tenants,
    bursty_arrivals,
    constant_arrivals,
    diurnal_arrivals,
    fixed_lengths,
    gamma_arrivals,
    make_workload,
    parse_mix,
    poisson_arrivals,
    sample,
    seed_stream,
    share_prefixes,
    synthetic,
)
from actorllm.types.objective import SLO, RequestClass


def of(arrivals: Any) -> Workload:
    return make_workload(arrivals, fixed_lengths(arrivals.size, 10, 5))


@pytest.mark.parametrize(
    ("arrive", "cv"),
    [
        (lambda n, rate, seed: poisson_arrivals(n, rate, seed), 1.0),
        (lambda n, rate, seed: gamma_arrivals(n, rate, 3.0, seed), 3.0),
        (lambda n, rate, seed: gamma_arrivals(n, rate, 0.3, seed), 0.3),
        (lambda n, rate, seed: constant_arrivals(n, rate), 0.0),
        (lambda n, rate, seed: bursty_arrivals(n, rate, period_s=20, seed=seed), None),
    ],
)
def test_arrivals_have_their_rate_and_burstiness(arrive: Callable[..., Any], cv: float | None) -> None:
    workload = of(arrive(20_000, 4.0, 1))
    assert workload.rate == pytest.approx(4.0, rel=0.1)
    if cv is not None:
        assert workload.cv == pytest.approx(cv, rel=0.06, abs=1e-9)
    else:
        assert workload.cv > 1.3
    assert np.array_equal(workload.arrival, arrive(20_000, 4.0, 1)), "the same seed, the same arrivals"


def test_another_rate_brings_the_same_requests_closer_together() -> None:
    slow, fast = synthetic(500, 1.0, seed=3), synthetic(500, 4.0, seed=3)
    assert np.allclose(slow.arrival / 4, fast.arrival)
    assert np.array_equal(slow.num_prompt, fast.num_prompt)
    assert slow.at_rate(4.0).rate == pytest.approx(4.0)


def test_classes_are_a_transform_of_their_own() -> None:
    workload = synthetic(4000, 2.0, seed=5)
    a, b = RequestClass("a", SLO(tpot=0.05)), RequestClass("b")
    half = assign_classes(workload, [(a, 0.5), (b, 0.5)], seed=9)
    more = assign_classes(workload, [(a, 0.6), (b, 0.4)], seed=9)
    assert np.array_equal(half.num_output, workload.num_output)
    assert (half.class_ids == 0).mean() == pytest.approx(0.5, abs=0.03)
    assert ((half.class_ids == 0) <= (more.class_ids == 0)).all(), "who was in class a stays there"
    tenants = assign_tenants(half, [3, 1], seed=9)
    assert tenants.tenants == ("tenant-0", "tenant-1")
    assert (tenants.tenant_ids == 0).mean() == pytest.approx(0.75, abs=0.03)


def test_a_mix_is_read_as_it_is_written() -> None:
    mix = parse_mix("ls:0.5:ttft=0.5+p/4000,tpot=0.05 be:1.5:e2e=120,priority=3,patience=60,sensitive=0 rest:1")
    assert mix == [
        (RequestClass("ls", SLO(0.5, 0.05, None, 1 / 4000), True), 0.5),
        (RequestClass("be", SLO(e2e=120), False, 3, 60.0), 1.5),
        (RequestClass("rest"), 1.0),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ls:0.5:tpots=1", "'tpots' is not known; did you mean 'tpot'"),
        ("ls:x", "share='x' must be a positive number"),
        ("ls:0:tpot=1", "share='0' must be a positive number"),
        ("ls:1:ttft=0.5+p/0", "ttft='0' must be a positive number"),
        ("ls:1:tpot=-1", "SLO tpot=-1.0"),
        ("ls:1/2 be:1/2/3", "class 'ls' has 2 shares and another one 3"),
        ("ls:1/0", "share='0' must be a positive number"),
        ("", "at least one class"),
    ],
)
def test_a_wrong_mix_says_where(text: str, problem: str) -> None:
    with pytest.raises(InvalidParameterError, match=problem.replace("(", r"\(").replace("+", r"\+")):
        parse_mix(text)


def test_a_mix_needs_classes_with_shares_and_names() -> None:
    workload = synthetic(5, 1.0)
    with pytest.raises(InvalidParameterError, match="names a class twice: a, a"):
        assign_classes(workload, [(RequestClass("a"), 1), (RequestClass("a"), 1)])
    with pytest.raises(InvalidParameterError, match="share of class 'a'=-1"):
        assign_classes(workload, [(RequestClass("a"), -1)])


def test_a_mix_may_change_in_time() -> None:
    """Three parts of the time, however the requests are spread over it; one share is that of all parts."""
    at = np.sort(seed_stream(3, "at").random(6000) ** 2) * 90 + 5
    at[0], at[-1] = 5.0, 95.0
    workload = make_workload(at, fixed_lengths(6000, 10, 5))
    mix = parse_mix("day:8/1/1 night:1/1/8 always:1")
    assert [share for _, share in mix] == [(8, 1, 1), (1, 1, 8), 1]
    found = assign_classes(workload, mix, seed=2)
    for part, wanted in enumerate(([0.8, 0.1, 0.1], [1 / 3, 1 / 3, 1 / 3], [0.1, 0.8, 0.1])):
        mine = found.class_ids[(at >= 5 + 30 * part) & (at < 35 + 30 * part)]
        assert np.bincount(mine, minlength=3) / mine.size == pytest.approx(wanted, abs=0.05)
    constant = assign_classes(workload, parse_mix("day:2/2 night:1/1"), seed=2)
    assert np.array_equal(constant.class_ids, assign_classes(workload, parse_mix("day:2 night:1"), seed=2).class_ids)


def test_prompts_of_a_group_have_equal_block_hashes_up_to_the_border() -> None:
    workload = share_prefixes(
        make_workload(constant_arrivals(60, 1.0), fixed_lengths(60, 200, 5)), num_groups=3, num_tokens=128, seed=2
    )
    prefixes = workload.prefixes
    assert prefixes is not None
    hashes = [prefixes.block_hashes(i, 200, 16) for i in range(60)]
    assert {h.size for h in hashes} == {200 // 16 * HASH_BYTES}
    groups = {h[: 128 // 16 * HASH_BYTES].tobytes() for h in hashes}
    assert len(groups) == 3
    assert len({h[: 144 // 16 * HASH_BYTES].tobytes() for h in hashes}) == 60, "what follows is their own"
    blocks = np.concatenate(hashes).reshape(-1, HASH_BYTES)
    assert np.unique(blocks, axis=0).shape[0] == 3 * 8 + 60 * 4, "no two blocks are taken for one another"
    chosen = workload.select(np.array([3, 7, 50]))
    assert chosen.prefixes is not None
    assert np.array_equal(chosen.prefixes.block_hashes(2, 200, 16), hashes[50])


def test_the_same_id_behind_another_one_is_another_prefix() -> None:
    workload = sample().head(2)
    prefixes = workload.prefixes
    assert prefixes is not None
    other = replace(prefixes, ids=np.array([1, 2, 3, 2], np.int64), starts=np.array([0, 2, 4]), block_tokens=16)
    first, second = other.block_hashes(0, 32, 16), other.block_hashes(1, 32, 16)
    assert not np.array_equal(first[HASH_BYTES:], second[HASH_BYTES:])


def test_repeating_goes_on_where_the_trace_ended_and_shares_nothing_with_it() -> None:
    workload = share_prefixes(synthetic(50, 2.0, seed=1), num_groups=2, num_tokens=64, seed=1)
    many = workload.repeated(120)
    assert len(many) == 120
    assert (np.diff(many.arrival) >= 0).all()
    assert many.rate == pytest.approx(workload.rate, rel=0.2)
    assert np.array_equal(many.num_prompt[50:100], workload.num_prompt)
    assert many.prefixes is not None
    first, second = (
        set(many.prefixes.ids[: many.prefixes.starts[50]]),
        set(many.prefixes.ids[many.prefixes.starts[50] :]),
    )
    assert not first & second


def test_requests_that_are_too_long_are_left_out() -> None:
    source = synthetic(300, 1.0, seed=1)
    fitting = source.fitting(1500)
    assert 0 < len(fitting) < len(source)
    assert int((fitting.num_prompt + fitting.num_output).max()) <= 1500


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"arrival": np.array([1.0, 0.5])}, "in order"),
        ({"num_prompt": np.array([1, 0], np.int32)}, "num_prompt=0"),
        ({"class_ids": np.array([0, 4], np.int16)}, "outside of 1 classes"),
        ({"num_output": np.array([1], np.int32)}, "num_output has 1 rows"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(columns: dict[str, Any], problem: str) -> None:
    good = {
        "arrival": np.array([0.0, 1.0]),
        "num_prompt": np.array([1, 2], np.int32),
        "num_output": np.array([1, 2], np.int32),
        "class_ids": np.zeros(2, np.int16),
    }
    with pytest.raises(InvalidParameterError, match=problem):
        Workload(**(good | columns))


@pytest.mark.parametrize("arrive", [poisson_arrivals, constant_arrivals])
def test_a_rate_must_be_positive(arrive: Callable[..., Any]) -> None:
    with pytest.raises(InvalidParameterError, match="rate=0 must be a positive number"):
        arrive(10, 0)
    with pytest.raises(InvalidParameterError, match="must be at most 1"):
        bursty_arrivals(10, 1.0, peak=6.0, share=0.2)


def test_objectives_that_nobody_can_keep_are_told() -> None:
    workload = assign_classes(synthetic(3, 1.0), [(RequestClass("odd", SLO(ttft=2.0, e2e=1.0)), 1)])
    assert workload.warnings() == ["class 'odd': e2e=1.0 ends before ttft=2.0 does; the ttft can be left out"]


def test_a_day_goes_up_and_down() -> None:
    """By quarters of a period: more, more, less, less; and the rate of the whole is that which was asked for."""
    arrival = diurnal_arrivals(40_000, 5.0, swing=0.8, num_periods=2.0, seed=3)
    assert (np.diff(arrival) > 0).all()
    assert arrival[-1] == pytest.approx(40_000 / 5, rel=0.02)
    counts = np.histogram(arrival, np.arange(9) * 1000)[0] / 5000
    assert counts == pytest.approx([1 + 0.8 * 2 / np.pi * sign for sign in (1, 1, -1, -1) * 2], abs=0.05)
    assert diurnal_arrivals(9, 1.0, swing=0.0, seed=3) == pytest.approx(poisson_arrivals(9, 1.0, 3))
    assert diurnal_arrivals(0, 1.0).size == 0
    with pytest.raises(InvalidParameterError, match="swing=1 must be 0 or more and below 1"):
        diurnal_arrivals(9, 1.0, swing=1)
