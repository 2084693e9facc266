"""How many threads each step computes with: chosen by what steps have taken, and left when it turns out wrong.

Steps of about as many tokens and samples are one *kind*. For each kind, the newest times of every number of threads are kept.
Their medians are compared. If the same rows go on, a step lasts until the next one begins. So a team that keeps scheduler and
frontend from their work pays for that itself. Times are divided by what the products of the step take with one thread (`Rates`,
measured while loading). So a batch that grows or shrinks changes little. Until a kind has been seen, these rates choose.

Other numbers are tried again, after pauses that double as long as they stay slower. The pauses are short after a change, and at
most `LONGEST_PAUSE`, so that less than one step in a hundred is a trial. A larger team is tried at once when cores begin to stand
idle (`IdleCores`): then whatever was in its way is gone.

Free of torch. The bits of a step do not depend on the number: `cpu.rates` leaves out numbers for which they would.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NUM_TIMES = 3
"""Times of one number of threads that count: two slow steps are enough to leave it, one is not."""

SHORTEST_PAUSE, LONGEST_PAUSE = 4, 256
"""Steps between two trials of another number."""

MIN_GAIN = 0.05
"""A number is left for one that is faster by this share, so that two that are alike do not take turns."""

LOOK_EVERY_S = 0.1
"""How often the idle time of the cores is read; the kernel counts it in hundredths of a second."""

MAX_LOOK_S = 1.0
"""A look after more than this says nothing of now."""

IDLE_SHARE = 0.8
"""Of the cores that a larger team needs more: so much must stand idle to try it at once."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a product of a model takes here, in seconds, by number of threads."""

    one_row: Mapping[int, float]
    """For one token: mostly reading the weight."""
    per_row: Mapping[int, float]
    """For each further token."""
    region_s: Mapping[int, float] = field(default_factory=dict)
    """To start and to end a team, which every product does."""
    num_products: int = 1
    """Of a step."""

    def step_s(self, num_threads: int, num_tokens: int) -> float:
        """What the products of a step take together."""
        return self.num_products * (self.one_row[num_threads] + self.per_row[num_threads] * max(0, num_tokens - 1))


class IdleCores:
    """How many of the cores that this process may use have stood idle."""

    def __init__(self, path: str = "/proc/stat", cores: Sequence[int] | None = None) -> None:
        """cores: None: those of this process."""
        self._path = Path(path)
        self._names = {f"cpu{core}" for core in (_cores() if cores is None else cores)}
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._before: tuple[float, float] | None = None

    def read(self, now: float) -> float | None:
        """Of the cores, how many have stood idle since the last call. None: that is not known."""
        idle = 0.0
        with suppress(OSError, ValueError, IndexError):
            for line in self._path.read_text().splitlines():
                name, *numbers = line.split()
                if name in self._names:
                    idle += (int(numbers[3]) + int(numbers[4])) / self._ticks_per_s  # idle, and waiting for disks
        before, self._before = self._before, (now, idle)
        if before is None or now <= before[0] or idle <= 0:
            return None
        return (idle - before[1]) / (now - before[0])


def _cores() -> Sequence[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


@dataclass(slots=True)
class _Kind:
    """What is known of steps of one kind."""

    chosen: int
    times: dict[int, deque[float]]
    """By number of threads, the newest last, in times of what the products take with one."""
    pause: int = SHORTEST_PAUSE
    num_left: int = SHORTEST_PAUSE
    """Steps until the next trial."""
    trials: int = 0
    changes: int = 0
    is_confirming: bool = False
    """The last trial was faster than what is chosen: the next step is one as well."""
    is_crowded: bool = False
    """The cores that a larger team needs were not idle when they were looked at last."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Of the last step with each number."""

    def median(self, size: int) -> float | None:
        times = self.times[size]
        return statistics.median(times) if times else None


@dataclass(slots=True)
class _Step:
    """One that is under way, or whose successor has not begun."""

    kind: _Kind
    size: int
    began: float
    scale: float
    is_trial: bool
    ended: float | None = None


class Team:
    """Chooses the number of threads of each step. Called by one thread, in the order of the steps."""

    def __init__(
        self,
        sizes: Sequence[int],
        rates: Rates | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        idle: IdleCores | None = None,
    ) -> None:
        """sizes: the numbers of threads to choose between. rates: None where there is one. idle: None: that of this machine."""
        self._all_sizes = self.sizes = tuple(sorted(sizes))
        self._rates, self._clock = rates, clock
        self._idle = IdleCores() if idle is None and len(self.sizes) > 1 else idle
        self._kinds: dict[tuple[int, int, bool], _Kind] = {}
        self._step: _Step | None = None
        self._looked = -math.inf
        self.idle_cores: float | None = None
        """How many of the cores stood idle when they were looked at last."""

    @property
    def most(self) -> int:
        """The largest number that it may ever choose."""
        return self._all_sizes[-1]

    def limit(self, num_threads: int) -> None:
        """Choose at most so many from the next step on, or the smallest number that there is."""
        allowed = tuple(size for size in self._all_sizes if size <= num_threads)
        self.sizes = allowed or self._all_sizes[:1]
        self._kinds.clear()
        self._step = None

    def begin(self, num_tokens: int, num_samples: int, *, goes_on: bool) -> int:
        """A step begins; returns its number of threads.

        Arguments:
            num_tokens, num_samples: of the step.
            goes_on: its rows are those of the step before. Then nothing but the engine itself has kept it waiting.
        """
        if len(self.sizes) == 1:
            return self.sizes[0]
        now = self._clock()
        self._count(now if goes_on else None)
        is_prompt = num_tokens > num_samples
        key = num_tokens.bit_length(), 0 if is_prompt else num_samples.bit_length(), is_prompt
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = self._new_kind(num_tokens)
        assert self._rates is not None
        size, is_trial = self._next(kind, now)
        scale = self._rates.step_s(self.sizes[0], num_tokens)
        self._step = _Step(kind, size, now, scale, is_trial)
        return size

    def end(self) -> None:
        """The step that began last is done."""
        if self._step is not None:
            self._step.ended = self._clock()

    def _new_kind(self, num_tokens: int) -> _Kind:
        assert self._rates is not None
        rates = self._rates
        best = min(self.sizes, key=lambda size: rates.step_s(size, num_tokens))
        return _Kind(best, {size: deque(maxlen=NUM_TIMES) for size in self.sizes})

    def _count(self, now: float | None) -> None:
        """Note what the step before has taken. now: when its rows go on; None: they do not."""
        step, self._step = self._step, None
        if step is None or step.ended is None:
            return
        seconds = (step.ended if now is None else now) - step.began
        kind, size = step.kind, step.size
        kind.times[size].append(seconds / step.scale)
        kind.seconds[size] = seconds
        best = self._best(kind)
        if step.is_trial:
            kind.trials += 1
            chosen = kind.median(kind.chosen)
            kind.is_confirming = (
                best == kind.chosen and chosen is not None and seconds / step.scale < chosen * (1 - MIN_GAIN)
            )
        if best != kind.chosen:
            kind.chosen, kind.changes, kind.is_confirming = best, kind.changes + 1, False
            kind.pause = kind.num_left = SHORTEST_PAUSE

    def _best(self, kind: _Kind) -> int:
        """The number with the lowest median, unless it gains too little over the chosen one."""
        known = {size: median for size in self.sizes if (median := kind.median(size)) is not None}
        best = min(known, key=lambda size: known[size])
        chosen = known.get(kind.chosen)
        return best if chosen is None or known[best] < chosen * (1 - MIN_GAIN) else kind.chosen

    def _next(self, kind: _Kind, now: float) -> tuple[int, bool]:
        """The number of threads of the next step of this kind, and whether it is a trial."""
        neighbours = self._neighbours(kind.chosen)
        if kind.is_confirming:
            return min(neighbours, key=lambda size: kind.times[size][-1] if kind.times[size] else math.inf), True
        if not kind.times[kind.chosen]:
            return kind.chosen, False
        larger = [size for size in neighbours if size > kind.chosen]
        if larger and self._is_free_again(kind, larger[0] - kind.chosen, now):
            return larger[0], True
        if kind.num_left > 0:
            kind.num_left -= 1
            return kind.chosen, False
        unknown = [size for size in neighbours if len(kind.times[size]) < NUM_TIMES]
        kind.pause = SHORTEST_PAUSE if unknown else min(2 * kind.pause, LONGEST_PAUSE)
        kind.num_left = kind.pause
        # In turns, those that have been seen least first.
        return (unknown or neighbours)[kind.trials % len(unknown or neighbours)], True

    def _neighbours(self, size: int) -> list[int]:
        at = self.sizes.index(size)
        return [self.sizes[i] for i in (at - 1, at + 1) if 0 <= i < len(self.sizes)]

    def _is_free_again(self, kind: _Kind, num_more: int, now: float) -> bool:
        """Whether so many more cores stand idle that were busy before; looked at now and then."""
        if self._idle is None or now < self._looked + LOOK_EVERY_S:
            return False
        is_recent = now < self._looked + MAX_LOOK_S
        self._looked = now
        idle = self._idle.read(now)
        if idle is None or not is_recent:
            return False
        self.idle_cores = round(idle, 2)
        was_crowded, kind.is_crowded = kind.is_crowded, idle < IDLE_SHARE * num_more
        return was_crowded and not kind.is_crowded

    def statistics(self) -> dict[str, Any]:
        """What was chosen, and why: by kind of step the milliseconds of the last steps with each number of threads."""
        found: dict[str, Any] = {"sizes": list(self.sizes), "idle_cores": self.idle_cores, "kinds": {}}
        if self._rates is not None:
            found["product_us"] = {
                str(size): {
                    "one_row": round(1e6 * self._rates.one_row[size], 2),
                    "per_row": round(1e6 * self._rates.per_row[size], 3),
                    "region": round(1e6 * self._rates.region_s.get(size, 0.0), 2),
                }
                for size in self.sizes
            }
        for (tokens, samples, is_prompt), kind in sorted(self._kinds.items()):
            name = f"{1 << tokens >> 1} to {(1 << tokens) - 1} tokens"
            name += ", with prompts" if is_prompt else "" if samples == tokens else ", with drafts"
            medians = {size: kind.median(size) for size in self.sizes}
            measured = [f"{size}: {median:.2f}" for size, median in medians.items() if median is not None]
            found["kinds"][name] = {
                "num_threads": kind.chosen,
                "why": "medians by number of threads, in times of the products with one: " + ", ".join(measured)
                if len(measured) > 1
                else "the rates of products",
                "last_ms": {str(size): round(1e3 * seconds, 3) for size, seconds in sorted(kind.seconds.items())},
                "num_trials": kind.trials,
                "num_changes": kind.changes,
            }
        return found
