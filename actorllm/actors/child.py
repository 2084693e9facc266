"""The main program of a spawned actor, and the control protocol between it and the supervisor.

Run as `python -P child.py <control descriptor> <pid of the owner>`. It is run by path, so that it works before the first frame
has set sys.path to that of the owner. The owner's `__main__` is thereby never imported: no guard is needed, and a REPL, a
notebook, stdin and `python -c` work. Until the first frame only the standard library is imported.

The control socket is a SEQPACKET pair: one JSON object per packet, in order, descriptors beside it.

    supervisor → child    park {modules, sys_path}: import these, and wait for what follows, perhaps for ever
                          start {actor, path, rank, config_path, config, modules, sys_path} + the descriptor of its heartbeat
                          configure {config} · link {info, generation, num_spokes, index} + descriptors · run
                          lost {link, generation, type_name, error} · stop
    child → supervisor    parked {memory_bytes}: everything is imported
                          started {facts} · configured · ready · failed {type_name, message, traceback} · progress
                          broken {link, generation, error}: this link is corrupt, and the actor goes on without it
                          defect {peer, link, generation, what}: this peer has a defect, and is to be ended

Invariants: the child never outlives the owner, by the parent-death signal and by the end of the control socket. Ctrl-C and
SIGTERM belong to the owner, which may have work to finish when a terminal or a service manager signals all processes. A failure
is reported before the process exits. Exit code 0 after a stop, 1 after a failure. Started by the supervisor only.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from actorllm.actors.actor import Runner
    from actorllm.actors.link import LinkInfo
    from actorllm.errors import ActorLLMError

MAX_PACKET = 1 << 17
MAX_DESCRIPTORS = 250
MAX_TRACEBACK = 1 << 14

FOR_THE_OWNER = (signal.SIGINT, signal.SIGTERM)
"""Signals that processes of an engine ignore. They are spawned with them blocked."""

OWNER_GONE = 117
"""Exit code of a child whose owner went away; no process is left to see it."""

LOWEST_PRIORITY = 19
NUM_TRIES = 20
RETRY_S = 0.11
"""As `nice` counts."""

DUMP_SIGNAL = signal.SIGUSR2
"""Makes it write the stacks of its threads to stderr, whatever it is at."""

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15


# The control protocol -------------------------------------------------------------------------------------------------


def send_frame(control: socket.socket, op: str, fds: tuple[int, ...] = (), **fields: Any) -> None:
    """One packet. Raises OSError (EPIPE: the other side is gone; EAGAIN: it has not read for very long) or ValueError."""
    packet = json.dumps({"op": op, **fields}).encode()
    if len(packet) > MAX_PACKET:
        raise ValueError(f"a control frame {op!r} of {len(packet)} bytes; the limit is {MAX_PACKET}")
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    control.sendmsg([packet], ancillary, socket.MSG_NOSIGNAL)


def receive_frame(control: socket.socket) -> tuple[dict[str, Any] | None, tuple[int, ...]]:
    """The next packet and its descriptors, which the caller owns. (None, ()): the other side is gone.

    Raises BlockingIOError when there is none and the socket does not block, ValueError when it is no JSON.
    """
    fds = array.array("i")
    room = socket.CMSG_SPACE(MAX_DESCRIPTORS * fds.itemsize)
    try:
        packet, ancillary, _, _ = control.recvmsg(MAX_PACKET, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # Said once, when the other side closed before it had read everything. Its own last words are still there.
        packet, ancillary, _, _ = control.recvmsg(MAX_PACKET, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    try:
        return (json.loads(packet) if packet else None), tuple(fds)
    except ValueError:
        for fd in fds:
            os.close(fd)
        raise


# The child ------------------------------------------------------------------------------------------------------------


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with_owner(int(sys.argv[2]))
    control.set_inheritable(False)
    for number in FOR_THE_OWNER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_OWNER)
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    start, fds = receive_frame(control)
    if start is not None and start["op"] == "park":
        park(control, start)
        start, fds = receive_frame(control)
    if start is None:
        os._exit(OWNER_GONE)
    name_process(f"actor:{start['actor']}")
    sys.path[:] = start["sys_path"]
    try:
        is_failed = live(control, start, fds)
    except BaseException as error:
        # Before the actor exists, or a defect of the runtime itself; what an actor raises is reported by its runner.
        report_failure(control, type(error).__name__, str(error), traceback.format_exc())
        is_failed = True
    end(is_failed)


def end(is_failed: bool) -> NoReturn:
    """End this process without the interpreter's own finalization.

    The finalization looks at every object that torch made, which takes half a second of processor time. The supervisor waits
    for the end of a process, to replace it or to let `shutdown()` return. What was registered with `atexit` runs after a stop;
    after a failure it does not, since the state of the process is not to be trusted.
    """
    if not is_failed:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, without a reader, or closed by a library
            stream.flush()
    os._exit(is_failed)


def park(control: socket.socket, frame: dict[str, Any]) -> None:
    """Load what takes long, so that an actor that needs a process gets one that is nearly ready; then say what it costs.

    On a thread of the lowest priority, since streams go on meanwhile. The main thread keeps its own: a process without
    privileges cannot raise a priority again.
    """
    name_process("actor:parked")
    sys.path[:] = frame["sys_path"]
    errors: list[BaseException] = []

    set_session_niceness(LOWEST_PRIORITY)

    def load() -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
            load_modules(frame["modules"])
        except BaseException as error:  # on a thread: it is raised again where the imports are awaited
            errors.append(error)

    loader = threading.Thread(target=load, name="actorllm:parked")
    loader.start()
    loader.join()
    set_session_niceness(0)
    if errors:
        raise errors[0]
    send_frame(control, "parked", memory_bytes=proportional_bytes())


def load_modules(names: list[str]) -> None:
    """Import these without the garbage collector, which looks again and again at what stays for the life of the process."""
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        gc.enable()


def set_session_niceness(niceness: int) -> None:
    """Of the session of this process, against other sessions. From 0 to 19; needs no privileges in either direction.

    Where the kernel groups processes by session (sched_autogroup_enabled), the niceness of a process counts within its
    session only, and each process of an engine has a session of its own. Does nothing where there are no such groups.
    """
    for _ in range(NUM_TRIES):
        try:
            with open("/proc/self/autogroup", "w") as file:
                file.write(str(niceness))
            return
        except BlockingIOError:  # the kernel takes ten changes a second, of all processes together
            time.sleep(RETRY_S)
        except OSError:
            return


def proportional_bytes() -> int:
    """The memory of this process, what it shares with others counted by its share; 0: the kernel does not say."""
    try:
        with open("/proc/self/smaps_rollup") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def die_with_owner(owner: int) -> None:
    """SIGKILL when the thread that spawned this process ends, and the end now if that has happened already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != owner:
        os._exit(OWNER_GONE)


def name_process(name: str) -> None:
    """What ps and top show; the kernel keeps 15 characters."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]), 0, 0, 0)


def report_failure(control: socket.socket, type_name: str, message: str, text: str) -> None:
    send_frame(control, "failed", type_name=type_name, message=message[:MAX_TRACEBACK], traceback=text[-MAX_TRACEBACK:])


def live(control: socket.socket, start: dict[str, Any], fds: tuple[int, ...]) -> bool:
    """The actor's whole life; True when it failed. fds: its heartbeat, if a watchdog looks at it."""
    from actorllm.actors.actor import Failure, Runner
    from actorllm.actors.engine_thread import run_loop
    from actorllm.actors.heartbeat import Heartbeat
    from actorllm.actors.topology import load

    def report(error: BaseException | None) -> None:
        if error is not None:
            failure = Failure.of(error)
            report_failure(control, failure.type_name, failure.message, failure.traceback)

    load_modules(start["modules"])
    actor = load(start["path"])(start["actor"], start["rank"])
    for fd in fds:
        actor.heartbeat = Heartbeat(fd)
        os.close(fd)
    config_class = load(start["config_path"])

    def report_broken(info: LinkInfo, error: BaseException) -> None:
        send_frame(control, "broken", link=info.name, generation=info.generation, error=str(error)[:MAX_TRACEBACK])

    def report_defect(info: LinkInfo, what: str) -> None:
        about, link = what[:MAX_TRACEBACK], info.name
        send_frame(control, "defect", peer=info.peer, link=link, generation=info.generation, what=about)

    runner = Runner(actor, report, report_broken, lambda: send_frame(control, "progress"), report_defect)
    run_loop(ChildProgram(control, runner, config_class).run, config_class.from_json(start["config"]))
    return runner.failure is not None


def error_of_loss(frame: dict[str, Any]) -> ActorLLMError:
    """The exception that a "lost" frame stands for."""
    from actorllm.actors.actor import own_class
    from actorllm.errors import EngineDeadError

    return (own_class(frame["type_name"]) or EngineDeadError)(frame["error"])


class ChildProgram:
    """Does what the control socket says: setup frames one after the other, stop and the end of the socket at once."""

    def __init__(self, control: socket.socket, runner: Runner, config_class: Any) -> None:
        self._control = control
        self._runner = runner
        self._config_class = config_class
        self._frames: deque[tuple[dict[str, Any], tuple[int, ...]]] = deque()

    async def run(self, config: Any) -> None:
        import anyio

        from actorllm.actors.engine_thread import current_loop

        loop = current_loop()
        self._arrived = loop.waiter()
        self._setup_scope = anyio.CancelScope()
        self._control.setblocking(False)
        loop.watch(self._control.fileno(), self._on_readable)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._obey, config)
            await self._runner.live()
            tasks.cancel_scope.cancel()
        loop.unwatch(self._control.fileno())

    def _on_readable(self) -> None:
        while True:
            try:
                frame, fds = receive_frame(self._control)
            except BlockingIOError:
                break
            if frame is None:
                os._exit(OWNER_GONE)
            if frame["op"] == "stop":
                self._setup_scope.cancel()
                self._runner.stop()
            else:
                self._frames.append((frame, fds))
        self._arrived.set()

    async def _obey(self, config: Any) -> None:
        with self._setup_scope:
            try:
                facts = await self._runner.start(config)
                send_frame(self._control, "started", facts=facts)
                while True:
                    while self._frames:
                        await self._obey_frame(*self._frames.popleft())
                    await self._arrived.wait()
            except Exception as error:  # the frame is a defect of either side, and this actor cannot go on
                self._runner.fail(error)

    async def _obey_frame(self, frame: dict[str, Any], fds: tuple[int, ...]) -> None:
        from actorllm.actors.link import LinkInfo, open_ring
        from actorllm.actors.topology import ATTACHED
        from actorllm.errors import TransportError
        from actorllm.ring.channel import LinkEnd

        match frame["op"]:
            case "configure":
                await self._runner.configure(self._config_class.from_json(frame["config"]))
                send_frame(self._control, "configured")
            case "link":
                end = LinkEnd(frame["generation"], frame["num_spokes"], frame["index"], fds)
                info = LinkInfo.from_json(frame["info"])
                try:
                    link = open_ring(info, end)
                except (TransportError, OSError, ValueError) as error:
                    if not info.peer.startswith(ATTACHED):
                        raise  # nothing goes on without this peer: another process, which has room, takes this place
                    # No room for the link of a program that joined (descriptors, memory), or it is damaged. That program
                    # alone is told, also while this process starts: all others have a scheduler.
                    send_frame(self._control, "broken", link=info.name, generation=info.generation, error=str(error))
                else:
                    self._runner.install(link)
            case "run":
                gc.collect()
                gc.freeze()  # what start-up made lives as long as the process: no collection looks at it again
                self._runner.run()
                send_frame(self._control, "ready")
            case "lost":
                self._runner.lose(frame["link"], frame["generation"], error_of_loss(frame))
            case op:
                raise ValueError(f"control frame {op!r} is unknown")


if __name__ == "__main__":
    main()
