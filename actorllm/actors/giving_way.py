"""`GivingWay`: within a long step, the interpreter goes to the application's threads now and then.

With topology="inline" a step is computed on a thread of the application's process. Torch gives the interpreter back in every
operation. Most operations of a decode step are over before a thread that waits for the interpreter has woken up. Such a
thread gets it after Python's switch interval (5 ms), which is the whole process's and so not ours to change. Called by the
runner between two layers.
"""

from __future__ import annotations

import time

from actorllm.actors.engine_thread import serves_loops

INTERVAL_S = 0.0015
"""Between two pauses. An event loop waits for the interpreter so long, twice where its first callback waits again."""
PAUSE_S = 60e-6
"""Long enough for another thread to wake up and take the interpreter. What it costs: some per cent of a step."""


class GivingWay:
    """Of one thread that computes."""

    def __init__(self) -> None:
        self._last = 0.0

    def between_layers(self) -> None:
        """Pause if it is time, and if an event loop of the application has waited for an engine. Callers that block need none."""
        if time.monotonic() - self._last < INTERVAL_S:
            return
        if serves_loops():
            time.sleep(PAUSE_S)
        self._last = time.monotonic()
