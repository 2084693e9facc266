"""`TokenizerPool`: the threads on which the prompts of an engine are read, and the thread that watches them.

A tokenizer worker is a thread; it takes jobs from one queue (`job_queue`). Work that may take long, or that a
request decides, goes to an intake process: large texts (LARGE_TEXT), long conversations, templates of requests. The process is
killed when the request is not wanted any more, when its deadline passes, and when the work takes longer than
`intake_timeout_s`. The model's own template, which the user of the engine has chosen, and short texts are read on the thread.
A process would add its way to every chat, and its memory to every engine.

A thread that has worked on one job for longer than `intake_timeout_s` is stuck: a thread cannot be ended. Its request fails,
and another worker takes its place, so twice at most at a time. After MAX_REPLACED replacements all texts are read in intake
processes, which can be ended, so that no more workers get stuck. Further workers that do are missing until they come back. If
none is left, the engine's health says so and requests fail at once.

The watcher looks while there is work, and sleeps when there is none. A worker, or the watcher, that dies is started again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import numpy as np

from actorllm.clock import now
from actorllm.errors import EngineError, InvalidPromptError, RequestFailedError
from actorllm.intake.intake_process import IntakeProcess, ProcessEndedError, too_long
from actorllm.intake.job import Job
from actorllm.intake.job_queue import JobQueue
from actorllm.supervision.health import ThreadHealth
from actorllm.text.chat_template import Conversation
from actorllm.text.tokenizer import I32, Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

NUM_WORKERS = 3
MAX_REPLACED = 2
"""Workers that are stuck and have been replaced."""
WATCH_INTERVAL_S = 0.1
RENDER_TIMEOUT_S = 5.0
"""Of a conversation, which takes milliseconds: two endless templates hold up the other requests' templates no longer."""
MAX_IDLE_PROCESSES = 1
"""Intake processes that are kept when there is nothing to do; the tokenizer of each takes memory."""
MEMORY_BYTES = 1 << 30
MEMORY_PER_CHARACTER = 512
"""What an intake process may take: so much, and this for every character that a prompt may have."""


class TokenizerWorker:
    """One thread, and the place where its jobs have texts read (a `tokenization.Workplace`)."""

    def __init__(self, pool: TokenizerPool, number: int) -> None:
        self._pool = pool
        name = "actorllm:intake" if number == 1 else f"actorllm:intake-{number}"
        self.thread = threading.Thread(target=pool._run, args=(self,), name=name, daemon=True)
        self.job: Job | None = None
        self.process: IntakeProcess | None = None
        self.is_cut = False
        """The job that it does is not wanted any more: its process is killed, or not begun."""
        self.is_stuck = False
        self.is_aside = False
        """A process works for it, and not the thread."""

    def begin(self) -> None:
        """The engine runs: from here on the job's time counts."""
        job = self.job
        if job is not None:
            job.since = now()
        self._pool._note_begun()

    @property
    def takes_all(self) -> bool:
        return self._pool.num_replaced >= MAX_REPLACED

    def render(self, tokenizer: Tokenizer, conversation: Conversation, most: int) -> str | None:
        fields = {name: getattr(conversation, name) for name in Conversation.__dataclass_fields__ if name != "items"}
        fields["messages"] = list(conversation.messages)
        try:
            return self._ask("render", str(tokenizer.path), most, fields, most_s=RENDER_TIMEOUT_S).decode()
        except RecursionError:
            raise InvalidPromptError("the messages are nested too deeply") from None
        except ValueError as error:
            if type(error) is not ValueError:
                raise
            return None  # objects of the caller's program, which do not travel

    def encode(self, tokenizer: Tokenizer, method: Literal["encode", "encode_within"], *arguments: Any) -> I32:
        return np.frombuffer(self._ask(method, str(tokenizer.path), *arguments), np.int32).copy()

    def wait(self, future: Future[T]) -> T:
        """The result of another thread, whose time is not the job's. Raises RequestFailedError if nothing waits any more."""
        self.is_aside = True
        try:
            while True:
                try:
                    return future.result(WATCH_INTERVAL_S)
                except FutureTimeoutError:
                    if self.is_cut:
                        raise RequestFailedError("the request is not wanted any more") from None
        finally:
            self.begin()
            self.is_aside = False

    def _ask(self, *request: Any, most_s: float = math.inf) -> bytes:
        timeout_s = self._pool.timeout_s
        limit = "intake_timeout_s=" if timeout_s <= most_s else ""
        while True:
            with self._pool._process_for(self) as process:
                was_used = process.num_asked > 0
                try:
                    return process.ask(request, min(timeout_s, most_s), self.begin, limit)
                except ProcessEndedError as error:
                    if not was_used or self.is_cut:
                        raise RequestFailedError(f"the process that was to read this prompt {error}") from error


class TokenizerPool:
    """See the module docstring. All methods may be called from any thread.

    is_serial: whether one job at a time is to run, because the engine has not started. max_characters: of a prompt.
    """

    def __init__(self, is_serial: Callable[[], bool], timeout_s: float, max_characters: int) -> None:
        self.timeout_s = timeout_s
        self.num_replaced = 0
        self._is_serial = is_serial
        self._memory_bytes = MEMORY_BYTES + MEMORY_PER_CHARACTER * max_characters
        self._queue = JobQueue(NUM_WORKERS - 1)
        self._changed = threading.Condition()
        self._workers: list[TokenizerWorker] = []
        self._stuck: set[TokenizerWorker] = set()
        self._num_idle = 0
        self._last_number = 0
        self._is_closed = False
        self._was_serial = False
        self._idle_processes: list[IntakeProcess] = []
        self._watcher: threading.Thread | None = None
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_asleep = False
        """The watcher waits for a call."""
        self._num_restarts = 0
        self._last_failure: str | None = None
        self._counts = dict.fromkeys(("done", "dropped", "timed_out", "processes_started", "processes_killed"), 0)
        self._waited_s = self._worked_s = 0.0

    # For submitters

    def submit(self, job: Job, put: Callable[[JobQueue, Job], None] = JobQueue.put) -> bool:
        """Take a job. False: the pool is closed. Raises EngineError when no worker can take it."""
        with self._changed:
            if self._is_closed:
                return False
            if not self._workers and not self._add_worker():
                raise EngineError(f"the engine cannot read prompts: {self._last_failure}")
            put(self._queue, job)
            self._dispatch()
            self._ensure_watcher()
        return True

    def look(self) -> None:
        """A caller does not want a job of its own any more. Also from `__del__`: takes no lock."""
        self._calls.put(None)

    @property
    def is_busy(self) -> bool:
        """Whether a job waits or is done."""
        with self._changed:
            return len(self._queue) > 0 or any(worker.job is not None for worker in self._workers)

    @property
    def failure(self) -> str | None:
        """Why no request can be taken, if that is so."""
        if self._workers or self._is_closed or not self._last_number:
            return None
        return f"the engine cannot read prompts: {self._last_failure}"

    def close(self) -> None:
        """Take no more, and end what is under way as far as it can be ended."""
        with self._changed:
            self._is_closed = True
            for worker in [*self._workers, *self._stuck]:
                worker.is_cut = True
                if worker.process is not None:
                    worker.process.kill()
            self._changed.notify_all()
        self._calls.put(None)

    def join(self, timeout: float) -> list[Job]:
        """Wait for the threads, behind `close`; those that do not end in time are left alone.

        Returns the jobs that no thread does any more.
        """
        until = now() + timeout
        with self._changed:
            processes, self._idle_processes = self._idle_processes, []
            threads = [*(worker.thread for worker in self._workers), self._watcher]
        for process in processes:
            process.close()
        for thread in threads:
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, until - now()))
        with self._changed:
            return self._queue.clear() + [worker.job for worker in self._workers if worker.job is not None]

    def statistics(self) -> dict[str, Any]:
        """Counters, as JSON values."""
        with self._changed:
            processes = [
                *self._idle_processes,
                *(worker.process for worker in self._workers if worker.process is not None),
            ]
            return {
                "num_workers": len(self._workers),
                "num_busy": sum(worker.job is not None for worker in self._workers),
                "num_waiting": len(self._queue),
                "num_stuck": len(self._stuck),
                "num_replaced": self.num_replaced,
                "num_restarts": self._num_restarts,
                "process_pids": [process.pid for process in processes],
                **{f"num_{name}": count for name, count in self._counts.items()},
                "waited_s": self._waited_s,
                "worked_s": self._worked_s,
            }

    def note_dropped(self) -> None:
        """A request was not wanted any more, before its prompt had been read."""
        with self._changed:
            self._counts["dropped"] += 1

    def note_read(self, waited_s: float, worked_s: float) -> None:
        """The prompt of one request has been handed over: how long it had waited for a worker, and how long it took."""
        with self._changed:
            self._waited_s += waited_s
            self._worked_s += worked_s

    def health(self) -> ThreadHealth:
        """Of all the threads here together."""
        with self._changed:
            state: Literal["new", "running", "stuck", "dead"] = "running"
            if not self._last_number:
                state = "new"
            elif not self._workers:
                state = "dead"
            elif self._stuck:
                state = "stuck"
            return ThreadHealth(state, self._num_restarts + self.num_replaced, self._last_failure)

    # Under the lock

    def _dispatch(self) -> None:
        """If a job may be done now, have one more worker that does it. A worker that takes a job calls this for the next one."""
        if not self._queue.has_next(now(), self._is_serial()):
            return
        if self._num_idle:
            self._changed.notify()
        else:
            self._add_worker()

    def _add_worker(self) -> bool:
        """False: there is none, and none can be added. Every worker that is stuck beyond MAX_REPLACED is one less."""
        room = NUM_WORKERS - max(0, len(self._stuck) - MAX_REPLACED)
        if len(self._workers) < room:
            self._last_number += 1
            worker = TokenizerWorker(self, self._last_number)
            self._workers.append(worker)
            try:
                worker.thread.start()
            except RuntimeError as error:  # those there are do it, and it is tried again
                self._workers.remove(worker)
                self._last_failure = f"no thread can be started ({error})"
        return bool(self._workers)

    def _ensure_watcher(self) -> None:
        """It runs, and looks."""
        if self._watcher is None or not self._watcher.is_alive():
            self._num_restarts += self._watcher is not None
            self._watcher = threading.Thread(target=self._watch, name="actorllm:intake-watch", daemon=True)
            try:
                self._watcher.start()
            except RuntimeError as error:  # it is tried again with the next job
                self._watcher = None
                logger.warning("prompts are read without being watched: no thread can be started (%s)", error)
        elif self._is_asleep:
            self._is_asleep = False
            self._calls.put(None)

    # On a worker

    def _run(self, worker: TokenizerWorker) -> None:
        failure: BaseException | None = None
        try:
            while self._do_next(worker):
                pass
        except BaseException as error:  # a defect here: callers that wait for a worker get another one
            failure = error
        finally:
            self._on_worker_end(worker, failure)

    def _do_next(self, worker: TokenizerWorker) -> bool:
        """Wait for a job and do it. False: there will be no more."""
        job = self._take(worker)
        if job is None:
            return False
        try:
            job.run(worker)
        except BaseException as error:  # whatever it is, it belongs to this job
            job.end(error)
        with self._changed:
            self._queue.done(job)
            self._counts["done"] += 1
            worker.job, worker.is_cut = None, False
            return not worker.is_stuck

    def _take(self, worker: TokenizerWorker) -> Job | None:
        with self._changed:
            while not self._is_closed:
                job = self._queue.take(now(), self._is_serial())
                if job is not None:
                    worker.job = job
                    self._was_serial |= self._is_serial()
                    self._dispatch()
                    return job
                self._num_idle += 1
                try:
                    self._changed.wait()
                finally:
                    self._num_idle -= 1
        return None

    def _on_worker_end(self, worker: TokenizerWorker, failure: BaseException | None) -> None:
        with self._changed:
            self._stuck.discard(worker)
            is_death = worker in self._workers and not self._is_closed
            if worker in self._workers:
                self._workers.remove(worker)
            job, worker.job = worker.job, None
            if job is not None:
                self._queue.done(job)
            if is_death:
                self._num_restarts += 1
                self._last_failure = f"a tokenizer worker died: {type(failure).__name__}: {failure}"
            if not self._is_closed:
                self._add_worker()
        if is_death:
            logger.error("a tokenizer worker died and is started again", exc_info=failure)
        if job is not None:
            job.end(RequestFailedError(f"the thread that read this prompt died: {type(failure).__name__}: {failure}"))

    def _note_begun(self) -> None:
        """The engine has started: there may be more than one job at a time."""
        if self._was_serial:
            with self._changed:
                self._was_serial = False
                self._dispatch()

    @contextmanager
    def _process_for(self, worker: TokenizerWorker) -> Iterator[IntakeProcess]:
        """An intake process for one question; one that was killed is not used again."""
        worker.is_aside = True
        process: IntakeProcess | None = None
        try:
            process = self._acquire_process(worker)
            yield process
        finally:
            if process is not None:
                self._release_process(worker, process)
            worker.begin()  # what comes next is done on the thread
            worker.is_aside = False

    def _acquire_process(self, worker: TokenizerWorker) -> IntakeProcess:
        with self._changed:
            process = self._idle_processes.pop() if self._idle_processes else None
            if worker.job is not None:
                worker.job.since = None  # its time begins when the process does
        if process is None:
            try:
                process = IntakeProcess(self._memory_bytes)
            except OSError as error:
                raise RequestFailedError(f"no process can be started that reads this prompt: {error}") from error
        with self._changed:
            self._counts["processes_started"] += not process.num_asked
            worker.process = process
            if worker.is_cut or self._is_closed:
                process.kill()
        return process

    def _release_process(self, worker: TokenizerWorker, process: IntakeProcess) -> None:
        with self._changed:
            worker.process = None
            has_room = len(self._idle_processes) < MAX_IDLE_PROCESSES
            is_kept = has_room and not process.is_killed and not self._is_closed
            if is_kept:
                self._idle_processes.append(process)
            self._counts["processes_killed"] += process.is_killed
        if not is_kept:
            process.close()

    # On the watcher's thread

    def _watch(self) -> None:
        is_busy = True
        while not self._is_closed:
            with contextlib.suppress(queue.Empty):
                self._calls.get(timeout=WATCH_INTERVAL_S if is_busy else None)
            try:
                is_busy = self._look_after()
            except Exception:  # of one request's end: the others are looked after all the same
                logger.exception("a job of the intake could not be ended")

    def _look_after(self) -> bool:
        """Drop what is not wanted any more, and end what takes too long. Whether there is anything to look after."""
        at = now()
        gone: list[Job] = []
        late: list[Job] = []
        with self._changed:
            if self._is_closed:
                return False
            if len(self._queue):
                gone += self._queue.drop(lambda job: job.is_gone(at))
            for worker in list(self._workers):
                job = worker.job
                if job is None:
                    continue
                if job.is_gone(at):
                    if not worker.is_cut:
                        gone.append(job)
                    worker.is_cut = True
                    if worker.process is not None:
                        worker.process.kill()
                elif not worker.is_aside and job.since is not None and at - job.since > self.timeout_s:
                    late.append(job)
                    self._give_up(worker, job)
            self._counts["timed_out"] += len(late)
            self._dispatch()  # what waits behind a job that takes long is let past it when its time has come
            is_busy = bool(len(self._queue) or any(worker.job is not None for worker in self._workers))
            self._is_asleep = not is_busy
        for job in gone:
            job.end(None)
        for job in late:
            job.end(too_long(self.timeout_s))
        return is_busy

    def _give_up(self, worker: TokenizerWorker, job: Job) -> None:
        """A thread cannot be ended: another worker takes its place."""
        worker.is_stuck = True
        self._workers.remove(worker)
        self._stuck.add(worker)
        self._queue.done(job)
        self.num_replaced += 1
        self._last_failure = (
            f"a tokenizer worker has read one prompt for more than {self.timeout_s:g} s and cannot be ended"
        )
        logger.error("%s", self._last_failure)
        self._add_worker()
