"""Files of KV blocks: what was written is read, and whatever is not as it was written is not found."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from actorllm.actors.memory_file import MemoryFile
from actorllm.actors.tiers.slot_file import HEADER, KEY_BYTES, PAGE, WAYS, SlotFile, num_slots_of
from tests.actors.tiers.slots import FINGERPRINT, SLOT, block, content, empty, key, make


def has(file: SlotFile, number: int) -> bool:
    views = empty()
    if not file.read(key(number), views):
        return False
    assert content(views) == content(block(number))
    return True


def test_what_was_written_is_read_by_others_and_after_a_restart(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a"), make(tmp_path / "a")
    assert not has(first, 1)
    assert first.write(key(1), block(1))
    assert has(first, 1)
    assert has(second, 1)
    assert second.contains(np.stack([key(1), key(2)])).tolist() == [True, False]
    first.close()
    second.close()
    third = make(tmp_path / "a")
    assert has(third, 1)
    third.close()


def test_a_full_set_gives_up_what_was_used_longest_ago(tmp_path: Path) -> None:
    file = make(tmp_path / "a", num_slots=WAYS)
    for number in range(WAYS):
        assert file.write(key(number), block(number))
    assert has(file, 0)  # is used now
    file.write(key(100), block(100))
    assert has(file, 0)
    assert has(file, 100)
    assert not has(file, 1)
    assert file.num_used == WAYS
    assert os.stat(file.path).st_size <= file._first + WAYS * SLOT
    file.close()


def test_memory_without_a_name_is_shared_as_well() -> None:
    memory = MemoryFile("test")
    first, second = make(memory.path), make(memory.path)
    first.write(key(1), block(1))
    assert has(second, 1)
    with pytest.raises(OSError, match="another model"):
        make(memory.path, fingerprint=bytes(32))
    for file in (first, second):
        file.close()
    memory.close()


@pytest.mark.parametrize("what", ["block", "checksum", "key", "claim", "cut"])
def test_a_corrupt_slot_is_not_found(tmp_path: Path, what: str) -> None:
    file = make(tmp_path / "a")
    file.write(key(1), block(1))
    slot = file._find(key(1))
    places = {
        "block": file._first + slot * SLOT + 500,
        "checksum": PAGE + 48 * file.num_slots + 4 * slot,
        "key": PAGE + KEY_BYTES * slot + 5,
    }
    if what == "cut":
        os.truncate(file.path, file._first + slot * SLOT + 10)
    elif what == "claim":
        file._keys[slot // WAYS, slot % WAYS] = 0  # a writer has claimed it and was killed
    else:
        with open(file.path, "r+b") as raw:
            raw.seek(places[what])
            byte = raw.read(1)[0]
            raw.seek(places[what])
            raw.write(bytes([byte ^ 16]))
    assert not has(file, 1)
    assert not file.contains(key(1)[None])[0], "it is not tried again"
    if what != "cut":
        assert file.write(key(1), block(1))
        assert has(file, 1)
    file.close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: b"",
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"\0" * len(raw),
        lambda raw: raw[:20] + b"x" + raw[21:],
        lambda raw: random.Random(1).randbytes(len(raw)),
    ],
    ids=["empty", "half", "zeros", "header", "noise"],
)
def test_a_file_that_is_none_of_ours_is_replaced(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    file = make(tmp_path / "a")
    file.write(key(1), block(1))
    file.close()
    path = tmp_path / "a"
    path.write_bytes(spoil(path.read_bytes()))
    again = make(path)
    assert not has(again, 1)
    assert again.write(key(1), block(1))
    again.close()
    assert os.listdir(tmp_path) == ["a"], "nothing is left beside it"


def test_noise_behind_a_good_header_is_not_found(tmp_path: Path) -> None:
    file = make(tmp_path / "a")
    file.write(key(1), block(1))
    file.close()
    raw = bytearray((tmp_path / "a").read_bytes())
    for at in range(HEADER.size, len(raw)):
        if random.Random(at).random() < 0.5:
            raw[at] = at * 31 % 256
    (tmp_path / "a").write_bytes(bytes(raw))
    again = make(tmp_path / "a")
    assert not has(again, 1)
    for number in range(40):
        again.write(key(number), block(number))
        assert has(again, number)
    again.close()


def test_another_fingerprint_finds_nothing(tmp_path: Path) -> None:
    file = make(tmp_path / "a")
    file.write(key(1), block(1))
    other = make(tmp_path / "a", fingerprint=bytes(32))
    assert not has(other, 1)
    assert has(file, 1), "a process that has it open keeps it"
    file.close()
    other.close()


def test_a_writer_that_another_one_overtakes_leaves_nothing(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a", num_slots=WAYS), make(tmp_path / "a", num_slots=WAYS)
    views = block(1)

    class Slow(list[memoryview]):
        """While it is written, others fill the set."""

        def __iter__(self):  # type: ignore[no-untyped-def]
            for number in range(2, 2 + WAYS):
                second.write(key(number), block(number))
            return super().__iter__()

    assert not first.write(key(1), Slow(views))
    assert not has(first, 1)
    for number in range(2, 2 + WAYS):
        views = empty()
        assert not second.read(key(number), views) or content(views) == content(block(number))
    first.close()
    second.close()


def test_two_writers_of_one_block_leave_it_once(tmp_path: Path) -> None:
    """Else the one that is not removed would still be found."""
    first, second = make(tmp_path / "a"), make(tmp_path / "a")

    class Slow(list[memoryview]):
        """While it is written, another one writes the same."""

        def __iter__(self):  # type: ignore[no-untyped-def]
            assert second.write(key(1), block(1))
            return super().__iter__()

    assert first.write(key(1), Slow(block(1)))
    assert first.num_used == 1
    assert has(first, 1)
    first.remove(key(1)[None])
    assert not second.contains(key(1)[None])[0]
    first.close()
    second.close()


@pytest.mark.parametrize("what", ["another writer was sooner", "the disk is full"])
def test_a_slot_that_stays_empty_is_the_next_one_that_is_taken(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a block that is in use would give way to the next one, and the file would hold fewer."""
    first, second = make(tmp_path / "a", num_slots=WAYS), make(tmp_path / "a", num_slots=WAYS)
    for number in range(WAYS):
        assert first.write(key(number), block(number))

    class Slow(list[memoryview]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            assert second.write(key(100), block(100))
            return super().__iter__()

    def fails(fd: int, views: list[memoryview], at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if what == "the disk is full":
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fails)
            assert not first.write(key(100), block(100))
    else:
        assert first.write(key(100), Slow(block(100)))
    assert first.num_used == WAYS - 1
    assert first.write(key(101), block(101))
    assert first.num_used == WAYS, "nothing had to give way"
    first.close()
    second.close()


@pytest.mark.parametrize(("call", "number"), [("pwritev", errno.ENOSPC), ("pwritev", errno.EIO), ("preadv", errno.EIO)])
def test_a_disk_that_is_full_or_fails_costs_the_block_alone(
    tmp_path: Path, call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make(tmp_path / "a")
    assert file.write(key(1), block(1))
    right = getattr(os, call)

    def fails(fd: int, views: list[memoryview], at: int) -> int:
        """After a part."""
        if len(views) < 2:
            raise OSError(number, os.strerror(number))
        return int(right(fd, views[:-1], at))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        if call == "pwritev":
            assert not file.write(key(2), block(2))
        else:
            assert not has(file, 1)
    assert not has(file, 2)
    assert has(file, 1) is (call == "pwritev"), "what could not be read once is not tried again"
    assert file.write(key(2), block(2))
    assert has(file, 2)
    file.close()


@pytest.mark.parametrize("target", ["other", "nothing"])
def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path, target: str) -> None:
    (tmp_path / "other").write_bytes(b"of something else")
    (tmp_path / "a").symlink_to(tmp_path / target)
    with pytest.raises(OSError, match="symbolic links"):
        make(tmp_path / "a")
    assert (tmp_path / "other").read_bytes() == b"of something else"
    assert sorted(os.listdir(tmp_path)) == ["a", "other"]


def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    file = make(tmp_path / "a")
    assert file.write(key(1), block(1))
    assert has(file, 1)
    file.close()
    (tmp_path / "b").mkdir()
    with pytest.raises(OSError, match="directory"):
        make(tmp_path / "b")


WRITER = """
import sys
sys.path.insert(0, {root!r})
from tests.actors.tiers.slots import block, key, make
file = make({path!r}, num_slots=16)
print("ready", flush=True)
number = 0
while True:
    file.write(key(number % 400), block(number % 400))
    number += 1
"""


def test_writers_that_are_killed_leave_no_wrong_block(tmp_path: Path) -> None:
    path, root = str(tmp_path / "a"), str(Path(__file__).parents[3])
    reader = make(path, num_slots=16)
    num_read = 0
    for round_number in range(3):
        code = WRITER.format(root=root, path=path)
        writers = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        for _ in range(3):
            num_read += sum(has(reader, number) for number in range(400))  # which asserts what it reads
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
        num_read += sum(has(reader, number) for number in range(400))
        assert reader.write(key(500 + round_number), block(500 + round_number)), "no lock is left behind"
    assert num_read
    reader.close()


def test_what_is_too_small_says_how_much_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hold less than 8 blocks of 1000 bytes"):
        SlotFile(str(tmp_path / "a"), FINGERPRINT, SLOT, 5000)
    assert num_slots_of(SLOT, 0) == 0
    assert not os.listdir(tmp_path)
