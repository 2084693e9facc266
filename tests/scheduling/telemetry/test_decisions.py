"""Recorded decisions: what a policy of one's own did can be gone through again where it is not."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from actorllm.messages import pack
from actorllm.scheduling.policy import Admit, Decision, KeyPolicy
from actorllm.scheduling.policy_fallback import PolicyWithFallback
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.scheduling.telemetry.decisions import DECIDE, TellingPolicy, ToldPolicy
from actorllm.scheduling.telemetry.recording import Entry, RecordedScheduler, replay
from tests.scheduling.conftest import Engine, make_scheduler


class Moody(KeyPolicy):
    """No rule at all: it draws what it does, so that nobody could decide the same without its answers."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def key(self, sequence: Any, view: Any) -> Any:
        return (self._random.random(),)

    def victim_key(self, sequence: Any, view: Any) -> Any:
        return (self._random.random(),)

    def admit(self, sequence: Any, view: Any) -> Admit:
        return self._random.choice((Admit.ADMIT, Admit.ADMIT, Admit.SKIP))

    def decode_mask(self, view: Any) -> Any:
        mask = np.array([self._random.random() < 0.8 for _ in view.decode_slots], np.bool_)
        return mask if mask.any() else None

    def wake_at(self, view: Any) -> float:
        return self._random.choice((-float("inf"), view.now, float(view.now) + 0.01))


class Greedy(KeyPlanner):
    """Plans more than fits, refuses and turns away, and leaves memory to `victim`."""

    def plan(self, view: Any) -> Decision:
        decision = super().plan(view)
        rng = self.policy._random  # type: ignore[attr-defined]
        if rng.random() < 0.2:
            decision.preempt = [s for s in view.running() if rng.random() < 0.3]
        if rng.random() < 0.2:
            decision.prefill += [(s, 10**30) for s in view.waiting()[:2]]
        if rng.random() < 0.1:
            decision.reject = [(s, "not today \ud800") for s in view.waiting()[-1:]]
        if rng.random() < 0.1:
            decision.decode = np.zeros(99, np.bool_)
        return decision


def run(policy: Any, entries: list[Entry]) -> Engine:
    engine = Engine()
    engine.scheduler = RecordedScheduler(
        sink=entries.append,
        policy=TellingPolicy(policy, entries.append),
        num_blocks=14,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=40,
        vocab_size=97,
        eos_token_ids=(5,),
    )
    for rid in range(1, 25, 2):
        prompt = [rid % 3] * (3 + rid)
        engine.submit(rid, prompt, max_tokens=12, ignore_eos=True)
        engine.submit(rid + 1, prompt, max_tokens=12, ignore_eos=True, fork_of=rid, seed=rid, sample_index=1)
    for turn in range(400):
        engine.now += 0.01
        while engine.scheduler.may_plan and engine.launch() is not None:
            pass
        engine.scheduler.take_rejected()
        if turn == 9:
            engine.abort(4)
        if engine.results:
            engine.complete()
    return engine


def encoded(plan: Any) -> Any:
    kind, scalars, arrays = pack(plan)
    return kind, scalars, [a.tobytes() for a in arrays]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("planner", [KeyPlanner, Greedy])
def test_the_same_plans_come_of_the_answers_alone(seed: int, planner: type[KeyPlanner]) -> None:
    entries: list[Entry] = []
    engine = run(PolicyWithFallback(planner(Moody(seed))), entries)
    assert any(call.startswith(DECIDE) for call, _, _ in entries)
    num_steps = engine.scheduler.statistics().num_steps
    assert num_steps > 20
    again = make_scheduler(num_blocks=14, primary_eos_token_id=None, policy=ToldPolicy(entries))
    plans = list(replay(entries, again))
    assert len(plans) == num_steps
    assert again.statistics().num_dropped_results == 0
    first, second = engine.scheduler.statistics(), again.statistics()
    assert (first.num_preemptions, first.num_forks) == (second.num_preemptions, second.num_forks)
    assert first.kv == second.kv


def test_without_forks_there_are_none_again() -> None:
    class Plain:
        """A PlanPolicy of its own kind."""

        def __init__(self) -> None:
            self._planner = KeyPlanner(KeyPolicy())

        def __getattr__(self, name: str) -> Any:
            if name in ("may_fork", "ahead_of", "on_fork"):
                raise AttributeError(name)
            return getattr(self._planner, name)

    entries: list[Entry] = []
    engine = run(Plain(), entries)
    told = ToldPolicy(entries)
    assert not hasattr(told, "may_fork")
    again = make_scheduler(num_blocks=14, primary_eos_token_id=None, policy=told)
    list(replay(entries, again))
    assert again.statistics().num_steps == engine.scheduler.statistics().num_steps
    assert again.statistics().num_forks == 0


def test_a_recording_that_ends_within_a_decision_ends_there() -> None:
    entries: list[Entry] = []
    run(KeyPlanner(KeyPolicy()), entries)
    last = max(i for i, (call, _, _) in enumerate(entries) if call == "decide plan")
    cut = entries[:last]
    scheduler = make_scheduler(num_blocks=14, primary_eos_token_id=None, policy=ToldPolicy(cut))
    plans = list(replay(cut, scheduler))
    assert plans
    assert scheduler.statistics().num_dropped_results == 0
