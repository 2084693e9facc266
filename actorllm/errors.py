"""Every exception that the library raises on purpose.

    ActorLLMError
    ├── VLLMValidationError (ValueError)      the base of what vLLM raises under this name: the three that are marked with a *
    ├── ConfigError * (ValueError)            an engine argument is wrong; nothing was started
    │   └── UnknownArgumentError (TypeError)  no such argument; the nearest name is in the message
    ├── ModelError                            the model cannot be served
    │   ├── ModelNotFoundError (FileNotFoundError)
    │   ├── CorruptModelError                 a file of the model is unreadable or contradicts another
    │   └── UnsupportedModelError             the architecture or a feature of it is not there; says which
    ├── RequestError                          one request is wrong or failed; nothing else is affected
    │   ├── InvalidParameterError * (ValueError)
    │   │   └── UnknownParameterError (TypeError)
    │   ├── InvalidPromptError * (ValueError)
    │   ├── DuplicateRequestError (ValueError)
    │   ├── EngineOverloaded                  too much waits already; carries the counts and the limits
    │   └── RequestFailedError                the engine accepted the request and could not finish it
    ├── EngineError                           the engine as a whole
    │   ├── EngineStartError                  it never became ready; carries the child's own message
    │   ├── EngineDeadError                   a process died; names it and its last words
    │   ├── ReplicaLostError                  the replica that the request was pinned to is gone for good
    │   ├── EngineShutdownError               it was shut down before or while the call ran
    │   │   └── EngineDrainingError           it finishes what it has and takes no new requests
    │   ├── EngineSleepingError               it sleeps, and was told to refuse requests meanwhile
    │   ├── EngineNotFoundError               no engine of this name runs; lists those that do
    │   ├── AttachError                       it runs and cannot be joined: another version, another user, no answer, no router
    │   ├── CollectiveCallError               a function that workers called has raised; carries what each rank returned
    │   └── ForkedProcessError                it belongs to the process that built it, not to a fork of that process
    ├── DownloadError                         a public trace cannot be downloaded, or is not what it should be
    └── TransportError                        rings and links
        ├── WouldBlock                        a `_nowait` call that would have had to wait
        ├── CorruptLinkError                  a word or frame written by the peer is impossible; the link is dropped
        ├── PeerLostError                     the other end of a link is gone; pending asks end with it
        │   └── PeerRestartedError            and it comes back, with a new link
        └── SharedMemoryError (OSError)       /dev/shm is full, too small or not writable

Errors that also derive from a built-in do so that `except ValueError` of a program written for vLLM keeps working.
"""

from __future__ import annotations

import copy
import difflib
import itertools
import reprlib
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actorllm.types.request_end import RequestEnd
    from actorllm.types.request_metrics import RequestMetrics


class ActorLLMError(Exception):
    """Base of everything this library raises on purpose."""


class VLLMValidationError(ActorLLMError, ValueError):
    """A value that was given cannot be used: of an engine's argument, a sampling parameter or a prompt. vLLM's name."""


class ConfigError(VLLMValidationError):
    """An engine argument has a value that cannot be used."""


class UnknownArgumentError(ConfigError, TypeError):
    """An engine argument that does not exist."""


class ModelError(ActorLLMError):
    """The model cannot be served."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """No model under this name or in this folder."""


class CorruptModelError(ModelError):
    """A file of the model is unreadable, incomplete, or contradicts another file."""


class UnsupportedModelError(ModelError):
    """The architecture, or something the configuration asks for, is not supported; the message says what and why."""


class RequestError(ActorLLMError):
    """One request is wrong or failed. Every other request goes on."""


class InvalidParameterError(RequestError, VLLMValidationError):
    """A sampling parameter has the wrong type or is out of range."""


class UnknownParameterError(InvalidParameterError, TypeError):
    """A sampling parameter that does not exist."""


class InvalidPromptError(RequestError, VLLMValidationError):
    """The prompt is empty, too long, or holds ids outside the vocabulary."""


class DuplicateRequestError(RequestError, ValueError):
    """A request with this id is still running."""


class EngineOverloaded(RequestError):
    """So much waits already that this request was not taken: it may be tried again later, or elsewhere.

    Also of a request that waited and that a policy turned away, because it could not be served in time any more.
    num_waiting_requests, num_waiting_tokens: what waited when it came, of this program. max_waiting_requests,
    max_waiting_tokens: the limits for this program; None where there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        num_waiting_requests: int = 0,
        max_waiting_requests: int | None = None,
        num_waiting_tokens: int = 0,
        max_waiting_tokens: int | None = None,
    ) -> None:
        super().__init__(message)
        self.num_waiting_requests = num_waiting_requests
        self.max_waiting_requests = max_waiting_requests
        self.num_waiting_tokens = num_waiting_tokens
        self.max_waiting_tokens = max_waiting_tokens


class RequestFailedError(RequestError):
    """The engine accepted the request and could not finish it; the message is the engine's own."""

    end: RequestEnd | None = None
    """What the scheduler knows of it, if it was the scheduler that ended it."""
    metrics: RequestMetrics | None = None
    """Those of the request, where `end` is known."""


class EngineError(ActorLLMError):
    """The engine as a whole cannot do what was asked."""


class EngineStartError(EngineError):
    """The engine never became ready. The message is that of the process that failed."""


class EngineDeadError(EngineError):
    """A process of the engine died. The message names it and quotes its last words."""


class ReplicaLostError(EngineError):
    """The replica that this request was pinned to (`data_parallel_rank`) is gone for good."""


class EngineShutdownError(EngineError):
    """The engine was shut down before or during the call."""


class EngineDrainingError(EngineShutdownError):
    """The engine finishes the requests that it has, and takes no new ones: send this one elsewhere."""


class EngineSleepingError(EngineError):
    """The engine has given back its memory (`sleep`) and refuses requests until `wake_up`."""


class EngineNotFoundError(EngineError):
    """No running engine of this user has this name. The message lists those that do."""


class AttachError(EngineError):
    """The engine runs, and this process cannot join it; the message says why."""


class CollectiveCallError(EngineError):
    """A function that the workers called (`collective_rpc`, `apply_model`) has raised on some ranks. The engine goes on.

    Attributes:
        results: of all ranks, in the order of replicas and ranks; None of those that failed.
        errors: by index in `results`, what was raised there.
    """

    results: list[object]
    errors: dict[int, str]


class ForkedProcessError(EngineError):
    """The engine was built in a parent process; after a fork only the parent may use it."""


class DownloadError(ActorLLMError):
    """A file cannot be downloaded, or what came is something else."""


class TransportError(ActorLLMError):
    """A ring or a link cannot do what was asked."""


class WouldBlock(TransportError):
    """A `_nowait` call found the ring full or empty."""


class CorruptLinkError(TransportError):
    """The peer wrote a word or a frame that is impossible. The link must be dropped; nothing of the frame was used."""


class PeerLostError(TransportError, ConnectionError):
    """The other end of the link is gone."""


class PeerRestartedError(PeerLostError):
    """The other end of the link is gone and is started again: a new link follows, on which all has to be asked again."""


class SharedMemoryError(TransportError, OSError):
    """Shared memory could not be created: /dev/shm is full, too small or not writable."""


def is_failure(error: BaseException) -> bool:
    """Whether an exception tells that a call failed, and not that a task, thread or process is to end.

    A panic of a library in Rust is a failure, although its class is no `Exception`; pyo3 makes that class for each library.
    So is a SystemExit: where an actor runs, only code of the application raises it, and it would end the loop without a word.
    """
    return isinstance(error, Exception | SystemExit) or type(error).__name__ == "PanicException"


MAX_NEAR_NAME = 100
MAX_SHOWN = 100
"""Characters of a value in a message."""


def without_frames(error: BaseException) -> BaseException:
    """The exception without its tracebacks, for a place that keeps it; one that is not of this library has their text as a note.

    A traceback refers to frames, and these to all that they and their callers named, which may be an engine.
    """
    if error.__traceback__ is not None and not isinstance(error, ActorLLMError):
        error.add_note("".join(traceback.format_exception(error)))
    left, seen = [error], set[int]()
    while left:
        found = left.pop()
        if id(found) not in seen:
            seen.add(id(found))
            found.__traceback__ = None
            left += [one for one in (found.__cause__, found.__context__) if one is not None]
    return error


def copied(error: BaseException) -> BaseException:
    """A copy to raise of an exception that is kept: a raise adds the frames of the caller to what is raised."""
    try:
        own = copy.copy(error)
    except Exception:  # of a library: its constructor takes other arguments than it keeps
        return error
    own.__cause__, own.__context__ = error.__cause__, error.__context__
    return own.with_traceback(error.__traceback__)


def nearest_name(unknown: str, known: Iterable[str]) -> str:
    """The tail of an 'unknown name' message: `; did you mean 'x'?`, or nothing when no name is near.

    Takes a millisecond for a hundred known names; one much longer than those, which would take far longer, is near to none.
    """
    if len(unknown) > MAX_NEAR_NAME:
        return ""
    near = difflib.get_close_matches(unknown, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


class ShortRepr(reprlib.Repr):
    """As `repr` up to MAX_SHOWN characters, of values as large as a client may send: looks at no more than that. For one value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = MAX_SHOWN
        self.maxstring = self.maxlong = 4 * MAX_SHOWN
        self._left = MAX_SHOWN

    def repr1(self, x: Any, level: int) -> str:
        self._left -= 1  # each has a character at least
        return "..." if self._left < 0 else super().repr1(x, level)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        first = itertools.islice(x.items(), MAX_SHOWN)  # in its own order
        pairs = [f"{self.repr1(key, level - 1)}: {self.repr1(one, level - 1)}" for key, one in first]
        return f"{{{', '.join(pairs)}}}"

    def repr_instance(self, x: Any, level: int) -> str:
        return repr(x)


def shown(value: object) -> str:
    """For a message: short, whatever it is, at a cost that does not depend on its size."""
    try:
        text = ShortRepr().repr(value)
    except Exception:  # an integer of more digits than Python writes out, or an object's own failure
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def innermost(error: BaseException) -> BaseException:
    """What the first task of a group has raised, through all groups around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
