"""Steps that are launched before the last ones are done: how a worker runs whose model computes elsewhere, on a GPU.

The loop stays free. A plan is launched as soon as it is here, also while the step before computes. So the device goes from one
to the next. A thread waits for the end of the oldest step and wakes the loop, which reports the result. Sampling may need
something from the host (`LateInputs`, or the tokens of the step before). It is launched once that is there, and until then no
later plan is. A plan whose step depends on all earlier results, as drafts do, is launched when these are there.

Invariants: steps are launched, sampled and reported in the order of their plans, at most MAX_FLIGHTS at a time. A failure is
reported in its place. While any step is under way, the heartbeat shows the oldest. Used by `WorkerActor.run`, on its loop.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, Protocol

from actorllm.actors.engine_thread import HostLoop
from actorllm.actors.heartbeat import WITHOUT_NUMBER, Heartbeat
from actorllm.actors.link import Link
from actorllm.actors.step_budget import NEW_BUDGET_S
from actorllm.clock import now
from actorllm.messages import LateInputs, StepFailed, StepPlan, StepResult

logger = logging.getLogger(__name__)

IDLE_S = 0.05
"""Nothing was under way for so long: what requests there are wait for something else than the next step."""

MAX_FLIGHTS = 2
"""The scheduler plans no further ahead."""


class PipelinedWorker(Protocol):
    """What a pipeline asks of its worker, a `WorkerActor`."""

    name: str
    rank: int
    runner: Any
    is_running: bool
    is_alone: bool
    heartbeat: Heartbeat | None
    plans: deque[tuple[Link, StepPlan]]
    late_inputs: dict[tuple[Link, int], LateInputs]
    owner: Link | None
    unsent: tuple[Link, StepResult | StepFailed] | None

    def wake(self) -> None: ...
    async def wait(self, until: float | None = None) -> bool: ...
    def take_over(self, link: Link) -> None: ...
    def drop_plans_of(self, link: Link) -> None: ...
    def count_tokens(self, plan: StepPlan) -> int: ...
    def count_step(self, num_tokens: int, seconds: float) -> None: ...
    def count_orphan(self) -> None: ...
    def budget_of(self, num_tokens: int) -> float: ...
    def failure_of(self, link: Link, plan: StepPlan, error: Exception) -> StepFailed: ...
    def check_itself(self, step: int, error: str) -> None: ...
    def report(self, link: Link, message: StepResult | StepFailed) -> None: ...
    async def send_unsent(self) -> None: ...


@dataclass(slots=True)
class Flight:
    """A step under way: its handle, or what it failed with."""

    link: Link
    plan: StepPlan
    num_tokens: int
    handle: Any = None
    failure: StepFailed | None = None

    @property
    def waits(self) -> bool:
        """Its sampling has not been launched."""
        return self.failure is None and self.handle.waits_for

    @property
    def is_done(self) -> bool:
        return self.failure is not None or self.handle.is_done


class Pipeline:
    """See the module docstring."""

    def __init__(self, worker: PipelinedWorker) -> None:
        self._worker = worker
        self._runner: Any = worker.runner
        self._flights: deque[Flight] = deque()
        self._last_end = 0.0
        self._idle_from = 0.0
        """When there has been nothing to do for long enough, if nothing comes; monotonic seconds."""
        self._awaited: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def statistics(self) -> dict[str, int]:
        """What the device's runner counts."""
        counts: dict[str, int] = self._runner.statistics()
        return counts

    async def run(self) -> None:
        """Until the worker is stopped."""
        worker, host = self._worker, HostLoop.current()

        def watch() -> None:
            while (wait := self._awaited.get()) is not None:
                try:
                    wait()
                except Exception:  # the code that finishes the step meets it again
                    logger.debug("a step ended with an error", exc_info=True)
                host.call_soon_threadsafe(worker.wake)

        thread = threading.Thread(target=watch, name=f"{worker.name}-steps", daemon=True)
        thread.start()
        try:
            while worker.is_running:
                if self.turn():
                    worker.wake()  # perhaps there is more; the loop turns once before
                if worker.unsent is not None:
                    await self._send_unsent()
                await worker.wait(self.wakes_at)
        finally:
            self._awaited.put(None)
            thread.join()

    @property
    def wakes_at(self) -> float | None:
        """When `turn` is to be called though nothing has woken the worker; monotonic seconds."""
        is_free = not self._flights and not self._worker.plans
        return self._idle_from if is_free and self._runner.wants_to_record else None

    def turn(self) -> bool:
        """Do the next thing that can be done. False: there is none."""
        worker, flights = self._worker, self._flights
        if flights and flights[0].is_done:
            self._report(flights.popleft())
            return True
        if flights and flights[-1].waits:
            return self._go_on(flights[-1])
        if worker.plans:
            link, plan = worker.plans[0]
            if len(flights) == MAX_FLIGHTS or (link is not worker.owner and flights):
                return False  # requests of a scheduler that is gone are forgotten when nothing of them is under way
            if flights and self._runner.waits_for_results(plan):
                return False
            worker.plans.popleft()
            if link.is_open or not worker.is_alone:  # what a dead scheduler has sent, it has sent to every rank
                worker.take_over(link)
                self._launch(link, plan)
            else:
                worker.count_orphan()
            return True
        return not flights and self._record()

    def _launch(self, link: Link, plan: StepPlan) -> None:
        flight = Flight(link, plan, self._worker.count_tokens(plan))
        self._flights.append(flight)
        self._idle_from = now() + IDLE_S
        if len(self._flights) == 1:
            self._show(flight)
        try:
            flight.handle = self._runner.execute(plan)
        except Exception as error:  # of a step: blame for it is found like that of any step
            self._fail(flight, error)
        self._watch(flight)

    def _go_on(self, flight: Flight) -> bool:
        """Launch the sampling of the newest step, if what it waits for is there."""
        worker, handle, late = self._worker, flight.handle, None
        if flight.plan.late_slots.size:
            key = (flight.link, flight.plan.step)
            if not flight.link.is_open and (worker.is_alone or key not in worker.late_inputs):  # it will never come
                self._flights.pop()
                worker.drop_plans_of(flight.link)
                if not self._flights and worker.heartbeat is not None:
                    worker.heartbeat.end()
                return True
            if key not in worker.late_inputs:
                flight.link.finish()  # they may be there already: take them without waiting for their doorbell
            if key not in worker.late_inputs:
                return False
        if handle.waits_for_tokens and len(self._flights) > 1:
            return False
        if flight.plan.late_slots.size:
            late = worker.late_inputs.pop((flight.link, flight.plan.step))
        try:
            self._runner.choose(handle, late)
        except Exception as error:  # of a step: blame for it is found like that of any step
            self._fail(flight, error)
        self._watch(flight)
        return True

    def _watch(self, flight: Flight) -> None:
        if not flight.waits and not flight.is_done:
            self._awaited.put(flight.handle.waiter())

    def _fail(self, flight: Flight, error: Exception) -> None:
        if self._runner.is_torn:
            raise error  # the device is lost, and with it this process
        flight.failure = self._worker.failure_of(flight.link, flight.plan, error)
        flight.handle = None
        self._check(flight, flight.failure.error)

    def _check(self, flight: Flight, error: str) -> None:
        """Whether it is the worker's fault; not while a step waits for its sampling, whose rows and logits are in place."""
        if not any(other.waits for other in self._flights):
            self._worker.check_itself(flight.plan.step, error)

    def _report(self, flight: Flight) -> None:
        worker = self._worker
        if flight.failure is not None:
            worker.report(flight.link, flight.failure)
        else:
            result = self._runner.finish(flight.handle)
            if result.came_to_nothing:
                self._check(flight, "nothing in it was finite")
            started = max(flight.handle.started, self._last_end)  # before, the device was at the step in front
            self._last_end = ended = now()
            worker.count_step(flight.num_tokens, ended - started)
            if worker.rank:  # the first one says it for all
                result = StepResult(step=flight.plan.step)
            worker.report(flight.link, replace(result, started=started, ended=ended))
        self._idle_from = now() + IDLE_S
        if self._flights:
            self._show(self._flights[0])
        elif worker.heartbeat is not None:
            worker.heartbeat.end()
        if flight.link.is_open:
            flight.link.finish()  # the next plan is there already: take it without waiting for its doorbell

    async def _send_unsent(self) -> None:
        """Launch and report nothing before there is room for the last result."""
        heartbeat = self._worker.heartbeat
        if heartbeat is not None:
            heartbeat.end()  # it is not the steps that take so long
        await self._worker.send_unsent()
        self.show()

    def show(self) -> None:
        """The heartbeat was used for something else meanwhile."""
        if self._flights:
            self._show(self._flights[0])

    def _show(self, flight: Flight) -> None:
        """From now on this step is the one that is waited for."""
        if self._worker.heartbeat is not None:
            self._worker.heartbeat.begin(flight.plan.step, self._worker.budget_of(flight.num_tokens))

    def _record(self) -> bool:
        """There is nothing else to do: record a step as a graph, if one is wanted.

        Not between the steps of a request, whose next plan may be about to come.
        """
        heartbeat = self._worker.heartbeat
        if not self._runner.wants_to_record or now() < self._idle_from:
            return False
        if heartbeat is not None:
            heartbeat.begin(WITHOUT_NUMBER, NEW_BUDGET_S)
        try:
            self._runner.record_next()
        except Exception:  # of a step that no request asked for: it is done without
            if self._runner.is_torn:
                raise
            logger.exception("a step for no request failed; those of its size may fail as well")
        finally:
            if heartbeat is not None:
                heartbeat.end()
        return True
