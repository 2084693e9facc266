"""A process of the pool: reads points from stdin, a line each, and writes their records. Ends with its input.

What a policy prints goes to stderr, or it would be taken for a record.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from actorllm.scheduling.admission_policy import register_admission
from actorllm.scheduling.policy import register_policy
from actorllm.slo.experiments.point import Point
from actorllm.slo.experiments.pool import told
from actorllm.slo.experiments.record import record_of


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this, and ends it
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answer = json.dumps(_answer(line), separators=(",", ":"))
        try:
            answers.write(answer + "\n")
            answers.flush()
        except BrokenPipeError:  # the answers are not wanted any more
            os._exit(0)


def _answer(line: str) -> dict[str, Any]:
    try:
        given = json.loads(line)
        for name, path in given["policies"].items():
            if ":" in path:
                register_policy(name, path)
        for name, path in given["admissions"].items():
            if ":" in path:
                register_admission(name, path)
        point = Point.from_dict(given["point"])
        return {"record": record_of(point, point.run())}
    except Exception as error:  # of a policy of the user's own: anything
        return {"error": told(error)}
