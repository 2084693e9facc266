"""One process of `bench/scheduler.py --against`: runs bursts of steps of the tree that it is told.

    python scheduler_peer.py TREE

Reads one burst per line (JSON: requests running, churn, whether there is a prefix cache, steps), and answers with the seconds
of CPU that a step took on average. The steps are those of `bench/scheduler.py` of that tree. A batch lives on from burst to burst.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

MAX_STEPS = 1500
"""After so many steps a batch without churn is built anew: its requests end soon after."""


def main() -> None:
    tree = Path(sys.argv[1])
    sys.path[:0] = [str(tree / "bench"), str(tree), str(tree / "kernels")]
    import scheduler  # type: ignore[import-not-found,unused-ignore]

    time.perf_counter = time.thread_time  # the clock of the tree's script: CPU time of this process alone
    drivers: dict[tuple[int, float, bool], scheduler.Driver] = {}
    num_steps: dict[tuple[int, float, bool], int] = {}
    for line in sys.stdin:
        running, churn, is_caching, steps = json.loads(line)
        key = running, churn, is_caching
        num_steps[key] = num_steps.get(key, 0) + steps
        if key not in drivers or (not churn and num_steps[key] > MAX_STEPS):
            drivers[key] = scheduler.Driver(*key)
            num_steps[key] = steps
        driver = drivers[key]
        print(sum(driver.step() for _ in range(steps)) / steps, flush=True)


if __name__ == "__main__":
    main()
