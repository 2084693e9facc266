"""Policies that raise, or decide nonsense: another one takes their place, and no request notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actorllm.scheduling.policies.fcfs import Fcfs
from actorllm.scheduling.policy import Decision, KeyPolicy
from actorllm.scheduling.policy_fallback import PolicyWithFallback
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.scheduling.waiting_order import WaitingLines
from tests.scheduling.chained_tokens import reference_stream
from tests.scheduling.conftest import Engine

HOOKS = ["plan", "victim", "on_arrival", "on_admit", "on_refusal", "on_end", "on_step"]


class Failing(KeyPlanner):
    """First come, first served, with too much in every step, until the n-th call of one of its hooks."""

    def __init__(self, hook: str, calls: int, result: Callable[[], Any] | None = None) -> None:
        super().__init__(Fcfs())
        right = getattr(super(), hook)

        def wrong(*arguments: Any) -> Any:
            nonlocal calls
            calls -= 1
            if calls > 0:
                return right(*arguments)
            if result is None:
                raise RuntimeError("planted")
            return result()

        self._view: Any = None
        setattr(self, hook, wrong)
        if hook != "plan":
            self.plan = self._greedy  # type: ignore[method-assign]

    def _greedy(self, view: Any) -> Decision:
        """Admits everybody at once, so that some are refused, and never makes room for the decode."""
        decision = Decision(prefill=[(s, view.remaining(s)) for s in view.prefilling])
        for sequence in view.waiting():
            decision.prefill.append((sequence, view.remaining(sequence)))
        self._order = WaitingLines(self.policy)
        return decision


def run(policy: Any, **overrides: Any) -> Engine:
    engine = Engine(policy=policy, num_blocks=14, **overrides)
    for rid in range(1, 8):
        engine.submit(rid, [rid, *range(7)], max_tokens=16, ignore_eos=True)
    engine.run()
    for rid in range(1, 8):
        assert engine.streams[rid] == reference_stream([rid, *range(7)], rid, 16)
    assert engine.scheduler.statistics().kv.num_free == 14
    return engine


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("calls", [1, 3])
def test_requests_lose_nothing(hook: str, calls: int) -> None:
    told: list[str] = []
    policy = PolicyWithFallback(Failing(hook, calls), lambda what, error: told.append(f"{what}: {error}"))
    run(policy)
    assert policy.failure == f"{hook} raised RuntimeError: planted"
    assert told == [f"{hook}: planted"]
    assert isinstance(policy.policy, KeyPlanner)
    assert isinstance(policy.policy.policy, Fcfs)


@pytest.mark.parametrize(
    ("hook", "result"),
    [
        ("plan", lambda: None),
        ("plan", lambda: Decision(prefill=["x"])),  # type: ignore[list-item]
        ("plan", lambda: Decision(prefill=[("x", 1)])),  # type: ignore[list-item]
        ("plan", lambda: Decision(prefill=None)),  # type: ignore[arg-type]
        ("plan", lambda: Decision(preempt=[7])),  # type: ignore[list-item]
        ("plan", lambda: Decision(decode=[True])),  # type: ignore[arg-type]
        ("plan", lambda: Decision(wake_at=float("nan"))),
        ("plan", lambda: Decision(wake_at="soon")),  # type: ignore[arg-type]
        ("victim", lambda: "the next one"),
    ],
)
def test_what_is_no_decision_is_a_failure_too(hook: str, result: Callable[[], Any]) -> None:
    policy = PolicyWithFallback(Failing(hook, 2, result))
    run(policy)
    assert policy.failure is not None
    assert policy.failure.startswith(f"{hook} raised ")


def test_a_policy_that_behaves_stays() -> None:
    class Backwards(KeyPolicy):
        def key(self, sequence: Any, view: Any) -> tuple[Any, ...]:
            return (-sequence.arrival_index,)

    policy = PolicyWithFallback(KeyPlanner(Backwards()))
    engine = run(policy, max_num_seqs=1)
    assert policy.failure is None
    assert list(engine.ends) == [7, 6, 5, 4, 3, 2, 1]


def test_numpy_integers_are_integers() -> None:
    class Numbers(Failing):
        def _greedy(self, view: Any) -> Decision:
            decision = super()._greedy(view)
            decision.prefill = [(s, np.int64(size)) for s, size in decision.prefill]  # type: ignore[misc]
            return decision

    policy = PolicyWithFallback(Numbers("on_end", 1000))
    run(policy)
    assert policy.failure is None


@pytest.mark.parametrize("hook", ["may_fork", "on_fork", "ahead_of"])
def test_sequences_of_one_prompt_lose_nothing_either(hook: str) -> None:
    policy = PolicyWithFallback(Failing(hook, 1))
    engine = Engine(policy=policy, num_blocks=40)
    for rid in (1, 2, 3):
        leader = {} if rid == 1 else {"fork_of": 1}
        engine.submit(rid, [7, *range(9)], max_tokens=6, ignore_eos=True, **leader)
    engine.run()
    assert policy.failure == f"{hook} raised RuntimeError: planted"
    for rid in (1, 2, 3):
        assert engine.streams[rid] == reference_stream([7, *range(9)], rid, 6)


def test_a_policy_that_does_not_know_forks_has_none() -> None:
    class Old:
        def plan(self, view: Any) -> Decision:
            return Decision()

    assert not hasattr(PolicyWithFallback(Old()), "may_fork")  # type: ignore[arg-type]
