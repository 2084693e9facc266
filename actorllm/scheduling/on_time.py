"""`most_on_time`: which of several prompts to compute so that the most of them are ready when they are due.

One machine works them off one after the other, the earliest deadline first. That order is the best one for any set that can
be on time at all. Dynamic programming finds the set itself (Lawler and Moore 1969). It goes through the
prompts in the order of deadlines, and keeps the least work by which so many are on time. Pure; for policies and admission policies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import F64


def most_on_time(work: F64, due: F64, is_kept: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
    """Which ones to choose: the most that can be on time, and of these sets one with the least work.

    work: seconds that each takes. due: seconds from now until each is due. is_kept: those that must be chosen if they can
    be on time at all beside the others that must; None: none. Costs by the square of how many there are.
    """
    num = work.size
    order = np.lexsort((work, due))
    least = np.full(num + 1, np.inf)  # by how many that need not be chosen are: the least work of all that are
    least[0] = 0.0
    taken = np.zeros((num, num + 1), np.bool_)
    for row, item in enumerate(order.tolist()):
        ends = least + work[item]
        in_time = ends <= due[item]
        if is_kept is not None and is_kept[item]:
            if (in_time & np.isfinite(least)).any():
                taken[row] = in_time
                least = np.where(in_time, ends, np.inf)
            continue
        better = in_time[:-1] & (ends[:-1] < least[1:])
        taken[row, 1:] = better
        least[1:] = np.where(better, ends[:-1], least[1:])
    chosen = np.zeros(num, np.bool_)
    count = int(np.flatnonzero(np.isfinite(least))[-1])
    for row in range(num - 1, -1, -1):
        item = int(order[row])
        if taken[row, count]:
            chosen[item] = True
            if is_kept is None or not is_kept[item]:
                count -= 1
    return chosen
