"""Files that hold what users wrote: prompts, request ids. For their owner alone, and never through a link.

A name in a folder that others may write to, such as /tmp, may be a link that another user made, or that user's file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import IO

from actorllm.errors import ConfigError

MODE = 0o600


def open_private(path: str | Path, *, is_emptied: bool = True) -> IO[bytes]:
    """Open a file for writing, with mode 0600. What cannot be written raises OSError; what must not be, ConfigError."""
    try:
        # O_NONBLOCK: a pipe without a reader is refused and not waited for.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, MODE)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise ConfigError(f"{str(path)!r} is a link: name the file itself") from None
        if error.errno == errno.ENXIO:
            raise ConfigError(f"{str(path)!r} is no regular file: name one, or a new one") from None
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{str(path)!r} is no regular file: name one, or a new one")
        if found.st_uid != os.geteuid():
            raise ConfigError(f"{str(path)!r} belongs to another user (uid {found.st_uid}): name a new file")
        if found.st_nlink > 1:
            raise ConfigError(f"{str(path)!r} is a link: the file has {found.st_nlink} names; name a new one")
        if is_emptied:
            if stat.S_IMODE(found.st_mode) != MODE:
                os.fchmod(fd, MODE)
            os.ftruncate(fd, 0)
        return os.fdopen(fd, "wb")
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise


def check_private(path: str | Path | None, argument: str) -> None:
    """Whether a file can be written, before anything is started; it is there then. Raises ConfigError naming the argument."""
    if path is None:
        return
    try:
        open_private(path, is_emptied=False).close()
    except ConfigError as error:
        raise ConfigError(f"{argument}={error}") from None
    except OSError as error:
        raise ConfigError(f"{argument}={str(path)!r} cannot be written: {error.strerror}") from error
