"""`WeightMemory`: memory files for new weights; those of a version that counts no more are written to again for a later one.

Fresh pages of shared memory cost several times the copy that fills them. So files of earlier versions are kept, up to the size of
the version that counts, and fewer where memory is short. One that is written to again is mapped from then on. A copy to
mapped pages takes a third of a write to the file. So the resident memory of this program counts them. A file that a process still
reads is never written to again. Any thread may call it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from actorllm.actors.memory_file import MemoryFile
from actorllm.model import memory

LEAST_BYTES = 1 << 20
"""Of a file that is kept: a few pages are soon had."""
MAX_FILES = 64
"""That are kept: each takes a descriptor."""
MAX_CHANGE = 0.25
"""What of its size a kept file may lose, or gain, for what is written to it next."""
MAX_OF_AVAILABLE = 0.25
"""What kept files may take of the memory that is available."""


@dataclass(frozen=True, slots=True)
class KeptFile:
    """Memory that waits for the next version."""

    num_bytes: int
    fd: int
    pages: NDArray[np.uint8] | None
    """All of it, mapped to write; None: it was written to once."""

    def close(self) -> None:
        os.close(self.fd)


class WeightFile(MemoryFile):
    """One of a `WeightMemory`, which gets its memory back when it is closed."""

    def __init__(self, owner: WeightMemory, fd: int, num_bytes: int) -> None:
        self.fd, self.num_bytes = fd, num_bytes
        self._owner = owner
        self._pages: NDArray[np.uint8] | None = None
        """None: it is new. Then a write takes less than mapping it."""

    def map(self, kept: KeptFile) -> None:
        """Write to its pages from here on. kept: what it was before, maybe of another size."""
        if kept.pages is not None and kept.num_bytes == self.num_bytes:
            self._pages = kept.pages
            return
        with contextlib.suppress(
            OSError, ValueError
        ):  # no room for a mapping, or nothing to map: it is written to instead
            pages = mmap.mmap(self.fd, self.num_bytes)
            self._pages = np.frombuffer(pages, np.uint8)

    def write(self, data: NDArray[np.uint8], at: int) -> None:
        if self._pages is None:
            super().write(data, at)
        else:
            np.copyto(self._pages[at : at + data.size], data)

    def close(self) -> None:
        """No other process can open it any more. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            pages, self._pages = self._pages, None
            self._owner.take_back(KeptFile(self.num_bytes, fd, pages))

    def __del__(self) -> None:
        # It is not kept: this may run at any moment, also where the lock is held.
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class WeightMemory:
    """See the module docstring."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held for moments."""
        self._kept: list[KeptFile] = []
        """The largest first."""
        self._lent: weakref.WeakSet[WeightFile] = weakref.WeakSet()
        self._is_closed = False

    @property
    def num_kept_bytes(self) -> int:
        """Of the files that wait for the next version."""
        with self._lock:
            return sum(kept.num_bytes for kept in self._kept)

    def new(self, num_bytes: int) -> WeightFile:
        """A file of this size with any contents, which nothing reads. Raises OSError."""
        kept = self._from_kept(num_bytes)
        if kept is None:
            made = MemoryFile("weights")
            fd, made.fd = made.fd, -1
            file = WeightFile(self, fd, num_bytes)
            os.ftruncate(fd, num_bytes)
        else:
            file = WeightFile(self, kept.fd, num_bytes)
            os.ftruncate(kept.fd, num_bytes)
            file.map(kept)
        with self._lock:
            self._lent.add(file)
        return file

    def room_for(self, num_bytes: int) -> int:
        """How many bytes of a new file of this size need no fresh memory: a kept file serves. Where none does, none is kept."""
        with self._lock:
            found = self._nearest(num_bytes)
            if found is not None:
                with contextlib.suppress(OSError):  # a worker has tensors that are views of it
                    fcntl.flock(found.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    fcntl.flock(found.fd, fcntl.LOCK_UN)
                    return min(found.num_bytes, num_bytes)
        self.clear()
        return 0

    def _nearest(self, num_bytes: int) -> KeptFile | None:
        """The one that is nearest in size; None: none is near. The lock is held."""
        near = [one for one in self._kept if abs(one.num_bytes - num_bytes) <= MAX_CHANGE * one.num_bytes]
        return min(near, key=lambda one: abs(one.num_bytes - num_bytes), default=None)

    def _from_kept(self, num_bytes: int) -> KeptFile | None:
        """None: there is none that may be written to."""
        while True:
            with self._lock:
                found = self._nearest(num_bytes)
                if found is None:
                    return None
                self._kept.remove(found)
            try:
                fcntl.flock(found.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # `MappedTensors` has the other lock
                return found
            except OSError:  # a worker has tensors that are views of it
                found.close()

    def take_back(self, file: KeptFile) -> None:
        """Keep the memory of a file, if there is room, under another number: a path that was told before is no file's."""
        try:
            room = int(MAX_OF_AVAILABLE * memory.available_bytes())
            again = -1 if file.num_bytes < LEAST_BYTES or self._is_closed else os.dup(file.fd)
        except OSError:  # no descriptor is left
            room, again = 0, -1
        file.close()
        if again < 0:
            return
        dropped: list[KeptFile] = []
        with self._lock:
            self._kept.append(replace(file, fd=again))
            self._kept.sort(key=lambda kept: kept.num_bytes, reverse=True)
            room = min(room, sum(file.num_bytes for file in self._lent if file.fd >= 0))
            while self._kept and (
                self._is_closed or len(self._kept) > MAX_FILES or sum(kept.num_bytes for kept in self._kept) > room
            ):
                dropped.append(self._kept.pop())
        for one in dropped:  # not under the lock: the system takes a tenth of a second for a GiB
            one.close()

    def clear(self) -> None:
        """Give back to the system what is kept."""
        with self._lock:
            kept, self._kept = self._kept, []
        for one in kept:
            one.close()

    def close(self) -> None:
        """Keep nothing from here on. Idempotent."""
        self._is_closed = True
        self.clear()
