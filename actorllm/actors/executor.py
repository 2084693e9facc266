"""`FairExecutor`: work that takes long, on threads beside an actor's loop, bounded in number, size and time.

Two threads serve the jobs: one takes small ones only, so that these never wait for a large one; the other takes any. Among those
that wait, the owner and then the tenant that was served least recently comes first. Among the jobs of one tenant, a small one
comes before a large one that came shortly before it. A job whose outcome is no longer waited for is dropped before it runs.
While it runs, it can ask (`is_wanted`).

A job that takes longer than the limit ends with TimeoutError then, whatever its thread does: native code cannot be interrupted.
Such a thread is replaced, a few of them at a time, and ends when the job returns. Whatever a job raises is its outcome, a panic of
a native library (a BaseException) included. A thread that ends all the same is replaced with the next job.

Everything but `_serve` and what it calls runs on the owner's loop. Used by SchedulerActor for grammars.
"""

from __future__ import annotations

import contextvars
import heapq
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from actorllm.clock import now

logger = logging.getLogger(__name__)

MAX_JOBS = 4096
"""That wait, of all owners; several share it evenly."""
MAX_SIZE = 64 << 20
"""Sum of the sizes of those that wait, in the same way."""
SMALL = 16 << 10
"""Sizes that the thread for small jobs takes."""
MAX_REPLACED = 2
"""Threads that have passed the limit, run on and have been replaced, for each of the two kinds."""
SECONDS_PER_SIZE = 1e-4
"""How much later a job counts as arrived, by its size: some ten times as long as it takes."""
RETRY_S = 0.05
"""When it is asked again whether there is room for a job that there was none for."""
JOIN_S = 1.0
"""How long `close` waits for threads that are idle."""


class JobDropped(Exception):
    """A job's outcome was no longer waited for, and the job was not run."""


class ExecutorJob(Protocol):
    """What a FairExecutor runs."""

    @property
    def owner(self) -> int:
        """Whose it is: owners get the same share of the queue and of the threads."""

    @property
    def tenant(self) -> str | None:
        """On whose behalf; tenants of one owner take turns."""

    @property
    def size(self) -> int: ...

    @property
    def is_wanted(self) -> bool:
        """Whether its outcome is still waited for. From any thread."""

    @property
    def is_timed(self) -> bool:
        """Whether the time that passes counts against the limit: not while it gets ready what all jobs need."""

    def run(self) -> Any:
        """On a thread of the queue."""


J = TypeVar("J", bound=ExecutorJob)


@dataclass(slots=True, eq=False)
class _Entry:
    job: Any
    began: float = math.inf
    is_told: bool = False


@dataclass(slots=True, eq=False)
class _Flow:
    """What waits of one tenant of one owner: two heaps by when a job counts as arrived."""

    owner: int
    small: list[tuple[float, int, _Entry]] = field(default_factory=list)
    large: list[tuple[float, int, _Entry]] = field(default_factory=list)
    served: int = 0
    """When one of them was taken last."""

    def heads(self, *, is_small: bool) -> list[list[tuple[float, int, _Entry]]]:
        """The heaps that a thread may take from, the one whose first job comes first before the other."""
        heaps = [heap for heap in ((self.small,) if is_small else (self.small, self.large)) if heap]
        return sorted(heaps, key=lambda heap: heap[0][:2])


@dataclass(slots=True)
class _Owner:
    num_jobs: int = 0
    size: int = 0
    served: int = 0


@dataclass(slots=True, eq=False)
class _PoolThread:
    """A thread and what it is at."""

    is_small: bool
    thread: threading.Thread | None = None
    entry: _Entry | None = None
    is_abandoned: bool = False


@dataclass(slots=True)
class QueueStatistics:
    num_waiting: int = 0
    num_running: int = 0
    num_dropped: int = 0
    """Jobs whose outcome was no longer waited for when it was their turn."""
    num_refused: int = 0
    num_timeouts: int = 0
    num_abandoned: int = 0
    """Threads that run on beyond the limit, now."""
    num_restarted: int = 0
    """Threads that took the place of one that was abandoned or has ended."""


@dataclass(slots=True)
class FairExecutor(Generic[J]):
    """See the module docstring. on_outcome: called on a thread when an outcome is there. has_room: whether a job of a size may
    begin now. Sizes and limits are attributes, to be changed before the first job."""

    name: str
    on_outcome: Callable[[], object]
    has_room: Callable[[int], bool] = lambda size: True
    timeout_s: float = math.inf
    max_jobs: int = MAX_JOBS
    max_size: int = MAX_SIZE
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _flows: dict[tuple[int, str | None], _Flow] = field(default_factory=dict)
    _owners: dict[int, _Owner] = field(default_factory=dict)
    """Flows and owners of what waits."""
    _num_waiting: int = 0
    _threads: list[_PoolThread] = field(default_factory=list)
    _outcomes: list[tuple[_Entry, Any]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _is_closed: bool = False
    _counts: QueueStatistics = field(default_factory=QueueStatistics)

    # On the loop

    def put(self, job: J) -> bool:
        """Have a job run. False: too much waits, of its owner."""
        with self._changed:
            if not self._fits(job):
                self._drop_unwanted()
                if not self._fits(job):
                    self._counts.num_refused += 1
                    return False
            flow = self._flows.setdefault((job.owner, job.tenant), _Flow(job.owner))
            due = now() + SECONDS_PER_SIZE * job.size
            heapq.heappush(flow.small if job.size <= SMALL else flow.large, (due, next(self._numbers), _Entry(job)))
            owner = self._owners.setdefault(job.owner, _Owner())
            owner.num_jobs += 1
            owner.size += job.size
            self._num_waiting += 1
            self._start_missing()
            self._changed.notify_all()
        return True

    def take_outcomes(self) -> list[tuple[J, Any]]:
        """What has come of jobs: what they returned, or the exception that they raised; a TimeoutError after the limit, or
        JobDropped."""
        at = now()
        with self._changed:
            for worker in self._threads:
                entry = worker.entry
                if entry is not None and not entry.job.is_timed:
                    entry.began = at
                if entry is not None and not worker.is_abandoned and entry.began + self.timeout_s <= at:
                    worker.is_abandoned = True
                    self._counts.num_timeouts += 1
                    self._tell(entry, TimeoutError(f"it took longer than {self.timeout_s:g} s"))
                    logger.warning("%s: a job of size %d takes too long", self.name, entry.job.size)
            self._start_missing()
            outcomes, self._outcomes = self._outcomes, []
        return [(entry.job, outcome) for entry, outcome in outcomes]

    @property
    def is_busy(self) -> bool:
        """Whether anything waits, runs, or is to be taken."""
        return bool(self._num_waiting or self._outcomes) or any(
            worker.entry is not None and not worker.is_abandoned for worker in self._threads
        )

    @property
    def expires_at(self) -> float:
        """When `take_outcomes` has to be called even if no outcome is there."""
        began = [worker.entry.began for worker in self._threads if worker.entry is not None and not worker.is_abandoned]
        return min(began, default=math.inf) + self.timeout_s

    def wait(self, timeout: float) -> None:
        """Until an outcome is there or `timeout` seconds have passed. For an owner without a loop."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._outcomes), timeout)

    def close(self) -> None:
        """No job begins any more. Threads that are idle have ended; one in native code ends when it returns."""
        with self._changed:
            self._is_closed = True
            self._flows.clear()
            self._owners.clear()
            self._num_waiting = 0
            idle = [worker.thread for worker in self._threads if worker.entry is None and worker.thread is not None]
            self._changed.notify_all()
        for thread in idle:
            thread.join(JOIN_S)

    def statistics(self) -> QueueStatistics:
        with self._changed:
            counts = self._counts
            counts.num_waiting = self._num_waiting
            counts.num_running = sum(worker.entry is not None and not worker.is_abandoned for worker in self._threads)
            counts.num_abandoned = sum(worker.is_abandoned for worker in self._threads)
            return replace(counts)

    # Under the lock

    def _fits(self, job: J) -> bool:
        owner = self._owners.get(job.owner)
        if owner is None:
            return True
        num_owners = len(self._owners)
        return owner.num_jobs < self.max_jobs // num_owners and owner.size + job.size <= self.max_size // num_owners

    def _drop_unwanted(self) -> None:
        for flow in list(self._flows.values()):
            for heap in (flow.small, flow.large):
                for at in [at for at in heap if not at[2].job.is_wanted]:
                    heap.remove(at)
                    self._drop(at[2], flow)
                heapq.heapify(heap)

    def _drop(self, entry: _Entry, flow: _Flow) -> None:
        self._counts.num_dropped += 1
        self._forget(entry.job, flow)
        self._tell(entry, JobDropped())

    def _forget(self, job: J, flow: _Flow) -> None:
        """A job waits no more. It is not in its heap."""
        self._num_waiting -= 1
        owner = self._owners[job.owner]
        owner.num_jobs -= 1
        owner.size -= job.size
        if not owner.num_jobs:
            del self._owners[job.owner]
        if not flow.small and not flow.large:
            del self._flows[job.owner, job.tenant]

    def _start_missing(self) -> None:
        """Threads for those that there are none of: at first, and where one was abandoned or has ended."""
        if self._is_closed or not self._num_waiting:
            return
        for worker in [
            worker for worker in self._threads if worker.thread is not None and not worker.thread.is_alive()
        ]:
            self._threads.remove(worker)
            self._counts.num_restarted += 1
            if worker.entry is not None:
                self._tell(worker.entry, RuntimeError("the thread of the job has ended"))
        # One worker of each kind works, besides those that are stuck in a job beyond its limit.
        for is_small in (True, False):
            workers = [worker for worker in self._threads if worker.is_small == is_small]
            num_abandoned = sum(worker.is_abandoned for worker in workers)
            if len(workers) == num_abandoned <= MAX_REPLACED:
                self._counts.num_restarted += num_abandoned > 0
                self._start(is_small)

    def _start(self, is_small: bool) -> None:
        worker = _PoolThread(is_small)
        context = contextvars.Context()  # an empty one: a thread must not keep what its starter is in
        worker.thread = threading.Thread(target=context.run, args=(self._serve, worker), name=self.name, daemon=True)
        self._threads.append(worker)
        worker.thread.start()

    def _tell(self, entry: _Entry, outcome: Any) -> None:
        if not entry.is_told:
            entry.is_told = True
            self._outcomes.append((entry, outcome))

    def _pick(self, is_small: bool) -> _Entry | None:
        """The job whose turn it is; None: there is none for this thread."""
        too_large = math.inf
        for flow in sorted(self._flows.values(), key=lambda flow: (self._owners[flow.owner].served, flow.served)):
            for heap in (flow.small, flow.large):
                while heap and not heap[0][2].job.is_wanted:
                    self._drop(heapq.heappop(heap)[2], flow)
            for heap in flow.heads(is_small=is_small):
                size = heap[0][2].job.size
                if size >= too_large or not self.has_room(size):
                    too_large = min(size, too_large)
                    continue
                entry = heapq.heappop(heap)[2]
                self._owners[flow.owner].served = flow.served = next(self._numbers)
                self._forget(entry.job, flow)
                return entry
        return None

    # On a thread of the queue

    def _serve(self, worker: _PoolThread) -> None:
        try:
            while self._next(worker):
                self._run(worker)
        finally:
            with self._changed:
                if worker in self._threads and (worker.is_abandoned or self._is_closed):
                    self._threads.remove(worker)

    def _next(self, worker: _PoolThread) -> bool:
        """Wait for a job. False: the thread is to end."""
        with self._changed:
            while not self._is_closed and not worker.is_abandoned:
                entry = self._pick(worker.is_small)
                if entry is not None:
                    entry.began = now()
                    worker.entry = entry
                    break
                if self._outcomes:
                    self.on_outcome()  # of jobs that were dropped
                self._changed.wait(RETRY_S if self._num_waiting and not worker.is_small else None)
            else:
                return False
        self.on_outcome()  # it has begun: the loop sets its timer for the limit
        return True

    def _run(self, worker: _PoolThread) -> None:
        entry = worker.entry
        assert entry is not None
        try:
            outcome = entry.job.run()
        except BaseException as error:
            # A panic of a native library, too: it is the outcome of this job and of no other.
            outcome = error
        with self._changed:
            worker.entry = None
            if worker.is_abandoned:
                self._threads.remove(worker)
            self._tell(entry, outcome)
            self._changed.notify_all()
        self.on_outcome()
