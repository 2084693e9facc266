"""The actors of an engine, driven by calls: what `LLMEngine.step` runs with topology="inline".

No loop, thread, process or ring: a message is a call of its receiver. `step` plans one step of the model, computes it and hands
out what it brought, all in the caller. So a debugger sees one stack, and nothing goes on between two steps.

Ctrl-C waits for the end of the step, so that the next one finds everything in order. What breaks into the middle of one
all the same (a second Ctrl-C, a signal handler of the host's that raises) ends the engine.

Invariants: the actors run only within `start`, `run_pending`, `step`, `call` and `stop`, and by one thread at a time.
What is posted from anywhere else (an object's end, say) waits for the next of them. There is one worker and one step in
flight: a second could not run meanwhile.

Offers `Engine` the same verbs as EngineThread and Supervisor together.
"""

from __future__ import annotations

import ctypes
import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import isawaitable
from types import FrameType
from typing import Any, TypeVar

from actorllm.actors.actor import Actor, Failure, Runner
from actorllm.actors.engine_thread import STOP_TIMEOUT_S, Waiter
from actorllm.actors.frontend import FrontendActor
from actorllm.actors.link import Inbox, Link, LinkInfo, LinkStatistics
from actorllm.actors.private_file import check_private
from actorllm.actors.scheduler import SchedulerActor
from actorllm.actors.worker import WorkerActor
from actorllm.clock import now
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, EngineDeadError, EngineError, EngineShutdownError
from actorllm.messages import Message
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.health import ActorHealth, EngineHealth, EngineState
from actorllm.supervision.supervisor import Resolve

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Stepper:
    """A frontend, a scheduler and a worker in the caller's hands."""

    def __init__(
        self,
        config: EngineConfig,
        frontend: FrontendActor,
        resolve: Resolve,
        on_death: Callable[[ActorDeath], None] = lambda death: None,
        around_start: Callable[[EngineConfig], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """on_death: hears of the exception that ends the engine, and tells the requests. around_start: as in Supervisor."""
        if config.num_workers != 1 or config.is_launched:
            raise ConfigError(f"tensor_parallel_size={config.world_size} needs topology='process' here, not 'inline'")
        self.config = replace(config, scheduler=replace(config.scheduler, depth=1))
        self.is_alive = False
        self.failure: EngineDeadError | None = None
        """Why the engine is dead."""
        self._resolve = resolve
        self._on_death = on_death
        self._around_start = around_start
        self._is_over = False
        self._posted: deque[Callable[[], object]] = deque()
        self._is_running_posted = False
        self._frontend = frontend
        self._scheduler = SchedulerActor()
        self._worker = WorkerActor()

    # As EngineThread

    def start(self) -> None:
        """Load the model and connect the actors; nothing if that was done. Raises what made it fail."""
        if self.is_alive:
            return
        if self._is_over:
            raise EngineShutdownError("the engine was shut down; build a new one")
        check_private(self.config.record, "record")
        with self._around_start(self.config):
            self._start()
        self.is_alive = True
        self.run_pending()

    def _start(self) -> None:
        actors: list[Actor] = [self._frontend, self._scheduler, self._worker]
        for actor in actors:
            actor._runner = CallRunner(actor)
            actor._wakeup = NoWaiter()
        facts = {actor.name: run_to_end(actor.on_start(self.config)) for actor in actors}
        self.config = self._resolve(self.config, facts)
        for actor in actors:
            configured: Any = actor.on_configure(self.config)
            if isawaitable(configured):
                run_to_end(configured)  # type: ignore[arg-type]
        _connect(self._scheduler, self._frontend, "scheduler-frontend")
        _connect(self._scheduler, self._worker, "workers")

    def stop(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """End what is under way and forget the model. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        self.is_alive = False
        self._posted.clear()
        run_to_end(self._frontend.on_stop())
        run_to_end(self._scheduler.on_stop())
        run_to_end(self._worker.on_stop())
        del self._worker, self._scheduler

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Run a function before anything else happens. From anywhere: it may have to wait for the next call."""
        if self._is_over:
            raise EngineShutdownError("the engine was shut down")
        self._posted.append(partial(function, *args))

    def call(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Future[Any]:
        """Run a function, or a coroutine function that has nothing to wait for. The future is done."""
        self.run_pending()
        future: Future[Any] = Future()
        try:
            result = function(*args, **keywords)
            future.set_result(run_to_end(result) if isawaitable(result) else result)  # type: ignore[arg-type]
        except Exception as error:  # it is the outcome of this call
            future.set_exception(error)
        return future

    # As Supervisor

    @property
    def pids(self) -> dict[str, int]:
        return {}

    def change_config(self, change: Callable[[EngineConfig], EngineConfig]) -> None:
        self.config = change(self.config)

    def health(self) -> EngineHealth:
        state: EngineState = "running" if self.is_alive else "stopped" if self._is_over else "new"
        if self.failure is not None:
            return EngineHealth("dead", {}, last_failure=str(self.failure))
        names = ("frontend", "scheduler", "worker0") if self.is_alive else ()
        return EngineHealth(state, {name: ActorHealth("running", None, 1, None) for name in names})

    def statistics(self) -> dict[str, Any]:
        return {"phase": "running" if self.is_alive else "stopped" if self._is_over else "new"}

    # The engine

    def run_pending(self) -> None:
        """Carry out what was posted: the scheduler knows every request and has freed what was aborted."""
        if not self.is_alive or self._is_running_posted:
            return
        self._is_running_posted = True
        try:
            while self._posted:
                self._posted.popleft()()
            self._scheduler.take_inbox()
        finally:
            self._is_running_posted = False

    def step(self, until: float = math.inf) -> bool:
        """Plan one step, compute it, hand out its outputs. False: nothing could be planned.

        Waits only for a scheduling policy that has asked to be woken later, or for a deadline; not beyond `until`.
        """
        if not self.is_alive:
            return False
        with interrupts_held():
            try:
                is_done = self._step()
            except BaseException:
                self.stop()
                raise
        if not is_done:
            deadline = self._scheduler.next_deadline()
            if deadline is not None:
                time.sleep(max(0.0, min(deadline, until) - now()))
        return is_done

    def drain(self, until: float) -> bool:
        """Step until every request has ended. What is left at `until` (monotonic seconds) is aborted, and it is False.

        False as well if the engine ends meanwhile, and every request with it.
        """
        self.run_pending()
        while self.failure is None and self._frontend.has_work and now() < until:
            self.step(until)
        if self.failure is not None:
            return False
        if not self._frontend.has_work:
            return True
        self._frontend.abort_all()
        self.run_pending()
        return False

    def _step(self) -> bool:
        self.run_pending()
        actor: Actor = self._scheduler
        try:
            self._scheduler.turn()
            actor = self._worker
            if not run_to_end(self._worker.turn()):
                return False
            actor = self._scheduler
            self._scheduler.turn()
        except DefectError as found:
            self._die(ActorDeath(self._worker.name, failure=Failure.of(found)))
        except Exception as error:  # it is the death of that actor
            self._die(ActorDeath(actor.name, failure=Failure.of(error)))
        return True

    def _die(self, death: ActorDeath) -> None:
        """An exception ends an actor, and nothing can take its place here."""
        logger.error("%s", death)
        self.failure = death.to_error()
        self._on_death(death)
        self.stop()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """The first Ctrl-C in here is raised at the end, the second at once.

    Where Python's own handler would raise it, that is: a handler of the host's is left alone.
    """
    ours = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not ours:
        yield
        return
    is_held = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal is_held
        if is_held:
            ours(number, frame)
        is_held = True

    _replace_handler(hold)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is hold:  # else the host has set one meanwhile
            _replace_handler(ours)
    if is_held:
        raise KeyboardInterrupt


def _replace_handler(handler: Callable[[int, FrameType | None], object]) -> None:
    """What Python calls for SIGINT, and nothing of what the kernel calls.

    `signal.signal` sets that, too. It would remove a function of C in front of Python's (`faulthandler.register`), and the flags
    that `signal.siginterrupt` has set.
    """
    action = ctypes.create_string_buffer(_SIZE_OF_ACTION)
    is_known = _sigaction is not None and _sigaction(signal.SIGINT, None, action) == 0
    signal.signal(signal.SIGINT, handler)
    if is_known:
        _sigaction(signal.SIGINT, action, None)


_SIZE_OF_ACTION = 512
"""Bytes for a `struct sigaction`, which has at most 152 on Linux and macOS."""
_sigaction: Any = getattr(ctypes.CDLL(None), "sigaction", None)


class CallLink(Link):
    """One end of a connection within one thread: to send is to call the peer's `on_message`."""

    def __init__(self, info: LinkInfo, target: Actor) -> None:
        super().__init__(info)
        self.target = target
        self._other: CallLink

    def send_nowait(self, message: Message) -> None:
        if not self.is_open:
            self._refuse_closed()
        self._num_sent += 1
        self._other._num_received += 1
        self.target.on_message(self._other, message)

    def open(self, inbox: Inbox) -> None:
        """There is nothing to deliver."""

    def recheck(self) -> bool:
        return False

    def finish(self) -> None:
        """Everything was delivered when it was sent."""

    def close(self) -> None:
        self.is_open = False

    def statistics(self) -> LinkStatistics:
        return self._snapshot(0, 0.0, 0.0)


def _connect(hub: Actor, spoke: Actor, name: str) -> None:
    """Give each of two actors its end of a link."""
    is_broadcast = name == "workers"
    to_spoke = CallLink(LinkInfo(name, name if is_broadcast else spoke.name, spoke.rank, 1), spoke)
    to_hub = CallLink(LinkInfo(name, hub.name, hub.rank, 1), hub)
    to_spoke._other, to_hub._other = to_hub, to_spoke
    for actor, link in ((hub, to_spoke), (spoke, to_hub)):
        actor.links[link.peer] = link
        actor.on_link(link)


class DefectError(EngineError):
    """The scheduler has found the worker at fault (`Actor.report_defect`)."""


class CallRunner(Runner):
    """What an actor asks for of its runner, where there is no loop."""

    def __init__(self, actor: Actor) -> None:
        super().__init__(actor, lambda _: None)

    def report_defect(self, link: Link, what: str) -> None:
        raise DefectError(f"it was found {what}")

    async def ask(self, link: Link, verb: str, timeout: float, arguments: dict[str, Any]) -> list[Any]:
        assert isinstance(link, CallLink)
        answer = link.target.answer(verb, arguments)
        return [await answer if isawaitable(answer) else answer]

    def waker(self) -> None:
        return None

    def start_task(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        run_to_end(function(*args))

    def work_aside(self, function: Callable[[], Any], then: Callable[[Any], None]) -> None:
        then(self._run_aside(function))


class NoWaiter(Waiter):
    """Nothing waits where everything is called."""

    __slots__ = ()

    def set(self) -> None:
        pass

    async def wait(self, until: float | None = None) -> bool:
        raise RuntimeError("an actor waited, and there is no loop to wait on")


def run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} waited, and there is no loop to wait on")
