"""Tensors in memory files: what workers read is what was given, and each tensor is kept once."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from actorllm.actors.memory_file import MemoryFile
from actorllm.errors import CorruptModelError, InvalidParameterError
from actorllm.model.updates import tensor_files
from actorllm.model.updates.tensor_files import DTYPES, MappedTensors, file_of_tensors, layered

MEMORY = partial(MemoryFile, "weights")


def read(path: str) -> dict[str, torch.Tensor]:
    return load_file(Path(path))


def test_what_is_read_is_what_was_given_whatever_its_type_and_layout() -> None:
    given: dict[str, Any] = {
        f"of {name}": torch.arange(12, dtype=torch.float32).view(3, 4).to(dtype) for dtype, name in DTYPES.items()
    }
    given["of a column"] = torch.arange(12.0).view(3, 4).T[1]
    given["scalar"] = torch.tensor(3.0)
    given["empty"] = torch.zeros(0, 4)
    given["of a parameter"] = torch.nn.Parameter(torch.ones(2))
    given["of numpy"] = np.arange(3, dtype=np.int64)
    given["backwards"] = np.arange(3.0)[::-1]
    given["not to be written to"] = np.frombuffer(bytes(8), np.float32)
    given["negated"] = torch._neg_view(torch.ones(3))
    given["of an odd size"] = torch.arange(3, dtype=torch.int8)
    given["behind it"] = torch.arange(3.0)
    file = file_of_tensors(given, MEMORY)
    found, mapped = read(file.path), MappedTensors(file.path)
    assert found.keys() == mapped.records.keys() == given.keys()
    for name, value in given.items():
        wanted = torch.as_tensor(np.array(value) if isinstance(value, np.ndarray) else value).detach()
        for one in (found[name], mapped.tensor(name)):
            assert one.dtype == wanted.dtype, name
            assert torch.equal(one, wanted), name
    file.close()


def test_tensors_that_share_their_memory_are_written_once() -> None:
    """Such as an embedding that is the head, too."""
    shared, other = torch.arange(4000.0), torch.ones(10)
    whole = {"a": shared, "b": other, "c": shared.view(40, 100), "d": shared[:10]}
    file = file_of_tensors(whole, MEMORY)
    size = os.stat(file.path).st_size
    assert 4 * 4020 < size < 4 * 4020 + 1000
    less = file.without(["b"])
    assert os.stat(less.path).st_size < size
    for one, names in ((file, "abcd"), (less, "acd")):
        mapped = MappedTensors(one.path)
        assert mapped.records.keys() == set(names)
        assert all(torch.equal(mapped.tensor(name), whole[name]) for name in names)
        one.close()


@pytest.mark.parametrize(
    "content", [b"", b"abc", bytes(8), bytes([2] + 7 * [0]) + b"{]", bytes([99] + 7 * [0]) + b"{}", bytes(8 * [255])]
)
def test_what_is_no_such_file_is_told(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(CorruptModelError, match="cannot be read"):
        MappedTensors(str(path))
    with pytest.raises(CorruptModelError, match="cannot be read"):
        MappedTensors(str(tmp_path / "nowhere"))


def test_a_file_that_was_cut_short_is_told() -> None:
    file = file_of_tensors({"a": torch.ones(100)}, MEMORY)
    os.truncate(file.path, os.stat(file.path).st_size - 1)
    with pytest.raises(CorruptModelError, match="too short for its tensors"):
        MappedTensors(file.path)
    file.close()


def test_much_is_written_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", 1000)
    given = {str(size): torch.arange(size) for size in (1, 100, 125, 126, 5000)}
    file = file_of_tensors(given, MEMORY)
    assert all(torch.equal(one, given[name]) for name, one in read(file.path).items())
    file.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1], "must be a mapping"),
        ({}, "is empty"),
        ({"a": 3}, "tensor 'a' is int"),
        ({3: torch.ones(1)}, "tensor name 3"),
        ({"x" * 5000: torch.ones(1)}, "1 to 1000 characters"),
        ({"\ud800": torch.ones(1)}, "valid Unicode"),
        ({"__metadata__": torch.ones(1)}, "__metadata__"),
        ({"a": torch.ones(1, dtype=torch.complex64)}, "torch.complex64"),
        ({"a": torch.eye(2).to_sparse()}, "sparse"),
        ({"a": np.array(["x"])}, "tensor 'a'"),
        ({"a": np.zeros(2, ">f4")}, "tensor 'a'"),
        ({"a": torch.ones(2, device="meta")}, "tensor 'a' cannot be read"),
    ],
)
def test_what_is_no_tensor_is_named(given: Any, said: str) -> None:
    with pytest.raises(InvalidParameterError, match=said.replace("(", r"\(")):
        file_of_tensors(given, MEMORY)


def test_each_tensor_is_kept_once_over_many_files() -> None:
    """Whole updates, disjoint ones, and ones that overlap in part."""

    def of(*names: str, value: float) -> Any:
        return file_of_tensors({name: torch.full((1000,), value) for name in names}, MEMORY)

    files: list[Any] = []
    expected: dict[str, float] = {}
    before = len(os.listdir("/proc/self/fd"))
    for turn, names in enumerate(["abc", "abc", "a", "bc", "cd", "d", "ae", "abcde"] * 5):
        files, dropped = layered(files, [of(*names, value=float(turn))])
        for file in dropped:
            file.close()
        expected |= dict.fromkeys(names, float(turn))
        found = [(name, float(value[-1])) for file in files for name, value in read(file.path).items()]
        assert sorted(found) == sorted(expected.items())
    assert len(os.listdir("/proc/self/fd")) <= before + len(expected)
    for file in files:
        file.close()
    assert len(os.listdir("/proc/self/fd")) <= before
