"""`Draining`: an engine takes no new requests, and those that it has come to their end. A part of `Engine`."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from actorllm.actors.engine_thread import STOP_TIMEOUT_S, EngineThread
from actorllm.actors.frontend import Consumer
from actorllm.clock import now
from actorllm.errors import EngineError, EngineShutdownError
from actorllm.messages import Submit
from actorllm.types.weight_version import WeightSource

if TYPE_CHECKING:
    from actorllm.client.stepper import Stepper

logger = logging.getLogger(__name__)


class EngineFrontend(Protocol):
    """What an engine asks of its frontend: a `FrontendActor`, or what stands before several of them."""

    last_rid: int

    @property
    def num_open(self) -> int: ...
    @property
    def is_paused(self) -> bool: ...
    @property
    def weights(self) -> WeightSource: ...
    def submit(
        self, make_submit: Callable[[int], Submit], consumer: Consumer, on_rid: Callable[[int], None]
    ) -> None: ...
    def submit_several(
        self, make_submit: Callable[[int], Submit], consumers: Sequence[Consumer], on_rid: Callable[[int], None]
    ) -> None: ...
    def abort(self, rid: int) -> None: ...
    def abort_all(self) -> None: ...
    def fail_all(self, error: BaseException) -> None: ...
    async def wait_until_idle(self) -> bool: ...
    async def ask_scheduler(self, verb: str, **arguments: Any) -> Any: ...
    def statistics(self) -> dict[str, Any]: ...


class DrainedEngine(Protocol):
    """What a drain asks of its engine, an `Engine`."""

    _num_on_the_way: int
    _has_started: bool

    @property
    def _thread(self) -> EngineThread | Stepper: ...
    @property
    def _frontend(self) -> EngineFrontend: ...
    def all_handed_over(self) -> Future[None]: ...
    def _end_on_the_way(self) -> int: ...
    async def _wait_until_idle(self) -> None: ...
    async def _abort_all(self) -> None: ...


class Draining:
    """One call of `Engine.drain`: behind the requests of before, but not for longer than its time.

    It begins on the loop when the intake has handed over every request of before. If that is too late, because the engine
    still starts, its timer ends what is on the way.
    """

    def __init__(self, engine: DrainedEngine, until: float, answer: Future[bool]) -> None:
        self._engine = engine
        self._until = until
        self._answer = answer
        self._lock = threading.Lock()
        self._has_begun = False
        self._num_ended = 0
        self._timer: threading.Timer | None = None
        if until < math.inf:
            self._timer = threading.Timer(max(0.0, until - now()), self._on_time)
            self._timer.daemon = True

    def begin(self) -> None:
        self._answer.add_done_callback(self._on_answered)
        if self._timer is not None:
            self._timer.start()
        self._enqueue()

    def _enqueue(self) -> None:
        try:
            self._engine.all_handed_over().add_done_callback(self._on_turn)
        except EngineShutdownError:
            self._resolve(False)

    def _on_turn(self, handed_over: Future[None]) -> None:
        """On a worker: every request of before has been handed to the loop, or has ended. Or the engine was shut down."""
        if handed_over.exception() is not None:
            self._resolve(False)
        elif self._engine._num_on_the_way:  # let in a moment before, by another thread that is about to enqueue it
            self._enqueue()
        else:
            self._drain()

    def _on_time(self) -> None:
        """On the timer's thread."""
        self._num_ended = self._engine._end_on_the_way()
        if self._engine._has_started:
            self._drain()
        else:  # nothing has reached the frontend
            self._resolve(not self._num_ended)

    def _drain(self) -> None:
        with self._lock:
            has_begun, self._has_begun = self._has_begun, True
        if has_begun or self._answer.done():
            return
        try:
            on_loop = self._engine._thread.call(self._end_requests)
        except EngineError as error:  # it did not start, or has ended
            logger.debug("nothing to drain: %s", error)
            self._resolve(False)
            return
        on_loop.add_done_callback(self._on_drained)
        self._answer.add_done_callback(lambda answer: on_loop.cancel() if answer.cancelled() else None)

    async def _end_requests(self) -> bool:
        """On the loop: every request has reached the frontend."""
        engine, frontend = self._engine, self._engine._frontend
        try:
            with anyio.move_on_after(self._until - now()):
                await engine._wait_until_idle()
                return await frontend.wait_until_idle()
            with anyio.move_on_after(STOP_TIMEOUT_S) as in_time:
                frontend.abort_all()  # in the journal: a scheduler that takes the place of this one hears it as well
                with contextlib.suppress(TimeoutError):
                    await engine._abort_all()
                await frontend.wait_until_idle()
        except EngineError as error:
            logger.warning("the engine ended before its requests did: %s", error)
            return False
        if in_time.cancelled_caught:
            logger.warning("the scheduler did not end what is left within %g s", STOP_TIMEOUT_S)
        return False

    def _on_drained(self, on_loop: Future[bool]) -> None:
        if on_loop.cancelled():
            return
        error = on_loop.exception()
        if error is None or isinstance(error, EngineError):  # the end of the engine overtook it
            self._resolve(error is None and on_loop.result() and not self._num_ended)
        else:
            with contextlib.suppress(InvalidStateError):
                self._answer.set_exception(error)

    def _resolve(self, is_drained: bool) -> None:
        with contextlib.suppress(InvalidStateError):  # the caller that asked has gone
            self._answer.set_result(is_drained)

    def _on_answered(self, _: Future[bool]) -> None:
        if self._timer is not None:
            self._timer.cancel()
