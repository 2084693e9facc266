"""The autoscaler: bounds, no oscillation, promises of the replicas that stay, and what it needs for known work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorllm.errors import ConfigError
from actorllm.scheduling.autoscaler import Autoscaler, ScalingPolicy, is_step, quantile, stretch, survivors_keep
from actorllm.scheduling.router import ReplicaView, Routable
from actorllm.scheduling.window_quantile import WindowQuantile
from actorllm.types.objective import SLO
from tests.effort import examples

POLICY = ScalingPolicy(window_s=60.0, shrink_pause_s=10.0)
STEP_S = 0.01


def per_row(prompt: float, rows: float, context: float) -> float:
    """A replica with 20 rows has a token of each in 50 ms."""
    return STEP_S + 0.0001 * prompt + 0.002 * rows


def view(number: int, **more: object) -> ReplicaView:
    return ReplicaView(number, **{"step_seconds": per_row, "max_num_seqs": 64} | more)  # type: ignore[arg-type]


def fluid(num_replicas: int, rows: float, num_waiting_tokens: int = 0) -> list[ReplicaView]:
    """So many rows in all, evenly spread."""
    each, more = divmod(round(rows), num_replicas)
    shares = [each + (number < more) for number in range(num_replicas)]
    return [
        view(number, num_running=share, num_context=150 * share, num_waiting_tokens=num_waiting_tokens)
        for number, share in enumerate(shares)
    ]


def run(scaler: Autoscaler, rates: Sequence[float], slo: SLO | None = None, start: int = 0) -> list[int]:
    """Seconds with so many arrivals each, of 100 tokens that become 100. Returns what was wanted after each second."""
    found, owed = [], 0.0
    for second, rate in enumerate(rates, start):
        owed += rate
        while owed >= 1.0:
            owed -= 1.0
            scaler.note(Routable(100, max_tokens=100, slo=slo), [], second + 0.5)
            scaler.note_ends(1, 100)
        found.append(scaler.decide(fluid(scaler.wanted, rate * 100 * 0.03), second + 1.0))
    return found


SLOS = st.none() | st.builds(SLO, ttft=st.floats(0.05, 10.0), tpot=st.none() | st.floats(0.012, 0.5))
VIEWS = st.lists(
    st.builds(
        ReplicaView,
        st.just(0),
        num_running=st.integers(0, 64),
        num_waiting=st.integers(0, 300),
        num_waiting_tokens=st.integers(0, 100_000),
        num_context=st.integers(0, 100_000),
        num_free_blocks=st.none() | st.integers(0, 5000),
        max_num_seqs=st.integers(1, 256),
        step_seconds=st.sampled_from([None, per_row]),
    ),
    max_size=6,
)


@given(
    bounds=st.tuples(st.integers(1, 8), st.integers(0, 8)),
    initial=st.none() | st.integers(1, 64),
    target=st.floats(0.01, 0.999),
    seconds=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5000), SLOS, VIEWS, st.integers(0, 40)), max_size=12),
)
def test_never_outside_of_the_bounds_and_fewer_only_if_the_others_keep_what_is_promised(
    bounds: tuple[int, int],
    initial: int | None,
    target: float,
    seconds: list[tuple[int, int, SLO | None, list[ReplicaView], int]],
) -> None:
    least, most = bounds[0], sum(bounds)
    scaler = Autoscaler(least, most, target, POLICY, initial)
    assert least <= scaler.wanted <= most
    at = 0.0
    strictest = np.inf
    for num_arrivals, num_prompt, slo, views, num_ends in seconds:
        for number, one in enumerate(views):
            one.number = number
        for _ in range(num_arrivals):
            scaler.note(Routable(num_prompt, slo=slo), views, at)
        if num_arrivals and slo is not None and slo.tpot is not None:
            strictest = min(strictest, slo.tpot)
        scaler.note_ends(num_ends, 100 * num_ends)
        before = scaler.wanted
        at += 20.0
        wanted = scaler.decide(views, at)
        assert least <= wanted <= most
        assert 0.0 <= scaler.predicted_attainment <= 1.0
        if wanted < before:
            assert wanted == before - 1
            kept = views[:wanted]
            gone = sum(one.load for one in views[wanted:]) / len(kept)
            for one in kept:
                assert one.load + gone <= one.max_num_seqs
                assert strictest == np.inf or target < 1 - 1 / 1024 or per_row(0, one.load + gone, 0) <= strictest
        # What remains takes no more than its blocks.
        if wanted < before and all(one.num_free_blocks is not None for one in views):
            moved = sum(one.num_context + one.num_waiting_tokens for one in views[wanted:]) / len(views[:wanted])
            assert all(moved <= (one.num_free_blocks or 0) * one.block_size for one in views[:wanted])


@settings(max_examples=examples(13, 40))
@given(rate=st.floats(0.05, 60.0), slo=SLOS, most=st.integers(1, 10))
def test_a_constant_load_has_a_constant_number(rate: float, slo: SLO | None, most: int) -> None:
    scaler = Autoscaler(1, most, policy=POLICY)
    found = run(scaler, [rate] * 300, slo)
    assert len(set(found[120:])) == 1, found
    assert sorted(found) == found, "it grew, and never too far"


def test_it_is_as_many_as_the_work_needs() -> None:
    """With 20 rows at 50 ms a replica does 4 requests of 100 tokens in a second, less what their prompts take."""
    scaler = Autoscaler(1, 20, policy=POLICY)
    assert run(scaler, [10.0] * 100, SLO(ttft=1.0, tpot=0.05))[-1] == pytest.approx(
        10 / 3.6 / POLICY.utilization, abs=1
    )
    loose = Autoscaler(1, 20, policy=POLICY)
    assert run(loose, [10.0] * 100, SLO(ttft=1.0, tpot=0.2))[-1] < scaler.wanted, "with more rows each does more"


def test_a_burst_is_met_at_once_and_remembered_for_the_window() -> None:
    scaler = Autoscaler(1, 20, policy=POLICY)
    slo = SLO(ttft=1.0, tpot=0.05)
    calm = run(scaler, [3.0] * 30, slo)
    assert calm[-1] == 1
    burst = run(scaler, [15.0] * 10, slo, 30)
    assert burst[2] > 1
    assert burst[-1] >= 3
    after = run(scaler, [3.0] * 50, slo, 40)
    assert min(after) == burst[-1], "what it needed is kept"
    later = run(scaler, [3.0] * 120, slo, 90)
    assert later[-1] == 1
    assert all(0 <= one - two <= 1 for one, two in itertools.pairwise(later)), "one at a time"


def test_a_demand_that_rises_is_met_before_it_is_there() -> None:
    slo = SLO(ttft=1.0, tpot=0.05)
    rates = [3.0 + 0.15 * second for second in range(60)]
    ahead, behind = (Autoscaler(1, 20, policy=replace(POLICY, lead_s=lead)) for lead in (20.0, 0.0))
    assert run(ahead, rates, slo)[-1] > run(behind, rates, slo)[-1]
    level = Autoscaler(1, 20, policy=POLICY)
    assert run(level, [rates[-1]] * 60, slo)[-1] <= ahead.wanted


def test_nothing_is_taken_away_before_anything_is_known() -> None:
    scaler = Autoscaler(1, 8, policy=POLICY, num_replicas=3)
    views = [view(number) for number in range(3)]
    assert [scaler.decide(views, at) for at in (0.0, 5.0, 9.0)] == [3, 3, 3]
    assert scaler.decide(views, 10.0) == 2


def test_a_burst_of_a_smaller_share_than_may_fail_is_not_met() -> None:
    slo = SLO(ttft=1.0, tpot=0.05)
    rates = ([3.0] * 59 + [15.0]) * 2  # one in twelve of the requests comes in that second
    strict, loose = Autoscaler(1, 20, 0.99, POLICY), Autoscaler(1, 20, 0.8, POLICY)
    assert run(strict, rates, slo)[-1] > run(loose, rates, slo)[-1] == 1
    assert loose.predicted_attainment >= 0.8


def test_what_waits_too_long_asks_for_more_whatever_was_expected() -> None:
    scaler = Autoscaler(1, 8, policy=POLICY)
    scaler.note(Routable(100), [], 0.0)
    backlog = [view(0, num_waiting=3, num_waiting_tokens=100_000)]  # ten seconds of prompts, where two are patience
    assert scaler.decide(backlog, 1.0) == 1, "it may be gone in a moment"
    assert [scaler.decide(backlog, at) for at in (2.0, 3.0, 4.0)][-1] >= 5
    wanted = scaler.wanted
    assert scaler.decide(backlog, 9.0) == wanted, "those that start are for these"


def test_prompts_that_a_cache_has_are_less_work() -> None:
    cached = [view(0, find=lambda hashes: len(hashes) // 32, block_size=16)]
    cold, warm = Autoscaler(1, 99, policy=POLICY), Autoscaler(1, 99, policy=POLICY)
    for scaler, views in ((cold, [view(0)]), (warm, cached)):
        for _ in range(50):
            scaler.note(Routable(4096, bytes(32 * 255)), views, 0.5)
            scaler.note_ends(1, 2)
        scaler.decide([view(0)], 1.0)
    assert warm.needed < cold.needed / 5


def test_nothing_is_decided_before_a_step_is_known() -> None:
    scaler = Autoscaler(1, 8, policy=POLICY)
    for _ in range(1000):
        scaler.note(Routable(1000), [], 0.0)
    assert scaler.decide([ReplicaView(0, num_waiting=1000)], 1.0) == 1
    assert scaler.decide([], 2.0) == 1


def test_replicas_that_cannot_take_more_keep_the_others() -> None:
    assert survivors_keep([view(0, num_running=5), view(1, num_running=5)], 1, 1.0, 0.05)
    assert not survivors_keep([view(0, num_running=15), view(1, num_running=15)], 1, 1.0, 0.05), (
        "their steps are too long"
    )
    assert not survivors_keep([view(0), view(1, num_running=65)], 1, 1.0, np.inf), "they have no slots"
    full = view(0, num_free_blocks=2, block_size=16)
    assert not survivors_keep([full, view(1, num_running=1, num_context=33)], 1, 1.0, np.inf), "nor blocks"
    assert not survivors_keep([view(0), view(1, num_waiting_tokens=20_000)], 1, 1.0, np.inf), (
        "their prompts take too long"
    )
    assert survivors_keep([ReplicaView(0), view(1)], 1, 1.0, np.inf), "it is as quick as the other one"
    assert not survivors_keep([ReplicaView(0), ReplicaView(1)], 1, 1.0, np.inf), "it is not known"
    assert not survivors_keep([view(2)], 2, 1.0, np.inf), "none of those that stay is there"


def test_a_replica_that_never_starts_does_not_keep_the_others() -> None:
    scaler = Autoscaler(1, 8, policy=POLICY, num_replicas=4)
    assert [scaler.decide([view(0), view(1)], at) for at in (0.0, 9.0, 10.0, 20.0, 30.0)] == [4, 4, 3, 2, 1]


def test_replicas_that_are_missing_do_no_work() -> None:
    """One that is drained counts among those that are wanted, and not among those that can take what the last one does."""
    slo = SLO(ttft=1.0, tpot=0.05)
    scaler = Autoscaler(1, 20, policy=POLICY)
    run(scaler, [4.2] * 100, slo)
    scaler.set_wanted(3, 100.0)
    views = [view(number, num_running=4, num_context=600) for number in range(3)]
    assert 0.73 < scaler.needed < 1.44
    assert [scaler.decide(views[1:], at) for at in (101.0, 112.0, 113.0)] == [3, 3, 3]
    assert scaler.decide(views, 114.0) == 2


def test_a_replica_that_is_missing_for_a_moment_keeps_the_others() -> None:
    """It comes back with the streams that it has."""
    scaler = Autoscaler(1, 8, policy=POLICY, num_replicas=3)
    scaler.decide([view(0), view(1), view(2)], 0.0)
    busy = [view(number, num_running=12) for number in range(3)]
    assert [scaler.decide(busy, float(at)) for at in range(1, 10)] == [3] * 9
    assert scaler.decide([view(0), view(1)], 12.0) == 3


def test_an_idle_fleet_shrinks_though_few_steps_are_known() -> None:
    scaler = Autoscaler(1, 8, policy=POLICY, num_replicas=3)
    assert [scaler.decide([view(0), ReplicaView(1), ReplicaView(2)], at) for at in (0.0, 10.0, 20.0)] == [3, 2, 1]


@pytest.mark.parametrize("slo", [SLO(tpot=0.001), SLO(ttft=1e-320), SLO(ttft=0.001)])
def test_a_promise_that_no_replica_keeps_asks_for_none(slo: SLO) -> None:
    scaler = Autoscaler(1, 8, policy=POLICY, num_replicas=3)
    scaler.note(Routable(100, slo=slo), [], 0.0)
    waiting = [view(0, num_waiting=1, num_waiting_tokens=100), view(1), view(2)]
    assert [scaler.decide(waiting, float(at)) for at in range(5)] == [3] * 5
    assert scaler.decide([view(number) for number in range(3)], 100.0) == 2, "what is idle goes"


def test_what_cannot_move_keeps_its_replica() -> None:
    scaler = Autoscaler(1, 8, policy=POLICY, num_replicas=2)
    views = [view(0), view(1)]
    assert [scaler.decide(views, at, keeps_all=True) for at in (0.0, 20.0)] == [2, 2]
    assert scaler.decide(views, 21.0) == 1


@pytest.mark.parametrize("given", [(0, 4, 0.99), (4, 1, 0.99), (1, 4, 99.0), (1, 4, float("nan"))])
def test_bounds_of_no_sense(given: tuple[int, int, float]) -> None:
    with pytest.raises(ConfigError, match="must be "):
        Autoscaler(*given)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 30))
def test_a_stretch_is_the_sum_of_the_last_values(values: list[int], length: int) -> None:
    found = stretch(np.array(values, np.float64), length)
    assert found.tolist() == [sum(values[max(0, at + 1 - length) : at + 1]) for at in range(len(values))]


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(0, 3)), min_size=1, max_size=20), st.floats(0.01, 1.0))
def test_a_quantile_leaves_out_no_more_than_it_may(pairs: list[tuple[float, int]], share: float) -> None:
    values, weights = np.array([v for v, _ in pairs]), np.array([w for _, w in pairs], np.float64)
    found = quantile(values, weights, share)
    if weights.sum():
        assert weights[values <= found].sum() >= share * weights.sum() - 1e-6
        assert weights[values < found].sum() < share * weights.sum() + 1e-6
    else:
        assert found == 0.0


@pytest.mark.parametrize(
    "given",
    [{"utilization": 0}, {"utilization": 1.5}, {"margin": 1}, {"period_s": 0}, {"window_s": 0.1}, {"margin": True}],
)
def test_a_policy_of_no_sense(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="autoscaling: "):
        ScalingPolicy.of(given)


@pytest.mark.parametrize("before", [0.0, 4.0])
def test_a_step_is_met_as_it_is_and_not_as_the_beginning_of_a_slope(before: float) -> None:
    slo = SLO(ttft=1.0, tpot=0.05)
    policy = replace(POLICY, shrink_pause_s=1000.0)  # what was wanted too much would stay
    ahead, behind = (Autoscaler(1, 40, policy=replace(policy, lead_s=lead)) for lead in (20.0, 0.0))
    rates = [before] * 50 + [20.0] * 50
    assert run(ahead, rates, slo) == run(behind, rates, slo)


def test_a_slope_is_told_from_a_step_of_any_moment() -> None:
    rng = np.random.default_rng(0)
    for first in range(1, 40):
        assert is_step(np.where(np.arange(40) >= first, 30.0, 3.0)), first
    told = [
        is_step(rng.poisson(5.0 + 1.5 * np.maximum(0, np.arange(40) - first)).astype(float))
        for first in range(25)
        for _ in range(10)
    ]
    assert sum(told) < len(told) / 20


def test_promises_are_forgotten_with_the_window_and_not_by_their_number() -> None:
    """Many requests of one second leave the strict ones of some seconds before in force; later ones do not."""
    scaler = Autoscaler(1, 8, policy=POLICY)
    for number in range(3000):
        scaler.note(Routable(100, slo=SLO(tpot=0.05) if number < 100 else None), [], 0.5 if number < 100 else 30.5)
    assert scaler._promised()[1] == 0.05
    scaler.note(Routable(100), [], 70.0)
    assert scaler._promised()[1] == np.inf


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e4) | st.just(np.inf), st.floats(0, 1)), min_size=1, max_size=60),
    st.floats(0, 1),
)
def test_a_quantile_of_a_window_is_exact_to_two_percent(values: list[tuple[float, float]], share: float) -> None:
    window, at, noted = WindowQuantile(64.0), 0.0, []
    for value, pause in values:
        at += 4 * pause
        window.note(value, at)
        noted.append((value, at))
    kept = sorted(value for value, when in noted if when >= np.floor(at) - 63)
    wanted = kept[int(share * (len(kept) - 1))]
    found = window.at(share, 0.0)
    assert found == wanted or wanted / 1.021 <= found <= wanted
    assert found in kept
    assert WindowQuantile(1.0).at(share, 3.0) == 3.0


def test_a_window_of_many_values_takes_bounded_memory() -> None:
    window = WindowQuantile(1.0)
    for value in np.random.default_rng(0).lognormal(0, 9, 50_000).tolist():
        window.note(value, 0.5)
    assert window.num_counted < 1200
