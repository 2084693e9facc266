"""`PolicyMonitor`: what a scheduling policy does to requests that no single decision of it shows.

    stall        nothing is planned although a request could run, and nothing will happen that changes it
    starvation   requests wait and wait while others that came later are started
    objectives   a promise that not even the fastest step keeps
    timers       it asks to be woken at times that have passed (`WakeTimer`)

Says what is wrong in a sentence without the policy's name, which the caller adds. Costs nothing per step. Stalls are looked for
when nothing was planned, starvation when a request comes, objectives in a few steps after a new one was seen. Used by the
scheduler actor, and its timers by the simulator; pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from actorllm.messages import StepResult
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.sequence import Sequence

MAX_IDLE_S = 60.0
"""A policy that asks to be woken later may plan nothing for so long."""
STARVED_S = 60.0
"""A request that waits for longer than this, and than was promised, starves if others overtake it."""
LOOK_S = 10.0
MAX_LOOK = 5000
"""Where more are waiting, starvation is not looked for: long waits are no news then, and the search would add to them."""
NUM_STEPS = 20
"""In which the fastest step is looked for."""
MAX_OBJECTIVES = 1000
"""So many different ones are told apart."""
SHORTEST_TIMER_S = 0.001
LONGEST_TIMER_S = 0.1
"""Between two timers of a policy that asks for times that have passed, at first and at last."""
MANY_IN_VAIN = 10
"""So many of them in a row are told of."""

Fields = tuple[float | None, ...]


def patience(slo: Iterable[float | None] | None, num_prompt: int) -> float:
    """Seconds that a request may wait before it starves."""
    if slo is None:
        return STARVED_S
    ttft, _, e2e, per_prompt_token = slo
    first = 0.0 if ttft is None else ttft + (per_prompt_token or 0.0) * num_prompt
    return max(STARVED_S, first, e2e or 0.0)


class PolicyMonitor:
    """See the module docstring."""

    def __init__(self) -> None:
        self.num_starving = 0
        """When they were last looked for."""
        self._idle_step = -1
        self._idle_since = 0.0
        self._look_at = 0.0
        self._seen: set[Fields] = set()
        self.unjudged: list[Fields] = []
        """Objectives that have not been looked at: while there are any, `measure` is to be told of steps."""
        self._fastest = math.inf
        self._num_steps = 0

    # Stalls

    def stall(self, scheduler: Scheduler) -> str | None:
        """Called when nothing was planned though there was room. Why that is a stall; None: it is none, or none yet."""
        if scheduler.num_in_flight or (scheduler.transfers is not None and scheduler.transfers.holds_blocks):
            return None
        num = len(scheduler.running()) + scheduler.num_waiting
        if not num:
            return None
        if scheduler.wake_at == math.inf:
            return f"it plans nothing for {num} requests that could run, and does not ask to be woken"
        step = scheduler.ledger.next_step
        if step != self._idle_step:
            self._idle_step, self._idle_since = step, scheduler.now
        idle = scheduler.now - self._idle_since
        if idle < MAX_IDLE_S:
            return None
        return f"for {idle:.0f} s it has planned nothing for {num} requests that could run, and asks again to be woken"

    # Starvation

    def starvation(self, scheduler: Scheduler, now: float) -> str | None:
        """Called when a request comes. The request that starves, at most once in LOOK_S seconds."""
        if now < self._look_at or scheduler.num_waiting > MAX_LOOK:
            return None
        self._look_at = now + LOOK_S
        starved = list(starving(scheduler, now))
        self.num_starving = len(starved)
        if not starved:
            return None
        first = starved[0]
        return (
            f"{len(starved)} requests starve; one of {first.num_prompt} prompt tokens has waited for "
            f"{now - first.queued:.0f} s, and others that came later were started"
        )

    # Objectives

    def see(self, slo: Iterable[float | None] | None) -> None:
        """A request with this objective came (fields as in `Submit.slo`)."""
        if slo is None:
            return
        fields = tuple(slo)
        if fields not in self._seen and len(self._seen) < MAX_OBJECTIVES:
            self._seen.add(fields)
            self.unjudged.append(fields)
            self._num_steps, self._fastest = 0, math.inf

    def measure(self, result: StepResult) -> list[str]:
        """A step's result, while there are `unjudged` objectives. Returns what is wrong with new objectives once that is known."""
        took = result.ended - result.started
        if took > 0:
            self._num_steps += 1
            self._fastest = min(self._fastest, took)
        if self._num_steps < NUM_STEPS:
            return []
        unjudged, self.unjudged = self.unjudged, []
        return [told for fields in unjudged for told in _impossible(fields, self._fastest)]


class WakeTimer:
    """When a policy that asks to be woken (`Decision.wake_at`) is: at that time.

    A time that has passed, or is less than SHORTEST_TIMER_S away, is asked for in vain if nothing is planned then. So it is
    granted after SHORTEST_TIMER_S, after twice as long when it is asked for again, and so on up to LONGEST_TIMER_S, until a
    step is planned. Such a policy holds no core, and whatever happens to requests is planned at once all the same.
    """

    def __init__(self) -> None:
        self.num_in_vain = 0
        """Timers in a row that had passed when they were asked for."""
        self._step = -1
        self._at = -math.inf
        self._has_told = False

    def next(self, scheduler: Scheduler) -> float:
        """Nothing was planned though there was room. When to plan again even if nothing happens."""
        at, now, step = scheduler.wake_at, scheduler.now, scheduler.ledger.next_step
        if step != self._step or at >= now + SHORTEST_TIMER_S:
            self._step, self._at, self.num_in_vain = step, -math.inf, 0
        if at >= now + SHORTEST_TIMER_S:
            return at
        if now >= self._at:  # else something else happened meanwhile
            wait = SHORTEST_TIMER_S * 2.0 ** min(self.num_in_vain, 60)
            self._at = now + min(wait, LONGEST_TIMER_S)
            self.num_in_vain += 1
        return self._at

    def complaint(self, scheduler: Scheduler) -> str | None:
        """What is wrong with its timers, once."""
        if self._has_told or self.num_in_vain < MANY_IN_VAIN:
            return None
        self._has_told = True
        ago = scheduler.now - scheduler.wake_at
        when = f"{ago:.3g} s ago" if 0 <= ago < math.inf else "at once" if ago < 0 else "long ago"
        return (
            f"it asks to be woken {when}, {self.num_in_vain} times in a row, and plans nothing then; until it plans a step it is "
            f"woken every {LONGEST_TIMER_S:g} s, and whenever something happens to a request"
        )


def starving(scheduler: Scheduler, now: float) -> Iterator[Sequence]:
    """Waiting requests that have been overtaken for longer than they can be expected to bear, the first to come first."""
    latest = max((s.arrival_index for s in scheduler.running()), default=-1)
    for sequence in scheduler.waiting():
        if sequence.arrival_index > latest:
            return
        if now - sequence.queued > patience(sequence.submit.slo, sequence.num_prompt) and scheduler.may_start(sequence):
            yield sequence


def _impossible(fields: Fields, fastest: float) -> Iterator[str]:
    ttft, tpot, e2e, per_prompt_token = fields
    for name, limit in (("ttft", None if per_prompt_token else ttft), ("tpot", tpot), ("e2e", e2e)):
        if limit is not None and limit < fastest:
            yield f"SLO {name}={limit:g} s cannot be met: the fastest of the last {NUM_STEPS} steps took {fastest:.3g} s"
