"""Creation, validation and the sweep of segments."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from pathlib import Path

import posix_ipc
import pytest

from actorllm.errors import CorruptLinkError, SharedMemoryError
from actorllm.ring import layout, segment
from actorllm.ring.segment import Segment, create_segment, process_start_time, sweep_stale

SIZE = layout.HEADER_BYTES + 4096


def names(beginning: str = "") -> set[str]:
    return {path.name for path in Path(segment.SHM_FOLDER).iterdir() if path.name.startswith(beginning)}


def test_a_new_segment_is_nameless_private_and_allocated() -> None:
    fd = create_segment(4096, num_readers=3, generation=7, link_id=(1, 2))
    try:
        assert not names(f"allm-{os.getpid():x}-")
        info = os.fstat(fd)
        assert info.st_size == SIZE
        assert info.st_mode & 0o777 == 0o600
        assert info.st_blocks * 512 >= info.st_size, "sparse: a store could end in SIGBUS"
        assert not os.get_inheritable(fd)
        attached = Segment.attach(fd)
        assert (attached.capacity, attached.num_readers, attached.generation) == (4096, 3, 7)
        assert attached.link_id == (1, 2)
        attached.close()
    finally:
        os.close(fd)


@pytest.mark.parametrize("capacity", [0, -4096, 256, 4095, 6144])
def test_impossible_capacities_are_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        create_segment(capacity)


@pytest.mark.parametrize("num_readers", [0, layout.MAX_READERS + 1])
def test_impossible_numbers_of_readers_are_refused(num_readers: int) -> None:
    with pytest.raises(ValueError, match="num_readers"):
        create_segment(4096, num_readers=num_readers)


def test_a_full_dev_shm_is_an_error_that_names_sizes_and_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = names(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        SharedMemoryError, match=r"4\.0 MiB.*No space left.*MiB of .* MiB are free.*--shm-size"
    ) as caught:
        create_segment(4 << 20)
    assert caught.value.errno == errno.ENOSPC
    assert names() == before[0]
    assert len(os.listdir("/proc/self/fd")) <= before[1]


@pytest.mark.parametrize("capacity", [1 << 31, 1 << 50, 1 << 70])
def test_an_absurd_size_is_the_same_error(capacity: int) -> None:
    with pytest.raises(SharedMemoryError, match="cannot allocate"):
        create_segment(capacity)


def test_more_than_dev_shm_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    info = os.statvfs(segment.SHM_FOLDER)
    monkeypatch.setattr(layout, "MAX_CAPACITY", 1 << 60)
    capacity = 1 << (info.f_blocks * info.f_frsize).bit_length()
    with pytest.raises(SharedMemoryError, match="configure smaller rings"):
        create_segment(capacity)


def test_a_dev_shm_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise posix_ipc.PermissionsError("no")

    monkeypatch.setattr(posix_ipc, "SharedMemory", refuse)
    with pytest.raises(SharedMemoryError, match="writable tmpfs"):
        create_segment(4096)


def store(fd: int, word: int, value: int) -> None:
    os.pwrite(fd, struct.pack("<Q", value), 8 * word)


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        (layout.MAGIC_WORD, 0, "magic"),
        (layout.MAGIC_WORD, layout.MAGIC ^ 1, "magic"),
        (layout.VERSION_WORD, layout.VERSION_VALUE + (1 << 32), "format version 2"),
        (layout.VERSION_WORD, layout.VERSION_VALUE + 8, "header of 4104"),
        (layout.CAPACITY_WORD, 0, "capacity"),
        (layout.CAPACITY_WORD, 4095, "capacity"),
        (layout.CAPACITY_WORD, 8192, "bytes"),
        (layout.CAPACITY_WORD, 2048, "bytes"),
        (layout.CAPACITY_WORD, 1 << 63, "capacity"),
        (layout.NUM_READERS_WORD, 0, "0 readers"),
        (layout.NUM_READERS_WORD, layout.MAX_READERS + 1, "readers"),
        (layout.FLAGS_WORD, 1, "flags"),
    ],
)
def test_every_static_word_is_checked(word: int, value: int, message: str) -> None:
    fd = create_segment(4096)
    try:
        store(fd, word, value)
        with pytest.raises(CorruptLinkError, match=message):
            Segment.attach(fd)
    finally:
        os.close(fd)


def test_other_descriptors_are_refused(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    path.chmod(0o644)
    readable = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(CorruptLinkError, match="no shared memory"):
            Segment.attach(read_end)
        with pytest.raises(CorruptLinkError, match="0o644"):
            Segment.attach(readable)
        os.fchmod(readable, 0o600)
        with pytest.raises(CorruptLinkError, match="magic"):
            Segment.attach(readable)
        os.ftruncate(readable, 100)
        with pytest.raises(CorruptLinkError, match="too few"):
            Segment.attach(readable)
    finally:
        for fd in (read_end, write_end, readable):
            os.close(fd)


def test_a_segment_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = create_segment(4096)
    try:
        monkeypatch.setattr(os, "geteuid", lambda: os.fstat(fd).st_uid + 1)
        with pytest.raises(CorruptLinkError, match="belongs to uid"):
            Segment.attach(fd)
    finally:
        os.close(fd)


def test_close_leaves_the_mapping_to_whoever_holds_a_view() -> None:
    fd = create_segment(4096)
    attached = Segment.attach(fd)
    os.close(fd)
    view = memoryview(attached.memory)[layout.HEADER_BYTES :]
    attached.close()
    assert view[0] == 0
    view.release()


def test_the_sweep_removes_what_a_killed_creator_left_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(segment, "SHM_FOLDER", str(tmp_path))  # engines of other tests sweep the real one
    me = os.getpid()
    start = process_start_time(me)
    assert start is not None
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale = [f"allm-{gone.pid:x}-5-0", f"allm-{me:x}-{start + 1:x}-1"]  # no such process; the pid was given to us later
    kept = [f"allm-{me:x}-{start:x}-ff", "allm-other", f"allm-{gone.pid:x}-5-0.txt"]
    folder = Path(segment.SHM_FOLDER)
    try:
        for name in stale + kept:
            (folder / name).touch(mode=0o600)
        removed = sweep_stale()
        assert set(stale) <= set(removed)
        assert not set(kept) & set(removed)
        assert not set(stale) & names()
        assert set(kept) <= names()
    finally:
        for name in stale + kept:
            (folder / name).unlink(missing_ok=True)


def test_the_sweep_leaves_other_users_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(segment, "SHM_FOLDER", str(tmp_path))  # as above
    path = Path(segment.SHM_FOLDER) / "allm-3ffffff-5-0"
    path.touch(mode=0o600)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
            assert path.name not in sweep_stale()
        assert path.name in sweep_stale()
    finally:
        path.unlink(missing_ok=True)


def test_a_creation_that_is_swept_meanwhile_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = posix_ipc.unlink_shared_memory

    def swept(name: str) -> None:
        unlink(name)
        unlink(name)

    monkeypatch.setattr(posix_ipc, "unlink_shared_memory", swept)
    fd = create_segment(4096)
    Segment.attach(fd).close()
    os.close(fd)


def test_start_times() -> None:
    assert process_start_time(os.getpid()) == process_start_time(os.getpid()) != None  # noqa: E711
    assert process_start_time(2**22 + 1) is None
