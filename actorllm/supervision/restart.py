"""`RestartCounter`: decides whether an actor that died is started again, and how soon, by counting deaths.

Deaths in a row are counted per group (`group`). A token of any request ends all rows, because it shows that everything
works. An engine therefore outlives any number of accidents. One that cannot work ends soon, with the error of the last
death. Plain arithmetic, without a clock; asked by the supervisor.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """How many deaths in a row are one too many, and how long to wait after each."""

    max_deaths: int = 5
    """Of a group, without one token in between."""
    max_early_deaths: int = 3
    """Of a group in one restart, before it was ready."""
    first_delay_s: float = 0.1
    """After the second death in a row; after the first there is none, and it doubles with every further one."""
    max_delay_s: float = 2.0


class RestartCounter:
    """The deaths of an engine so far."""

    def __init__(self, limits: RestartLimits) -> None:
        self.limits = limits
        self._deaths: dict[str, int] = {}
        self._early: dict[str, int] = {}

    def died(self, group: str, *, was_ready: bool) -> float | None:
        """One more death: seconds to wait before the group is started again; None: never again.

        was_ready: it had been running, in contrast to one that did not get that far.
        """
        deaths = self._deaths[group] = self._deaths.get(group, 0) + 1
        early = self._early[group] = 0 if was_ready else self._early.get(group, 0) + 1
        if deaths >= self.limits.max_deaths or early >= self.limits.max_early_deaths:
            return None
        return 0.0 if deaths == 1 else min(self.limits.first_delay_s * 2.0 ** (deaths - 2), self.limits.max_delay_s)

    def progressed(self) -> None:
        """A token was emitted, or the last death told more about the request that they die of.

        Either shows that what died had been ready, even if it died before this process had heard so.
        """
        self._deaths.clear()
        self._early.clear()

    def explain(self, group: str) -> str:
        """Why `died` has said never again."""
        if self._early.get(group, 0) >= self.limits.max_early_deaths:
            return f"it did not become ready in {self._early[group]} attempts"
        return f"these were {self._deaths[group]} deaths in a row without one token in between"
