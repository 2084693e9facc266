"""What steps of so many tokens take here, measured when a worker starts; how many drafts pay goes by it.

The numbers travel with the configuration. Recordings have them, and a worker that takes another's place goes on with them: what is
planned does not depend on a second measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of a step."""
NUM_SURE = 4
"""Sizes that are measured however long they take."""
ROUNDS = 5
BUDGET_S = 0.5
"""Processor time of this thread for each of what is measured; larger sizes and later rounds are left out when it is used up."""
LONGEST_S = 3.0
"""The same in wall time, where other programs keep the processor busy."""


def measured(*computes: Callable[[int], object]) -> list[tuple[tuple[int, float], ...]]:
    """Of each, (tokens, seconds) for some sizes, the shortest of several rounds each.

    They take turns at every size. So what comes behind a step is computed with the threads of a step of that size, as it is later.
    In processor time of this thread, which takes part in every product: what else the machine does has less effect on it.

    Arguments:
        computes: each computes something of so many tokens.
    """
    began, spent = time.perf_counter(), time.thread_time()

    def is_over(share: float) -> bool:
        is_long = time.perf_counter() - began > share * LONGEST_S * len(computes)
        return is_long or time.thread_time() - spent > share * BUDGET_S * len(computes)

    best: list[dict[int, float]] = [{} for _ in computes]
    for number, size in enumerate(SIZES):
        if number >= NUM_SURE and is_over(0.5):
            break
        for found, compute in zip(best, computes, strict=True):
            compute(size)  # the first one makes the kernels for this size
            found[size] = float("inf")
    for turn in range(ROUNDS):
        if turn and is_over(1.0):
            break
        for size in best[0]:
            for found, compute in zip(best, computes, strict=True):
                start = time.thread_time()
                compute(size)
                found[size] = min(found[size], time.thread_time() - start)
    return [tuple(found.items()) for found in best]
