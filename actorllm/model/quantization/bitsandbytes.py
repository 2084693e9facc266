"""Layers of bitsandbytes: numbers of a table of 16 (nf4, fp4), or integers of 8 bits with one scale for each output.

Format: https://github.com/bitsandbytes-foundation/bitsandbytes, as transformers stores it. With 4 bits, `weight` is uint8
[numbers / 2, 1], the upper half of a byte first. `weight.quant_map` is the table. `weight.absmax` has the scale of each block of
numbers that follow each other. Scales may be of 8 bits: places in `weight.nested_quant_map`, times `weight.nested_absmax` of
blocks of scales, plus an offset. `weight.quant_state.bitsandbytes__nf4` is JSON that has the sizes of blocks and the offset. With
8 bits, `weight` is int8, and `SCB` has the largest magnitude of each output. A layer whose weight is floats is not quantized.
"""

from __future__ import annotations

import math
from typing import Any

import orjson
import torch

from actorllm.errors import CorruptModelError
from actorllm.model.linear import LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.quantization.grouped import checked_scales
from actorllm.model.quantization.int8 import LIMIT, Int8
from actorllm.model.quantization.stored_layer import StoredLayer

STATE = ".weight.quant_state.bitsandbytes__"
NUM_LEVELS, NUM_SCALE_LEVELS = 16, 256


def read(layer: StoredLayer) -> LinearWeight:
    """A layer. Raises CorruptModelError with the name of the tensor that is wrong."""
    found, shape = layer.stored(".weight"), (layer.out_features, layer.in_features)
    part = {"rows": layer.rows, "columns": layer.columns}
    if found is not None and found.kind == "I8":
        scales = (
            checked_scales(f"{layer.name}.SCB", layer.take(".SCB", layer.out_features, dtype=torch.float32)) / LIMIT
        )
        if layer.stored(".weight_format") is not None and bool(layer.take_whole(".weight_format", torch.uint8).any()):
            raise CorruptModelError(f"tensor {layer.name + '.weight_format'!r} is not 0: its rows have another order")
        codes = layer.take(".weight", *shape, **part, dtype=torch.int8)
        return Int8(codes.contiguous(), scales[layer.rows].contiguous(), layer.bias)
    if found is None or found.kind != "U8":
        return Dense(layer.take(".weight", *shape, **part).contiguous(), layer.bias)
    state, num_numbers = _state(layer), math.prod(shape)
    block = _size(layer, state, "blocksize")
    packed = layer.take(".weight", -(-num_numbers // 2), 1, dtype=torch.uint8)
    levels = layer.take(".weight.quant_map", NUM_LEVELS, dtype=torch.float32)
    numbers = levels[torch.cat((packed >> 4, packed & 15), 1).int()].view(-1)[:num_numbers]
    scales = _scales(layer, state, -(-num_numbers // block)).repeat_interleave(block)[:num_numbers]
    return layer.rounded(numbers.mul_(scales).view(shape))


def _scales(layer: StoredLayer, state: dict[str, Any], count: int) -> torch.Tensor:
    """float32 [count], of blocks."""
    name = f"{layer.name}.weight.absmax"
    if layer.stored(".weight.nested_absmax") is None:
        return checked_scales(name, layer.take(".weight.absmax", count, dtype=torch.float32))
    block, offset = _size(layer, state, "nested_blocksize"), state.get("nested_offset")
    if isinstance(offset, bool) or not isinstance(offset, int | float):
        raise CorruptModelError(
            f"tensor {layer.name + STATE!r}...: nested_offset is {offset!r:.80}, a number is needed"
        )
    places = layer.take(".weight.absmax", count, dtype=torch.uint8)
    levels = layer.take(".weight.nested_quant_map", NUM_SCALE_LEVELS, dtype=torch.float32)
    outer = layer.take(".weight.nested_absmax", -(-count // block), dtype=torch.float32)
    return checked_scales(name, levels[places.int()] * outer.repeat_interleave(block)[:count] + offset)


def _state(layer: StoredLayer) -> dict[str, Any]:
    kind = next((kind for kind in ("nf4", "fp4") if layer.stored(STATE + kind) is not None), "nf4")
    text = bytes(layer.take_whole(STATE + kind, torch.uint8).tolist())
    try:
        state = orjson.loads(text)
    except orjson.JSONDecodeError:
        state = None
    if not isinstance(state, dict) or state.get("shape") != [layer.out_features, layer.in_features]:
        raise CorruptModelError(
            f"tensor {layer.name + STATE + kind!r} is {text!r:.200}, JSON with shape "
            f"{[layer.out_features, layer.in_features]} is needed"
        )
    return state


def _size(layer: StoredLayer, state: dict[str, Any], field: str) -> int:
    value = state.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CorruptModelError(
            f"tensor {layer.name + STATE!r}...: {field} is {value!r:.80}, a positive integer is needed"
        )
    return value
