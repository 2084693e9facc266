"""What becomes of a hostile peer? Changes to every word, frame, body and message of a link, counted.

    python bench/fuzz_rings.py [--trials 1000000] [--seed 1] [--json FILE]

Nine of ten trials change a word of the header, a field of a frame, or bytes of a message under ordinary traffic; the
others are whole messages of an attached frontend with a field that no frontend would send, to a scheduler that serves an
honest one beside it. A trial passes when the link is dropped with an error, or when everything that arrives is what was
sent; anything else (another exception, another message, a stream that differs) stops the run with a traceback. See
tests/ring/hostile.py for what exactly must hold.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from report import environment, write_json

from tests.messages import hostile_frontend
from tests.ring import hostile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    report = hostile.Report()
    part = max(1, options.trials // 20)
    while report.trials.total() < options.trials:
        number = report.trials.total()
        report += hostile.run(part - part // 10, options.seed + number)
        report += hostile_frontend.run(part // 10, options.seed + number)
        print(f"{report.trials.total()} of {options.trials} trials", file=sys.stderr)
    took = time.monotonic() - began
    print(f"{'target':32} {'trials':>9} {'refused':>9}")
    for target in sorted(report.trials):
        print(f"{target:32} {report.trials[target]:9} {report.refused[target]:9}")
    print(f"{'all':32} {report.trials.total():9} {report.refused.total():9}")
    print(f"seed {options.seed}, {took:.0f} s; no crash, no hang, no message that was not sent")
    if options.json:
        targets = [*sorted(report.trials), "all"]
        trials, refused = (
            report.trials + Counter(all=report.trials.total()),
            report.refused + Counter(all=report.refused.total()),
        )
        rows = [{"target": target, "trials": trials[target], "refused": refused[target]} for target in targets]
        write_json(
            options.json,
            {
                "bench": "fuzz_rings",
                "environment": environment(),
                "configuration": {"trials": options.trials, "seed": options.seed},
                "seconds": round(took, 1),
                "rows": rows,
            },
        )


if __name__ == "__main__":
    main()
