"""`Timeline`: what the engine did when, as Chrome-trace events (open the file in Perfetto or chrome://tracing).

Kept by the scheduler actor, which knows every time of a step. These are when it was planned and sent, when the worker ran it,
when its result was applied and when its text was made. So one sees step N+1 run while step N is detokenized.
Deaths of other actors are marked.
Format: the Trace Event Format, complete events ("X") and instants ("i"), times in microseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from actorllm.messages import StepResult

SCHEDULER, WORKER = 1, 2

MAX_EVENTS = 80_000
"""What is kept until it is taken: some 20,000 steps, the newest. The answer to the call that takes them is one message."""

Event = dict[str, Any]


class Timeline:
    """Events in the order in which they became known."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._step = 0
        self._num_ever = 0

    def statistics(self) -> dict[str, int]:
        return {"num_events": len(self._events), "num_dropped": self._num_ever - len(self._events)}

    def _keep(self, event: Event) -> None:
        self._num_ever += 1
        self._events.append(event)

    def _span(self, pid: int, name: str, began: float, ended: float, **args: Any) -> None:
        self._keep(
            {
                "ph": "X",
                "pid": pid,
                "tid": pid,
                "name": name,
                "ts": began * 1e6,
                "dur": (ended - began) * 1e6,
                "args": args,
            }
        )

    def mark(self, name: str, at: float, **args: Any) -> None:
        """Something that happened to the engine as a whole."""
        self._keep(
            {"ph": "i", "s": "g", "pid": SCHEDULER, "tid": SCHEDULER, "name": name, "ts": at * 1e6, "args": args}
        )

    def launched(self, step: int, began: float, ended: float, num_decode: int, num_tokens: int) -> None:
        self._span(SCHEDULER, f"plan {step}", began, ended, step=step, decode_rows=num_decode, tokens=num_tokens)

    def updated(self, result: StepResult, began: float, done: float) -> None:
        step, num_drafts = result.step, result.num_checked
        drafts: dict[str, int] = {}
        if num_drafts:  # a row has one token beside its right drafts
            drafts = {"drafts": num_drafts, "accepted": int(np.maximum(result.counts - 1, 0).sum())}
        self._span(WORKER, f"step {step}", result.started, result.ended, step=step, **drafts)
        self._span(SCHEDULER, f"update {step}", began, done, step=step)
        self._step = step

    def rendered(self, began: float, rendered: float, sent: float, num_rows: int) -> None:
        step = self._step
        self._span(SCHEDULER, f"detokenize {step}", began, rendered, step=step, rows=num_rows)
        self._span(SCHEDULER, f"send {step}", rendered, sent, step=step)

    def events(self) -> list[Event]:
        """The newest MAX_EVENTS, and the names of the tracks."""
        names: list[Event] = [
            {"ph": "M", "pid": pid, "tid": pid, "name": "process_name", "args": {"name": name}}
            for pid, name in ((SCHEDULER, "scheduler"), (WORKER, "worker"))
        ]
        return [*names, *self._events]
