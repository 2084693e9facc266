"""Which mixer computes a recurrent layer, by its shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from actorllm.model.cpu.recurrent.gated_delta import GatedDeltaMixer
from actorllm.model.cpu.recurrent.mamba import MambaMixer
from actorllm.model.cpu.recurrent.mamba2 import Mamba2Mixer
from actorllm.model.cpu.recurrent.rg_lru import RgLruMixer
from actorllm.model.cpu.recurrent.short_conv import ShortConvMixer
from actorllm.model.families.recurrent_shapes import (
    GatedDeltaShape,
    Mamba2Shape,
    MambaShape,
    RecurrentShape,
    RgLruShape,
    ShortConvShape,
)
from actorllm.model.families.recurrent_tensors import (
    GatedDeltaTensors,
    Mamba2Tensors,
    MambaTensors,
    RecurrentTensors,
    RgLruTensors,
    ShortConvTensors,
)
from actorllm.model.linear import Linear, LinearWeight

RecurrentMixer: TypeAlias = Mamba2Mixer | GatedDeltaMixer | MambaMixer | RgLruMixer | ShortConvMixer


def mixer_of(
    shape: RecurrentShape, tensors: RecurrentTensors, linear: Callable[[LinearWeight], Linear]
) -> RecurrentMixer:
    """tensors: of one layer of that shape. linear: makes the products within the mixer, if it has some."""
    match shape, tensors:
        case GatedDeltaShape(), GatedDeltaTensors():
            return GatedDeltaMixer(shape, tensors)
        case Mamba2Shape(), Mamba2Tensors():
            return Mamba2Mixer(shape, tensors)
        case MambaShape(), MambaTensors():
            return MambaMixer(shape, tensors, linear)
        case RgLruShape(), RgLruTensors():
            return RgLruMixer(shape, tensors)
        case ShortConvShape(), ShortConvTensors():
            return ShortConvMixer(tensors)
    raise AssertionError(f"{type(tensors).__name__} are not of a {type(shape).__name__}")
