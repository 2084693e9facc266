"""`PolicyWithFallback`: a policy of the user's own, whose exceptions end its rule and nothing more.

A policy is called in the middle of things: while a step is packed, requests have a slot and no blocks yet. So no exception of
the policy gets through. The first exception, or a decision that is none, replaces the policy by "fcfs" for good. Waiting
requests are then announced to "fcfs", and the call that raised is made there. Requests lose nothing. A decision that is merely
wrong is left out and counted by the scheduler, as of every policy.

Built by the scheduler actor around policies that are not built in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import numpy as np

from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policy import Decision, PlanPolicy, StepDone, View
from actorllm.scheduling.sequence import Sequence

FALLBACK = "fcfs"


class StalledPolicyError(RuntimeError):
    """A policy keeps requests waiting for nothing."""


class PolicyWithFallback:
    """A PlanPolicy. on_failure(what, error) is called once, when the policy is replaced by what `fallback` builds."""

    def __init__(
        self,
        policy: PlanPolicy,
        on_failure: Callable[[str, BaseException], object] | None = None,
        fallback: Callable[[], PlanPolicy] = lambda: load_policy(FALLBACK),
    ) -> None:
        self.policy = policy
        """The one that decides now."""
        self.failure: str | None = None
        """What the policy did, if it was replaced."""
        self._on_failure = on_failure
        self._fallback = fallback
        if hasattr(policy, "may_fork"):  # one that does not know forks has none
            self.may_fork, self.on_fork, self.ahead_of = self._may_fork, self._on_fork, self._ahead_of

    def plan(self, view: View) -> Decision:
        try:
            decision = self.policy.plan(view)
            problem = _problem(decision)
            if problem is None:
                return decision
            raise TypeError(problem)
        except (Exception, SystemExit) as error:  # of a policy of the user's own: anything
            if not self._replace("plan", error, view):
                raise
        return self.policy.plan(view)

    def victim(self, view: View) -> Sequence | None:
        try:
            victim = self.policy.victim(view)
            if victim is None or isinstance(victim, Sequence):
                return victim
            raise TypeError(f"victim is {victim!r:.80}, which is no request")
        except (Exception, SystemExit) as error:  # of a policy of the user's own: anything
            if not self._replace("victim", error, view):
                raise
        return self.policy.victim(view)

    def _may_fork(self, sequence: Sequence, view: View) -> bool:
        try:
            return bool(self.policy.may_fork(sequence, view))
        except (Exception, SystemExit) as error:  # of a policy of the user's own: anything
            if not self._replace("may_fork", error, view):
                raise
        return False  # it waits like any other, and is announced so

    def _ahead_of(self, sequence: Sequence, view: View) -> list[Sequence]:
        try:
            others = list(self.policy.ahead_of(sequence, view))
            if all(isinstance(other, Sequence) for other in others):
                return others
            raise TypeError(f"ahead_of gives {others!r:.80}")
        except (Exception, SystemExit) as error:  # of a policy of the user's own: anything
            if not self._replace("ahead_of", error, view):
                raise
        return list(self.policy.ahead_of(sequence, view))

    def _on_fork(self, sequence: Sequence, view: View) -> None:
        self._tell("on_fork", view, sequence, view)

    def on_arrival(self, sequence: Sequence, view: View) -> None:
        self._tell("on_arrival", view, sequence, view)  # after a failure it was announced with all that wait

    def on_admit(self, sequence: Sequence, view: View) -> None:
        self._tell("on_admit", view, sequence, view)

    def on_refusal(self, sequence: Sequence, view: View) -> None:
        self._tell("on_refusal", view, sequence, view)

    def on_end(self, sequence: Sequence, view: View) -> None:
        self._tell("on_end", view, sequence, view)

    def on_step(self, done: StepDone, view: View) -> None:
        self._tell("on_step", view, done, view)

    def _tell(self, event: str, view: View, *arguments: Any) -> None:
        try:
            getattr(self.policy, event)(*arguments)
        except (Exception, SystemExit) as error:  # of a policy of the user's own: anything
            if not self._replace(event, error, view):
                raise

    def give_up(self, error: StalledPolicyError, view: View) -> bool:
        """It stalls: replace it, or what stands before it (`AdmissionGate`). Whether anything is replaced by that."""
        before = getattr(self.policy, "give_up", None)
        return (before is not None and before(error, view)) or self._replace("plan", error, view)

    def _replace(self, what: str, error: BaseException, view: View) -> bool:
        """Whether the policy was replaced; an error of the replacement is a defect of ours."""
        if self.failure is not None:
            return False
        self.failure = f"{what} raised {type(error).__name__}: {error}"
        self.policy = self._fallback()
        for sequence in view.waiting():
            self.policy.on_arrival(sequence, view)
        if self._on_failure is not None:
            self._on_failure(what, error)
        return True


def _problem(decision: Any) -> str | None:
    """Why this cannot be carried out, not even in part."""
    if not isinstance(decision, Decision):
        return f"the decision is {decision!r:.80}"
    if decision.decode is not None and not isinstance(decision.decode, np.ndarray):
        return f"decode is {decision.decode!r:.80}, not a mask"
    if not isinstance(decision.wake_at, Real) or math.isnan(decision.wake_at):
        return f"wake_at is {decision.wake_at!r:.80}"
    for sequence in decision.preempt:
        if not isinstance(sequence, Sequence):
            return f"preempt holds {sequence!r:.80}"
    for sequence, reason in decision.reject:
        if not isinstance(sequence, Sequence) or not isinstance(reason, str):
            return f"reject holds {(sequence, reason)!r:.80}"
    for entry in decision.prefill:
        sequence, size = entry
        if not isinstance(sequence, Sequence) or not isinstance(size, Integral):
            return f"prefill holds {entry!r:.80}"
    return None
