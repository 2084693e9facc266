"""`WeightMemory`: memory files for new weights; those of a version that counts no more are written to again for a later one.

Fresh pages of shared memory cost several times the copy that fills them. So files of earlier versions are kept, up to the size of
the version that counts, and fewer where memory is short. A file that a process still reads is never written to again. Any thread
may call it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref

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


class WeightFile(MemoryFile):
    """One of a `WeightMemory`, which gets its memory back when it is closed."""

    def __init__(self, owner: WeightMemory, fd: int, num_bytes: int) -> None:
        self.fd, self.num_bytes = fd, num_bytes
        self._owner = owner

    def close(self) -> None:
        """No other process can open it any more. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._owner.take_back(fd, self.num_bytes)

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
        self._kept: list[tuple[int, int]] = []
        """Size and descriptor of each."""
        self._lent: weakref.WeakSet[WeightFile] = weakref.WeakSet()
        self._is_closed = False

    @property
    def num_kept_bytes(self) -> int:
        """Of the files that wait for the next version."""
        with self._lock:
            return sum(size for size, _ in self._kept)

    def new(self, num_bytes: int) -> WeightFile:
        """A file of this size with any contents, which nothing reads. Raises OSError."""
        fd = self._from_kept(num_bytes)
        if fd is None:
            made = MemoryFile("weights")
            fd, made.fd = made.fd, -1
        file = WeightFile(self, fd, num_bytes)
        os.ftruncate(fd, num_bytes)
        with self._lock:
            self._lent.add(file)
        return file

    def room_for(self, num_bytes: int) -> int:
        """How many bytes of a new file of this size need no fresh memory: a kept file serves. Where none does, none is kept."""
        with self._lock:
            found = self._nearest(num_bytes)
            if found is not None:
                with contextlib.suppress(OSError):  # a worker has tensors that are views of it
                    fcntl.flock(found[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
                    fcntl.flock(found[1], fcntl.LOCK_UN)
                    return min(found[0], num_bytes)
        self.clear()
        return 0

    def _nearest(self, num_bytes: int) -> tuple[int, int] | None:
        """Size and descriptor of the kept file that is nearest in size; None: none is near. The lock is held."""
        near = [one for one in self._kept if abs(one[0] - num_bytes) <= MAX_CHANGE * one[0]]
        return min(near, key=lambda one: abs(one[0] - num_bytes), default=None)

    def _from_kept(self, num_bytes: int) -> int | None:
        """The descriptor of a kept file; None: there is none that may be written to."""
        while True:
            with self._lock:
                found = self._nearest(num_bytes)
                if found is None:
                    return None
                self._kept.remove(found)
            try:
                fcntl.flock(found[1], fcntl.LOCK_EX | fcntl.LOCK_NB)  # `MappedTensors` has the other lock
                return found[1]
            except OSError:  # a worker has tensors that are views of it
                os.close(found[1])

    def take_back(self, fd: int, num_bytes: int) -> None:
        """Keep the memory of a file, if there is room, under another number: a path that was told before is no file's."""
        try:
            room = int(MAX_OF_AVAILABLE * memory.available_bytes())
            again = -1 if num_bytes < LEAST_BYTES or self._is_closed else os.dup(fd)
        except OSError:  # no descriptor is left
            room, again = 0, -1
        os.close(fd)
        if again < 0:
            return
        dropped: list[int] = []
        with self._lock:
            self._kept = sorted([*self._kept, (num_bytes, again)], reverse=True)
            room = min(room, sum(file.num_bytes for file in self._lent if file.fd >= 0))
            while self._kept and (
                self._is_closed or len(self._kept) > MAX_FILES or sum(size for size, _ in self._kept) > room
            ):
                dropped.append(self._kept.pop()[1])
        for one in dropped:  # not under the lock: the system takes a tenth of a second for a GiB
            os.close(one)

    def clear(self) -> None:
        """Give back to the system what is kept."""
        with self._lock:
            kept, self._kept = self._kept, []
        for _, fd in kept:
            os.close(fd)

    def close(self) -> None:
        """Keep nothing from here on. Idempotent."""
        self._is_closed = True
        self.clear()
