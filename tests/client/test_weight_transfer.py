"""Updates of the weights in parts: each part is of the update that it was given to, or of none."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actorllm.client.weight_memory import LEAST_BYTES, WeightMemory
from actorllm.client.weight_transfer import TransferPart, WeightTransfer, read
from actorllm.client.weight_updates import NewWeights
from actorllm.errors import EngineError, InvalidParameterError
from actorllm.model import memory
from actorllm.model.updates.tensor_files import TensorFile


def request(**values: float) -> dict[str, Any]:
    return {"update_info": {"tensors": {name: torch.full((4,), value) for name, value in values.items()}}}


def finished(transfer: WeightTransfer) -> dict[str, float]:
    new = transfer.finish()
    found = {name: float(value[0]) for file in new.tensor_files for name, value in load_file(Path(file.path)).items()}
    new.close()
    return found


def bring_late(part: TransferPart, new: NewWeights, transfer: WeightTransfer) -> None:
    part.bring()


def add_late(part: TransferPart, new: NewWeights, transfer: WeightTransfer) -> None:
    transfer.add(new, part)


@pytest.mark.parametrize("come", [bring_late, add_late])
def test_a_part_that_is_read_slowly_is_in_no_other_update(come: Callable[..., None]) -> None:
    transfer = WeightTransfer()
    transfer.start()
    part, new = transfer.part(request(a=1.0)), read(request(a=1.0))
    transfer.start()
    transfer.part(request(a=2.0, b=2.0)).bring()
    with pytest.raises(InvalidParameterError, match="so the part was not kept; wait for every update_weights"):
        come(part, new, transfer)
    part, late = transfer.part(request(b=3.0)), read(request(b=3.0))
    assert finished(transfer) == {"a": 2.0, "b": 2.0}
    with pytest.raises(InvalidParameterError, match="so the part was not kept"):
        come(part, late, transfer)
    for one in (new, late):
        one.close()


def test_a_part_whose_caller_waits_no_more_replaces_nothing() -> None:
    transfer = WeightTransfer()
    transfer.start()
    part = transfer.part(request(a=1.0))
    part.is_given_up = True
    transfer.part(request(a=2.0)).bring()
    with pytest.raises(InvalidParameterError):
        part.bring()
    assert finished(transfer) == {"a": 2.0}


def test_an_update_without_a_part_goes_on() -> None:
    transfer = WeightTransfer()
    transfer.start()
    with pytest.raises(InvalidParameterError, match="call update_weights before"):
        transfer.finish()
    transfer.part(request(a=1.0)).bring()
    assert finished(transfer) == {"a": 1.0}


def test_want_of_memory_costs_the_part_that_came_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(self: TensorFile, names: Any) -> TensorFile:
        raise OSError(errno.ENOSPC, "No space left on device")

    transfer = WeightTransfer()
    transfer.start()
    transfer.part(request(a=1.0, b=1.0)).bring()
    part = transfer.part(request(a=2.0))
    with monkeypatch.context() as patch:
        patch.setattr(TensorFile, "without", without)
        with pytest.raises(
            EngineError, match=r"there is no memory for the new weights, and nothing was changed: .*No space"
        ):
            part.bring()
    transfer.part(request(b=3.0)).bring()
    assert finished(transfer) == {"a": 1.0, "b": 3.0}


def test_files_that_are_larger_than_the_memory_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(1000)}, tmp_path / "a.safetensors")
    given = {"update_info": {"files": [str(tmp_path / "a.safetensors")]}}
    monkeypatch.setattr(memory, "available_bytes", lambda: 10_000)
    with pytest.raises(EngineError, match=r"1 files have \d+ bytes, .* of which 10000 are available"):
        read(given)
    monkeypatch.setattr(memory, "available_bytes", lambda: 20_000)
    read(given).close()


def test_memory_is_given_back_where_a_part_of_it_serves_and_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version came in parts of several sizes, whose files are all kept."""
    save_file({"a": torch.ones(LEAST_BYTES)}, tmp_path / "a.safetensors")
    size = (tmp_path / "a.safetensors").stat().st_size
    weights = WeightMemory()
    lasting = weights.new(4 * size)
    for part in [weights.new(size), weights.new(2 * size)]:
        part.close()
    assert weights.num_kept_bytes == 3 * size
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * size - weights.num_kept_bytes)
    new = read({"update_info": {"files": [str(tmp_path / "a.safetensors")]}}, weights)
    assert weights.num_kept_bytes == 0
    new.close()
    lasting.close()
    weights.close()


def test_memory_that_is_kept_counts_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a version before serves the copy; where it has another size, it is given back first."""
    save_file({"a": torch.ones(LEAST_BYTES)}, tmp_path / "a.safetensors")
    size = (tmp_path / "a.safetensors").stat().st_size
    given = {"update_info": {"files": [str(tmp_path / "a.safetensors")]}}
    for kept_bytes, serves in ((size, True), (2 * size, False)):
        weights = WeightMemory()
        lasting, before = weights.new(kept_bytes), weights.new(kept_bytes)
        known = os.stat(before.path).st_ino
        before.close()
        assert weights.num_kept_bytes == kept_bytes
        with monkeypatch.context() as patch:
            patch.setattr(memory, "available_bytes", lambda weights=weights: 3 * size - weights.num_kept_bytes)
            new = read(given, weights)
        assert weights.num_kept_bytes == 0, "it is that of the new ones, or of the system"
        assert (os.stat(new.tensor_files[0].path).st_ino == known) is serves
        new.close()
        lasting.close()
        weights.close()
