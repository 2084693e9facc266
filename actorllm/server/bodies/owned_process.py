"""`OwnedProcess`: a child that answers one question after the other, over a socket, with frames of any size.

Owns the life of the child. The parent-death signal follows the thread that started it by exec, and `start` has one that lives
as long as the child. It ignores the signals of a terminal and ends with the socket. It is killed when a question is given up, as
nothing else can stop it. Nothing here is bound to an event loop.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue

from anyio import CapacityLimiter, to_thread, wait_readable, wait_writable

from actorllm.actors.child import FOR_THE_OWNER
from actorllm.actors.search_path import search_path
from actorllm.actors.shortage import above_standard_streams, interpreter
from actorllm.server.bodies.frames import NUM_LENGTH_BYTES

CHUNK = 1 << 18
"""Bytes of one read or write, so that the loop's other tasks get their turns between them."""

PROGRAM = "import json,sys; sys.path[:] = json.loads(sys.argv[3]); from {module} import main; main()"


class ProcessGone(Exception):
    """The child ended before it had answered."""


class OwnedProcess:
    def __init__(self, module: str) -> None:
        """module: with a `main` that reads its descriptor and the owner's pid from argv. Raises OSError."""
        ours, theirs = above_standard_streams(partial(socket.socketpair, socket.AF_UNIX, socket.SOCK_STREAM))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_OWNER)  # inherited until the child ignores them
        program = PROGRAM.format(module=module)
        try:
            process = subprocess.Popen(
                [interpreter(), "-P", "-c", program, str(theirs.fileno()), str(os.getpid()), json.dumps(search_path())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        ours.setblocking(False)
        self.pid = process.pid
        self._socket = ours
        self._process = process
        self._owner = os.getpid()
        self.is_idle = True
        """It has answered every question."""
        self._end = weakref.finalize(self, _end, process, ours, self._owner)

    @classmethod
    async def start(cls, module: str) -> OwnedProcess:
        """As the constructor, but away from the loop: a large host takes long to start a process. Raises OSError."""
        started: SimpleQueue[OwnedProcess | Exception] = SimpleQueue()
        arguments = cls, module, started
        try:
            threading.Thread(target=_start_and_stay, args=arguments, name="actorllm:starter", daemon=True).start()
        except RuntimeError as error:  # no thread to be had
            raise OSError(str(error)) from error
        outcome = await to_thread.run_sync(started.get, limiter=CapacityLimiter(1))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @property
    def is_alive(self) -> bool:
        return self._end.alive and os.getpid() == self._owner and self._process.poll() is None

    async def ask(self, question: Sequence[bytes | bytearray]) -> bytearray:
        """The answer to one question, which is the parts of a frame. Raises ProcessGone.

        One at a time; after any error, cancellation included, the caller has to `kill` it.
        """
        self.is_idle = False
        try:
            await self._send(sum(map(len, question)).to_bytes(NUM_LENGTH_BYTES, "little"))
            for part in question:
                await self._send(part)
            length = await self._receive(NUM_LENGTH_BYTES)
            answer = await self._receive(int.from_bytes(length, "little"))
            self.is_idle = True
            return answer
        except (OSError, EOFError) as error:
            raise ProcessGone(f"process {self.pid} has ended") from error

    async def _send(self, data: bytes | bytearray) -> None:
        with memoryview(data) as view:
            at = 0
            while at < len(view):
                await wait_writable(self._socket)
                with contextlib.suppress(BlockingIOError):
                    at += self._socket.send(view[at : at + CHUNK])

    async def _receive(self, number: int) -> bytearray:
        received = bytearray(number)
        with memoryview(received) as view:
            at = 0
            while at < number:
                await wait_readable(self._socket)
                with contextlib.suppress(BlockingIOError):
                    size = self._socket.recv_into(view[at : at + CHUNK])
                    if not size:
                        raise EOFError
                    at += size
        return received

    def kill(self) -> None:
        """From any thread. Idempotent; what is killed is reaped by `wait`, or when this object is dropped."""
        if self._end.alive and os.getpid() == self._owner:
            self._process.kill()

    def wait(self) -> None:
        """Kill it and release everything; takes as long as the system needs to take its memory back."""
        self._end()


def _start_and_stay(cls: type[OwnedProcess], module: str, started: SimpleQueue[OwnedProcess | Exception]) -> None:
    """Start a process, and return when it has ended. No reference to it is kept here, so that it may be dropped."""
    try:
        process = cls(module)
    except Exception as error:  # whatever it is, the caller of `start` waits for it
        started.put(error)
        return
    pid = process.pid
    started.put(process)
    del process
    with contextlib.suppress(ChildProcessError):  # it was waited for already
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _end(process: subprocess.Popen[bytes], control: socket.socket, owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
    control.close()
    if os.getpid() == owner:
        process.wait()
