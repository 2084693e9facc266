"""`HangDetector`: decides which processes are stuck and which are only busy, from their signs of life.

`StepBudget` (`actors.step_budget`) says before a step how long it may take. The detector looks at the signs of all
processes (`actors.heartbeat`) now and then. A process is stuck in four cases:

    it is stopped                        for heartbeat_timeout_s, whatever it does
    a step takes longer than its budget  its loop cannot turn meanwhile, so nothing else can be asked of it
    so does its start                    after a restart; the caller of the first start has a limit of its own
    outside of a step, the loop stands   for heartbeat_timeout_s: a policy that never returns, a deadlock

Time counts as *observed*. Two looks may be far apart, because the watching process itself was stopped, or the machine was
asleep or starved. Then only as much time passes as between two regular looks. A process is therefore not killed for time
in which it could not run, nor is a thread given up that the application keeps from the interpreter (`Sign.share`). Pure;
`watchdog` looks and kills.
"""

from __future__ import annotations

from dataclasses import dataclass

from actorllm.actors.heartbeat import STARTING, WITHOUT_NUMBER, Sign

CAUGHT = "its loop has not turned for"
"""How the reason begins when a process neither steps nor is stopped: it is caught in something that does not return."""


@dataclass(frozen=True, slots=True)
class StuckProcess:
    """A process is stuck."""

    actor: str
    reason: str
    """What follows "stuck: "."""


@dataclass(slots=True)
class _Watched:
    """One process, and for how long it has been seen like this."""

    sign: Sign
    still_s: float = 0.0
    step_s: float = 0.0
    stopped_s: float = 0.0


class HangDetector:
    """Watches the processes that are looked at regularly, from the first look on until `forget`."""

    def __init__(self, heartbeat_timeout_s: float, interval_s: float) -> None:
        """interval_s: how far apart looks are when nothing delays them."""
        self._timeout_s = heartbeat_timeout_s
        self._most_s = 2 * interval_s
        self._last: float | None = None
        self._watched: dict[str, _Watched] = {}

    def look(self, now: float, signs: dict[str, Sign]) -> list[StuckProcess]:
        """The signs of all processes at this time (any monotonic seconds). Those that are stuck are returned once.

        A process that is not in `signs` is forgotten; under its name another one may come.
        """
        passed = 0.0 if self._last is None else min(max(0.0, now - self._last), self._most_s)
        self._last = now
        stuck: list[StuckProcess] = []
        seen: dict[str, _Watched] = {}
        for actor, sign in signs.items():
            watched = self._watched.get(actor)
            if watched is None:
                seen[actor] = _Watched(sign)
                continue
            reason = self._reason(watched, sign, passed)
            if reason is None:
                seen[actor] = watched
            else:
                stuck.append(StuckProcess(actor, reason))
        self._watched = seen
        return stuck

    def _reason(self, watched: _Watched, sign: Sign, passed: float) -> str | None:
        last, watched.sign = watched.sign, sign
        # Three clocks, each set back by the sign of life that it waits for: of the step, of the loop, of the process.
        is_same_step = sign.step and sign.num_steps == last.num_steps
        watched.step_s = watched.step_s + passed * sign.share if is_same_step else 0.0
        has_moved = sign.beats != last.beats or sign.num_steps != last.num_steps
        watched.still_s = 0.0 if has_moved or sign.step else watched.still_s + passed
        watched.stopped_s = watched.stopped_s + passed if sign.is_stopped and last.is_stopped else 0.0
        what = {WITHOUT_NUMBER: "a control", STARTING: "its start"}.get(sign.step, f"step {sign.step}")
        if watched.stopped_s > self._timeout_s:
            during = f" during {what}" if sign.step else ""
            return f"the process was stopped for {watched.stopped_s:.1f} s{during}, limit {self._timeout_s:g} s"
        if sign.step and watched.step_s > sign.budget_s:
            return f"{what} ran for {watched.step_s:.1f} s, deadline {sign.budget_s:.3g} s"
        if watched.still_s > self._timeout_s and not sign.is_stopped:
            return f"{CAUGHT} {watched.still_s:.1f} s, limit {self._timeout_s:g} s"
        return None

    def forget(self) -> None:
        """No more looks, for now."""
        self._watched.clear()
        self._last = None
