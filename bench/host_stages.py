"""Where does the CPU of the host go per streamed token? Parts of a token's way are timed by the clocks of their threads.

Functions of the engine are wrapped, each as the entry of a stage; a stage within another one is not counted there. What the
wrappers cost is measured and taken off. For the threads' remainders, loops and switches between tasks and threads, there is the
whole CPU of each thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

CALIBRATION_CALLS = 20_000


class Stages:
    """Functions that are timed while they are wrapped."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._nested: Counter[str] = Counter()
        """Calls of other stages within each stage: their wrappers' cost is counted there."""
        self._local = threading.local()
        self._undo: list[tuple[Any, str, Any]] = []
        self.inner_s, self.outer_s = self._calibrate()

    def watch(self, owner: Any, name: str, stage: str) -> None:
        """Time this function of a class or module from now on."""
        right = getattr(owner, name)
        self._undo.append((owner, name, right))
        setattr(owner, name, self._wrapped(right, stage))

    def end(self) -> None:
        for owner, name, right in reversed(self._undo):
            setattr(owner, name, right)
        self._undo.clear()

    def net(self, stage: str) -> float:
        """Seconds of CPU, without the wrappers'."""
        return self.seconds[stage] - self.calls[stage] * self.inner_s - self._nested[stage] * self.outer_s

    def _wrapped(self, right: Callable[..., Any], stage: str) -> Callable[..., Any]:
        seconds, calls, nested, local, clock = self.seconds, self.calls, self._nested, self._local, time.thread_time

        def wrapped(*arguments: Any, **more: Any) -> Any:
            outer = getattr(local, "open", None)
            frame = local.open = [stage, 0.0, 0]
            began = clock()
            try:
                return right(*arguments, **more)
            finally:
                spent = clock() - began
                local.open = outer
                seconds[stage] += spent - frame[1]
                calls[stage] += 1
                nested[stage] += frame[2]
                if outer is not None:
                    outer[1] += spent
                    outer[2] += 1

        return wrapped

    def _calibrate(self) -> tuple[float, float]:
        """What a wrapper adds to its own stage and to the one around it, by call."""
        self.inner_s = self.outer_s = 0.0
        nothing = self._wrapped(bool, "nothing")

        def many() -> None:
            for _ in range(CALIBRATION_CALLS):
                nothing()

        def bare() -> None:
            for _ in range(CALIBRATION_CALLS):
                pass

        self._wrapped(many, "around")()
        self._wrapped(bare, "bare")()
        alone = self.seconds["bare"] / CALIBRATION_CALLS
        found = self.seconds["nothing"] / CALIBRATION_CALLS, self.seconds["around"] / CALIBRATION_CALLS
        for counts in (self.seconds, self.calls, self._nested):
            counts.clear()
        return max(0.0, found[0] - alone), found[1]


def cpu_of_threads() -> dict[str, float]:
    """CPU seconds of each Python thread so far, by its name."""
    found: Counter[str] = Counter()
    for thread in threading.enumerate():
        if thread.native_id is not None:
            text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            found[thread.name] += int(text.split()[0]) / 1e9
    return dict(found)


TAKE = "host's loop: an output is made of what came"
TASKS = "host's loop: tasks are woken and run, with the application's own code"
LOOP = "host's loop: turns of the loop"
READ = "engine thread: a batch is read from the ring and unpacked"
APPLY = "engine thread: the journal is kept, and each stream gets its part"
WAKE = "engine thread: the host's loop is called"
ENGINE = "engine thread: turns of the loop, sleeping and waking"
OTHER = "other threads: prompts are read"


async def measure(consume: Callable[[], Awaitable[None]], num_tokens: int) -> dict[str, float]:
    """Microseconds per token by stage, of an engine with topology="process"."""
    from actorllm.actors import frontend
    from actorllm.client.stream import RequestStream
    from actorllm.ring.channel import Receiver

    stages = Stages()
    main = threading.current_thread().name
    # Callbacks that were registered keep the function that they were given: `_take_turn` is looked up at each bell.
    stages.watch(Receiver, "_take_turn", READ)
    stages.watch(frontend.FrontendActor, "_apply", APPLY)
    stages.watch(frontend.FrontendActor, "_wake", WAKE)
    stages.watch(frontend, "_wake_all", TASKS)
    stages.watch(RequestStream, "take", TAKE)
    before = cpu_of_threads()
    try:
        await consume()
    finally:
        after = cpu_of_threads()
        stages.end()
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
    net = {stage: max(0.0, stages.net(stage)) for stage in (TAKE, TASKS, READ, APPLY, WAKE)}
    engine = sum(seconds for name, seconds in spent.items() if name == "actorllm:engine")
    # Of the outermost stages, a part of the wrapper is outside of its clock, in the thread's remainder.
    rest = {stage: stages.calls[stage] * stages.outer_s for stage in (TASKS, READ)}
    net[LOOP] = max(0.0, spent[main] - stages.seconds[TAKE] - stages.seconds[TASKS] - rest[TASKS])
    net[ENGINE] = max(0.0, engine - sum(stages.seconds[stage] for stage in (READ, APPLY, WAKE)) - rest[READ])
    net[OTHER] = sum(spent.values()) - spent[main] - engine
    order = (TAKE, TASKS, LOOP, READ, APPLY, WAKE, ENGINE, OTHER)
    return {stage: 1e6 * net[stage] / num_tokens for stage in order}
