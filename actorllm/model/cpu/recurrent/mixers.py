"""Which mixer computes a recurrent layer, by its shape."""

from __future__ import annotations

from typing import TypeAlias

from actorllm.model.cpu.recurrent.gated_delta import GatedDeltaMixer
from actorllm.model.cpu.recurrent.mamba2 import Mamba2Mixer
from actorllm.model.families.recurrent_shapes import GatedDeltaShape, Mamba2Shape, RecurrentShape
from actorllm.model.families.recurrent_tensors import GatedDeltaTensors, Mamba2Tensors, RecurrentTensors

RecurrentMixer: TypeAlias = Mamba2Mixer | GatedDeltaMixer


def mixer_of(shape: RecurrentShape, tensors: RecurrentTensors) -> RecurrentMixer:
    """tensors: of one layer of that shape."""
    if isinstance(shape, GatedDeltaShape):
        assert isinstance(tensors, GatedDeltaTensors)
        return GatedDeltaMixer(shape, tensors)
    assert isinstance(shape, Mamba2Shape)
    assert isinstance(tensors, Mamba2Tensors)
    return Mamba2Mixer(shape, tensors)
