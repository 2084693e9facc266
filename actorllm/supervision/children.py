"""`Child`: one life of one actor, wherever it runs: on the engine's loop, in a thread, in a process, in another program.

It is the supervisor's view, with the same verbs for every placement. A process has a control socket, a pidfd and a pipe
for its stderr; everything of it is released when it is gone. Made by the supervisor; `AttachServer` makes those of
attached frontends.

Invariants: processes are spawned by exec, from the engine thread only, since the parent-death signal follows the thread.
A process that reported a failure is gone soon after.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup

from actorllm.actors import child as child_program
from actorllm.actors.actor import Actor, Failure, Runner
from actorllm.actors.child import receive_frame, send_frame
from actorllm.actors.engine_thread import STOP_TIMEOUT_S, AsyncioLoop, LoopThread
from actorllm.actors.heartbeat import STARTING, Heartbeat, Sign, is_stopped
from actorllm.actors.link import Link, LinkInfo, open_ring
from actorllm.actors.search_path import search_path
from actorllm.actors.shortage import above_standard_streams, interpreter
from actorllm.actors.topology import ActorSpec, load, path_of
from actorllm.errors import ActorLLMError, EngineError, EngineShutdownError, EngineStartError
from actorllm.ring.channel import LinkEnd
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.interpreter_share import InterpreterShare
from actorllm.supervision.stderr_pipe import StderrPipe

logger = logging.getLogger(__name__)

DUMP_TIME_S = 0.2
"""How long a stuck process may take to write down where it is."""
EXIT_GRACE_S = 2.0
"""How long a process that reported a failure may take to exit."""


ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
"""Of every process, unless the user has set it: numpy starts a thread for each core when it is imported, and no actor has use
for them."""


class Child(ABC):
    """One life of one actor, wherever it runs. The supervisor's view: the same verbs for every placement."""

    is_process = False
    """It has a process of its own, here or elsewhere: a start that is tried again makes another one."""

    def __init__(self, spec: ActorSpec, on_end: Callable[[Any, ActorDeath], None]) -> None:
        self.spec = spec
        self.phase = "new"
        self.gone = anyio.Event()
        """Nothing of it runs any more."""
        self.on_broken: Callable[[str, int, str], None] = lambda link, generation, error: None
        """Hears (link, generation, error) of a link that the actor found corrupt and goes on without."""
        self.on_progress: Callable[[], object] = lambda: None
        """Hears that the actor's work has come to something (`Actor.report_progress`)."""
        self.on_defect: Callable[[str, str, int, str], None] = lambda peer, link, generation, what: None
        """Hears (peer, link, generation, what) of a defect that the actor has found in a peer (`Actor.report_defect`)."""
        self.on_work: Callable[[], object] = bool
        """To be called when `has_work` becomes true."""
        self._on_end = on_end

    @property
    def has_work(self) -> bool:
        """Whether it may wait for other actors, which are watched while it does."""
        return self.spec.placement == "attached"

    @property
    def is_linkable(self) -> bool:
        """It is configured: what it needs next are its links."""
        return self.phase in ("configured", "running")

    @abstractmethod
    async def spawn(self, tasks: TaskGroup, config: Any) -> None:
        """Make the place where it runs; leaves nothing behind if it raises."""

    @abstractmethod
    async def start(self, config: Any) -> dict[str, Any]:
        """`Actor.on_start`; returns its facts. This and the next two raise the error that the start ends with."""

    @abstractmethod
    async def configure(self, config: Any) -> None:
        """`Actor.on_configure`."""

    @abstractmethod
    async def run(self) -> None:
        """Start the main loop; returns when it is started."""

    @abstractmethod
    def install_ring(self, info: LinkInfo, end: LinkEnd) -> None:
        """Give it one end of a link over rings; the descriptors are taken over in any case."""

    @abstractmethod
    def lose(self, link: str, generation: int, error: ActorLLMError) -> None:
        """Its peer on this link is dead."""

    @abstractmethod
    def request_stop(self) -> None:
        """Begin the orderly end. `gone` follows."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, if it can be. From any thread."""

    def end_defective(self, what: str) -> None:  # noqa: B027 - an attached program is dropped by its peers
        """A peer has found this one at fault (what: "contradicting its plans: ..."): it ends, as a death."""

    @abstractmethod
    def close(self) -> None:
        """Release what is left, gone or not."""

    def statistics(self) -> dict[str, Any]:
        return {"placement": self.spec.placement, "phase": self.phase}


class LocalChild(Child):
    """An actor in this process, on this loop or on that of its own thread."""

    runner: Runner

    @abstractmethod
    def install(self, link: Link) -> None:
        """Give it one end of a link."""

    def _report_broken(self, info: LinkInfo, error: BaseException) -> None:
        self.on_broken(info.name, info.generation, str(error))

    def _report_defect(self, info: LinkInfo, what: str) -> None:
        self.on_defect(info.peer, info.name, info.generation, what)

    def end_defective(self, what: str) -> None:
        message = f"it was found {what}"
        self._on_end(self, ActorDeath(self.spec.name, failure=Failure(EngineError.__name__, message, "")))

    def _report_end(self, error: BaseException | None) -> None:
        self.phase = "failed" if error is not None else "ended"
        self._on_end(self, ActorDeath(self.spec.name, failure=None if error is None else Failure.of(error)))


class OwnerChild(LocalChild):
    """An actor on the engine thread's loop."""

    def __init__(self, spec: ActorSpec, on_end: Callable[[Any, ActorDeath], None], actor: Actor) -> None:
        super().__init__(spec, on_end)
        self.runner = Runner(actor, self._report_end, self._report_broken, on_defect=self._report_defect)

    @property
    def has_work(self) -> bool:
        return self.runner.actor.has_work

    async def spawn(self, tasks: TaskGroup, config: Any) -> None:
        alive = anyio.Event()
        tasks.start_soon(self._live, alive)
        await alive.wait()

    async def _live(self, alive: anyio.Event) -> None:
        try:
            await self.runner.live(alive.set)
        finally:
            self.gone.set()

    async def start(self, config: Any) -> dict[str, Any]:
        self.phase = "starting"
        return await self.runner.start(config)

    async def configure(self, config: Any) -> None:
        self.phase = "configuring"
        await self.runner.configure(config)
        self.phase = "configured"

    async def run(self) -> None:
        self.runner.run()
        self.phase = "running"

    def install(self, link: Link) -> None:
        self.runner.install(link)

    def install_ring(self, info: LinkInfo, end: LinkEnd) -> None:
        self.runner.install(open_ring(info, end))

    def lose(self, link: str, generation: int, error: ActorLLMError) -> None:
        self.runner.lose(link, generation, error)

    def request_stop(self) -> None:
        self.runner.stop()

    def kill(self) -> None:
        """It ends with this process."""

    def close(self) -> None:
        """Its runner has closed everything."""


class ThreadChild(LocalChild):
    """An actor on a loop and a thread of its own, for work that holds the loop."""

    def __init__(self, spec: ActorSpec, on_end: Callable[[Any, ActorDeath], None], loop: AsyncioLoop) -> None:
        super().__init__(spec, on_end)
        self._loop = loop
        self._thread = LoopThread(f"actorllm:{spec.name}")
        self._heartbeat = Heartbeat.of_thread()
        self._share: InterpreterShare | None = None  # of the step that computes
        self._is_stuck = False

    async def spawn(self, tasks: TaskGroup, config: Any) -> None:
        actor = new_actor(self.spec)
        actor.heartbeat = self._heartbeat
        self.runner = Runner(actor, self._report_end_there, self._report_broken_there)
        alive = anyio.Event()
        self._thread.start_thread()
        living = self._thread.call(self.runner.live, lambda: self._loop.call_soon_threadsafe(alive.set))
        living.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self.gone.set))
        try:
            await alive.wait()
        except BaseException:  # a stop during the start; the supervisor does not have this child yet
            self._thread.request_stop()
            self._thread.join(STOP_TIMEOUT_S)
            raise

    async def start(self, config: Any) -> dict[str, Any]:
        self.phase = "starting"
        facts: dict[str, Any] = await self._there(self.runner.start, config)
        return facts

    async def configure(self, config: Any) -> None:
        self.phase = "configuring"
        await self._there(self.runner.configure, config)
        self.phase = "configured"

    async def run(self) -> None:
        await self._there(self.runner.run)
        self.phase = "running"

    def install(self, link: Link) -> None:
        self._post(self.runner.install, link)

    def install_ring(self, info: LinkInfo, end: LinkEnd) -> None:
        end.close()
        raise TypeError(f"{self.spec.name} runs in a thread of the owner; its links are in memory")

    def lose(self, link: str, generation: int, error: ActorLLMError) -> None:
        self._post(self.runner.lose, link, generation, error)

    def request_stop(self) -> None:
        self._post(self.runner.stop)

    def kill(self) -> None:
        """A thread cannot be killed. It is a daemon: it ends with the process at the latest."""

    def sign(self) -> Sign | None:
        """What it shows of a step that it computes now, None: it computes none."""
        sign = self._heartbeat.read()
        ident = self._thread.ident
        if not sign.step or self.phase != "running" or ident is None or not self._thread.is_alive:
            self._share = None
            return None
        if self._share is None:
            self._share = InterpreterShare(ident)
        return replace(sign, share=self._share.look())

    def give_up_stuck(self, reason: str) -> None:
        """It does not go on, and that is the end of the engine: nothing can take its place while it may still come back."""
        message = (
            f"{reason}; its thread cannot be stopped and is abandoned (step_timeout_s says how long a step may take)"
        )
        logger.error("%s is stuck: %s", self.spec.name, message)
        self._is_stuck = True
        self.phase = "failed"
        self._on_end(self, ActorDeath(self.spec.name, failure=Failure("TimeoutError", message, self.stack())))

    def stack(self) -> str:
        """Where its thread is now, as in a traceback."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def close(self) -> None:
        self._thread.request_stop()
        if self.gone.is_set():  # what is left is to close its loop: its descriptors must not outlive the engine
            if not self._thread.join(STOP_TIMEOUT_S):
                logger.error("thread %s does not end and is abandoned", self._thread.name)
        elif not self._is_stuck:
            logger.error("thread %s does not react and is abandoned", self._thread.name)

    def _report_broken_there(self, info: LinkInfo, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._report_broken, info, error)

    def _report_end_there(self, error: BaseException | None) -> None:
        if not self._is_stuck:
            self._loop.call_soon_threadsafe(self._report_end, error)

    async def _there(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._loop.result_of(self._thread.call(function, *args))

    def _post(self, function: Callable[..., object], *args: Any) -> None:
        with contextlib.suppress(EngineShutdownError):  # the thread has ended and hears nothing
            self._thread.post(function, *args)


def new_actor(spec: ActorSpec) -> Actor:
    try:
        actor: Actor = load(spec.path)(spec.name, spec.rank)
    except Exception as error:
        raise Failure.of(error).to_start_error(spec.name) from error
    return actor


class RemoteChild(Child):
    """An actor in another process, told of its links over a control socket."""

    def install_ring(self, info: LinkInfo, end: LinkEnd) -> None:
        try:
            self._send(
                "link",
                end.fds,
                info=asdict(info),
                generation=end.generation,
                num_spokes=end.num_spokes,
                index=end.index,
            )
        finally:
            end.close()

    def lose(self, link: str, generation: int, error: ActorLLMError) -> None:
        self._send("lost", link=link, generation=generation, type_name=type(error).__name__, error=str(error))

    @abstractmethod
    def _send(self, op: str, fds: tuple[int, ...] = (), **fields: Any) -> None:
        """One frame to the other process; nothing happens when it is gone."""


class ProcessChild(RemoteChild):
    """An actor in a process of its own."""

    is_process = True

    def __init__(self, spec: ActorSpec, on_end: Callable[[Any, ActorDeath], None], loop: AsyncioLoop) -> None:
        super().__init__(spec, on_end)
        self.pid: int | None = None
        self._loop = loop
        self._heartbeat: Heartbeat | None = None
        self._kill_reason: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._pidfd = -1
        self._stderr: StderrPipe | None = None
        self._reports: dict[str, dict[str, Any]] = {}
        self._reported = anyio.Event()
        self.failure: Failure | None = None
        """What it reported before it exits."""
        self.death: ActorDeath | None = None
        """How it ended."""

    async def spawn(self, tasks: TaskGroup, config: Any) -> None:
        self._tasks = tasks
        try:
            environment = (
                ENVIRONMENT | os.environ | (load(self.spec.environment)(config) if self.spec.environment else {})
            )
            self._exec(environment)
        except Exception as error:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self.close()
            self.gone.set()
            raise Failure.of(error).to_start_error(self.spec.name) from error

    def _exec(self, environment: Mapping[str, str]) -> None:
        try:
            python = interpreter()
        except FileNotFoundError as error:
            raise EngineStartError(f"{error}; use topology='inline', whose actors are threads") from None
        with contextlib.ExitStack() as of_the_child:
            self._control, theirs = above_standard_streams(
                partial(socket.socketpair, socket.AF_UNIX, socket.SOCK_SEQPACKET)
            )
            of_the_child.callback(theirs.close)
            self._control.setblocking(False)
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            of_the_child.callback(os.close, write_end)
            self._stderr = StderrPipe(self._loop, read_end)
            # Inherited, until the child ignores them: else one that is not that far would die of what is for the owner.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, child_program.FOR_THE_OWNER)
            of_the_child.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
            self._process = subprocess.Popen(
                [python, "-P", child_program.__file__, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=write_end,  # what a library prints there must not end up in the output of the user's program
                stderr=write_end,
                env=environment,
                pass_fds=[theirs.fileno()],
                close_fds=True,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.watch(self._pidfd, self._on_exit)
        self._loop.watch(self._control.fileno(), self._on_readable)

    def park(self) -> None:
        """After `spawn`: let it load what it will need, and wait for `start`, which may never come."""
        self.phase = "parked"
        self._send("park", modules=self.spec.preload, sys_path=search_path())

    @property
    def parked_bytes(self) -> int | None:
        """What a parked process holds once it has loaded everything; None: it has not."""
        report = self._reports.get("parked")
        return None if report is None else int(report["memory_bytes"])

    def adopt(self, spec: ActorSpec, on_end: Callable[[Any, ActorDeath], None]) -> None:
        """A parked process is needed: as this actor, whose end is to be reported there."""
        self.spec = spec
        self.phase = "spawned"
        self._on_end = on_end

    async def start(self, config: Any) -> dict[str, Any]:
        self.phase = "starting"
        self._heartbeat, fd = Heartbeat.create()
        try:
            self._send_start(config, fd)
        finally:
            os.close(fd)
        facts: dict[str, Any] = (await self._report("started"))["facts"]
        self.phase = "started"
        return facts

    def _send_start(self, config: Any, heartbeat: int) -> None:
        self._send(
            "start",
            (heartbeat,),
            actor=self.spec.name,
            path=self.spec.path,
            rank=self.spec.rank,
            config_path=path_of(type(config)),
            config=config.to_json().decode(),
            modules=self.spec.preload,
            sys_path=search_path(),
        )

    async def configure(self, config: Any) -> None:
        self.phase = "configuring"
        self._send("configure", config=config.to_json().decode())
        await self._report("configured")
        self.phase = "configured"

    async def run(self) -> None:
        self._send("run")
        await self._report("ready")
        self.phase = "running"

    def request_stop(self) -> None:
        self._send("stop")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()  # knows when the process was reaped: never hits a stranger of the same pid

    @property
    def is_alive(self) -> bool:
        """There is a process, whatever it is at."""
        return self.pid is not None and not self.gone.is_set()

    def sign(self, start_budget_s: float) -> Sign | None:
        """What it shows of itself now, None: nothing any more. start_budget_s: for as long as it is not running."""
        if self.pid is None or self.gone.is_set():
            return None
        if self._heartbeat is None or self.phase not in ("started", "configured", "running"):
            return Sign(0, 0, STARTING, start_budget_s, is_stopped(self.pid))
        return self._heartbeat.read(
            is_stopped=is_stopped(self.pid)
        )  # its loop turns, also while it waits for the others

    def kill_stuck(self, reason: str) -> None:
        """It does not go on. A stopped process is killed at once, any other writes down first where it is."""
        logger.error("%s is stuck and is killed: %s", self.spec.name, reason)
        self._kill_reason = f"stuck: {reason}"
        assert self._process is not None
        if self.pid is None or is_stopped(self.pid):
            self.kill()
        else:
            self._process.send_signal(child_program.DUMP_SIGNAL)
            self._loop.call_later(DUMP_TIME_S, self.kill)

    def end_defective(self, what: str) -> None:
        self._kill_reason = what
        self.kill()

    def close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        if self._control is not None:
            self._loop.unwatch(self._control.fileno())
            self._control.close()
            self._control = None
        if self._pidfd >= 0:
            self._loop.unwatch(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._stderr is not None:
            self._stderr.close()

    def statistics(self) -> dict[str, Any]:
        return super().statistics() | {
            "pid": self.pid,
            "num_stderr_bytes_cut": 0 if self._stderr is None else self._stderr.num_cut,
        }

    def _send(self, op: str, fds: tuple[int, ...] = (), **fields: Any) -> None:
        """To a process that died meanwhile nothing is sent: its pidfd says so next. One that does not read is killed."""
        if self._control is None:
            return
        try:
            send_frame(self._control, op, fds, **fields)
        except (BrokenPipeError, ConnectionResetError):
            return
        except BlockingIOError:
            logger.error("%s does not read its control socket and is killed", self.spec.name)
            self._kill_reason = "stuck: it did not read its control socket"
            self.kill()

    async def _report(self, op: str) -> dict[str, Any]:
        while op not in self._reports:
            if self.death is not None:
                raise self.death.to_start_error()
            if self.failure is not None:
                raise self.failure.to_start_error(self.spec.name)
            await self._reported.wait()
        return self._reports[op]

    def _on_readable(self) -> None:
        while self._control is not None:
            try:
                frame, _ = receive_frame(self._control)
            except BlockingIOError:
                return
            if frame is None:
                self._loop.unwatch(self._control.fileno())  # it exits, or has closed its end: the pidfd knows
                return
            op = frame.pop("op")
            if op == "broken":
                self.on_broken(frame["link"], frame["generation"], frame["error"])
                continue
            if op == "progress":
                self.on_progress()
                continue
            if op == "defect":
                self.on_defect(frame["peer"], frame["link"], frame["generation"], frame["what"])
                continue
            if op == "failed":
                if self.failure is not None:
                    continue  # the first one is the cause of what goes wrong in its wake
                self.failure = Failure(**frame)
                self._tasks.start_soon(self._kill_late)
            self._reports[op] = frame
            self._wake()

    def _on_exit(self) -> None:
        """The pidfd is readable: the process is a zombie."""
        assert self._process is not None
        assert self._stderr is not None
        code = self._process.poll()
        if code is None:
            return
        self._on_readable()  # the failure that it reported, if any
        self._stderr.drain()
        self.death = ActorDeath(
            self.spec.name,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            failure=self.failure,
            # One that has just begun dies of being asked where it is.
            reason=self._kill_reason if code in (-signal.SIGKILL, -child_program.DUMP_SIGNAL) else None,
            last_words=self._stderr.last_lines(),
        )
        self.phase = "dead"
        self.close()
        self.gone.set()
        self._wake()
        self._on_end(self, self.death)

    def _wake(self) -> None:
        reported, self._reported = self._reported, anyio.Event()
        reported.set()

    async def _kill_late(self) -> None:
        with anyio.move_on_after(EXIT_GRACE_S):
            await self.gone.wait()
        if not self.gone.is_set():
            logger.error("%s reported a failure and does not exit; it is killed", self.spec.name)
            self.kill()
