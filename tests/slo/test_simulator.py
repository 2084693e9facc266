"""The simulator: times that can be worked out by hand, the same run by whichever path, and the plans of the real engine."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from actorllm.cli.laboratory import ScenarioOptions
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.messages import StepPlan, StepResult, Submit, pack
from actorllm.scheduling.cost_model import LinearModel, Regime, StepDetail, preset
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policy import Admit, KeyPolicy, PlanPolicy
from actorllm.scheduling.router import ROUTERS, VIEW_AGE_S, LeastLoad, ReplicaView, RoundRobin, Routable
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.scheduling.telemetry.recording import Entry, RecordedScheduler, replay
from actorllm.slo.experiments import Scenario
from actorllm.slo.explanation import worst_request
from actorllm.slo.objectives import Promises
from actorllm.slo.simulator import EngineShape, SimulatedDrafts, SimulatedRun, rerun, simulate
from actorllm.slo.timeline import ABORTED, FAILED, FINISHED, UNFINISHED, RunTimeline
from actorllm.slo.workload import (
    Workload,
    assign_classes,
    assign_tenants,
    fixed_lengths,
    gamma_arrivals,
    lognormal_lengths,
    make_workload,
    share_prefixes,
)
from actorllm.types.objective import SLO, RequestClass

SHAPE = EngineShape(num_blocks=400, max_num_seqs=32, max_num_batched_tokens=256, max_model_len=2048)


def every_step(seconds: float, **overheads: float) -> LinearModel:
    return LinearModel((Regime(math.inf, (seconds, 0.0, 0.0, 0.0, 0.0, 0.0)),), "constant", **overheads)


NOISY = replace(preset("a100-llama-3-8b"), residuals=(0.9, 0.97, 1.0, 1.04, 1.5), gap_s=2e-4, launch_s=1e-3)  # type: ignore[type-var]


def mixed(num: int = 300, rate: float = 6.0, seed: int = 1, patience: float = 6.0) -> Workload:
    lengths = lognormal_lengths(num, (180, 900), (40, 200), longest=900, seed=seed)
    workload = make_workload(gamma_arrivals(num, rate, 2.0, seed), lengths)
    kinds = [
        (RequestClass("ls", SLO(0.5, 0.05), True, priority=0), 0.5),
        (RequestClass("be", SLO(e2e=60.0), priority=1, patience=patience), 0.5),
    ]
    return assign_classes(workload, kinds, seed)


def columns(timeline: RunTimeline) -> dict[str, list[Any]]:
    names = [name for name in RunTimeline.__slots__ if name not in ("spans", "step_ends", "deliver_s")]
    found = {name: getattr(timeline, name).tolist() for name in names}
    found |= {"times": [timeline.token_times(row).tolist() for row in range(len(timeline))]}
    return found | {"step_ends": [ends.tolist() for ends in timeline.step_ends]}


def assert_equal(one: SimulatedRun, other: SimulatedRun) -> None:
    """To the last bit."""
    first, second = columns(one.timeline), columns(other.timeline)
    for name in first:
        assert repr(first[name]) == repr(second[name]), name
    assert one.statistics == other.statistics


# By hand -----------------------------------------------------------------------------------------------------------------


def test_one_request_takes_a_step_for_its_prompt_and_one_for_each_token() -> None:
    workload = make_workload(np.array([2.0]), fixed_lengths(1, 100, 4))
    timeline = simulate(workload, SHAPE, every_step(0.5)).timeline
    assert timeline.token_times(0).tolist() == [2.5, 3.0, 3.5, 4.0]
    assert (timeline.scheduled[0], timeline.first_token[0], timeline.end[0]) == (2.0, 2.5, 4.0)
    assert timeline.outcome.tolist() == [FINISHED]


def test_a_long_prompt_goes_through_in_chunks() -> None:
    workload = make_workload(np.array([0.0]), fixed_lengths(1, 600, 2))
    timeline = simulate(workload, SHAPE, every_step(1.0)).timeline
    assert timeline.token_times(0).tolist() == [3.0, 4.0], "256 + 256 + 88 tokens"


@pytest.mark.parametrize(("depth", "expected"), [(1, [1.25, 2.5, 3.75, 5.0]), (2, [1.25, 2.375, 3.5, 4.625])])
def test_planning_ahead_hides_the_launch_but_not_the_gap(depth: int, expected: list[float]) -> None:
    workload = make_workload(np.array([0.0]), fixed_lengths(1, 10, 4))
    model = every_step(1.0, launch_s=0.25, gap_s=0.125)
    timeline = simulate(workload, replace(SHAPE, depth=depth), model).timeline
    assert timeline.token_times(0).tolist() == expected


def test_the_published_model_is_applied_to_what_is_in_a_step() -> None:
    workload = make_workload(np.array([0.0]), fixed_lengths(1, 200, 3))
    model = preset("a100-llama-3-8b")
    timeline = simulate(workload, SHAPE, model).timeline
    expected = np.cumsum(
        [model.seconds(200, 0, 0, 0, 200 * 201 / 2), model.seconds(0, 1, 201), model.seconds(0, 1, 202)]
    )
    assert timeline.token_times(0).tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize(("depth", "wasted"), [(1, 1), (2, 2)])
def test_who_gives_up_has_had_tokens_computed_in_vain(depth: int, wasted: int) -> None:
    """Steps end at 1, 2, 3 ...; at 3.5 the tokens of the steps in flight come to nothing."""
    kind = RequestClass("impatient", patience=3.5)
    workload = assign_classes(make_workload(np.array([0.0]), fixed_lengths(1, 10, 50)), [(kind, 1)])
    run = simulate(workload, replace(SHAPE, depth=depth), every_step(1.0))
    timeline = run.timeline
    assert timeline.outcome.tolist() == [ABORTED]
    assert timeline.token_times(0).tolist() == [1.0, 2.0, 3.0]
    assert (timeline.end[0], timeline.num_wasted[0]) == (3.5, wasted)
    assert run.statistics[0].num_wasted_tokens == wasted
    assert run.statistics[0].kv.usage == 0
    assert run.evaluate().summary["actorllm_num_aborted"] == 1


def test_a_request_that_fits_no_engine_fails_alone_and_is_told() -> None:
    workload = make_workload(np.array([0.0, 1.0]), (np.array([5000, 10], np.int32), np.array([5, 5], np.int32)))
    run = simulate(workload, SHAPE, every_step(0.1))
    assert run.timeline.outcome.tolist() == [FAILED, FINISHED]
    (warning,) = run.warnings
    assert warning.startswith("1 requests failed, the first with: 5000 tokens leave no room")


def test_a_run_can_be_cut_off() -> None:
    workload = make_workload(np.array([0.0, 1.0, 9.0]), fixed_lengths(3, 10, 100))
    workload = assign_classes(workload, [(RequestClass("x", SLO(e2e=3.5)), 1)])
    run = simulate(workload, SHAPE, every_step(0.5), until=4.25)
    timeline = run.timeline
    assert timeline.outcome.tolist() == [UNFINISHED] * 2, "the third one has never come, and is no failure"
    assert len(run.workload) == 2
    assert timeline.num_output.tolist() == [8, 5]
    assert timeline.scheduled.tolist() == [0.0, 1.0]
    assert math.isnan(timeline.end[0])
    assert run.warnings[:2] == (
        "1 requests were not due before the run was cut off at 4.25 s, and are left out",
        "2 requests were under way when the run was cut off at 4.25 s and count as missed; 1 of them had broken no promise by "
        "then",
    )


def test_objectives_beyond_the_model_are_warned_of() -> None:
    workload = assign_classes(
        make_workload(np.array([0.0]), fixed_lengths(1, 10, 5)), [(RequestClass("x", SLO(tpot=0.01)), 1)]
    )
    (warning,) = simulate(workload, SHAPE, every_step(0.5)).warnings
    assert warning.startswith("class 'x': tpot cannot be met by 1 of 1 requests with constant")


def test_nothing_to_do_is_no_error() -> None:
    run = simulate(make_workload(np.zeros(0), fixed_lengths(0, 1, 1)), SHAPE, every_step(1.0))
    assert run.num_steps == 0
    assert run.evaluate().summary["completed"] == 0
    assert repr(run) == "<SimulatedRun: 0 of 0 requests finished, 0 steps>"


# The same by whichever path ----------------------------------------------------------------------------------------------


class EverySecond(KeyPolicy):
    """A policy that holds rows back, so that streams have holes."""

    def __init__(self) -> None:
        self._calls = 0

    def decode_mask(self, view: Any) -> Any:
        self._calls += 1
        return (view.decode_slots + self._calls) % 2 == 0


@pytest.mark.parametrize(
    ("depth", "policy", "num_blocks"),
    [
        (1, "fcfs", 2000),
        (2, "fcfs", 2000),
        (3, "fcfs", 150),
        (2, "priority", 150),
        (2, "hrrn", 150),
        (2, "qoserve", 2000),
        (2, "cohost", 150),
        (2, "fairbatch", 2000),
    ],
)
def test_skipping_changes_nothing(depth: int, policy: str, num_blocks: int) -> None:
    shape = replace(SHAPE, depth=depth, num_blocks=num_blocks)
    workload = mixed(100, rate=3.0)
    one, other = (simulate(workload, shape, NOISY, policy=policy, skip=skip, seed=4) for skip in (True, False))
    assert_equal(one, other)
    assert other.num_steps_skipped == 0
    assert one.num_steps_skipped > 0.1 * one.num_steps
    assert (one.timeline.outcome == FINISHED).sum() > 50
    if num_blocks == 150:
        assert one.timeline.num_preemptions.sum() > 0


@pytest.mark.parametrize(
    ("depth", "policy", "num_blocks"), [(1, "fcfs", 150), (2, "cohost", 150), (2, "qoserve", 2000), (3, "hrrn", 150)]
)
def test_what_only_plans_tell_changes_nothing(depth: int, policy: str, num_blocks: int) -> None:
    """Where no plan is looked at, blocks are counted and not named, and steady steps are planned without the policy."""
    shape = replace(SHAPE, depth=depth, num_blocks=num_blocks)
    workload = mixed(100, rate=6.0, patience=2.0).asking_for(150)
    arguments: dict[str, Any] = {"policy": policy, "seed": 4, "num_replicas": 2, "router": "least-load"}
    one = simulate(workload, shape, NOISY, **arguments)
    other = simulate(workload, shape, NOISY, **arguments, on_plan=lambda number, plan: None)
    assert_equal(one, other)
    assert one.num_steps_skipped > other.num_steps_skipped == 0
    assert {FINISHED, ABORTED} <= set(one.timeline.outcome.tolist())
    if num_blocks == 150:
        assert one.timeline.num_preemptions.sum() > 0


def test_shared_prefixes_are_found_and_output_as_well() -> None:
    """Also those of steps that were made many at a time."""
    workload = share_prefixes(mixed(150, 5.0), num_groups=3, num_tokens=128, block_tokens=32, seed=2)
    shape = replace(SHAPE, num_blocks=200, max_model_len=1200)
    run = simulate(workload, shape, NOISY)
    assert run.num_steps_skipped > 0.1 * run.num_steps
    assert_equal(run, simulate(workload, shape, NOISY, skip=False))
    assert run.timeline.num_cached.sum() > 1000
    again = run.statistics[0].prefix_cache
    assert again is not None
    assert again.preempted_hits > 0, "preempted requests find what they had computed"
    without = simulate(workload, replace(shape, enable_prefix_caching=False), NOISY)
    assert without.timeline.num_cached.sum() == 0
    assert_equal(without, simulate(replace(workload, prefixes=None), shape, NOISY))
    assert_equal(run, simulate(workload, shape, NOISY, on_plan=lambda number, plan: None))


def test_the_seed_decides() -> None:
    workload = mixed(60)
    one, again, other = (simulate(workload, SHAPE, NOISY, seed=seed) for seed in (1, 1, 2))
    assert_equal(one, again)
    assert one.timeline.end.tolist() != other.timeline.end.tolist()


@pytest.mark.parametrize("num_blocks", [150, 2000])
def test_every_request_gets_the_tokens_it_wants(num_blocks: int) -> None:
    workload = replace(mixed(200), classes=(RequestClass("a"), RequestClass("b")))
    run = simulate(workload, replace(SHAPE, num_blocks=num_blocks), NOISY, policy=lambda: KeyPlanner(EverySecond()))
    timeline = run.timeline
    assert timeline.num_output.tolist() == workload.num_output.tolist()
    for row in range(len(workload)):
        times = timeline.token_times(row)
        assert times.size == workload.num_output[row]
        assert (np.diff(times) > 0).all()
        assert timeline.arrival[row] < timeline.scheduled[row] + 1e-12 < times[0] == timeline.first_token[row]
        assert times[-1] == timeline.last_token[row] == timeline.end[row]
    values, counts = timeline.gaps()
    assert counts.sum() == (workload.num_output - 1).sum()
    assert (values * counts).sum() == pytest.approx((timeline.last_token - timeline.first_token).sum())
    assert run.statistics[0].kv.usage == 0


def test_every_request_may_be_promised_something_else() -> None:
    """Policies see it, and what is promised to one is what it is judged by."""
    slos = [
        None,
        SLO(ttft=0.001),
        SLO(ttft=9.0),
        SLO(tpot=0.05),
        SLO(tpot=0.15),
        SLO(e2e=0.05),
        SLO(e2e=99.0, ttft=100.0),
    ]
    seen: dict[int, SLO | None] = {}

    class Looks(KeyPolicy):
        def key(self, sequence: Any, view: Any) -> Any:
            seen[sequence.key[1]] = SLO.from_fields(sequence.submit.slo)
            return (sequence.arrival,)

    num = len(slos)
    workload = make_workload(np.arange(num) * 10.0, fixed_lengths(num, 10, 5))
    workload = replace(workload, own_promises=Promises.of(slos))
    run = simulate(workload, SHAPE, every_step(0.1), policy=lambda: KeyPlanner(Looks()))
    assert [seen[row] for row in range(num)] == slos
    metrics = run.evaluate(with_fluidity=True)
    assert metrics.overall.attainment == {"tpot": 4 / 7, "deadline": 4 / 7}
    assert metrics.worst("tpot") == 4 / 7, "one class"
    assert worst_request(run.timeline, workload) == 1
    assert sum("class 'all': 1 requests, as 6: e2e=99.0 ends before ttft=100.0" in text for text in run.warnings) == 1
    assert any("ttft cannot be met by 1 of 7 requests" in text for text in run.warnings)


# Policies that go wrong ----------------------------------------------------------------------------------------------------


def test_a_policy_that_starves_everybody_is_told_of() -> None:
    class Never(KeyPolicy):
        def admit(self, sequence: Any, view: Any) -> Admit:
            return Admit.WAIT

    run = simulate(mixed(5).head(5), SHAPE, every_step(0.1), policy=lambda: KeyPlanner(Never()))
    assert any("plans nothing" in warning and "wait for ever" in warning for warning in run.warnings)


def test_a_policy_that_asks_for_too_much_is_told_of() -> None:
    class Greedy(KeyPlanner):
        def plan(self, view: Any) -> Any:
            decision = super().plan(view)
            decision.prefill = [(sequence, 10 * size) for sequence, size in decision.prefill]
            return decision

    workload = make_workload(np.array([0.0]), fixed_lengths(1, 100, 3))
    run = simulate(workload, SHAPE, every_step(0.1), policy=lambda: Greedy(KeyPolicy()))
    assert run.timeline.num_output.tolist() == [3]
    assert "1 parts of its decisions did not fit" in run.warnings[0]


def test_a_policy_that_asks_for_ever_to_be_woken_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Restless(KeyPolicy):
        def admit(self, sequence: Any, view: Any) -> Admit:
            return Admit.WAIT

        def wake_at(self, view: Any) -> float:
            return float(view.now)

    monkeypatch.setattr("actorllm.slo.simulator.MAX_IDLE_WAKES", 50)
    workload = make_workload(np.array([0.0]), fixed_lengths(1, 10, 5))
    run = simulate(workload, SHAPE, every_step(0.1), policy=lambda: KeyPlanner(Restless()))
    assert "asks again and again to be woken and plans nothing: 1 requests of replica 0" in run.warnings[0]
    assert "it asks to be woken 0 s ago, 10 times in a row, and plans nothing then" in run.warnings[1]


def test_a_policy_that_raises_is_named() -> None:
    with pytest.raises(ConfigError, match="'fcsf'; did you mean 'fcfs'"):
        simulate(mixed(5), SHAPE, every_step(0.1), policy="fcsf")

    class Broken(KeyPolicy):
        def key(self, sequence: Any, view: Any) -> Any:
            raise ZeroDivisionError("oh")

    def broken() -> PlanPolicy:
        return KeyPlanner(Broken())

    with pytest.raises(ZeroDivisionError) as raised:
        simulate(mixed(5), SHAPE, every_step(0.1), policy=broken)
    assert "broken" in raised.value.__notes__[0]


def test_a_policy_is_woken_when_it_asked() -> None:
    class Patient(KeyPolicy):
        def admit(self, sequence: Any, view: Any) -> Admit:
            return Admit.ADMIT if view.now >= 5.0 else Admit.WAIT

        def wake_at(self, view: Any) -> float:
            return 5.0 if view.now < 5.0 else math.inf

    workload = make_workload(np.array([1.0]), fixed_lengths(1, 10, 1))
    timeline = simulate(workload, SHAPE, every_step(0.5), policy=lambda: KeyPlanner(Patient())).timeline
    assert timeline.first_token.tolist() == [5.5]


# Several replicas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_replicas_share_the_work_and_each_is_an_engine(router: str) -> None:
    workload = assign_tenants(mixed(120, rate=12.0), [1, 1], seed=1)
    run = simulate(workload, SHAPE, NOISY, num_replicas=3, router=router, seed=3)
    again = simulate(workload, SHAPE, NOISY, num_replicas=3, router=router, seed=3, skip=False)
    assert_equal(run, again)
    counts = np.bincount(run.timeline.replica, minlength=3)
    assert counts.sum() == 120
    assert counts.min() > 25
    assert 0 < run.evaluate().summary["actorllm_jain_of_tenants"] <= 1
    if router == "round-robin":
        mine = workload.select(run.timeline.replica == 0)
        alone = simulate(mine, SHAPE, NOISY, seed=3)
        together = run.timeline.end[run.timeline.replica == 0]
        assert alone.timeline.end.tolist() == together.tolist(), "replicas do not know of each other"


def test_prefixes_are_found_where_they_were_sent() -> None:
    workload = share_prefixes(mixed(150, 12.0), num_groups=40, num_tokens=128, block_tokens=32, skew=0.0, seed=2)
    hits = {
        router: int(simulate(workload, SHAPE, NOISY, num_replicas=3, router=router).timeline.num_cached.sum())
        for router in ("round-robin", "prefix-aware")
    }
    assert hits["prefix-aware"] > 1.1 * hits["round-robin"]


def test_routers_see_which_prefixes_are_evicted_while_rows_decode() -> None:
    """Also of a replica that is only looked at, and computed later."""
    workload = share_prefixes(mixed(120, 8.0), num_groups=15, num_tokens=128, block_tokens=32, skew=0.0, seed=2)
    arguments: dict[str, Any] = {"num_replicas": 3, "router": "seconds"}
    shape = replace(SHAPE, num_blocks=150)
    run = simulate(workload, shape, NOISY, **arguments)
    assert_equal(run, simulate(workload, shape, NOISY, **arguments, skip=False))
    assert run.timeline.num_cached.sum() > 0


def test_views_may_be_old() -> None:
    seen: list[float] = []

    class Nosy(RoundRobin):
        needs_views = True

        def route(self, request: Routable, views: Sequence[ReplicaView]) -> int:
            seen.append(float(workload.arrival[len(seen)]) - views[0].seen)
            return super().route(request, views)

    workload = mixed(60, 10.0)
    simulate(workload, SHAPE, NOISY, num_replicas=2, router=Nosy(), view_interval_s=1.0)
    assert 0.5 < max(seen) < 1.0
    seen.clear()
    simulate(workload, SHAPE, NOISY, num_replicas=2, router=Nosy(), view_interval_s=0.0)
    assert set(seen) == {0.0}
    seen.clear()
    workload = mixed(60, 400.0)
    simulate(workload, SHAPE, NOISY, num_replicas=2, router=Nosy())
    assert 0.2 * VIEW_AGE_S < max(seen) < VIEW_AGE_S, "by default as in an engine"
    assert Scenario().view_interval_s == ScenarioOptions().view_interval == VIEW_AGE_S
    with pytest.raises(ConfigError, match="num_replicas=0 must be at least 1"):
        simulate(workload, SHAPE, NOISY, num_replicas=0)


def test_exact_views_have_what_was_sent_at_the_same_instant() -> None:
    class Lopsided(LeastLoad):
        num_routed = 0

        def route(self, request: Routable, views: Sequence[ReplicaView]) -> int:
            self.num_routed += 1
            return 0 if self.num_routed <= 10 else super().route(request, views)

    workload = make_workload(np.array([0.0] * 10 + [0.25] * 10), fixed_lengths(20, 10, 50))
    run = simulate(workload, SHAPE, every_step(0.5), num_replicas=2, router=Lopsided(), view_interval_s=0.0)
    assert run.timeline.replica.tolist() == [0] * 10 + [1] * 10


# The real engine -----------------------------------------------------------------------------------------------------------


def digest(plans: Any) -> list[str]:
    """Each plan by its bytes."""
    return [
        hashlib.sha256(json.dumps([kind, scalars]).encode() + b"".join(a.tobytes() for a in arrays)).hexdigest()
        for kind, scalars, arrays in map(pack, plans)
    ]


@pytest.mark.parametrize(("depth", "policy"), [(1, "fcfs"), (2, "priority")])
def test_a_simulation_is_a_recording_of_the_real_scheduler(depth: int, policy: str) -> None:
    """What the simulator asked of its scheduler, asked again of a fresh one: by hand, and by a replica with its times."""
    workload = share_prefixes(mixed(120, 8.0, patience=1.5), num_groups=3, num_tokens=128, block_tokens=32, seed=2)
    shape = replace(SHAPE, depth=depth, num_blocks=150)
    entries: list[Entry] = []
    plans: list[StepPlan] = []

    def recorded(number: int, own: PlanPolicy) -> Scheduler:
        return RecordedScheduler(sink=entries.append, policy=own, **shape.scheduler_arguments())

    def fresh() -> Scheduler:
        return shape.scheduler(load_policy(policy))

    run = simulate(
        workload, shape, NOISY, policy=policy, on_plan=lambda _, plan: plans.append(plan), make_scheduler=recorded
    )
    assert (run.timeline.outcome == ABORTED).any()
    assert run.timeline.num_preemptions.any()
    assert run.timeline.num_cached.any()
    assert digest(plans) == digest(replay(entries, fresh())) == digest(rerun(entries, fresh()))
    assert len(plans) == run.num_steps


def test_a_recording_in_which_a_deadline_passes_runs_again() -> None:
    entries: list[Entry] = []
    scheduler = RecordedScheduler(sink=entries.append, policy=load_policy("fcfs"), **SHAPE.scheduler_arguments())

    def submit(rid: int, now: float, deadline: float | None = None) -> None:
        prompt = np.full(20, rid, np.int32)
        scheduler.submit(0, Submit(rid=rid, arrival=now, prompt=prompt, max_tokens=4, deadline=deadline), now)

    def update(step: int, now: float) -> None:
        rows = len(next(iter(scheduler.ledger)).rows)
        scheduler.update(StepResult(step=step, tokens=np.full(rows, 7, np.int32)), now)

    submit(1, 0.0, deadline=0.7)
    scheduler.schedule(0.0)
    scheduler.schedule(0.0)
    update(1, 0.5)
    scheduler.schedule(0.5)
    assert len(scheduler.expire(0.7)) == 1
    submit(2, 0.8)
    update(2, 1.0)
    scheduler.schedule(1.0)
    update(3, 1.5)
    scheduler.schedule(1.5)
    plans = [digest(drive(entries, SHAPE.scheduler(load_policy("fcfs")))) for drive in (replay, rerun)]
    assert plans[0] == plans[1]
    assert len(plans[0]) == 5


def test_the_shape_is_that_of_an_engine(tmp_path: Path) -> None:
    config = EngineConfig.from_arguments("storyteller", max_num_seqs=7, max_num_batched_tokens=99)
    with pytest.raises(ConfigError, match="KV blocks is not known yet"):
        EngineShape.of(config)
    known = replace(config, cache=replace(config.cache, num_blocks=123))
    shape = EngineShape.of(known)
    assert (shape.num_blocks, shape.max_num_seqs, shape.max_num_batched_tokens) == (123, 7, 99)
    assert shape.block_size == known.cache.block_size


def test_the_way_to_the_scheduler_and_back_is_added() -> None:
    workload = make_workload(gamma_arrivals(40, 2.0, 1.0, 1), fixed_lengths(40, 50, 8))
    shape = EngineShape(num_blocks=4000)
    near = simulate(workload, shape, preset("a100-llama-3-8b")).timeline
    model = replace(preset("a100-llama-3-8b"), submit_s=0.25, deliver_s=0.5)
    far = simulate(workload, shape, model).timeline
    assert far.arrival.tolist() == near.arrival.tolist()
    assert far.ttft == pytest.approx(near.ttft + 0.75)
    assert far.e2e == pytest.approx(near.e2e + 0.75)
    assert far.tpot == pytest.approx(near.tpot)
    assert far.end == pytest.approx(near.end + 0.75)
    assert far.scheduled == pytest.approx(near.scheduled + 0.25)
    assert far.token_times(3) == pytest.approx(near.token_times(3) + 0.75)


# Drafts ---------------------------------------------------------------------------------------------------------------


def with_drafts(*acceptance: float, most: int = 3, **shape: Any) -> EngineShape:
    return replace(SHAPE, drafts=SimulatedDrafts(((1, 1000, most),), acceptance), **shape)


def test_right_drafts_are_tokens_of_the_same_step() -> None:
    workload = make_workload(np.array([0.0]), fixed_lengths(1, 100, 10))
    right = simulate(workload, with_drafts(1.0, depth=1), every_step(0.01))
    times = right.timeline.token_times(0).tolist()
    assert times == pytest.approx([0.01] + [0.02] * 4 + [0.03] * 4 + [0.04])
    wrong = simulate(workload, with_drafts(0.0, depth=1), every_step(0.01))
    assert wrong.timeline.token_times(0).tolist() == pytest.approx([0.01 * n for n in range(1, 11)])


def test_a_draft_takes_what_a_row_does() -> None:
    workload = make_workload(np.array([0.0]), fixed_lengths(1, 100, 3))
    per_row = LinearModel((Regime(math.inf, (0.0, 0.0, 0.01, 0.0, 0.0, 0.0)),), "rows")
    run = simulate(workload, with_drafts(0.0, depth=1), per_row)
    assert np.diff(run.timeline.token_times(0)).tolist() == pytest.approx([0.04, 0.04])


@pytest.mark.parametrize(("num_blocks", "depth"), [(400, 1), (130, 2)])
def test_requests_with_drafts_get_the_tokens_that_they_want(num_blocks: int, depth: int) -> None:
    workload = replace(mixed(120), classes=(RequestClass("a"), RequestClass("b")))
    run = simulate(workload, with_drafts(0.7, 0.5, num_blocks=num_blocks, depth=depth), NOISY)
    assert run.timeline.num_output.tolist() == workload.num_output.tolist()
    assert (run.timeline.num_preemptions.sum() > 0) == (num_blocks < 400)
    (statistics,) = run.statistics
    assert run.num_steps == statistics.num_steps
    drafts = statistics.speculation
    assert drafts is not None
    first, second, third = (n / drafts.num_drafts for n in drafts.num_accepted_tokens_per_pos)
    assert (first, second, third) == pytest.approx((0.7, 0.35, 0.175), abs=0.02)
    seen = SimulatedDrafts.of(((1, 1000, 3),), drafts.num_drafts, drafts.num_accepted_tokens_per_pos)
    assert seen.acceptance == pytest.approx((0.7, 0.5, 0.5), abs=0.03)
    assert_equal(run, simulate(workload, with_drafts(0.7, 0.5, num_blocks=num_blocks, depth=depth), NOISY))


def test_ends_of_text_within_a_run_of_drafts_end_the_request_there() -> None:
    classes = (RequestClass("a"), RequestClass("b"))
    workload = replace(mixed(60), classes=classes, max_tokens=np.full(60, 500, np.int32))
    run = simulate(workload, with_drafts(0.9), NOISY)
    assert run.timeline.num_output.tolist() == np.minimum(workload.num_output, 500).tolist()


def test_an_acceptance_is_a_share() -> None:
    for wrong in ((), (1.5,), (0.5, -0.1)):
        with pytest.raises(ConfigError, match="must be shares from 0 to 1, by position, at least one"):
            SimulatedDrafts(((1, 1, 1),), wrong)


class Skewed(LinearModel):
    """A prompt costs 5 ms beside its tokens, and a step waits for its longest row."""

    details: ClassVar[list[StepDetail]] = []

    def seconds_of(self, detail: StepDetail) -> float:
        self.details.append(detail)
        return 0.01 + 0.005 * detail.num_prompts + 1e-6 * detail.longest_context


def test_a_model_may_ask_how_many_prompts_a_step_has_and_for_its_longest_row() -> None:
    """A mean context cannot tell a step with one long row from one with even rows."""
    Skewed.details.clear()
    model = Skewed((Regime(math.inf, (1.0, 0, 0, 0, 0, 0)),))
    lengths = np.array([50, 10, 300], np.int32), np.array([4, 4, 4], np.int32)
    run = simulate(make_workload(np.zeros(3), lengths), EngineShape(num_blocks=100, max_model_len=1024), model)
    first, *others = Skewed.details
    assert (first.p, first.d, first.num_prompts, first.longest_context) == (360, 0, 3, 0)
    assert [one.num_prompts for one in others] == [0] * len(others)
    assert [one.longest_context for one in others] == [301, 302, 303]
    assert all(one.decode_context < 3 * one.longest_context for one in others)
    assert run.timeline.first_token.tolist() == pytest.approx([0.025] * 3)
    assert run.timeline.end.tolist() == pytest.approx([0.025 + 0.03 + 1e-6 * (301 + 302 + 303)] * 3)
    assert not run.num_steps_skipped
