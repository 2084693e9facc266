"""What each admission policy is for, at a load at which it shows: the same requests with it and without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, InvalidParameterError
from actorllm.scheduling.admission_policy import AdmissionPolicy
from actorllm.scheduling.admissions.slos_serve import SlosServe
from actorllm.scheduling.cost_model import LinearModel, Regime, preset
from actorllm.scheduling.policies.cohost import Cohost
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.slo.journal import Journal
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.timeline import FAILED, FINISHED
from actorllm.slo.traces import SAMPLE, load_trace
from actorllm.slo.workload import (
    Workload,
    assign_classes,
    fixed_lengths,
    make_workload,
    parse_mix,
    share_prefixes,
    synthetic,
)

MODEL = preset("a100-llama-3-8b")
SHAPE = EngineShape(num_blocks=2500, max_num_batched_tokens=512, max_model_len=16_384)
MIX = "ls:0.5:ttft=0.5+p/4000,tpot=0.05 be:0.5:e2e=120"


def conversations(num: int, rate: float) -> Workload:
    workload = synthetic(num, rate, seed=3).fitting(SHAPE.max_model_len - 2048).asking_for(2048)
    return assign_classes(workload, parse_mix(MIX), seed=1)


def num_preempted(run: SimulatedRun) -> int:
    return int(run.timeline.num_preemptions.sum())


def num_at_once(run: SimulatedRun) -> float:
    """Requests that had a slot, on average over the time in which any request arrived."""
    timeline = run.timeline
    end = float(timeline.arrival[-1])
    seconds = np.minimum(timeline.end, end) - np.minimum(timeline.scheduled, end)
    return float(np.nansum(seconds)) / end


def test_past_future_preempts_less_than_nobody_and_admits_more_than_the_worst_case() -> None:
    workload = conversations(900, 5.0)
    open_, worst, past = (
        simulate(workload, SHAPE, MODEL, admission=name) for name in (None, "worst-case", "past-future")
    )
    assert num_preempted(worst) == 0
    assert num_preempted(past) < 0.3 * num_preempted(open_)
    assert num_preempted(open_) > 20
    assert num_at_once(worst) < 0.7 * num_at_once(past)
    assert past.timeline.duration < 0.85 * worst.timeline.duration
    for run in (open_, worst, past):
        assert run.timeline.num_output.tolist() == np.minimum(workload.num_output, 2048).tolist()


def test_those_that_hold_the_memory_do_not_pause_for_those_that_wait_for_it() -> None:
    """Else both wait. And under worst-case, a policy that displaces does so still: that is no want of memory of who runs."""
    workload = assign_classes(load_trace(SAMPLE).workload.at_rate(6.0), parse_mix(MIX), seed=1)
    shape = replace(SHAPE, num_blocks=1200, max_num_seqs=64)
    journal = Journal()
    maker = journal.scheduler_maker(shape)
    cohost = simulate(workload, shape, MODEL, policy="cohost", admission="worst-case", make_scheduler=maker)
    qoserve = simulate(workload, shape, MODEL, policy="qoserve", admission="worst-case")
    assert cohost.timeline.duration < 1.3 * qoserve.timeline.duration
    assert cohost.evaluate().worst("deadline") > qoserve.evaluate().worst("deadline") - 0.05
    assert {event.why for event in journal.events if event.kind == "preempt"} <= {"displaced"}
    assert num_preempted(qoserve) == 0


def test_who_starves_in_an_overload_was_given_up() -> None:
    """Late for good, they wait behind everybody who can be in time, and are told of. Nobody else waits for so long."""
    workload = assign_classes(synthetic(250, 6.0, seed=1), parse_mix(MIX), seed=1)
    shape = replace(SHAPE, num_blocks=1200, max_num_seqs=64, max_num_batched_tokens=2048)
    run = simulate(workload, shape, MODEL, policy="cohost", admission="worst-case")
    (told,) = [warning for warning in run.warnings if "starved" in warning]
    num = int(told.split()[2])
    assert f"; {num} of them it had given up, because they could not be in time any more" in told
    assert not run.statistics[0].num_refused_decisions, "rows that pause have no token of the step to give"
    patient = type("Patient", (Cohost,), {"relegates": False})
    without = simulate(workload, shape, MODEL, policy=lambda: KeyPlanner(patient()), admission="worst-case")
    assert not any("starved" in warning for warning in without.warnings)
    assert without.evaluate().worst("deadline") < run.evaluate().worst("deadline") - 0.2


def test_credits_keep_the_pace_of_who_was_promised_one() -> None:
    """Steps of 40 rows take 40 ms: too long for half of the streams, and much shorter than the others need."""
    model = LinearModel((Regime(1e9, (0.004, 1e-5, 1e-3, 0.0, 0.0, 0.0)),), "decode-bound")
    mix = parse_mix("fast:0.5:tpot=0.03 slow:0.5:tpot=0.15")
    arrival = np.arange(120) * 0.15
    workload = assign_classes(make_workload(arrival, fixed_lengths(120, 50, 200)), mix, seed=2)
    shape = replace(SHAPE, max_num_seqs=64)
    found: dict[str | None, dict[str, float]] = {}
    for admission in (None, "credit"):
        run = simulate(workload, shape, model, admission=admission)
        assert (run.timeline.outcome == FINISHED).all()
        found[admission] = {kind.name: kind.attainment["tpot"] for kind in run.evaluate().classes}
    assert found[None]["fast"] < 0.6
    assert found["credit"]["fast"] > 0.9
    assert found["credit"]["slow"] > 0.9


def test_rejecting_the_late_keeps_the_others_in_time() -> None:
    workload = assign_classes(synthetic(500, 8.0, seed=3), parse_mix("ls:1:ttft=0.5+p/4000"), seed=1)
    shape = replace(SHAPE, num_blocks=25_000)
    open_, guarded = (simulate(workload, shape, MODEL, admission=name) for name in (None, "ttft-reject"))
    goodput = [run.evaluate(duration=60.0).overall.goodput["deadline"] for run in (open_, guarded)]
    assert goodput[1] > 4 * goodput[0]
    rejected = guarded.timeline.outcome == FAILED
    assert 50 < rejected.sum() < 350
    assert np.isnan(guarded.timeline.scheduled[rejected]).all()
    assert guarded.statistics[0].num_rejected == rejected.sum()
    (warning,) = [w for w in guarded.warnings if "requests failed" in w]
    assert "it cannot keep its objective any more" in warning
    waited = guarded.timeline.end[rejected] - guarded.timeline.arrival[rejected]
    assert waited.max() < 0.5 + 4 * workload.num_prompt.max() / 4000, "nobody waits for long to hear it"


class Unplanned(SlosServe):
    """A mistake: each request is looked at as if it were the only one."""

    def _plan(self, view: Any) -> list[Any]:
        new, declined = self._new, []
        for sequence in new:
            self._let_in, self._new = [], [sequence]
            declined += super()._plan(view)
        self._new = []
        return declined


def test_who_is_let_in_keeps_its_promise() -> None:
    """Twice as many requests as the engine can serve: those of the set that was planned are on time, nearly all."""
    workload = assign_classes(synthetic(400, 12.0, seed=3), parse_mix("ls:1:ttft=0.5+p/4000,tpot=0.2"), seed=1)
    shape = replace(SHAPE, num_blocks=25_000)
    found = {}
    for name, admission in (("open", None), ("slos-serve", "slos-serve"), ("mistake", Unplanned)):
        run = simulate(workload, shape, MODEL, policy="edf", admission=admission)
        let_in = run.timeline.outcome == FINISHED
        on_time = run.timeline.ttft[let_in] <= workload.promises.ttft_limit(workload.num_prompt)[let_in]
        found[name] = float(on_time.mean()), int(on_time.sum())
    assert found["slos-serve"][0] > 0.97
    assert found["slos-serve"][1] > 2 * found["open"][1], "and there are more of them than without"
    assert found["mistake"][0] < 0.9


@pytest.mark.parametrize("admission", ["past-future", "worst-case", "ttft-reject", "credit", "slos-serve"])
@pytest.mark.parametrize("depth", [1, 2])
def test_skipping_changes_nothing(admission: str, depth: int) -> None:
    workload = conversations(60, 2.5)
    shape = replace(SHAPE, depth=depth, num_blocks=1500)
    one, other = (
        simulate(workload, shape, MODEL, admission=admission, policy="edf", skip=skip) for skip in (True, False)
    )
    assert (one.num_steps_skipped > 0) == (admission != "credit")
    for name in ("scheduled", "first_token", "last_token", "end", "num_output", "num_wasted"):
        assert repr(getattr(one.timeline, name).tolist()) == repr(getattr(other.timeline, name).tolist()), name
    assert one.statistics == other.statistics


# Requests that end before their max_tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefixes", [False, True])
def test_they_end_where_they_end(prefixes: bool) -> None:
    workload = synthetic(80, 3.0, seed=5)
    if prefixes:
        workload = share_prefixes(workload, num_groups=3, num_tokens=128, block_tokens=32, seed=2)
    known = simulate(workload, SHAPE, MODEL)
    asked = simulate(workload.asking_for(300), SHAPE, MODEL)
    assert asked.timeline.num_output.tolist() == np.minimum(workload.num_output, 300).tolist()
    stopped = workload.num_output < 300
    assert asked.timeline.num_wasted[stopped].min() == 1, "the step behind the last one had begun"
    assert known.timeline.num_wasted.max() == 0
    assert asked.statistics[0].kv.usage == 0
    assert workload.asking_for(300).select(np.array([1, 2])).max_tokens.tolist() == [300, 300]  # type: ignore[union-attr]
    assert workload.asking_for(300).repeated(200).max_tokens.size == 200  # type: ignore[union-attr]
    with pytest.raises(InvalidParameterError, match="max_tokens=0 must be a number of tokens, 1 or more"):
        workload.asking_for(0)


# How they are chosen --------------------------------------------------------------------------------------------------------


def test_the_shape_of_an_engine_has_its_admission_policy() -> None:
    config = EngineConfig.from_arguments("storyteller", admission_policy="worst-case").resolved(2500)
    assert EngineShape.of(config).admission == "worst-case"
    shape = replace(SHAPE, num_blocks=1024)
    found = [
        num_preempted(simulate(conversations(150, 5.0), replace(shape, admission=name), MODEL))
        for name in (None, "worst-case")
    ]
    assert found[0] > 0 == found[1]


def test_one_that_raises_is_named() -> None:
    class Broken(AdmissionPolicy):
        def admit(self, *arguments: Any) -> Any:
            raise ZeroDivisionError("oh")

    with pytest.raises(ZeroDivisionError) as raised:
        simulate(conversations(5, 3.0), SHAPE, MODEL, admission=Broken)
    assert "and the admission policy <class" in raised.value.__notes__[0]
    with pytest.raises(ConfigError, match="'worstcase'; did you mean 'worst-case'"):
        simulate(conversations(5, 3.0), SHAPE, MODEL, admission="worstcase")
