"""The threads and event loops of an engine, and the loops of its callers.

Owns everything that knows a backend (the rest of the actors speaks anyio):

- `HostLoop`: one running event loop, ours or the caller's (asyncio, uvloop, trio), reduced to two things. One is "run this
  there, soon". The other is `Waiter`, an auto-reset event that costs a future. `ThreadHost` is the same for callers without a loop.
- `LoopThread`: a daemon thread with an uvloop loop of its own. The inline topology runs each thread-placed actor on one.
- `EngineThread`: the LoopThread that the owner process talks to. It runs one `Service` (the supervisor with the
  owner-placed actors), starts it, and stops it synchronously, at interpreter exit at the latest.

Invariants: whatever is handed to a loop either runs there or is reported as refused, also while that loop is closing. A
future from `call` is always resolved. Nothing of this is usable in a forked child, where none of these threads exists
(`ForkedProcessError`). The front doors call EngineThread and HostLoop, the supervisor and the links call the rest.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import inspect
import logging
import os
import queue
import subprocess
import sys
import threading
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from time import monotonic
from typing import Any, Protocol, TypeAlias, TypeVar

import anyio
from anyio.abc import TaskGroup

from actorllm.actors.loop_bell import LoopBell
from actorllm.actors.shortage import above_standard_streams, as_start_error
from actorllm.errors import EngineShutdownError, EngineStartError, ForkedProcessError, copied, without_frames

logger = logging.getLogger(__name__)

T = TypeVar("T")
Future: TypeAlias = "concurrent.futures.Future[T]"

GREENLET_LIBRARIES = ("gevent", "eventlet")
"""Their monkey patches make of the threads of a process what runs in one."""
STOP_TIMEOUT_S = 5.0
"""How long an orderly stop may take before what is left is killed."""
SEVERAL_WAITERS = "two tasks wait for one stream at the same time; let one task read it, or generate twice"


# Loops, ours and others' ----------------------------------------------------------------------------------------------


class SeveralWaitersError(RuntimeError):
    """A second task waits where one does."""


class Waiter(ABC):
    """An event for one waiting task that resets itself. `set` is called on the waiter's own loop only."""

    __slots__ = ()

    @abstractmethod
    def set(self) -> None:
        """Let the waiting task go on, or the next `wait` return at once."""

    def resume(self) -> None:
        """As `set`, in a callback of the loop: where that is possible, the task goes on before this returns."""
        self.set()

    @abstractmethod
    def wait(self, until: float | None = None) -> Awaitable[bool]:
        """True when it was set (a set that came before counts), False when the monotonic clock passed `until`.

        Always lets the loop turn once, so that a task that sets its own waiter starves no other. A cancelled wait loses
        no set.
        """


class HostLoop(ABC):
    """A running event loop as seen from other threads. One object per loop: compare and hash by identity."""

    __slots__ = ("__weakref__",)

    @property
    def is_of_application(self) -> bool:
        """Not run by a thread of the engine, and not closed as far as that can be told."""
        return True

    @staticmethod
    def current() -> HostLoop:
        """The loop that runs the calling code. Raises RuntimeError outside of one."""
        if "trio" in sys.modules:  # asked first: in guest mode trio runs inside another loop
            import trio

            if trio.lowlevel.in_trio_task():
                return _host_of(trio.lowlevel.current_trio_token(), TrioLoop)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("there is no running event loop in this thread (asyncio, uvloop or trio)") from None
        return _host_of(loop, AsyncioLoop)

    @abstractmethod
    def call_soon_threadsafe(self, function: Callable[..., object], *args: Any) -> bool:
        """Run `function` on the loop, in order of the calls. False: the loop is closed and nothing will run."""

    @abstractmethod
    def waiter(self) -> Waiter:
        """A new Waiter of this loop. To be called on the loop."""

    def spawn(self, function: Callable[[], Coroutine[Any, Any, None]], tasks: set[object]) -> None:
        """Run it on the loop as a task of its own, which ends with the loop at the latest. To be called on the loop.

        function: raises nothing. tasks: holds the task until it has ended.
        """
        raise RuntimeError("a task needs an event loop")

    async def result_of(self, future: Future[T]) -> T:
        """The result of a future that another thread resolves. Cancelling the wait cancels the future."""
        waiter = self.waiter()
        future.add_done_callback(lambda _: self.call_soon_threadsafe(waiter.set))
        try:
            await waiter.wait()
        except BaseException:
            future.cancel()
            raise
        error = future.exception()
        if error is not None:
            raise copied(error) from error.__cause__
        return future.result()


class Timer(Protocol):
    """What was to be called later."""

    def cancel(self) -> None: ...


class AsyncioLoop(HostLoop):
    """asyncio and uvloop."""

    __slots__ = ("_bell", "_context", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # the table of hosts must not keep a finished loop alive
        self._context: contextvars.Context | None = None
        self._bell: LoopBell | None = None
        """Wakes an application's loop for less than its own means, from the first task on that waits there."""

    def adopt_context(self) -> None:
        """Run everything that is handed over from now on in the context of the caller.

        Else it would run in that of the thread it comes from, where anyio finds another library's loop, or none.
        """
        if self._context is None:
            self._context = contextvars.copy_context()

    @property
    def is_of_application(self) -> bool:
        loop = self._loop()
        return self._context is None and loop is not None and not loop.is_closed()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop()
        if loop is None:
            raise RuntimeError("the event loop is gone")
        return loop

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """From the loop's own thread."""
        self.loop.call_soon(function, *args)

    def call_later(self, delay_s: float, function: Callable[..., object], *args: Any) -> Timer:
        """From the loop's own thread."""
        return self.loop.call_later(delay_s, function, *args)

    def call_soon_threadsafe(self, function: Callable[..., object], *args: Any) -> bool:
        loop = self._loop()
        if loop is None:
            return False
        if self._bell is not None and self._context is None:
            if loop.is_closed():
                self._bell = None
                return False
            self._bell.call(function, args)
            return True
        try:
            loop.call_soon_threadsafe(function, *args, context=self._context)
        except RuntimeError:
            if loop.is_closed():
                return False
            raise
        return True

    def spawn(self, function: Callable[[], Coroutine[Any, Any, None]], tasks: set[object]) -> None:
        task = self.loop.create_task(function())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def watch(self, fd: int, function: Callable[..., object], *args: Any) -> None:
        """Call `function` whenever `fd` is readable, until `unwatch`."""
        self.loop.add_reader(fd, function, *args)

    def unwatch(self, fd: int) -> None:
        """Must come before the fd is closed: the kernel keeps watching a description that another descriptor still holds."""
        self.loop.remove_reader(fd)

    def watch_writable(self, fd: int, function: Callable[..., object], *args: Any) -> None:
        """As `watch`, whenever `fd` takes more, until `unwatch_writable`."""
        self.loop.add_writer(fd, function, *args)

    def unwatch_writable(self, fd: int) -> None:
        """As `unwatch`."""
        self.loop.remove_writer(fd)

    def waiter(self) -> AsyncioWaiter:
        loop = self.loop
        if self._bell is None and LoopBell.fits(loop):
            with contextlib.suppress(OSError):  # without a descriptor the loop's own means do
                self._bell = LoopBell(loop)
        return AsyncioWaiter(loop)


def _resolved() -> asyncio.Future[None]:
    """A future with a result and without callbacks, for which its loop does nothing."""

    class NoLoop:
        get_debug = staticmethod(bool)

    future: asyncio.Future[None] = asyncio.Future(loop=NoLoop())  # type: ignore[arg-type]
    future.set_result(None)
    return future


_RESUMED = _resolved()
"""What all tasks are resumed with. Of a future that is one of asyncio's own, a task asks the result without a call in Python."""


class AsyncioWaiter(Waiter):
    """What the waiting task holds in place of a future, again and again.

    asyncio lets a task wait for anything with the methods of a future that tasks use (`asyncio.isfuture`). A future is made
    for one wait, and wakes its task by another callback of the loop; both cost more than the rest of a wait.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_cancellation",
        "_context",
        "_is_debugged",
        "_is_set",
        "_is_waited_for",
        "_loop",
        "_timer",
        "_wakeup",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        """A task reads it where there is no `get_loop`, which would be one more call for each wait."""
        self._asyncio_future_blocking = False
        self._wakeup: Callable[[Any], object] | None = None
        """What lets the task go on; None: no task waits, or it is being woken."""
        self._context: contextvars.Context | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._cancellation: tuple[object, ...] | None = None
        self._is_set = self._is_waited_for = False
        self._is_debugged = loop.get_debug()

    def set(self) -> None:
        self._is_set = True
        self._wake_soon()

    def _wake_soon(self) -> None:
        wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            self._loop.call_soon(wakeup, self, context=self._context)

    def resume(self) -> None:
        self._is_set = True
        if self._is_debugged or asyncio.current_task(self._loop) is not None:
            # The loop names a task that takes long; and a loop that turns within a task enters no other one here.
            self._wake_soon()
            return
        wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            assert self._context is not None
            self._context.run(wakeup, _RESUMED)

    @types.coroutine
    def wait(self, until: float | None = None) -> Generator[Any, None, bool]:
        if self._is_waited_for:
            raise SeveralWaitersError(SEVERAL_WAITERS)
        if self._is_set:
            self._is_set = False
            yield  # one turn of the loop
            return True
        self._is_waited_for = True
        if until is not None:
            self._set_timer(until, 0.0)
        self._asyncio_future_blocking = True
        try:
            yield self
        finally:
            self._is_waited_for = False
            self._wakeup = self._context = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        was_set, self._is_set = self._is_set, False
        return was_set

    def _set_timer(self, until: float, least_s: float) -> None:
        self._timer = self._loop.call_later(max(until - monotonic(), least_s), self._expire, until)

    def _expire(self, until: float) -> None:
        if monotonic() < until:  # uvloop counts rounded milliseconds from a truncated time: more than one early
            self._set_timer(until, 0.001)
        else:
            self._wake_soon()

    # What a task calls, and what looks at waiting tasks

    def done(self) -> bool:
        """Whether the task that waits is being woken: `anyio.wait_all_tasks_blocked` asks."""
        return self._wakeup is None

    def add_done_callback(self, wakeup: Callable[[Any], object], *, context: contextvars.Context) -> None:
        self._wakeup, self._context = wakeup, context

    def cancel(self, msg: object = None) -> bool:
        """False: the task is being woken, and hears of its cancellation then."""
        if self._wakeup is None:
            return False
        self._cancellation = () if msg is None else (msg,)
        self._wake_soon()
        return True

    def result(self) -> None:
        """Asked by the task as it goes on; what is raised here is raised where it waits."""
        cancellation, self._cancellation = self._cancellation, None
        if cancellation is not None:
            raise asyncio.CancelledError(*cancellation)


class TrioLoop(HostLoop):
    """trio, by its entry queue."""

    __slots__ = ("_token",)

    def __init__(self, token: Any) -> None:
        self._token = weakref.ref(token)

    def call_soon_threadsafe(self, function: Callable[..., object], *args: Any) -> bool:
        import trio

        token = self._token()
        if token is None:
            return False
        try:
            token.run_sync_soon(function, *args)
        except trio.RunFinishedError:
            return False
        return True

    def waiter(self) -> EventWaiter:
        return EventWaiter()

    def spawn(self, function: Callable[[], Coroutine[Any, Any, None]], tasks: set[object]) -> None:
        import trio

        trio.lowlevel.spawn_system_task(function)  # held by trio


class EventWaiter(Waiter):
    """A Waiter for every backend of anyio: an event that is replaced when it was seen."""

    __slots__ = ("_event", "_is_waited_for")

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._is_waited_for = False

    def set(self) -> None:
        self._event.set()

    async def wait(self, until: float | None = None) -> bool:
        if self._is_waited_for:
            raise SeveralWaitersError(SEVERAL_WAITERS)
        self._is_waited_for = True
        try:
            if until is None:
                await self._event.wait()
            else:
                with anyio.move_on_after(max(until - monotonic(), 0.0)):
                    await self._event.wait()
        finally:
            self._is_waited_for = False
        if not self._event.is_set():
            return False
        self._event = anyio.Event()
        return True


_hosts: weakref.WeakKeyDictionary[Any, HostLoop] = weakref.WeakKeyDictionary()
_hosts_lock = threading.Lock()


def _renew_hosts_lock() -> None:
    """In a fork: a thread that held the lock is not there."""
    global _hosts_lock
    _hosts_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_hosts_lock)


def _host_of(loop: Any, make: Callable[[Any], HostLoop]) -> HostLoop:
    with _hosts_lock:
        host = _hosts.get(loop)
        if host is None:
            host = _hosts[loop] = make(loop)
        return host


def serves_loops() -> bool:
    """Whether event loops of the application have waited for something of an engine, and are there still."""
    with _hosts_lock:
        for host in _hosts.values():  # a loop calls less than `any`; a decode step asks once
            if host.is_of_application:
                return True
    return False


class ThreadHost(HostLoop):
    """The host of a caller without a loop: what is handed over waits until the caller runs it.

    `run_pending` and `run_until` belong to the thread that made the object.
    """

    __slots__ = ("_is_closed", "_queue")

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]]] = queue.SimpleQueue()
        self._is_closed = False

    def call_soon_threadsafe(self, function: Callable[..., object], *args: Any) -> bool:
        if self._is_closed:
            return False
        self._queue.put((function, args))
        return True

    def waiter(self) -> Waiter:
        raise RuntimeError("a thread without an event loop cannot await; use run_until")

    def run_pending(self, timeout: float | None = 0.0) -> int:
        """Run what was handed over; wait up to `timeout` seconds (None: for ever) for the first. Returns how many ran."""
        num_run = 0
        try:
            item = self._queue.get(timeout=timeout) if timeout != 0.0 else self._queue.get_nowait()
            while True:
                function, args = item
                function(*args)
                num_run += 1
                item = self._queue.get_nowait()
        except queue.Empty:
            return num_run

    def run_until(self, is_done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Run what arrives until `is_done()`. False: `timeout` seconds passed first."""
        deadline = None if timeout is None else monotonic() + timeout
        while not is_done():
            remaining = None if deadline is None else deadline - monotonic()
            if remaining is not None and remaining <= 0:
                return False
            self.run_pending(remaining)
        return True

    def close(self) -> None:
        """From now on everything handed over is refused."""
        self._is_closed = True


# Loops of ours --------------------------------------------------------------------------------------------------------


LoopFactory: TypeAlias = "Callable[[], asyncio.AbstractEventLoop]"


def run_loop(main: Callable[..., Any], *args: Any, loop_factory: LoopFactory | None = None) -> Any:
    """`anyio.run` on the loop that all our threads and processes use, or on that of a factory.

    asyncio's debug mode, which an application may set for the whole process, is not for it: with `inline` a step is one long
    callback, and each would be reported.
    """
    options: dict[str, Any] = {"debug": False}
    if loop_factory is None and sys.platform != "win32":
        import uvloop

        loop_factory = uvloop.new_event_loop
    if loop_factory is not None:
        options["loop_factory"] = partial(above_standard_streams, loop_factory)
    return anyio.run(main, *args, backend="asyncio", backend_options=options)


def current_loop() -> AsyncioLoop:
    """The running loop of one of our threads, which is always asyncio's or uvloop's."""
    host = HostLoop.current()
    if not isinstance(host, AsyncioLoop):
        raise RuntimeError(f"actors run on asyncio or uvloop, not on {type(host).__name__}")
    host.adopt_context()
    return host


class LoopThread:
    """A daemon thread with an event loop that runs until `stop`. Started once. loop_factory: None: that of `run_loop`."""

    def __init__(self, name: str, loop_factory: LoopFactory | None = None) -> None:
        self.name = name
        self._loop_factory = loop_factory
        self.loop: AsyncioLoop | None = None
        self._tasks: TaskGroup | None = None
        self._stop_requested: Waiter | None = None
        self._started = threading.Event()
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._is_over = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def ident(self) -> int | None:
        """Of the thread, as Python counts them; None: it was not started."""
        return self._thread.ident

    def start_thread(self) -> None:
        """Returns when the loop turns. Raises EngineStartError."""
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise as_start_error(self._failure)

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Run a function on the loop; its result is dropped. Raises EngineShutdownError when the loop is over."""
        loop = self.loop
        if loop is None or self._is_over or not loop.call_soon_threadsafe(function, *args):
            raise EngineShutdownError(f"thread {self.name!r} does not run")

    def call(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Future[Any]:
        """Run a function or a coroutine function on the loop. Cancelling the future cancels the coroutine.

        Raises EngineShutdownError when the loop is over; a call that the end of the loop overtakes is resolved with it.
        """
        future: Future[Any] = concurrent.futures.Future()
        with self._lock:
            if self._is_over:
                raise EngineShutdownError(f"thread {self.name!r} does not run")
            self._pending.add(future)
        try:
            self.post(self._spawn, future, partial(function, *args, **keywords))
        except EngineShutdownError:
            self._pending.discard(future)
            raise
        return future

    def request_stop(self) -> None:
        """Ask the loop to end; `join` waits for it."""
        with contextlib.suppress(EngineShutdownError):
            self.post(self._set_stop)

    def join(self, timeout: float | None = None) -> bool:
        """True when the thread is gone."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    async def _serve(self) -> None:
        """What the thread does between start and stop."""
        assert self._stop_requested is not None
        await self._stop_requested.wait()

    def _run(self) -> None:
        try:
            run_loop(self._main, loop_factory=self._loop_factory)
        except Exception as error:  # only that no loop can be made is told to the caller
            if self.loop is not None:
                raise
            self._failure = error  # the loop could not be made: `start_thread` tells of it
        finally:
            with self._lock:
                self._is_over = True
                overtaken = list(self._pending)
            self._started.set()
            for future in overtaken:
                self._finish(future)

    async def _main(self) -> None:
        self._stop_requested = HostLoop.current().waiter()
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            self.loop = current_loop()
            self._started.set()
            await self._serve()
            self._tasks = None  # a call that comes now is refused
            tasks.cancel_scope.cancel()

    def _set_stop(self) -> None:
        assert self._stop_requested is not None
        self._stop_requested.set()

    def _spawn(self, future: Future[Any], function: Callable[[], Any]) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(self._carry, future, function)
        else:
            self._finish(future)

    async def _carry(self, future: Future[Any], function: Callable[[], Any]) -> None:
        """One call: its result or its exception belong to the caller, never to the loop."""
        loop = current_loop()
        try:
            with anyio.CancelScope() as scope:

                def cancel(done: Future[Any]) -> None:
                    if done.cancelled():
                        loop.call_soon_threadsafe(scope.cancel)

                future.add_done_callback(cancel)
                result = function()
                if inspect.isawaitable(result):
                    result = await result
                _resolve(future, result)
        except Exception as error:  # it is the outcome of this call, and the loop goes on
            _resolve(future, error=error)
        finally:
            self._finish(future)

    def _finish(self, future: Future[Any]) -> None:
        self._pending.discard(future)
        if not future.done():
            _resolve(future, error=EngineShutdownError(f"thread {self.name!r} ended before the call did"))


def _resolve(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except concurrent.futures.InvalidStateError:
        logger.debug("the caller no longer waits for the result of a call")


# The engine thread ----------------------------------------------------------------------------------------------------


class Service(Protocol):
    """What an EngineThread runs: the supervisor."""

    async def run(self, on_ready: Callable[[], object]) -> None:
        """The whole life: calls `on_ready` when started; an exception before that is the caller's.

        Returns after `request_stop`, or by itself when the service is over. Leaves nothing behind in any case.
        """

    def request_stop(self, timeout: float) -> None:
        """Make `run` return within about `timeout` seconds. Called on the loop, any number of times."""

    def kill(self) -> None:
        """Last resort from another thread, when the loop does not react: leave no process behind."""


class EngineThread(LoopThread):
    """The thread through which the owner process uses its engine. All methods are for other threads."""

    def __init__(
        self, service: Service, name: str = "actorllm:engine", loop_factory: LoopFactory | None = None
    ) -> None:
        super().__init__(name, loop_factory)
        self._service = service
        self._pid = os.getpid()
        self._start_lock = threading.Lock()
        self._start_future: Future[None] | None = None
        self._is_stopping = False
        self._stop_timeout_s = STOP_TIMEOUT_S

    def start(self, timeout: float | None = None) -> None:
        """Start the thread and the service; returns when it is ready.

        Raises what the service's start raised (EngineStartError, ConfigError, ModelError ...), and TimeoutError after
        `timeout` seconds; nothing is left running then.
        """
        future = self.start_nowait()
        try:
            error = future.exception(timeout)
        except concurrent.futures.CancelledError:
            stay_at_exit()
            raise EngineShutdownError("the engine was shut down while it started") from None
        except BaseException:
            self.stop()
            raise
        if error is not None:
            self.stop()
            error = without_frames(as_start_error(error) if isinstance(error, Exception) else error)
            raise copied(error) from error.__cause__

    def start_nowait(self) -> Future[None]:
        """As `start`, without waiting: cancelling the future, or `stop`, ends a start that is under way."""
        self._check_process()
        _check_threads()
        with self._start_lock:
            if self._start_future is None:
                if self._is_stopping:
                    raise EngineShutdownError("the engine was shut down before it was started")
                _engine_threads.add(self)
                self.start_thread()
                self._start_future = super().call(self._start_service)
            return self._start_future

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Run a function on the engine's loop, soon. Raises EngineShutdownError or ForkedProcessError."""
        if os.getpid() != self._pid:
            self._check_process()
        super().post(function, *args)

    def call(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Future[Any]:
        """Run a function or a coroutine function on the engine's loop. Raises as `post`."""
        self._check_process()
        return super().call(function, *args, **keywords)

    def stop(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Stop the service and the thread, and wait for that. Idempotent; from any thread.

        From the engine's own thread it only asks for the stop. In a forked child it does nothing: the engine is not
        the child's.
        """
        if os.getpid() != self._pid:
            return
        with self._start_lock:
            self._is_stopping = True
            self._stop_timeout_s = timeout
            if self._start_future is None:
                return
        self.request_stop()
        if threading.current_thread() is self._thread:
            return
        if not self.join(timeout + 2.0):
            logger.error("the engine thread did not stop within %.1f s; its processes are killed", timeout)
            self._service.kill()
            self.join(1.0)
        _engine_threads.discard(self)

    async def _serve(self) -> None:
        assert self._stop_requested is not None
        await self._stop_requested.wait()
        if self._start_future is not None and not self._start_future.done():
            self._start_future.cancel()
        self._service.request_stop(self._stop_timeout_s)

    async def _main(self) -> None:
        # The service has a task group of its own: the end of the loop waits for its orderly stop instead of cancelling
        # it, while calls that are under way when it is over are ended by the group of LoopThread.
        async with anyio.create_task_group() as services:
            self._services = services
            await super()._main()

    async def _start_service(self) -> None:
        """Not TaskGroup.start: its cancellation would break into the service's shielded clean-up."""
        decided, ended = anyio.Event(), anyio.Event()
        errors: list[BaseException] = []

        async def run() -> None:
            try:
                await self._service.run(decided.set)
            except Exception as error:  # the caller that started the service is told, or the log
                if decided.is_set():
                    logger.exception("the engine's service failed")
                errors.append(error)
            finally:
                decided.set()
                ended.set()

        self._services.start_soon(run)
        try:
            await decided.wait()
        except BaseException:
            self._service.request_stop(self._stop_timeout_s)
            with anyio.CancelScope(shield=True):
                await ended.wait()
            raise
        if errors:
            raise errors[0]

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                f"this engine belongs to process {self._pid}, this is its fork {os.getpid()}; build an engine after "
                f"forking, or attach to one by name"
            )


def _check_threads() -> None:
    """Greenlets in place of threads wait for each other for ever. Raises EngineStartError."""
    parts = {"threads": _thread.start_new_thread, "queues": queue.SimpleQueue, "processes": subprocess.Popen}
    libraries = {what: getattr(part, "__module__", "").partition(".")[0] for what, part in parts.items()}
    replaced = [what for what, library in libraries.items() if library in GREENLET_LIBRARIES]
    if replaced:
        library = libraries[replaced[0]]
        patch = {
            "gevent": "monkey.patch_all(thread=False, queue=False, subprocess=False, os=False)",
            "eventlet": "monkey_patch(os=False, thread=False)",
        }
        raise EngineStartError(
            f"{library} has replaced the {' and '.join(replaced)} of this process, and an engine needs those of the system; "
            f"call {patch[library]}, or run the engine in a process of its own (`actorllm serve`)"
        )


_engine_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


_stays_until: float | None = None
"""At the end of the interpreter: when a daemon thread is told what it waits for; None: it has not come."""

STAY_S = 5.0
"""From the end of the engines on: longer than the end of an interpreter takes that waits for no daemon thread."""


def _stop_at_exit() -> None:
    """Daemon threads still run while atexit callbacks do, so an orderly stop works here."""
    global _stays_until
    for thread in list(_engine_threads):
        _stays_until = monotonic() + STAY_S
        thread.stop()
    _stays_until = monotonic() + STAY_S


def stay_at_exit() -> None:
    """Of a caller that is about to be told that its engine has ended: at the end of the interpreter, a daemon thread is not.

    Whatever a daemon thread waits for otherwise, it waits for until the process has ended. An exception would be written to the
    application's log. It is told STAY_S later: what the application does at the end may be to join the thread.
    """
    if _stays_until is None or not threading.current_thread().daemon:
        return
    while (left := _stays_until - monotonic()) > 0:
        threading.Event().wait(left)


atexit.register(_stop_at_exit)
