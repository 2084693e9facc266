"""Tensors in memory files, as tests make and read them."""

from __future__ import annotations

from functools import partial

import torch

from actorllm.actors.memory_file import MemoryFile
from actorllm.model.updates.tensor_files import MappedTensors, TensorFile

new_memory = partial(MemoryFile, "weights")


def read(file: TensorFile) -> dict[str, torch.Tensor]:
    """What a worker finds there."""
    mapped = MappedTensors(file.path)
    return {name: mapped.tensor(name).clone() for name in mapped.records}
