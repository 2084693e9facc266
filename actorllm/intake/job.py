"""`Job`: one thing that a tokenizer worker does, mostly reading the prompt of one request."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Generic, Protocol, TypeVar

from actorllm.errors import without_frames
from actorllm.intake.tokenization import Workplace

T = TypeVar("T")


class JobPlace(Workplace, Protocol):
    """Where a job is done, and where its texts are read: a `tokenizer_pool.TokenizerWorker`."""

    def begin(self) -> None:
        """The work of its job begins: from now on its time counts."""


class Job(ABC):
    """One job. It ends once: by what `run` does, or by `end`, which may be called beside it from another thread."""

    submitter: str | None = None
    """Whose it is: tokenizer workers are shared evenly among submitters."""
    is_heavy = False
    """It may take long."""
    since: float | None = None
    """When its work began, in monotonic seconds; None: it waits, also for the start of the engine."""

    @abstractmethod
    def run(self, worker: JobPlace | None) -> None:
        """Do it, on a tokenizer worker; without one on the caller's thread."""

    @abstractmethod
    def end(self, error: BaseException | None) -> None:
        """It will not be done. None: its outcome is not wanted any more. Nothing happens if it has ended."""

    def is_gone(self, now: float) -> bool:
        """Whether its outcome is not wanted any more."""
        return False


class FunctionJob(Job):
    """A function that a caller waits for."""

    def __init__(self, function: Callable[[], None], on_end: Callable[[], object] = bool) -> None:
        """on_end: called in any case, at the end, before the future is resolved."""
        self.future: Future[None] = Future()
        self._function = function
        self._on_end = on_end
        self._turns = iter((True,))
        """The thread that takes the one turn runs the function, or ends it."""

    def run(self, worker: JobPlace | None) -> None:
        if not next(self._turns, False):
            return
        if not self.future.set_running_or_notify_cancel():
            self._on_end()
            return  # the caller that asked has gone
        try:
            self._function()
        except BaseException as error:  # it is the outcome of this call, and the tokenizer worker goes on
            self._on_end()
            self.future.set_exception(without_frames(error))
        else:
            self._on_end()
            self.future.set_result(None)

    def end(self, error: BaseException | None) -> None:
        if next(self._turns, False):
            self._on_end()
            if self.future.set_running_or_notify_cancel():
                self.future.set_exception(error or RuntimeError("the call was dropped"))


class Reading(Job, Generic[T]):
    """A prompt that a caller only wants to know something of. One that does not wait any more cancels the future."""

    def __init__(self, function: Callable[[JobPlace | None], T], is_heavy: bool) -> None:
        self.future: Future[T] = Future()
        self.is_heavy = is_heavy
        self._function = function

    def is_gone(self, now: float) -> bool:
        return self.future.cancelled()

    def run(self, worker: JobPlace | None) -> None:
        if worker is not None:
            worker.begin()
        result = self._function(worker)
        with contextlib.suppress(InvalidStateError):  # it has been given up meanwhile
            self.future.set_result(result)

    def end(self, error: BaseException | None) -> None:
        with contextlib.suppress(InvalidStateError):
            if error is None:
                self.future.cancel()
            else:
                self.future.set_exception(error)
