"""`JobQueue`: which job a tokenizer worker does next. Pure: no time, no threads; its user holds a lock.

1. The jobs of one submitter are done in order, the light ones and the heavy ones each for themselves: one at a time. A job
   that has run for longer than ORDER_GRACE_S loses its place, and the next one overtakes it.
2. Submitters take turns.
3. Light jobs come before heavy ones. One worker is never given a heavy job, and after LIGHT_IN_A_ROW light jobs a heavy one has
   its turn: neither kind starves the other.
4. A barrier comes when every job that was there before it has ended. A control waits for the light ones of before only, and not for
   one that has lost its place; then it goes before everything.

A submitter is known as long as a job of it waits, so that the number of names does not count.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import count

from actorllm.intake.job import Job

ORDER_GRACE_S = 3.0
LIGHT_IN_A_ROW = 8

Waiting = OrderedDict[str | None, deque[Job]]


class JobQueue:
    """See the module docstring. max_heavy: so many heavy jobs run at a time."""

    def __init__(self, max_heavy: int) -> None:
        self.max_heavy = max_heavy
        self._light: Waiting = OrderedDict()
        self._heavy: Waiting = OrderedDict()
        self._controls: deque[tuple[int, Job]] = deque()
        self._barriers: deque[tuple[int, Job]] = deque()
        self._numbers = count()
        self._open: OrderedDict[Job, int] = OrderedDict()
        """Jobs that wait or run, in the order in which they came."""
        self._open_light: OrderedDict[Job, int] = OrderedDict()
        self._running: list[Job] = []
        self._num_waiting = 0
        self._num_light = 0
        """Light jobs that were taken since the last heavy one, while a heavy one waited."""

    def __len__(self) -> int:
        """Jobs that wait."""
        return self._num_waiting + len(self._controls) + len(self._barriers)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_submitters(self) -> int:
        """Those that are known, once per kind of job."""
        return len(self._light) + len(self._heavy)

    def put(self, job: Job) -> None:
        number = self._open[job] = next(self._numbers)
        if not job.is_heavy:
            self._open_light[job] = number
        waiting = self._heavy if job.is_heavy else self._light
        waiting.setdefault(job.submitter, deque()).append(job)
        self._num_waiting += 1

    def put_control(self, job: Job) -> None:
        """One that waits for the light requests of before."""
        self._controls.append((next(self._numbers), job))

    def put_barrier(self, job: Job) -> None:
        """One that waits for every request of before."""
        self._barriers.append((next(self._numbers), job))

    def has_next(self, now: float, is_serial: bool = False) -> bool:
        """Whether `take` would return a job."""
        if is_serial and self._running:
            return False
        return bool(
            self._is_control_due(now)
            or self._is_barrier_due()
            or self._find(self._light, now)
            or (self._may_be_heavy() and self._find(self._heavy, now))
        )

    def take(self, now: float, is_serial: bool = False) -> Job | None:
        """The next job; None: there is none that may run now. is_serial: one at a time."""
        if is_serial and self._running:
            return None
        job = self._next(now)
        if job is not None:
            self._running.append(job)
        return job

    def _next(self, now: float) -> Job | None:
        if self._is_control_due(now):
            return self._controls.popleft()[1]
        if self._is_barrier_due():
            return self._barriers.popleft()[1]
        kinds = [self._light, self._heavy] if self._may_be_heavy() else [self._light]
        if self._num_light >= LIGHT_IN_A_ROW:
            kinds.reverse()
        for waiting in kinds:
            if found := self._find(waiting, now):
                job = self._pop(waiting, *found)
                is_before_heavy = bool(self._heavy) and not job.is_heavy
                self._num_light = self._num_light + 1 if is_before_heavy else 0
                return job
        return None

    def _is_control_due(self, now: float) -> bool:
        """Whether every light job that was there before it has ended, or takes long."""
        if not self._controls:
            return False
        before = next((number for job, number in self._open_light.items() if not _takes_long(job, now)), None)
        return before is None or before > self._controls[0][0]

    def _is_barrier_due(self) -> bool:
        """Whether every job that was there before it has ended."""
        if not self._barriers:
            return False
        number = self._barriers[0][0]
        return next(iter(self._open.values()), number + 1) > number

    def _may_be_heavy(self) -> bool:
        return sum(job.is_heavy for job in self._running) < self.max_heavy

    def _find(self, waiting: Waiting, now: float) -> tuple[str | None, deque[Job]] | None:
        """The first submitter that may have one more job done, and its jobs."""
        for submitter, jobs in waiting.items():
            if self._is_in_order(jobs[0], now):
                return submitter, jobs
        return None

    def _pop(self, waiting: Waiting, submitter: str | None, jobs: deque[Job]) -> Job:
        """The submitter goes to the end of the line."""
        job = jobs.popleft()
        self._num_waiting -= 1
        if jobs:
            waiting.move_to_end(submitter)
        else:
            del waiting[submitter]
        return job

    def _is_in_order(self, job: Job, now: float) -> bool:
        """Whether no job that must be done before it is running."""
        return not any(
            one.submitter == job.submitter
            and one.is_heavy == job.is_heavy
            and one in self._open
            and not _takes_long(one, now)
            for one in self._running
        )

    def done(self, job: Job) -> None:
        """It runs no more, or has been given up while it runs."""
        if job in self._running:
            self._running.remove(job)
            self._forget(job)

    def drop(self, is_gone: Callable[[Job], bool]) -> list[Job]:
        """Take out the jobs that wait and are not wanted any more."""
        dropped: list[Job] = []
        for waiting in (self._light, self._heavy):
            for submitter, jobs in list(waiting.items()):
                gone = [job for job in jobs if is_gone(job)]
                if not gone:
                    continue
                leaving = set(gone)
                kept = deque(job for job in jobs if job not in leaving)
                if kept:
                    waiting[submitter] = kept
                else:
                    del waiting[submitter]
                dropped += gone
        for job in dropped:
            self._forget(job)
        self._num_waiting -= len(dropped)
        return dropped

    def clear(self) -> list[Job]:
        """Take out everything that waits."""
        jobs = [*(job for _, job in self._controls), *(job for _, job in self._barriers)]
        self._controls.clear()
        self._barriers.clear()
        return [*jobs, *self.drop(lambda _: True)]

    def _forget(self, job: Job) -> None:
        self._open.pop(job, None)
        self._open_light.pop(job, None)


def _takes_long(job: Job, now: float) -> bool:
    """Whether it has lost its place."""
    return job.since is not None and now - job.since >= ORDER_GRACE_S
