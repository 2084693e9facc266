"""`MemoryFile`: memory that other processes of this user open by its number in this process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class MemoryFile:
    """It has no name of its own. So it goes with this process, whatever kills it."""

    @classmethod
    def opened(cls, path: str) -> MemoryFile:
        """That of another process of this user, which may end. Raises OSError."""
        file = cls.__new__(cls)
        file.fd = -1
        file.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return file

    @classmethod
    def opened_as_told(cls, told: str) -> MemoryFile:
        """As `opened`, by what `told_of` said. Raises OSError, also where the number is another file's by now."""
        inode, _, path = told.partition(":")
        file = cls.opened(path)
        if os.fstat(file.fd).st_ino != int(inode):
            file.close()
            raise FileNotFoundError(f"{path} is another file by now")
        return file

    def __init__(self, purpose: str, num_bytes: int = 0) -> None:
        """purpose: a word for listings of open files. Raises OSError."""
        self.fd = -1
        self.fd = os.memfd_create(f"actorllm-{purpose}", os.MFD_CLOEXEC)
        if num_bytes:
            os.ftruncate(self.fd, num_bytes)

    @property
    def path(self) -> str:
        """Under which other processes open it, as long as it is not closed."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def write(self, data: NDArray[np.uint8], at: int) -> None:
        """Bytes from the at-th on. Raises OSError.

        A write fills whole pages, which a mapping would have cleared before, and takes half of the processor time.
        """
        done = 0
        while done < data.size:
            done += os.pwrite(self.fd, data[done:].data, at + done)

    def clear(self) -> None:
        """Give the memory back, and be empty as at first; no process may have it mapped."""
        os.ftruncate(self.fd, 0)

    def close(self) -> None:
        """No other process can open it any more. Mappings stay. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def told_of(path: str) -> str:
    """For another process: the path of a file that is open now, and what tells it from a later one of the same number."""
    return f"{os.stat(path).st_ino}:{path}"
