"""Quantized checkpoints of models that run through transformers: linear layers as the files have them, all else as plain numbers.

transformers gets the weights of these layers as plain numbers, too, so that its own forward can be compared with ours (`probe`).
Then each stored layer takes the place of the module of its name (`packing.pack`). A layer whose weight is floats in the files
stays plain. Called by `transformers_backend`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from actorllm.config import ModelConfig
from actorllm.errors import UnsupportedModelError
from actorllm.model.linear import LinearPart, LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.quantization import open_weights
from actorllm.model.quantization.checkpoint import CheckpointForm
from actorllm.model.quantization.int4 import Int4
from actorllm.model.quantization.per_output import PerOutput
from actorllm.model.weights import FLOATS, tensor_files
from actorllm.types.quantization import KV_SCALES

KINDS = FLOATS | {"I64": torch.int64, "BOOL": torch.bool}
"""Types of plain weights, and of buffers that modules may have."""

NOT_NEEDED = ("rotary_emb.inv_freq", *KV_SCALES)
"""Ends of names of tensors that config.json determines, or that no cache here has."""


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """What the files of a folder hold."""

    layers: dict[str, LinearWeight] = field(default_factory=dict)
    """By the names of modules: what takes their places."""
    plain: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the names of tensors: all of the model, as transformers reads them."""


def read_stored(
    modules: Any, model: ModelConfig, form: CheckpointForm, dtype: torch.dtype, show_progress: bool | None
) -> StoredTensors:
    """Every tensor of a quantized checkpoint, on the CPU.

    Arguments:
        modules: the model of transformers, without weights.
        model: its folder.
        form: of the layers.
        dtype: of plain numbers.
        show_progress: as of `open_weights`.

    Raises:
        UnsupportedModelError: a quantized tensor is of no plain linear layer.
        CorruptModelError: a tensor is missing, left over, or of another shape or type than config.json asks for.
    """
    head, embedding = modules.get_output_embeddings(), modules.get_input_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    found = StoredTensors()
    with open_weights(model, dtype, show_progress) as weights:

        def kind(name: str) -> str:
            stored = weights.stored(name)
            return "" if stored is None else stored.kind

        for name, module in modules.named_modules():
            if type(module) is not torch.nn.Linear or (is_tied and module is head) or not form.scheme.quantizes(name):
                continue
            if kind(f"{name}.weight") in FLOATS:  # schemes say what is quantized of the layers that a family has
                continue
            shape, has_bias = (module.out_features, module.in_features), module.bias is not None
            layer = found.layers[name] = form.sharded(weights, LinearPart(name, *shape, has_bias=has_bias))
            found.plain[f"{name}.weight"] = _dense(layer).to(dtype)
            if has_bias:
                found.plain[f"{name}.bias"] = layer.bias  # type: ignore[attr-defined]
        # All else, which is of no quantized layer; `close` finds what the layers have left over.
        for name in sorted(tensor_files(Path(model.path))):
            owner = name.rpartition(".")[0]
            if _is_within(name, found.layers) or name.endswith(NOT_NEEDED):
                continue
            if kind(name) not in KINDS:
                raise UnsupportedModelError(
                    f"{model.path}: tensor {name!r} is {kind(name)}, and {model.architecture} of transformers has no plain linear "
                    f"layer {owner!r} that it could belong to; use the original model"
                )
            stored = weights.stored(name)
            assert stored is not None
            # In its own type: transformers rounds it, but for what it keeps in float32.
            found.plain[name] = weights.take(name, *stored.shape, dtype=KINDS[stored.kind])
        weights.close(is_ignorable=lambda name: name.endswith(NOT_NEEDED))
    return found


def _is_within(name: str, layers: Container[str]) -> bool:
    """Whether a tensor is one of a layer; some writers have names of several parts for these."""
    while name and name not in layers:
        name = name.rpartition(".")[0]
    return bool(name)


def _dense(layer: LinearWeight) -> torch.Tensor:
    """Its weight as plain numbers, [out_features, in_features]."""
    if isinstance(layer, PerOutput | Int4):
        return layer.dense()
    assert isinstance(layer, Dense)
    return layer.weight
