"""`Watchdog`: looks at the processes of an engine while they start or have work, and kills those that are stuck.

Runs on the engine thread's loop. There is work while an actor of this process says so (`Actor.has_work`: open requests or
questions), or a visitor is attached. With no work and no start under way, nothing is looked at and nothing wakes up.

The `HangDetector` decides from what it sees. A stuck process gets a moment to write its stacks to stderr, whose last
lines are part of the error. Then it gets SIGKILL, and its death is like any other. Of a thread of this process only the
steps are watched. A thread cannot be killed, so one that is stuck ends the engine. A look that fails is logged, and the
next one follows: a defect here ends nothing. Owned by the supervisor.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping

import anyio

from actorllm.clock import now
from actorllm.supervision.children import Child, ProcessChild, ThreadChild
from actorllm.supervision.hang_detector import HangDetector

logger = logging.getLogger(__name__)

MAX_INTERVAL_S = 1.0
LOOKS_PER_TIMEOUT = 8


class Watchdog:
    """children: the supervisor's, by name; those that are there when it looks are watched. parked: processes beside them."""

    def __init__(
        self,
        children: Mapping[str, Child],
        heartbeat_timeout_s: float,
        step_timeout_s: float | None,
        parked: Callable[[], Iterable[ProcessChild]] = tuple,
    ) -> None:
        shortest = min(heartbeat_timeout_s, step_timeout_s or heartbeat_timeout_s)
        self._interval_s = min(shortest / LOOKS_PER_TIMEOUT, MAX_INTERVAL_S)
        self._detector = HangDetector(heartbeat_timeout_s, self._interval_s)
        self._children = children
        self._parked = parked
        self._has_come: anyio.Event | None = None  # while it waits for work
        self._has_failed = False
        self.start_budget_s = math.inf
        """How long a process may take to get ready."""

    def wake(self) -> None:
        """There may be work, or a process that starts. On the loop."""
        if self._has_come is not None:
            self._has_come.set()

    async def run(self) -> None:
        """For as long as the engine lives."""
        while True:
            if self._is_needed():
                self._try_to_look()
                await anyio.sleep(self._interval_s)
            else:
                self._detector.forget()
                self._has_come = anyio.Event()
                await self._has_come.wait()

    def _is_needed(self) -> bool:
        processes = [child for child in self._children.values() if isinstance(child, ProcessChild) and child.is_alive]
        if any(child.phase != "running" for child in processes):
            return True
        if not processes and not any(isinstance(child, ThreadChild) for child in self._children.values()):
            return False  # the next process that is spawned wakes it
        return any(child.has_work for child in self._children.values())

    def _try_to_look(self) -> None:
        try:
            self._look()
            self._has_failed = False
        except Exception:  # looking must not end the engine that it looks after
            if not self._has_failed:  # once, however often it fails in the same way
                logger.exception("the processes of the engine could not be looked at; it goes on, and so do looks")
            self._has_failed = True

    def _look(self) -> None:
        processes = {
            f"{name} {child.pid}": child
            for name, child in self._children.items()
            if isinstance(child, ProcessChild) and child.is_alive
        }
        # Named with their pids, so that a process which takes another's place begins with a clean record.
        parked = {f"parked {child.pid}": child for child in self._parked()}
        signs = {key: sign for key, child in processes.items() if (sign := child.sign(self.start_budget_s)) is not None}
        signs |= {key: sign for key, child in parked.items() if (sign := child.sign(math.inf)) is not None}
        threads = {name: child for name, child in self._children.items() if isinstance(child, ThreadChild)}
        signs |= {key: sign for key, child in threads.items() if (sign := child.sign()) is not None}
        for stuck in self._detector.look(now(), signs):
            if stuck.actor in threads:
                threads[stuck.actor].give_up_stuck(stuck.reason)
            else:
                (processes | parked)[stuck.actor].kill_stuck(stuck.reason)
