"""What policies cost: seconds of the scheduler that pass while a policy decides, in virtual time.

    DeclaredCost(plan_s=2e-4, waiting_s=1e-6)   so much for each plan, and more for each request that waits
    MeasuredCost(time.perf_counter)             what the policy takes on this machine, while it is simulated

A step is launched after its policy has decided. A policy that takes longer than a step therefore lets the worker wait, as it does
in the engine. Steps are then planned one by one, which takes a simulation longer. Pure: the clock is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from actorllm.errors import ConfigError, shown
from actorllm.scheduling.policy import Decision, PlanPolicy, StepDone, View
from actorllm.scheduling.sequence import Sequence


class PolicyCost(Protocol):
    """What a policy takes."""

    def begin(self) -> float:
        """Before the policy is asked."""
        ...

    def seconds(self, began: float, view: View, is_plan: bool) -> float:
        """Once it has answered; is_plan: it was asked for a step, not told of an event."""
        ...


@dataclass(frozen=True, slots=True)
class DeclaredCost:
    """Seconds by a formula. Raises ConfigError for what is no number of seconds."""

    plan_s: float = 0.0
    """Of each step that is planned."""
    waiting_s: float = 0.0
    """And for each request that waits then."""
    event_s: float = 0.0
    """Of each arrival, start and end."""

    def __post_init__(self) -> None:
        for name in ("plan_s", "waiting_s", "event_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"policy cost: {name}={shown(value)} must be a number of seconds, 0 or more")

    def begin(self) -> float:
        return 0.0

    def seconds(self, began: float, view: View, is_plan: bool) -> float:
        return self.plan_s + self.waiting_s * view.num_waiting if is_plan else self.event_s


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Seconds of the machine that simulates, times a factor. Two runs are then never the same to the last bit."""

    clock: Callable[[], float]
    """Such as `time.perf_counter`."""
    factor: float = 1.0
    """By how much the engine's machine is slower."""

    def begin(self) -> float:
        return self.clock()

    def seconds(self, began: float, view: View, is_plan: bool) -> float:
        return self.factor * (self.clock() - began)


class CostedPolicy:
    """A PlanPolicy that does what another one does, and adds up what that takes."""

    ignores_decode_steps = False

    def __init__(self, policy: PlanPolicy, cost: PolicyCost) -> None:
        self.policy = policy
        self.due = 0.0
        """Seconds that no step has waited for yet."""
        self.total = 0.0
        self.longest = 0.0
        """Of one plan, with the events before it."""
        self.num_plans = 0
        self._cost = cost
        if hasattr(policy, "may_fork"):  # one that does not know forks has none
            self.may_fork, self.on_fork, self.ahead_of = policy.may_fork, policy.on_fork, policy.ahead_of

    def take(self) -> float:
        """What is due now; it is waited for once."""
        due, self.due = self.due, 0.0
        self.longest = max(self.longest, due)
        return due

    def _add(self, began: float, view: View, is_plan: bool = False) -> None:
        took = self._cost.seconds(began, view, is_plan)
        self.due += took
        self.total += took

    def plan(self, view: View) -> Decision:
        began = self._cost.begin()
        decision = self.policy.plan(view)
        self.num_plans += 1
        self._add(began, view, is_plan=True)
        return decision

    def victim(self, view: View) -> Sequence | None:
        return self.policy.victim(view)

    def on_arrival(self, sequence: Sequence, view: View) -> None:
        self._tell("on_arrival", sequence, view)

    def on_admit(self, sequence: Sequence, view: View) -> None:
        self._tell("on_admit", sequence, view)

    def on_refusal(self, sequence: Sequence, view: View) -> None:
        self._tell("on_refusal", sequence, view)

    def on_end(self, sequence: Sequence, view: View) -> None:
        self._tell("on_end", sequence, view)

    def on_step(self, done: StepDone, view: View) -> None:
        self._tell("on_step", done, view)

    def _tell(self, event: str, what: Any, view: View) -> None:
        began = self._cost.begin()
        getattr(self.policy, event)(what, view)
        self._add(began, view)

    def told(self) -> str:
        """For the warnings of a run."""
        mean = self.total / self.num_plans if self.num_plans else 0.0
        return (
            f"its policy took {self.total:.3g} s for {self.num_plans} plans: {mean * 1e3:.3g} ms in the mean, "
            f"{self.longest * 1e3:.3g} ms at most"
        )


def parse_policy_cost(text: str, clock: Callable[[], float]) -> PolicyCost:
    """measured, measured:FACTOR, or PLAN_S[:WAITING_S[:EVENT_S]]. Raises ConfigError."""
    kind, _, rest = text.partition(":")
    try:
        if kind == "measured":
            factor = float(rest) if rest else 1.0
            if not 0 < factor < math.inf:
                raise ValueError
            return MeasuredCost(clock, factor)
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3:
        raise ConfigError(
            f"policy_cost={text!r:.80} must be measured, measured:FACTOR, or PLAN_S[:WAITING_S[:EVENT_S]] in seconds"
        )
    return DeclaredCost(*numbers)
