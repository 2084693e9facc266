"""What is missing when rings, processes or loops cannot be made: as the supervisor waits for it, and as users are told of it."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Callable
from typing import TypeVar

from actorllm.errors import ActorLLMError, EngineStartError

T = TypeVar("T")

SHORTAGES = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN})
"""Why rings and processes cannot be made at the moment, and perhaps in the next."""

ENOUGH_FILES = 1024
"""What `ulimit -n` is in most shells: much more than any engine needs."""


def above_standard_streams(make: Callable[[], T]) -> T:
    """What is made with descriptors whose numbers are none of standard input, output and error.

    A daemon may lack these, and new descriptors would get their numbers. libuv ends the process when it is to close such a one, and
    a child process has its own streams there.
    """
    taken: list[int] = []
    try:
        while not taken or taken[-1] <= 2:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        return make()
    finally:
        for descriptor in taken:
            os.close(descriptor)


def shortage_of(error: BaseException | None) -> OSError | None:
    """What is missing that something could not be made, if it may be there in the next moment."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            return error
        error = error.__cause__
    return None


def as_start_error(error: Exception) -> Exception:
    """What the caller of a start is told: of a want of file descriptors, how many there may be and what to do.

    Everything else is returned as it is, unless it is an OSError, which is no error of the engine's own tree.
    A TimeoutError is left alone: the caller has asked for it.
    """
    if _is_of_descriptors(error):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        told: Exception = EngineStartError(
            f"the engine cannot start: a process may have {limit} files open (RLIMIT_NOFILE), and there is no room for what "
            f"the engine needs; allow more (ulimit -n {max(ENOUGH_FILES, 2 * limit)}), or close files that are not needed"
        )
    elif isinstance(error, OSError) and not isinstance(error, ActorLLMError | TimeoutError):
        told = EngineStartError(f"the engine cannot start: {error}")
        told.__cause__ = error
    else:
        return error
    return told


def _is_of_descriptors(error: BaseException | None) -> bool:
    """Here, or in a process that was started, whose exception has become text."""
    words = [f"[Errno {number}]" for number in (errno.EMFILE, errno.ENFILE)]
    words += [os.strerror(number) for number in (errno.EMFILE, errno.ENFILE)]
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        if isinstance(error, EngineStartError) and any(word in str(error) for word in words):
            return True
        error = error.__cause__
    return False


def interpreter() -> str:
    """The Python that runs processes of an engine. Raises FileNotFoundError: what would be started is the application again."""
    if getattr(sys, "frozen", False):
        raise FileNotFoundError(
            f"there is no Python to be started: this program is frozen, and sys.executable={sys.executable!r} is the program"
        )
    if not sys.executable:
        raise FileNotFoundError("there is no Python to be started: sys.executable is not known")
    return sys.executable
