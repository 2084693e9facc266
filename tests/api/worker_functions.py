"""What the tests of `collective_rpc` call in workers: functions, an extension and a class of workers."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from actorllm.errors import CorruptModelError, EngineError
from actorllm.model.rank_worker import RankWorker
from actorllm.types.adapter_folder import Adapter, AdapterDigests


def echo(worker: RankWorker, *args: Any, **kwargs: Any) -> Any:
    return {"rank": worker.rank, "replica": worker.replica, "args": args, "kwargs": kwargs}


def types_of(worker: RankWorker, *args: Any) -> list[str]:
    return [f"{type(one).__module__}.{type(one).__name__}" for one in args]


def embedding_row(model: Any) -> torch.Tensor:
    """As the model has it: in its own type."""
    row: torch.Tensor = model.embedding[7]
    return row


def module_name(model: Any) -> str:
    return type(model).__name__


def fails_on_the_second_rank(worker: RankWorker) -> str:
    if worker.rank + worker.replica == 1:
        raise LookupError("not here")
    return "done"


def returns_an_object(worker: RankWorker) -> Any:
    return {"worker": object()}


def returns_sets(worker: RankWorker, *given: Any) -> Any:
    return [{"b", "a"}, frozenset([3]), *map(set, given)]


async def coroutine(worker: RankWorker) -> None:
    pass


def many_bytes(worker: RankWorker, num_bytes: int) -> Any:
    return np.zeros(num_bytes, np.uint8)


def kill(worker: RankWorker) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse_weights_once(worker: RankWorker) -> bool:
    """The second rank or replica cannot use the next ones. Whether this is it."""
    if worker.rank + worker.replica != 1:
        return False
    runner = worker.model_runner
    right = runner.stage_weights

    def refusing(source: Any) -> Any:
        runner.stage_weights = right
        raise CorruptModelError("planted: this rank alone cannot use them")

    runner.stage_weights = refusing
    return True


def refuse_sleep_once(worker: RankWorker) -> bool:
    """The second replica cannot give its memory back. Whether this is it."""
    if worker.replica != 1:
        return False
    runner = worker.model_runner
    right = runner.release_weights

    def refusing(source: Any, *, keeps_pages: bool) -> None:
        runner.release_weights = right
        raise EngineError("planted: this replica alone cannot sleep")

    runner.release_weights = refusing
    return True


def hold_adapter(worker: RankWorker, call: str, folder: str, pipe: str) -> None:
    """The adapter of this folder is read, or "put" into its slot, when something has come through this named pipe."""
    adapters = worker.model_runner.adapters
    assert adapters is not None
    read, put = adapters.read, adapters.put
    digest = AdapterDigests(adapters.slots.max_rank).adapter_of(folder).digest

    def wait(held: str) -> None:
        if held == digest:
            with open(pipe) as file:
                file.read(1)

    def held_read(adapter: Adapter) -> Any:
        wait(adapter.digest)
        return read(adapter)

    def held_put(slot: int, held: str, tensors: Any) -> None:
        wait(held)
        put(slot, held, tensors)

    if call == "read":
        adapters.read = held_read  # type: ignore[method-assign]
    else:
        adapters.put = held_put  # type: ignore[method-assign]


def step_costs(worker: RankWorker) -> Any:
    """What it takes the number of drafts by; nothing: it goes by none."""
    paying = worker.model_runner._speculator._paying
    return [] if paying is None else paying._steps


def die_in_the_middle_of(worker: RankWorker, call: str, number: int) -> None:
    """Of this call of `os` that moves a block to a disk, or from one, when it comes for so many times: after a part."""
    right = getattr(os, call)
    numbers = iter(range(1, number))

    def dying(fd: int, views: Any, at: int) -> int:
        if next(numbers, None) is not None:
            return int(right(fd, views, at))
        right(fd, [memoryview(views[0])[: views[0].nbytes // 2]], at)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    setattr(os, call, dying)


def count_slots(worker: RankWorker) -> int:
    """Of the batch, between two steps."""
    return int(worker.model_runner.batch.num_slots)


class Extension:
    """As programs for vLLM write one: it calls what the worker has."""

    num_calls = 0

    def scaled_rank(self: Any, by: int = 2) -> int:
        self.num_calls += 1
        return int(self.rank) * by + int(self.num_calls)

    def describe(self: Any) -> dict[str, Any]:
        return {
            "device": str(self.device),
            "ranks": self.parallel_config.tensor_parallel_size,
            "layers": len(self.model_runner.model.layers),
            "length": self.vllm_config.model_config.max_model_len,
        }


class Taken:
    """It defines what workers have."""

    def get_model(self) -> None:
        pass


class OwnWorker(RankWorker):
    """With a state of its own, made when the model is loaded."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.log: list[str] = []

    def note(self, text: str) -> list[str]:
        self.log.append(text)
        return self.log


class BrokenWorker(RankWorker):
    def __init__(self, model_runner: Any) -> None:
        raise OSError("no such thing")


def tensor(worker: RankWorker) -> torch.Tensor:
    return torch.zeros(2)


class WeightExtension:
    """As trainers write it for vLLM: it reads weights where the worker is, and gives them to the model."""

    def update_weights_from_path(self: Any, path: str) -> int:
        names = self.model_runner.model.load_weights(weights=iter(load_file(path).items()))
        return len(names)

    def update_weight(self: Any, name: str, tensor: torch.Tensor) -> None:
        """One at a time, out of memory that is used again."""
        self.model_runner.model.load_weights([(name, tensor)])
        tensor.zero_()

    def update_and_fail(self: Any, path: str) -> None:
        self.update_weights_from_path(path)
        raise LookupError("not here")
