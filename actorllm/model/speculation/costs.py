"""What steps of so many tokens take here, measured when a worker starts; how many drafts pay goes by it.

The numbers travel with the configuration. Recordings have them, and a worker that takes another's place goes on with them: what is
planned does not depend on a second measurement. What other programs disturb is therefore measured again at once (`Sample`).
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of a step."""
NUM_SURE = 4
"""Sizes that are measured however long they take."""
ROUNDS = 5
MOST_ROUNDS = 10
"""Where sizes were disturbed in all rounds so far; only those are measured again."""
BUDGET_S = 0.5
"""Processor time of this thread for each of what is measured; larger sizes and later rounds are left out when it is used up."""
LONGEST_S = 3.0
"""The same in wall time, where other programs keep the processor busy."""
MOST_SWITCHES_S = 50
"""How often a second threads of this process may be taken off their processors in a quiet sample."""
LONGEST_WAIT = 1.5
"""Wall time of a quiet sample, in processor time of this thread."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement."""

    seconds: float
    """Processor time of this thread."""
    is_quiet: bool
    """No other program was in the way, as far as the system tells."""


def sample_of(compute: Callable[[int], object], size: int) -> Sample:
    """What computing something of this size takes."""
    switches, began, spent = _num_switches(), time.perf_counter(), time.thread_time()
    compute(size)
    seconds, passed = time.thread_time() - spent, time.perf_counter() - began
    is_quiet = _num_switches() - switches <= MOST_SWITCHES_S * passed and passed <= LONGEST_WAIT * seconds
    return Sample(seconds, is_quiet)


def _num_switches() -> int:
    """How often threads of this process had to make room for others."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def measured(*computes: Callable[[int], object], most_rounds: int = MOST_ROUNDS) -> list[tuple[tuple[int, float], ...]]:
    """Of each, (tokens, seconds) for some sizes, the shortest of several rounds each, of quiet ones where there are any.

    They take turns at every size. So what comes behind a step is computed with the threads of a step of that size, as it is later.
    In processor time of this thread, which takes part in every product: what else the machine does has less effect on it.

    Arguments:
        computes: each computes something of so many tokens.
        most_rounds: beside the first call of each size, where others disturb; ROUNDS or more.
    """
    began, spent = time.perf_counter(), time.thread_time()

    def is_late(share: float) -> bool:
        return time.perf_counter() - began > share * LONGEST_S * len(computes)

    def is_over(share: float) -> bool:
        return is_late(share) or time.thread_time() - spent > share * BUDGET_S * len(computes)

    samples: list[dict[int, list[Sample]]] = [{} for _ in computes]

    def measure(size: int) -> None:
        for found, compute in zip(samples, computes, strict=True):
            found[size].append(sample_of(compute, size))

    def disturbed() -> list[int]:
        """Sizes without a quiet sample of each."""
        return [size for size in samples[0] if not all(any(s.is_quiet for s in found[size]) for found in samples)]

    for number, size in enumerate(SIZES):
        if number >= NUM_SURE and is_over(0.5):
            break
        for found, compute in zip(samples, computes, strict=True):
            compute(size)  # the first one makes the kernels for this size
            found[size] = []
    for turn in range(ROUNDS):
        if turn and is_over(1.0):
            break
        for size in samples[0]:
            measure(size)
    for _ in range(ROUNDS, most_rounds):
        for size in disturbed():
            if not is_late(1.0):
                measure(size)
    if sizes := disturbed():
        told = "other programs were in the way when steps of %s tokens were measured: drafts may be tried less often than they pay"
        logger.warning("%s; num_speculative_tokens_per_batch_size says how often", told % ", ".join(map(str, sizes)))
    return [tuple((size, _shortest(of_size)) for size, of_size in found.items()) for found in samples]


def _shortest(samples: list[Sample]) -> float:
    return min(sample.seconds for sample in ([s for s in samples if s.is_quiet] or samples))
