"""Memory of new weights: it serves again, unless a process still reads it, and within bounds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from actorllm.client.transports.shared_devices import SharedDevices
from actorllm.client.weight_memory import LEAST_BYTES, MAX_FILES, WeightFile, WeightMemory
from actorllm.errors import CorruptModelError, InvalidParameterError
from actorllm.model import memory
from actorllm.model.updates.tensor_files import MappedTensors, TensorFile, file_of_tensors
from tests import programs

MANY = 4 * LEAST_BYTES


def inode(file: WeightFile | TensorFile) -> int:
    return os.stat(file.path).st_ino


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((MANY // 4,), value), "b": torch.full((3, 5), value)}


def test_memory_of_the_version_before_serves_the_next_one() -> None:
    weights = WeightMemory()
    num_open = len(os.listdir("/proc/self/fd"))
    first, second = weights.new(MANY), weights.new(MANY)
    known, path = inode(first), first.path
    first.close()
    first.close()
    assert weights.num_kept_bytes == MANY
    assert not os.path.exists(path), "what was told of it leads nowhere"
    third = weights.new(MANY - LEAST_BYTES // 2)
    assert inode(third) == known
    assert os.stat(third.path).st_size == MANY - LEAST_BYTES // 2
    assert inode(weights.new(MANY)) != inode(third)
    for file in (second, third):
        file.close()
    weights.close()
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_part_that_is_refused_takes_no_kept_memory() -> None:
    weights = WeightMemory()
    lasting, first = weights.new(MANY), weights.new(MANY)
    first.close()
    part = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[MANY // 4]], "ipc_handles": [{"GPU-1": "none"}]}
    with pytest.raises(InvalidParameterError, match="the handle of 'a'"):
        SharedDevices().part(part, weights)
    assert weights.num_kept_bytes == MANY
    lasting.close()
    weights.close()


def test_memory_that_is_still_read_is_not_written_to() -> None:
    weights = WeightMemory()
    first, second = (file_of_tensors(tensors(value), weights.new) for value in (1.0, 2.0))
    known = inode(first)
    view = MappedTensors(first.path).tensor("a")
    first.close()
    third = file_of_tensors(tensors(3.0), weights.new)
    assert inode(third) != known
    assert float(view.min()) == float(view.max()) == 1.0
    del view
    known = inode(second)
    second.close()
    fourth = file_of_tensors(tensors(4.0), weights.new)
    assert inode(fourth) == known
    assert float(MappedTensors(fourth.path).tensor("a").min()) == 4.0
    for file in (third, fourth):
        file.close()
    weights.close()


def test_a_file_of_any_size_that_serves_again_holds_what_was_written_last() -> None:
    weights = WeightMemory()
    lasting = weights.new(8 * LEAST_BYTES)
    known = None
    for number, size in enumerate((MANY, MANY, MANY, MANY - 4096, MANY - 4096, MANY + 5)):
        given = {"a": torch.full((size,), number, dtype=torch.uint8), "b": torch.arange(number + 1)}
        file = file_of_tensors(given, weights.new)
        if known is not None:
            assert inode(file) == known, "no fresh memory is taken"
        known = inode(file)
        read = MappedTensors(file.path)
        assert all(torch.equal(read.tensor(name), tensor) for name, tensor in given.items())
        del read
        file.close()
    lasting.close()
    weights.close()


def test_no_mapping_of_kept_memory_outlives_it() -> None:
    def num_mappings() -> int:
        return Path("/proc/self/maps").read_text().count("actorllm-weights")

    before = num_mappings()
    weights = WeightMemory()
    lasting = weights.new(MANY)
    for _ in range(3):
        weights.new(MANY - 1).close()
    assert num_mappings() == before + 1, "what serves again is mapped"
    weights.clear()
    assert num_mappings() == before
    weights.new(MANY).close()
    dropped = weights.new(MANY)
    assert num_mappings() == before + 1
    del dropped
    assert num_mappings() == before
    lasting.close()
    weights.close()


FORKED = """
import mmap, os
from actorllm.client.weight_memory import LEAST_BYTES, WeightMemory

weights = WeightMemory()
lasting = weights.new(64 * LEAST_BYTES)
weights.new(16 * LEAST_BYTES).close()
mapped = weights.new(16 * LEAST_BYTES)
pid = os.fork()
if not pid:
    own = [mmap.mmap(-1, 16 * LEAST_BYTES) for _ in range(4)]
    del mapped
    for memory in own:
        memory[0] = 1
    os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_fork_that_drops_a_mapping_keeps_its_own_memory() -> None:
    """Its own may lie where a mapping was that forks do not get, and would go with that one."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED]
    done = programs.run(command, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_what_is_being_written_is_not_read() -> None:
    weights = WeightMemory()
    file, other = (file_of_tensors(tensors(1.0), weights.new) for _ in range(2))
    size = os.stat(file.path).st_size
    file.close()
    again = weights.new(size)
    with pytest.raises(CorruptModelError, match="temporarily unavailable"):
        MappedTensors(again.path)
    other.close()
    weights.close()


def test_no_more_is_kept_than_a_version_has_and_less_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = WeightMemory()
    files = [weights.new(MANY) for _ in range(4)]
    for file in files[:3]:
        file.close()
    assert weights.num_kept_bytes == MANY
    files[3].close()
    assert weights.num_kept_bytes == 0, "there is no version of tensors"
    num_open = len(os.listdir("/proc/self/fd"))
    lasting = weights.new(100 * LEAST_BYTES)
    for file in [weights.new(LEAST_BYTES) for _ in range(2 * MAX_FILES)]:
        file.close()
    assert len(os.listdir("/proc/self/fd")) <= num_open + 1 + MAX_FILES
    weights.clear()
    weights.new(LEAST_BYTES - 1).close()
    monkeypatch.setattr(memory, "available_bytes", lambda: MANY)
    weights.new(MANY).close()
    assert weights.num_kept_bytes == 0
    lasting.close()
    weights.close()


def test_nothing_is_kept_of_an_engine_that_has_ended() -> None:
    weights = WeightMemory()
    lasting, file, dropped = (weights.new(MANY) for _ in range(3))
    del dropped
    weights.close()
    for one in (file, lasting):
        one.close()
    assert weights.num_kept_bytes == 0
