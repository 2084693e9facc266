"""`IntakeProcess`: a process that reads texts and renders templates for a worker, and that can be killed at any moment.

The owner's side; `intake_program` is the other. It is exec'd, so that no `__main__` guard is needed. It inherits one end of a
socket and nothing else, takes no signals of the terminal, and dies with its owner. What it sends is not trusted and is checked:
a template that breaks out of its sandbox is in there. Its memory is limited.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from actorllm.actors.child import FOR_THE_OWNER
from actorllm.actors.search_path import search_path
from actorllm.actors.shortage import above_standard_streams, interpreter
from actorllm.clock import now
from actorllm.errors import ActorLLMError, InvalidPromptError, RequestFailedError
from actorllm.intake import intake_program
from actorllm.intake.intake_program import BEGUN, ERROR, HEAD, RESULT

START_TIMEOUT_S = 120.0
"""Until it begins to work: it imports what it needs for that."""


class ProcessEndedError(Exception):
    """It has ended before it had begun with what it was asked."""


class IntakeProcess:
    """One process. `kill` may be called from any thread, the rest belongs to one tokenizer worker at a time.

    The kernel kills it when the thread that made it ends.
    """

    def __init__(self, memory_bytes: int, module: str | None = None, start_timeout_s: float = START_TIMEOUT_S) -> None:
        """Raises OSError where there is no room for one more.

        memory_bytes: what it may take, and the most that it may answer. module: of another program's `obey`; None: texts are
        read. start_timeout_s: until it begins to work.
        """
        self._memory_bytes = memory_bytes
        self._start_timeout_s = start_timeout_s
        self.num_asked = 0
        self.is_killed = False
        self._socket, theirs = above_standard_streams(partial(socket.socketpair, socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            # Inherited, until the child ignores them: else one that is not that far would die of what is for the owner.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_OWNER)
            try:
                self._process = subprocess.Popen(
                    [
                        *(interpreter(), "-P", intake_program.__file__, str(theirs.fileno()), str(os.getpid())),
                        *(str(memory_bytes), json.dumps(search_path())),
                        *(() if module is None else (module,)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # what goes wrong is told over the socket
                    env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
                    pass_fds=[theirs.fileno()],
                    close_fds=True,
                    start_new_session=True,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        weakref.finalize(self, _end, self._process, os.getpid())  # also at the end of the interpreter

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(
        self,
        request: tuple[Any, ...],
        timeout_s: float,
        on_begun: Callable[[], object],
        limit: str = "intake_timeout_s=",
        attachments: Iterable[memoryview] = (),
    ) -> bytes:
        """What the program answers to (operation, arguments ...), of values that JSON gives back as they were.

        on_begun: called when the work begins, whose time is limited. limit: what the limit is called before its value.
        attachments: bytes that follow the request.
        Raises what the program raised, ProcessEndedError, InvalidPromptError when the work took too long or the process died
        of it, ValueError for other values.
        """
        _check_plain(list(request))
        packed = json.dumps(request).encode()
        self.num_asked += 1
        has_begun = False
        try:
            self._socket.settimeout(self._start_timeout_s)
            self._socket.sendall(HEAD.pack(0, len(packed)))
            self._socket.sendall(packed)
            for attachment in attachments:
                self._socket.sendall(attachment)
            kind, _ = self._receive(now() + self._start_timeout_s)
            if kind == BEGUN:
                has_begun = True
                on_begun()
                kind, payload = self._receive(now() + timeout_s)
        except TimeoutError:
            self.kill()
            if not has_begun:
                raise RequestFailedError(
                    f"the intake process did not start within {self._start_timeout_s:g} s"
                ) from None
            raise too_long(timeout_s, limit) from None
        except (OSError, EOFError, ValueError) as error:
            if has_begun:
                raise InvalidPromptError(f"the process that read this prompt {self._last_words(error)}") from error
            raise ProcessEndedError(self._last_words(error)) from error
        if kind == RESULT:
            return payload
        raise _error(payload)

    def _receive(self, until: float) -> tuple[int, bytes]:
        kind, length = HEAD.unpack(self._exactly(HEAD.size, until))
        if kind not in (BEGUN, RESULT, ERROR) or length > self._memory_bytes:
            raise ValueError("sent an impossible answer")
        return kind, bytes(self._exactly(length, until))

    def _exactly(self, length: int, until: float) -> bytearray:
        data = bytearray()
        while len(data) < length:
            remaining = until - now()
            if remaining <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining)
            piece = self._socket.recv(min(length - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return data

    def _last_words(self, error: BaseException) -> str:
        self.kill()
        code = self._process.wait()
        if isinstance(error, ValueError):
            return str(error)
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"

    def kill(self) -> None:
        """End it at once. A thread that waits for an answer of it hears that it has ended."""
        self.is_killed = True
        self._process.kill()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """It is gone when this returns."""
        self.kill()
        self._process.wait()
        self._socket.close()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
        process.wait()


def _check_plain(value: Any) -> None:
    """Raises ValueError unless the other side gets the same: a tuple would become a list, and a key a string."""
    kind = type(value)
    if kind is dict and all(type(key) is str for key in value):
        value = value.values()
    elif kind is not list:
        if kind not in (str, int, float, bool, type(None)):
            raise ValueError(f"{kind.__name__} does not travel")
        return
    for one in value:
        _check_plain(one)


def too_long(timeout_s: float, limit: str = "intake_timeout_s=") -> InvalidPromptError:
    """What a request is told whose prompt cannot be read in time."""
    return InvalidPromptError(
        f"reading this prompt (chat template, tokenizer) took more than {limit}{timeout_s:g} s and was ended; "
        f"change or shorten it"
    )


def _error(payload: bytes) -> ActorLLMError:
    from actorllm.actors.actor import own_class

    name, _, message = payload.decode(errors="replace").partition("\n")
    return (own_class(name) or InvalidPromptError)(message)
