"""The life of an actor: what a subclass overrides, and the runner that drives it.

`Actor` is what the frontend, the scheduler and the workers derive from. All of an actor runs on one loop, its handlers
are synchronous and run to completion, so nothing inside needs a lock. `Runner` owns the life cycle. It is the same for an
actor in a process of its own, in a thread, and on the engine thread:

    setup      on_start(config) -> facts … on_configure(resolved config) … on_link(link) for each link
    running    run() until stopped; on_message(link, message)*, on_batch(); answer(verb, arguments); on_peer_lost(link)
    teardown   on_stop() or on_failure(error); every ask that is open here ends, and after a stop every one at the peers, too

Invariants: an exception in a handler or in `run` is a failure and ends the actor; a restart begins from a known state. An
exception in `answer` belongs to the peer that asked. Every Ask gets exactly one Reply while its link is open, unless the actor
fails. The supervisor tells of its loss then, as of a process that is killed. Every `ask` ends: with the value, the peer's error,
TimeoutError or PeerLostError. The runner is called by `child.main` and by the supervisor.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import anyio
import numpy as np
from anyio import to_thread
from anyio.abc import TaskGroup

from actorllm import errors
from actorllm.actors.engine_thread import HostLoop, Waiter
from actorllm.actors.heartbeat import Heartbeat
from actorllm.actors.link import Link, LinkInfo
from actorllm.clock import now
from actorllm.errors import (
    ActorLLMError,
    EngineError,
    EngineStartError,
    PeerLostError,
    PeerRestartedError,
    TransportError,
    WouldBlock,
    is_failure,
    nearest_name,
)
from actorllm.messages import Ask, Message, Reply

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 10.0
RECHECK_S = 0.25
"""How long a lost wake-up could go unnoticed. Wake-ups are not lost; the check costs 0.03 % of a core."""
STOP_GRACE_S = 1.0
"""How long `run` may take to end by itself once `is_running` is False; then it is cancelled."""
TEARDOWN_TIMEOUT_S = 2.0
"""How long `on_stop` may take."""
MAX_THREADS = 2
"""For what an actor has done beside its loop: one that takes long does not keep the next from its turn."""


class Actor:
    """Base of all actors. A subclass overrides the hooks of the first half and calls the methods of the second."""

    VERBS: tuple[str, ...] = ("ping", "statistics")
    """What `answer` understands, for the error about one that it does not."""

    def __init__(self, name: str = "actor", rank: int = 0) -> None:
        self.name = name
        self.rank = rank
        self.links: dict[str, Link] = {}
        """The open links by the name of the peer (of the link, for the hub of a broadcast)."""
        self.is_running = False
        """True from the start of `run` until a stop is asked for. A main loop is `while self.is_running:`."""
        self.heartbeat: Heartbeat | None = None
        """Where the actor of a process shows what it is at; None: no watchdog looks at it."""
        self.on_work: Callable[[], object] = bool
        """To be called when `has_work` becomes true."""
        self._runner: Runner
        self._wakeup: Waiter

    # Hooks

    async def on_start(self, config: Any) -> dict[str, Any]:
        """Get ready for everything that needs no peer (load weights, measure memory). Returns facts, as JSON values."""
        return {}

    def on_configure(self, config: Any) -> Awaitable[None] | None:
        """The configuration as resolved from the facts of all actors. May be a coroutine function."""
        return None

    def on_link(self, link: Link) -> None:
        """A peer is connected: at start, and again with a new generation whenever either end was restarted.

        The link that this one replaces, if any, was reported by `on_peer_lost` before.
        """

    async def run(self) -> None:
        """The visible main loop. Returning ends the actor. The default waits until it is stopped."""
        while self.is_running:
            await self.wait()

    def admits(self, link: Link, message: Message) -> bool:
        """Asked of every message first, asks and replies included. False: it is ignored, and its link has been dropped."""
        return True

    def on_message(self, link: Link, message: Message) -> None:
        """One message that is neither Ask nor Reply. On the hub of a broadcast, `link` is the spoke that sent it."""
        raise TypeError(f"{self.name} does not handle {type(message).__name__} (from {link.peer})")

    def on_batch(self) -> None:
        """Everything that had arrived was delivered. The default wakes the main loop."""
        self._wakeup.set()

    def answer(self, verb: str, arguments: dict[str, Any]) -> Any:
        """The value for an Ask, or a coroutine that returns it. An exception becomes the error reply.

        Values are JSON values, or an array of uint8. Of the arguments, the one that is called `data` may be such an array, too.
        """
        match verb:
            case "ping":
                return self.name
            case "statistics":
                return self.statistics()
            case _:
                raise EngineError(f"{self.name} has no answer for {verb!r}{nearest_name(verb, self.VERBS)}")

    def on_peer_lost(self, link: Link) -> None:
        """The peer is gone, or was restarted; `link.lost` says why. What it had sent was delivered before this.

        Of a peer that is dropped for what it sent, nothing more is delivered.
        """

    def on_link_error(self, link: Link, error: BaseException) -> None:
        """The link is corrupt and closed. Raise (the default) to fail, return to go on without this peer."""
        raise error

    async def on_stop(self) -> None:
        """An orderly end. Links are still open for sending; nothing is delivered any more."""

    def on_failure(self, error: BaseException) -> None:
        """The end after an exception, instead of `on_stop`."""

    @property
    def has_work(self) -> bool:
        """Whether an actor of the owner waits for other actors, which are watched while it does."""
        return False

    # Services

    def wake(self) -> None:
        """Let `wait` return. On the actor's own loop."""
        self._wakeup.set()

    def waker(self) -> Callable[[], object] | None:
        """What does as `wake`, from any thread; None: there is no loop, the actor is turned by calls."""
        return self._runner.waker()

    async def wait(self, until: float | None = None) -> bool:
        """Wait for `wake` (True) or for the monotonic second `until` (False); at once if woken meanwhile."""
        return await self._wakeup.wait(until)

    def drop_link(self, link: Link, error: BaseException) -> None:
        """The peer sent something impossible: as if its words had been (`on_peer_lost`, then `on_link_error`)."""
        self._runner.break_link(link, error)

    def report_defect(self, link: Link, what: str) -> None:
        """The peer has a defect, as its words show ("contradicting its plans: ..."): the supervisor is to end it.

        Its end follows as any other (`on_peer_lost`), unless it is the end of the engine.
        """
        self._runner.report_defect(link, what)

    async def ask(self, link: Link, verb: str, timeout: float = ASK_TIMEOUT_S, **arguments: Any) -> Any:
        """The peer's answer. Raises what the peer raised, TimeoutError, PeerLostError, or WouldBlock (link full)."""
        if len(link.spokes) != 1:
            raise ValueError(f"{link.name!r} has {len(link.spokes)} spokes: use ask_all")
        return (await self.ask_all(link, verb, timeout, **arguments))[0]

    async def ask_all(self, link: Link, verb: str, timeout: float = ASK_TIMEOUT_S, **arguments: Any) -> list[Any]:
        """The answers of all spokes of a broadcast, in order of their index. Raises as `ask`."""
        return await self._runner.ask(link, verb, timeout, arguments)

    def start_soon(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """A task beside `run`. Its exception fails the actor; it is cancelled when the actor ends."""
        self._runner.start_task(function, *args)

    def work_aside(self, function: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Run a function that takes long on a thread beside the loop, and then `then` with its result on the loop.

        Its exception fails the actor, also one that is no `Exception` (a panic in a Rust library). Threads are started as
        they are needed; `statistics` counts what they do. When the actor ends meanwhile, the work is not waited for, and its result
        is dropped.
        """
        self._runner.work_aside(function, then)

    def report_progress(self) -> None:
        """Something came of the work: the supervisor's count of deaths in a row begins anew. Once after each is enough."""
        self._runner.report_progress()

    @property
    def has_runner(self) -> bool:
        """It was given to a runner, and can be asked for statistics."""
        return hasattr(self, "_runner")

    def statistics(self) -> dict[str, Any]:
        """Counters, as JSON values. Subclasses add theirs. From any thread: a link that is closed meanwhile is left out."""
        links: dict[str, Any] = {}
        for peer, link in list(self.links.items()):
            with contextlib.suppress(ValueError):  # of memory that was given back
                links[peer] = asdict(link.statistics())
        return {"name": self.name, "rank": self.rank, "links": links, **self._runner.counters()}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception in a form that crosses processes."""

    type_name: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        error = _innermost(error)
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    @property
    def summary(self) -> str:
        return f"{self.type_name}: {self.message}" if self.message else self.type_name

    def to_start_error(self, actor: str) -> ActorLLMError:
        """The exception for the caller that started the engine: of the original class if that is one of ours."""
        cls = own_class(self.type_name)
        error = cls(self.message) if cls is not None else EngineStartError(f"{actor} failed to start: {self.summary}")
        error.add_note(f"In {actor}:\n{self.traceback}")
        return error


def _innermost(error: BaseException) -> BaseException:
    """A group of one says no more than the one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def own_class(name: str) -> type[ActorLLMError] | None:
    """The exception class of this name, if it is one of ours."""
    cls = getattr(errors, name, None)
    return cls if isinstance(cls, type) and issubclass(cls, ActorLLMError) else None


def _error_of(reply: Reply, verb: str, peer: str) -> ActorLLMError:
    """The exception that a reply stands for."""
    assert reply.error is not None
    name, _, message = reply.error.partition(": ")
    cls = own_class(name)
    return cls(message) if cls is not None else EngineError(f"{peer} failed to answer {verb!r}: {reply.error}")


class _OpenAsk:
    """An ask of ours that waits for one reply per spoke."""

    __slots__ = ("done", "error", "link", "replies")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.replies: dict[int, Reply] = {}
        self.error: BaseException | None = None
        self.done = anyio.Event()


class Runner:
    """One life of one actor. Everything is called on the actor's loop.

    `live` is the task that owns the actor's tasks; beside it, and in this order: start, configure, install (each link),
    run. `on_end` hears of a failure, or (None) that `run` returned by itself, as soon as it happens; `live` returns
    when the teardown is through. `on_broken` hears of a corrupt link that the actor goes on without, `on_progress` of
    `Actor.report_progress`, `on_defect` of `Actor.report_defect`.
    """

    def __init__(
        self,
        actor: Actor,
        on_end: Callable[[BaseException | None], None],
        on_broken: Callable[[LinkInfo, BaseException], None] | None = None,
        on_progress: Callable[[], object] | None = None,
        on_defect: Callable[[LinkInfo, str], None] | None = None,
    ) -> None:
        self.actor = actor
        self.failure: BaseException | None = None
        self._on_end = on_end
        self._on_broken = on_broken
        self._on_progress = on_progress
        self._on_defect = on_defect
        self._tasks: TaskGroup
        self._ended: anyio.Event
        self._run_returned: anyio.Event | None = None
        self._is_ending = False
        self._last_ask = 0
        self._asks: dict[int, _OpenAsk] = {}
        self._owed: set[tuple[Link, int]] = set()
        self._unsent_replies: list[tuple[Link, Reply]] = []
        self._num_late_replies = 0
        self._num_refused = 0
        self._num_rechecks_useful = 0
        self._threads: anyio.CapacityLimiter | None = None
        self._aside: dict[object, float] = {}
        """Since when each function runs on a thread beside the loop."""
        self._num_aside_done = 0
        self._num_aside_failed = 0
        actor._runner = self

    async def live(self, on_alive: Callable[[], object] = bool) -> None:
        """From before the start until the end of the teardown. Calls `on_alive` when all other methods may be called."""
        self._ended = anyio.Event()
        self.actor._wakeup = HostLoop.current().waiter()
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._recheck)
                on_alive()
                await self._ended.wait()
                if self.failure is None and self._run_returned is not None:
                    with anyio.move_on_after(STOP_GRACE_S):
                        await self._run_returned.wait()
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._tear_down()

    # Setup

    async def start(self, config: Any) -> dict[str, Any]:
        """Raises what `on_start` raises, after the actor has failed with it. So does `configure`."""
        try:
            return await self.actor.on_start(config)
        except Exception as error:
            self.fail(error)
            raise

    async def configure(self, config: Any) -> None:
        try:
            result = self.actor.on_configure(config)
            if inspect.isawaitable(result):
                await result
        except Exception as error:
            self.fail(error)
            raise

    def install(self, link: Link) -> None:
        """Give the actor a link; one that it has to the same peer is drained and closed first."""
        if self._is_ending:
            link.close()
            return
        old = self.actor.links.get(link.peer)
        if old is not None:
            self._drop(old, PeerRestartedError(f"the link to {old.peer} was replaced by generation {link.generation}"))
        self.actor.links[link.peer] = link
        self._attempt(self.actor.on_link, link)
        link.open(self)

    def run(self) -> None:
        """Setup is over: start the main loop, unless it was started in an earlier attempt."""
        if not self._is_ending and self._run_returned is None:
            self._run_returned = anyio.Event()
            self.actor.is_running = True
            self._tasks.start_soon(self._run)

    # Running: what others tell

    def lose(self, name: str, generation: int, error: BaseException) -> None:
        """The peer of this link died. Nothing happens if the link has been replaced already."""
        for link in list(self.actor.links.values()):
            if link.name == name and link.generation == generation:
                self._drop(link, error)

    def report_progress(self) -> None:
        if self._on_progress is not None:
            self._on_progress()

    def report_defect(self, link: Link, what: str) -> None:
        if self._on_defect is not None:
            self._on_defect(link.info, what)

    def stop(self) -> None:
        """Begin the orderly end."""
        self.actor.is_running = False
        self._ended.set()
        self.actor._wakeup.set()

    def fail(self, error: BaseException) -> None:
        """Begin the end that follows an exception. Only the first counts."""
        error = _innermost(error)
        if self.failure is None and not self._is_ending:
            self.failure = error
            self.actor.is_running = False
            self._ended.set()
            self._on_end(error)
        elif error is not self.failure:
            logger.error("%s failed again while it ended", self.actor.name, exc_info=error)

    # Running: what links deliver

    def deliver(self, link: Link, message: Message) -> None:
        if self._is_ending or self.failure is not None:
            self._refuse(link, message)
            return
        try:
            if not self.actor.admits(link, message):
                return
            if type(message) is Reply:
                self._take_reply(link, message)
            elif type(message) is Ask:
                self._take_ask(link, message)
            else:
                self.actor.on_message(link, message)
        except BaseException as error:  # of the actor; also a panic in Rust, which is no Exception
            if not is_failure(error):
                raise
            self.fail(error)

    def end_batch(self) -> None:
        if self._is_ending:
            return
        try:
            self.actor.on_batch()
        except BaseException as error:  # of the actor; also a panic in Rust, which is no Exception
            if not is_failure(error):
                raise
            self.fail(error)

    def break_link(self, link: Link, error: BaseException) -> None:
        link = link.group or link
        if not link.is_open:
            return  # the other direction has said so
        self._part_with(link, error)  # what else it had sent is not believed
        self._attempt(self.actor.on_link_error, link, error)
        if self.failure is None and self._on_broken is not None:
            self._on_broken(link.info, error)

    # Asks

    async def ask(self, link: Link, verb: str, timeout: float, arguments: dict[str, Any]) -> list[Any]:
        link = link.group or link
        if self._is_ending:
            raise PeerLostError(f"{self.actor.name} has ended")
        self._last_ask += 1
        # Replies of a hub reach every spoke; the upper half says which spoke had asked.
        number = link.info.index << 32 | self._last_ask
        ask = _OpenAsk(link)
        self._asks[number] = ask
        try:
            data = arguments.get("data")
            if data is None:
                link.send_nowait(Ask(id=number, verb=verb, arguments=arguments))
            else:
                others = {name: value for name, value in arguments.items() if name != "data"}
                link.send_nowait(Ask(id=number, verb=verb, arguments=others, data=data))
            with anyio.move_on_after(timeout):
                await ask.done.wait()
        finally:
            del self._asks[number]
        if ask.error is not None:
            raise ask.error
        if not ask.done.is_set():
            silent = [spoke.peer for spoke in link.spokes if spoke.info.index not in ask.replies]
            raise TimeoutError(f"no answer to {verb!r} from {', '.join(silent)} within {timeout:g} s")
        values = []
        for spoke in link.spokes:
            reply = ask.replies[spoke.info.index]
            if reply.error is not None:
                raise _error_of(reply, verb, spoke.peer)
            values.append(reply.data if reply.data.size else reply.value)
        return values

    def _take_reply(self, link: Link, reply: Reply) -> None:
        ask = self._asks.get(reply.id)
        if ask is None:
            if link.group is None and reply.id >> 32 != link.info.index:
                return  # to another spoke of the same broadcast
            self._num_late_replies += 1
            return
        ask.replies[link.info.index] = reply
        if len(ask.replies) == len(ask.link.spokes):
            ask.done.set()

    def _take_ask(self, link: Link, ask: Ask) -> None:
        try:
            arguments = {**ask.arguments, "data": ask.data} if ask.data.size else ask.arguments
            value = self.actor.answer(ask.verb, arguments)
        except Exception as error:  # whatever it is, it is the answer to this question
            self._reply(link, Reply(id=ask.id, error=_error_text(error)))
            return
        if inspect.isawaitable(value):
            self._owed.add((link, ask.id))
            self._tasks.start_soon(self._answer_later, link, ask.id, value)
        else:
            self._reply(link, _reply_of(ask.id, value))

    async def _answer_later(self, link: Link, number: int, value: Awaitable[Any]) -> None:
        try:
            reply = _reply_of(number, await value)
        except Exception as error:  # whatever it is, it is the answer to this question
            reply = Reply(id=number, error=_error_text(error))
        self._owed.discard((link, number))
        self._reply(link, reply)

    def _reply(self, link: Link, reply: Reply) -> None:
        target = link.group or link
        if not target.is_open:
            self._num_refused += 1  # the peer that asked is gone
            return
        try:
            target.send_nowait(reply)
        except WouldBlock:
            self._unsent_replies.append((link, reply))
        except (TypeError, ValueError) as error:  # too long for a message, or nothing that travels: so says the answer
            logger.error("%s cannot send what %s asked for: %s", self.actor.name, link.peer, error)
            self._reply(link, Reply(id=reply.id, error=f"{EngineError.__name__}: the answer cannot be sent: {error}"))
        except TransportError as error:  # the words of the peer that asked are impossible
            self.break_link(target, error)

    # The end

    def _refuse(self, link: Link, message: Message) -> None:
        """A message that no handler will see any more: after a stop an ask is answered all the same."""
        self._num_refused += 1
        if isinstance(message, Ask):
            self._refuse_ask(link, message.id)

    def _refuse_ask(self, link: Link, number: int) -> None:
        """An actor that fails leaves it open: callers go on when they hear of the loss, and know whether another actor follows."""
        if self.failure is None:
            self._reply(link, Reply(id=number, error=f"{EngineError.__name__}: {self.actor.name} has stopped"))

    async def _tear_down(self) -> None:
        self._is_ending = True
        self.actor.is_running = False
        try:
            if self.failure is not None:
                self.actor.on_failure(self.failure)
            else:
                with anyio.move_on_after(TEARDOWN_TIMEOUT_S) as scope:
                    await self.actor.on_stop()
                if scope.cancelled_caught:
                    logger.error("%s: on_stop took more than %.0f s", self.actor.name, TEARDOWN_TIMEOUT_S)
        except Exception as error:  # of the hooks: the actor has failed then, unless it had before
            if self.failure is None:
                self.failure = error
                self._on_end(error)
            else:
                logger.exception("%s: on_failure failed", self.actor.name)
        for link in list(self.actor.links.values()):  # one that turns out to be corrupt is dropped
            link.finish()
        for link, number in self._owed:
            self._refuse_ask(link, number)
        with anyio.move_on_after(TEARDOWN_TIMEOUT_S):
            for link in list(self.actor.links.values()):
                await self._flush(link)
        for link in list(self.actor.links.values()):
            link.lost = link.lost or PeerLostError(f"{self.actor.name} has ended")
            self._close(link)

    async def _flush(self, link: Link) -> None:
        """The last replies must be in the ring before this end of it is closed."""
        try:
            await link.wait_flushed()
        except TransportError as error:
            logger.info("%s: the last messages to %s could not be sent: %s", self.actor.name, link.peer, error)

    def _drop(self, link: Link, error: BaseException) -> None:
        """The peer is gone: what it had sent is valid, what is asked of it fails, then the actor is told."""
        if not link.is_open:
            return
        link.finish()
        if not link.is_open:
            return  # what it had sent was impossible, and its loss has been told
        self._part_with(link, error)

    def _part_with(self, link: Link, error: BaseException) -> None:
        link.lost = error
        self._close(link)
        self._attempt(self.actor.on_peer_lost, link)

    def _close(self, link: Link) -> None:
        self.actor.links.pop(link.peer, None)
        link.close()
        gone = {link, *link.spokes}
        self._owed = {owed for owed in self._owed if owed[0] not in gone}
        self._unsent_replies = [unsent for unsent in self._unsent_replies if unsent[0] not in gone]
        for ask in self._asks.values():
            if ask.link is link and not ask.done.is_set():
                kind = PeerRestartedError if isinstance(link.lost, PeerRestartedError) else PeerLostError
                ask.error = kind(f"{link.peer} is gone: {link.lost}")
                ask.error.__cause__ = link.lost
                ask.done.set()

    # Tasks

    def start_task(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        self._tasks.start_soon(self._guard, function, args)

    def waker(self) -> Callable[[], object] | None:
        return partial(HostLoop.current().call_soon_threadsafe, self.actor.wake)

    def work_aside(self, function: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self.start_task(self._work_aside, function, then)

    async def _work_aside(self, function: Callable[[], Any], then: Callable[[Any], None]) -> None:
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(MAX_THREADS)
        result = await to_thread.run_sync(self._run_aside, function, abandon_on_cancel=True, limiter=self._threads)
        self._num_aside_done += 1
        then(result)

    def _run_aside(self, function: Callable[[], Any]) -> Any:
        """On the thread. What is no `Exception` would end the loop without a word, and not the actor alone."""
        key = object()
        self._aside[key] = now()
        try:
            return function()
        except BaseException as error:
            self._num_aside_failed += 1
            if isinstance(error, Exception):
                raise
            raise EngineError(f"work beside the loop failed: {type(error).__name__}: {error}") from error
        finally:
            del self._aside[key]

    async def _run(self) -> None:
        assert self._run_returned is not None
        await self._guard(self.actor.run, ())
        self._run_returned.set()
        if not self._ended.is_set():
            self.actor.is_running = False
            self._ended.set()
            self._on_end(None)

    async def _guard(self, function: Callable[..., Coroutine[Any, Any, None]], args: tuple[Any, ...]) -> None:
        try:
            await function(*args)
        except BaseException as error:  # of the actor; also a panic in Rust, which is no Exception
            if not is_failure(error):
                raise
            self.fail(error)

    def _attempt(self, hook: Callable[..., None], *args: Any) -> None:
        try:
            hook(*args)
        except BaseException as error:  # of the actor; also a panic in Rust, which is no Exception
            if not is_failure(error):
                raise
            self.fail(error)

    async def _recheck(self) -> None:
        while True:
            await anyio.sleep(RECHECK_S)
            if self.actor.heartbeat is not None:
                self.actor.heartbeat.beat()
            for link in list(self.actor.links.values()):
                self._num_rechecks_useful += link.recheck() > 0
            unsent, self._unsent_replies = self._unsent_replies, []
            for link, reply in unsent:
                self._reply(link, reply)

    def counters(self) -> dict[str, float]:
        running = list(self._aside.values())
        return {
            "num_aside_running": len(running),
            "num_aside_done": self._num_aside_done,
            "num_aside_failed": self._num_aside_failed,
            "longest_aside_s": max((now() - began for began in running), default=0.0),
            "num_asks_open": len(self._asks),
            "num_asks_owed": len(self._owed),
            "num_late_replies": self._num_late_replies,
            "num_refused": self._num_refused,
            "num_rechecks_useful": self._num_rechecks_useful,
        }


def _reply_of(number: int, value: Any) -> Reply:
    """Bytes travel as they are."""
    return Reply(id=number, data=value) if isinstance(value, np.ndarray) else Reply(id=number, value=value)


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
