"""Shared memory without names: made, validated, mapped. Owns creation, the header's static words, and the mapping.

A segment is created under a name that only its creator knows and unlinked at once. From then on it exists as a file
descriptor that is passed to the processes that need it (pass_fds or SCM_RIGHTS). So no kill leaves anything in
/dev/shm, and no process can open a segment that was not given to it. The name carries the creator's pid and start time. If a
process is killed in the microseconds between creation and unlink, `sweep_stale` of a later start removes what it left.

posix_ipc, not multiprocessing.shared_memory: the latter's resource tracker unlinks live segments of other processes.

Callers: `channel.create_link` creates, `channel.open_hub` and `channel.open_spoke` attach, the supervisor sweeps.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import re
import stat
from pathlib import Path

import posix_ipc

from actorllm.errors import CorruptLinkError, SharedMemoryError
from actorllm.ring import layout

SHM_FOLDER = "/dev/shm"

_NAME = re.compile(r"allm-([0-9a-f]{1,8})-([0-9a-f]{1,16})-[0-9a-f]{1,8}")
_counter = itertools.count()


def process_start_time(pid: int) -> int | None:
    """Clock ticks since boot at which the process started, None when there is no such process.

    (pid, start time) names a process for ever; a pid alone is given to another one later.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name is in parentheses and may hold anything; field 22 is counted from behind it.
            return int(file.read().rsplit(b")", 1)[1].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def create_segment(
    capacity: int, *, num_readers: int = 1, generation: int = 0, link_id: tuple[int, int] = (0, 0)
) -> int:
    """A new segment, empty and ready to be attached; returns its file descriptor, which the caller owns.

    capacity: bytes, a power of two. Raises SharedMemoryError when the memory is not there: it is all allocated here, so
    that a full /dev/shm shows as an error now and not as SIGBUS at some later store.
    """
    if capacity & (capacity - 1) or capacity < layout.MIN_CAPACITY:
        raise ValueError(f"capacity {capacity} must be a power of two, at least {layout.MIN_CAPACITY}")
    if not 1 <= num_readers <= layout.MAX_READERS:
        raise ValueError(f"num_readers {num_readers} must be 1 to {layout.MAX_READERS}")
    size = layout.HEADER_BYTES + capacity
    if capacity > layout.MAX_CAPACITY:
        raise _no_memory(size, errno.EFBIG, f"a ring is limited to {layout.MAX_CAPACITY} bytes")
    fd = _create_nameless(size)
    try:
        with mmap.mmap(fd, size) as memory, memoryview(memory) as view, view[: layout.HEADER_BYTES].cast("Q") as words:
            words[layout.VERSION_WORD] = layout.VERSION_VALUE
            words[layout.CAPACITY_WORD] = capacity
            words[layout.NUM_READERS_WORD] = num_readers
            words[layout.LINK_ID_WORD], words[layout.LINK_ID_WORD + 1] = link_id
            words[layout.GENERATION_WORD] = generation
            # Passing the descriptor to another process orders these stores before anything that process does.
            words[layout.MAGIC_WORD] = layout.MAGIC
    except BaseException:
        os.close(fd)
        raise
    return fd


def _create_nameless(size: int) -> int:
    """The descriptor of `size` allocated bytes that no name leads to."""
    pid = os.getpid()
    name = f"/allm-{pid:x}-{process_start_time(pid) or 0:x}-{next(_counter):x}"
    try:
        shared = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
    except (OSError, posix_ipc.Error) as error:
        raise SharedMemoryError(
            getattr(error, "errno", None) or errno.EACCES,
            f"cannot create shared memory {name!r} ({error}); {SHM_FOLDER} must be a writable tmpfs",
        ) from error
    fd: int = shared.fd
    try:
        # A process of another pid namespace that shares our /dev/shm may have swept it; the descriptor is what counts.
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(name)
        os.set_inheritable(fd, False)
        # Not ftruncate: it makes a sparse file, and the first store to a page that cannot be had is a SIGBUS.
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        raise _no_memory(size, error.errno or errno.ENOSPC, error.strerror or str(error)) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _no_memory(size: int, code: int, reason: str) -> SharedMemoryError:
    """Says how much was wanted, how much there is, and what to do."""
    mebibyte = 1 << 20
    try:
        info = os.statvfs(SHM_FOLDER)
        state = (
            f"{info.f_bavail * info.f_frsize / mebibyte:.1f} MiB of {info.f_blocks * info.f_frsize / mebibyte:.1f} MiB"
            f" are free in {SHM_FOLDER}"
        )
    except OSError as error:
        state = f"{SHM_FOLDER} cannot be examined: {error.strerror}"
    return SharedMemoryError(
        code,
        f"cannot allocate {size / mebibyte:.1f} MiB of shared memory ({reason}); {state}. Enlarge it "
        f"(docker run --shm-size=1g, or mount -o remount,size=1G {SHM_FOLDER}) or configure smaller rings",
    )


def sweep_stale() -> list[str]:
    """Removes segment names of this user whose creator is gone; returns them. Called once when an engine starts."""
    removed = []
    try:
        entries = list(Path(SHM_FOLDER).iterdir())
    except FileNotFoundError:
        return []  # no tmpfs to list (macOS): nothing can be seen, so nothing can be swept
    for entry in entries:
        match = _NAME.fullmatch(entry.name)
        if match is None:
            continue
        pid, start = int(match[1], 16), int(match[2], 16)
        try:
            info = entry.lstat()
            if info.st_uid != os.geteuid() or not stat.S_ISREG(info.st_mode) or process_start_time(pid) == start:
                continue
            entry.unlink()
        except FileNotFoundError:
            continue  # its creator, or another sweep, was faster
        removed.append(entry.name)
    return removed


class Segment:
    """One mapping of a segment, with its static header words validated and copied.

    `memory` is the whole mapping, `words` the header as 64-bit words. A word is only ever stored through `words`: that
    is one aligned 8-byte store, while struct.pack_into zeroes the bytes first and a peer may read the zeros.
    """

    __slots__ = ("capacity", "generation", "link_id", "memory", "num_readers", "view", "words")

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.view = memoryview(memory)
        self.words = self.view[: layout.HEADER_BYTES].cast("Q")
        self.capacity = self.words[layout.CAPACITY_WORD]
        self.num_readers = self.words[layout.NUM_READERS_WORD]
        self.generation = self.words[layout.GENERATION_WORD]
        self.link_id = self.words[layout.LINK_ID_WORD], self.words[layout.LINK_ID_WORD + 1]

    @classmethod
    def attach(cls, fd: int) -> Segment:
        """Maps the segment behind `fd`, which stays the caller's. CorruptLinkError: it is not a usable segment.

        The descriptor may come from another process: owner, mode, size and every static word of the header are checked.
        """
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise CorruptLinkError(f"descriptor {fd} is no shared memory (mode {info.st_mode:#o})")
        if info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise CorruptLinkError(
                f"the segment belongs to uid {info.st_uid} with mode {stat.S_IMODE(info.st_mode):#o}; "
                f"uid {os.geteuid()} with mode 0o600 expected"
            )
        if info.st_size < layout.HEADER_BYTES + layout.MIN_CAPACITY:
            raise CorruptLinkError(f"the segment has {info.st_size} bytes, too few for a header and a ring")
        segment = cls(mmap.mmap(fd, info.st_size))
        problem = segment._problem(info.st_size)
        if problem is not None:
            segment.close()
            raise CorruptLinkError(f"the segment is unusable: {problem}")
        return segment

    def _problem(self, size: int) -> str | None:
        words = self.words
        if words[layout.MAGIC_WORD] != layout.MAGIC:
            return f"magic {words[layout.MAGIC_WORD]:#x} instead of {layout.MAGIC:#x}"
        version = words[layout.VERSION_WORD]
        if version != layout.VERSION_VALUE:
            return (
                f"format version {version >> 32} with a header of {version & 0xFFFFFFFF} bytes; this is version "
                f"{layout.VERSION} with {layout.HEADER_BYTES}"
            )
        if self.capacity & (self.capacity - 1) or not layout.MIN_CAPACITY <= self.capacity <= layout.MAX_CAPACITY:
            return f"capacity {self.capacity}"
        if size != layout.HEADER_BYTES + self.capacity:
            return f"{size} bytes, {layout.HEADER_BYTES} + {self.capacity} expected"
        if not 1 <= self.num_readers <= layout.MAX_READERS:
            return f"{self.num_readers} readers"
        if words[layout.FLAGS_WORD]:
            return f"unknown flags {words[layout.FLAGS_WORD]:#x}"
        return None

    def close(self) -> None:
        """Unmaps, or leaves that to the garbage collector while a view of a frame is still held."""
        self.words.release()
        self.view.release()
        # Unmapping under a live view would be a crash, so Python refuses; the mapping then goes with the last view.
        with contextlib.suppress(BufferError):
            self.memory.close()
