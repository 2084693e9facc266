"""`SlotFile`: KV blocks in a file of fixed slots, on a disk or in memory, which several processes share.

A file has a header, an index and slots. A block has a key of 32 bytes, its hash. The key names a set of WAYS slots, and a block
is in one of them. So a look-up reads one place, and the file never grows. In a full set the slot that was used longest ago
gives way.

Layout: a header of PAGE bytes, the index, and slots from a multiple of PAGE on. The index has the keys, [num_slots, 4] uint64,
times of the last use, float64, numbers of the last claim, uint64, and checksums, uint32. All but the slots is mapped.

*Sharing.* A writer claims a slot under the lock of its set, which is held for microseconds: the key is cleared. It writes the
block. It enters the checksum and the key under the lock, if no other writer has claimed the slot meanwhile. Readers take no
lock. They check the checksum, which covers the key and the block. So a block
that is half written is not found, whether its writer is alive, was killed, or wrote to a disk that forgot.

*Restarts.* The file keeps what it has. Its name and its header have a fingerprint of all that the bits of a block depend on
besides the hash (`fingerprint`). A file whose header is not as it should be is replaced by an empty one.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 32
PAGE = 4096
WAYS = 8
"""Slots of a set."""
BYTES_PER_ENTRY = KEY_BYTES + 8 + 8 + 4
MAGIC = b"actorllm KV 1\0\0\0"
HEADER = struct.Struct("<16s32sQQ")
MAX_SLOTS = 1 << 24
LOCK_TRIES, LOCK_PAUSE_S = 10, 0.001
LOCK = struct.Struct("hhqqi4x")
"""`struct flock`."""

Views = Sequence[memoryview]
"""A block, in as many pieces as the cache has it."""


class SlotFile:
    """See the module docstring. `read` may be called from several threads at a time, all else from one."""

    def __init__(self, path: str, fingerprint: bytes, slot_bytes: int, num_bytes: int) -> None:
        """Opens the file, or makes it.

        Arguments:
            path: of a file; or of memory without a name (`/proc/.../fd/...`), which is filled where it is.
            fingerprint: 32 bytes.
            slot_bytes: of a block.
            num_bytes: how large the file may get; at least one set of slots.

        Raises:
            ValueError: num_bytes is too small.
            OSError: it cannot be made, or there is no room for its index.
        """
        self.path = path
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots_of(slot_bytes, num_bytes)
        if not self.num_slots:
            least = WAYS * (slot_bytes + BYTES_PER_ENTRY) + 2 * PAGE
            raise ValueError(
                f"{num_bytes} bytes hold less than {WAYS} blocks of {slot_bytes} bytes; {least} are needed"
            )
        self._header = HEADER.pack(MAGIC, fingerprint, slot_bytes, self.num_slots)
        self._first = _first_slot(self.num_slots)
        self._size = self._first + self.num_slots * slot_bytes
        self._fd = self._open()
        try:
            self._map = mmap.mmap(self._fd, self._first)
        except BaseException:
            os.close(self._fd)
            raise
        at = PAGE
        self._keys: NDArray[np.uint64] = np.frombuffer(self._map, np.uint64, 4 * self.num_slots, at).reshape(
            -1, WAYS, 4
        )
        at += KEY_BYTES * self.num_slots
        self._used: NDArray[np.float64] = np.frombuffer(self._map, np.float64, self.num_slots, at)
        at += 8 * self.num_slots
        self._claims: NDArray[np.uint64] = np.frombuffer(self._map, np.uint64, self.num_slots, at)
        at += 8 * self.num_slots
        self._checksums: NDArray[np.uint32] = np.frombuffer(self._map, np.uint32, self.num_slots, at)
        self._num_sets = np.uint64(self.num_slots // WAYS)

    def close(self) -> None:
        """Idempotent. From here on the index is empty."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        self._keys = np.zeros((1, WAYS, 4), np.uint64)
        self._num_sets = np.uint64(1)
        self._used, self._claims, self._checksums = (
            self._used[:0].copy(),
            self._claims[:0].copy(),
            self._checksums[:0].copy(),
        )
        self._map.close()  # it has a descriptor of its own

    # Looking up: of the index alone, by any process

    def contains(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Of each of these keys, [n, 4], whether the index has it."""
        sets = (keys[:, 0] % self._num_sets).astype(np.intp)
        found: NDArray[np.bool_] = (self._keys[sets] == keys[:, None, :]).all(2).any(1)
        return found

    def remove(self, keys: NDArray[np.uint64]) -> None:
        """What the slots of these keys have is wrong."""
        for key in keys:
            number = int(key[0] % self._num_sets)
            # In a file of an older version two writers of one block may both have entered it.
            for way in (self._keys[number] == key).all(1).nonzero()[0].tolist():
                self._keys[number, way] = 0
                self._used[number * WAYS + way] = 0.0

    # Moving

    def write(self, key: NDArray[np.uint64], views: Views) -> bool:
        """Keep a block. False: another process was in the way, or there was no room on the disk; then it is not kept."""
        slot = self._find(key)
        if slot >= 0:
            self._used[slot] = time.time()
            return True
        claim = np.uint64(int.from_bytes(os.urandom(8), "little"))
        number = int(key[0] % self._num_sets)
        with self._locked(number) as has_lock:
            if not has_lock:
                return False
            first = number * WAYS
            slot = first + int(self._used[first : first + WAYS].argmin())
            self._keys[slot // WAYS, slot % WAYS] = 0
            self._used[slot], self._claims[slot] = time.time(), claim
        checksum = _checksum(key, views)
        try:
            _transfer(os.pwritev, self._fd, views, self._first + slot * self.slot_bytes)
        except OSError:  # of a full disk, or of one that is gone
            self._give_back(slot, claim)
            return False
        with self._locked(number) as has_lock:
            if not has_lock or self._claims[slot] != claim:
                self._give_back(slot, claim)
                return False
            if self._find(key) < 0:  # else another writer of the same block was sooner
                self._checksums[slot] = checksum
                self._keys[slot // WAYS, slot % WAYS] = key
            else:
                self._give_back(slot, claim)
        return True

    def _give_back(self, slot: int, claim: np.uint64) -> None:
        """Let a slot that was claimed and stays empty be the next one that is taken, unless another writer has claimed it."""
        if self._claims[slot] == claim:
            self._used[slot] = 0.0

    def read(self, key: NDArray[np.uint64], views: Views) -> bool:
        """Fill a block. False: it is not here, or not as it was written; then it holds anything."""
        slot = self._find(key)
        if slot < 0:
            return False
        claim, checksum = self._claims[slot], self._checksums[slot]
        try:
            _transfer(os.preadv, self._fd, views, self._first + slot * self.slot_bytes)
            is_good = bool(checksum == _checksum(key, views))
        except OSError:
            is_good = False
        if is_good:
            self._used[slot] = time.time()
        elif self._claims[slot] == claim:  # else a writer has taken the slot meanwhile
            self.remove(key[None])
        return is_good

    @property
    def num_used(self) -> int:
        """Slots with a block."""
        return int(self._keys.any(2).sum())

    def _find(self, key: NDArray[np.uint64]) -> int:
        number = int(key[0] % self._num_sets)
        (found,) = (self._keys[number] == key).all(1).nonzero()
        return number * WAYS + int(found[0]) if found.size and key.any() else -1

    @contextlib.contextmanager
    def _locked(self, number: int) -> Iterator[bool]:
        """Whether the lock of a set was had: a process that is stopped while it has it must stop no other."""
        has_lock = False
        for _ in range(LOCK_TRIES):
            with contextlib.suppress(OSError):  # held by another one, or not to be had of this file system
                self._lock(fcntl.F_WRLCK, number)
                has_lock = True
                break
            time.sleep(LOCK_PAUSE_S)
        try:
            yield has_lock
        finally:
            if has_lock:
                self._lock(fcntl.F_UNLCK, number)

    def _lock(self, kind: int, number: int) -> None:
        """Of this open file and not of this process: replicas may be threads of one."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, LOCK.pack(kind, os.SEEK_SET, number, 1, 0))

    # Making

    def _open(self) -> int:
        if self.path.startswith("/proc/"):
            return self._open_in_place()
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                if os.fstat(fd).st_size == self._size and os.pread(fd, HEADER.size, 0) == self._header:
                    fcntl.flock(fd, fcntl.LOCK_SH)  # it is in use, until it is closed
                    return fd
                os.close(fd)
                os.unlink(self.path)  # those that have it open keep theirs
            self._make()
        raise OSError(f"{self.path} is replaced again and again by something else")

    def _make(self) -> None:
        """Whole or not at all: another process may do the same at this moment."""
        made = f"{self.path}.{os.getpid()}-{os.urandom(4).hex()}"
        fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self._begin(fd)
            with contextlib.suppress(FileExistsError):
                os.link(made, self.path)
        finally:
            os.close(fd)
            os.unlink(made)

    def _open_in_place(self) -> int:
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            if not os.fstat(fd).st_size:
                self._begin(fd)
            elif os.pread(fd, HEADER.size, 0) != self._header:
                raise OSError(f"{self.path} holds the KV of another model, or of other arithmetic")
        except BaseException:
            os.close(fd)
            raise
        fcntl.flock(fd, fcntl.LOCK_UN)
        return fd

    def _begin(self, fd: int) -> None:
        """An empty file. The index has room on the disk from now on: a mapping cannot tell of a full one."""
        os.ftruncate(fd, 0)
        os.ftruncate(fd, self._size)
        os.posix_fallocate(fd, 0, self._first)
        os.pwrite(fd, self._header, 0)


def num_slots_of(slot_bytes: int, num_bytes: int) -> int:
    """How many slots a file of so many bytes has, a multiple of WAYS; 0: none."""
    number = max(0, num_bytes - 2 * PAGE) // (slot_bytes + BYTES_PER_ENTRY)
    return min(number, MAX_SLOTS) // WAYS * WAYS


def _first_slot(num_slots: int) -> int:
    return -(-(PAGE + num_slots * BYTES_PER_ENTRY) // PAGE) * PAGE


def _checksum(key: NDArray[np.uint64], views: Views) -> np.uint32:
    value = zlib.crc32(key.tobytes())
    for view in views:
        value = zlib.crc32(view, value)
    return np.uint32(value)


def _transfer(move: object, fd: int, views: Views, at: int) -> None:
    """All of a block. Raises OSError, also where the file ends before."""
    assert callable(move)
    left = [view.cast("B") for view in views]
    while left:
        done = move(fd, left[: os.sysconf("SC_IOV_MAX")], at)
        if not done:
            raise OSError("the file ends before the block does")
        at += done
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if done:
            left[0] = left[0][done:]
