"""What a policy does to requests that no decision of it shows: stalls, starvation, promises beyond any step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from actorllm.messages import StepResult
from actorllm.scheduling.admission_policy import AdmissionGate, AdmissionPolicy
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policies.fcfs import Fcfs
from actorllm.scheduling.policies.srpf import Srpf
from actorllm.scheduling.policy import Admit, KeyPolicy
from actorllm.scheduling.policy_fallback import PolicyWithFallback, StalledPolicyError
from actorllm.scheduling.policy_monitor import (
    LONGEST_TIMER_S,
    MANY_IN_VAIN,
    MAX_IDLE_S,
    NUM_STEPS,
    SHORTEST_TIMER_S,
    STARVED_S,
    PolicyMonitor,
    WakeTimer,
    patience,
)
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.step_packing import KeyPlanner
from tests.scheduling.chained_tokens import reference_stream
from tests.scheduling.conftest import Engine


class Sulking(KeyPolicy):
    """Lets nobody in, and wants to be woken then."""

    def __init__(self, wake_in: float = math.inf) -> None:
        self.wake_in = wake_in

    def admit(self, sequence: Any, view: Any) -> Admit:
        return Admit.WAIT

    def wake_at(self, view: Any) -> float:
        return float(view.now + self.wake_in)


def with_one(policy: Any) -> Engine:
    engine = Engine(policy=policy)
    engine.submit(1, [1, 2, 3], max_tokens=4, ignore_eos=True)
    return engine


def test_to_plan_nothing_for_ever_is_a_stall() -> None:
    engine, watch = with_one(KeyPlanner(Sulking())), PolicyMonitor()
    assert engine.launch() is None
    reason = watch.stall(engine.scheduler)
    assert reason == "it plans nothing for 1 requests that could run, and does not ask to be woken"


def test_to_hold_back_everybody_who_runs_is_one_as_well() -> None:
    class Still(KeyPolicy):
        def decode_mask(self, view: Any) -> Any:
            return np.zeros(view.decode_slots.size, bool) if view.decode_slots.size else None

    engine, watch = with_one(KeyPlanner(Still())), PolicyMonitor()
    engine.launch()
    engine.complete()
    assert engine.launch() is None
    assert watch.stall(engine.scheduler) is not None


def test_to_wait_for_a_time_is_none_unless_it_never_comes() -> None:
    engine, watch = with_one(KeyPlanner(Sulking(5.0))), PolicyMonitor()
    for engine.now in (0.0, 5.0, MAX_IDLE_S - 1):
        engine.launch()
        assert watch.stall(engine.scheduler) is None
    engine.now = MAX_IDLE_S + 1
    engine.launch()
    assert "for 61 s it has planned nothing for 1 requests" in str(watch.stall(engine.scheduler))


def test_a_pause_costs_nobody_a_look_at_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """While paused, whoever comes has the watch look for a stall."""
    engine, watch = with_one(load_policy("fcfs")), PolicyMonitor()
    engine.scheduler.pause("wait", 0.0)
    monkeypatch.setattr(Scheduler, "waiting", None)
    assert watch.stall(engine.scheduler) is None


def test_nothing_to_do_a_step_in_flight_and_a_pause_are_none() -> None:
    engine, watch = with_one(load_policy("fcfs")), PolicyMonitor()
    engine.launch()
    assert watch.stall(engine.scheduler) is None
    engine.run()
    assert watch.stall(engine.scheduler) is None
    engine.scheduler.pause("keep", 1.0)
    engine.submit(2, [1, 2, 3], max_tokens=4, ignore_eos=True)
    assert engine.launch() is None
    assert watch.stall(engine.scheduler) is None


@pytest.mark.parametrize("who", ["policy", "admission"])
def test_who_stalls_is_replaced_and_nobody_else(who: str) -> None:
    class Shut(AdmissionPolicy):
        def admit(self, *arguments: Any) -> Admit:
            return Admit.WAIT

    told: list[str] = []
    key_policy, admission = (Sulking(), AdmissionPolicy()) if who == "policy" else (Fcfs(), Shut())
    gate = AdmissionGate(KeyPlanner(key_policy), admission, lambda what, error: told.append(f"admission: {error}"))
    policy = PolicyWithFallback(
        gate,  # type: ignore[arg-type]
        lambda what, error: told.append(f"policy: {error}"),
        lambda: AdmissionGate(load_policy("fcfs"), admission),  # type: ignore[arg-type,return-value]
    )
    engine = with_one(policy)
    assert engine.launch() is None
    assert policy.give_up(StalledPolicyError("it stalls"), engine.scheduler)
    assert told == [f"{who}: it stalls"]
    assert (policy.failure is None, gate.failure is None) == ((False, True) if who == "policy" else (True, False))
    engine.run()
    assert engine.streams[1] == reference_stream([1, 2, 3], 1, 4)
    assert not policy.give_up(StalledPolicyError("again"), engine.scheduler) or who == "admission"


def test_who_is_overtaken_for_too_long_starves() -> None:
    engine, watch = Engine(policy=KeyPlanner(Srpf()), max_num_seqs=1), PolicyMonitor()
    engine.submit(1, list(range(20)), max_tokens=2, ignore_eos=True)
    engine.submit(2, [1] * 30, max_tokens=2, ignore_eos=True)
    engine.submit(3, [1] * 30, max_tokens=2, ignore_eos=True, slo=[None, None, 500.0, 0.0])
    engine.launch()
    engine.now = STARVED_S + 5
    assert watch.starvation(engine.scheduler, engine.now) is None, "nobody has overtaken anybody"
    rid = 4
    while engine.now < STARVED_S + 20:
        engine.submit(rid, [2, rid], max_tokens=2, ignore_eos=True)
        rid += 1
        engine.launch()
        engine.complete()
        engine.now += 1.0
    engine.submit(rid, [2, rid], max_tokens=2, ignore_eos=True)
    engine.launch()
    told = watch.starvation(engine.scheduler, engine.now)
    assert told is not None
    assert told.startswith("1 requests starve; one of 30 prompt tokens has waited for 8")
    assert watch.num_starving == 1
    assert watch.starvation(engine.scheduler, engine.now + 1) is None, "it is looked for now and then only"


def test_patience_is_as_long_as_the_promise() -> None:
    assert patience(None, 10) == patience([0.5, 0.05, None, 0.0], 10) == STARVED_S
    assert patience([30.0, None, None, 0.1], 1000) == 130.0
    assert patience([0.5, None, 90.0, 0.0], 10) == 90.0


def test_promises_beyond_the_fastest_step_are_told_of_once() -> None:
    watch = PolicyMonitor()
    for _ in range(3):
        watch.see([0.001, 0.004, 0.5, 0.0])
        watch.see([0.001, None, 0.003, 0.01])
        watch.see(None)
    assert watch.unjudged
    told: list[str] = []
    for step in range(NUM_STEPS):
        took = 0.005 if step == 7 else 0.05
        told += watch.measure(StepResult(step=step, tokens=np.zeros(0, np.int32), started=1.0, ended=1.0 + took))
    assert told == [
        "SLO ttft=0.001 s cannot be met: the fastest of the last 20 steps took 0.005 s",
        "SLO tpot=0.004 s cannot be met: the fastest of the last 20 steps took 0.005 s",
        "SLO e2e=0.003 s cannot be met: the fastest of the last 20 steps took 0.005 s",
    ]
    watch.see([0.001, 0.004, 0.5, 0.0])
    assert not watch.unjudged


# Timers


@pytest.mark.parametrize("wake_in", [0.0, -5.0, -math.inf, SHORTEST_TIMER_S / 2])
def test_times_that_have_passed_are_granted_ever_more_rarely_and_told_of_once(wake_in: float) -> None:
    engine, timer = with_one(KeyPlanner(Sulking(wake_in))), WakeTimer()
    woken, told = [], []
    for _ in range(2 * MANY_IN_VAIN):
        assert engine.launch() is None
        at = timer.next(engine.scheduler)
        told.append(timer.complaint(engine.scheduler))
        woken.append(at - engine.now)
        engine.now += (at - engine.now) / 2
        assert timer.next(engine.scheduler) == at, "what else happens meanwhile does not put it off"
        engine.now = at
    assert woken[0] == pytest.approx(SHORTEST_TIMER_S)
    assert max(woken) == pytest.approx(LONGEST_TIMER_S)
    assert woken[-1] == pytest.approx(LONGEST_TIMER_S)
    (complaint,) = [text for text in told if text is not None]
    assert f"{MANY_IN_VAIN} times in a row, and plans nothing then" in complaint


def test_times_to_come_are_kept_and_a_step_begins_anew() -> None:
    policy = Sulking(0.5)
    engine, timer = with_one(KeyPlanner(policy)), WakeTimer()
    engine.launch()
    assert timer.next(engine.scheduler) == engine.now + 0.5
    policy.wake_in = 0.0
    for _ in range(5):
        engine.launch()
        engine.now = timer.next(engine.scheduler)
    assert timer.num_in_vain == 5
    policy.admit = lambda *arguments: Admit.ADMIT  # type: ignore[method-assign]
    engine.launch()
    engine.complete()
    policy.decode_mask = lambda view: np.zeros(view.decode_slots.size, bool)  # type: ignore[method-assign]
    assert engine.launch() is None
    assert timer.next(engine.scheduler) == pytest.approx(engine.now + SHORTEST_TIMER_S)
    assert timer.num_in_vain == 1
