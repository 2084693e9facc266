"""`WorkerCalls` by itself: a call that is asked twice is made once, and what it brings waits for the engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from actorllm.actors.call_values import decode_value, encode_value
from actorllm.actors.worker_calls import WorkerCalls
from actorllm.client.weight_updates import NewWeights
from actorllm.errors import EngineError


class Counting:
    """In the place of the first worker."""

    rank = replica = num_calls = 0

    def __init__(self) -> None:
        self._brought: dict[str, Any] = {}

    def count(self) -> int:
        self.num_calls += 1
        return self.num_calls

    def bring(self, value: float) -> None:
        self._brought = {"a": torch.full((4,), value)}

    def take_weights(self) -> dict[str, Any]:
        brought, self._brought = self._brought, {}
        return brought


def called(calls: WorkerCalls, identity: str, target: str, *args: Any) -> Any:
    return decode_value(calls.answer(identity, target, False, encode_value({"args": args, "kwargs": {}}, "arguments")))


def test_a_scheduler_that_asks_again_gets_the_answer_of_before() -> None:
    """It took the place of one that died when the workers were through and its caller was not told."""
    calls = WorkerCalls(cast(Any, Counting()))
    told = [called(calls, identity, "count") for identity in ("a", "a", "b", "b", "a")]
    assert told == [{"value": 1}, {"value": 1}, {"value": 2}, {"value": 2}, {"value": 3}]


def test_weights_wait_for_the_engine_whatever_is_called_meanwhile(tmp_path: Path) -> None:
    """Several calls may be under way at once, and other updates."""
    calls = WorkerCalls(cast(Any, Counting()))
    told = called(calls, "a", "bring", 1.0)["weights"]
    assert called(calls, "b", "count") == {"value": 1}
    (tmp_path / "other").touch()
    calls.note_committed([str(tmp_path / "other"), str(tmp_path / "gone")])
    new = NewWeights.of_worker(told)
    (file,) = new.tensor_files
    assert load_file(Path(file.path))["a"].tolist() == [1.0] * 4
    calls.note_committed([file.path])
    with pytest.raises(EngineError, match="the new weights of this call are gone, and nothing was changed"):
        NewWeights.of_worker(told)
    new.close()


def test_a_file_that_took_the_number_of_another_one_is_not_taken_for_it() -> None:
    calls = WorkerCalls(cast(Any, Counting()))
    earlier, later = (called(calls, identity, "bring", 1.0)["weights"] for identity in "ab")
    assert earlier.partition(":")[2] == later.partition(":")[2], "the number is used again"
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EngineError, match="a later call has brought others"):
        NewWeights.of_worker(earlier)
    assert len(os.listdir("/proc/self/fd")) == num_open
    NewWeights.of_worker(later).close()
