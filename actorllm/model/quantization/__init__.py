"""Quantized weights: which form the linear layers of a model have (`model.linear`).

`int8` and `int4` are the arithmetic, in plain torch; `onednn` and `int4pack` compute the same on a CPU. `checkpoint` reads
checkpoints that are quantized, each layer by its method (`gptq`, `awq`, `compressed_tensors`, `float4`, `fp8`, `torchao`), and
`gguf` files of that kind. The embedding, the norms and the biases are never quantized. The head is, unless a checkpoint leaves
it out.
"""

from __future__ import annotations

from pathlib import Path

import torch

from actorllm.config import ModelConfig
from actorllm.model.linear import Form
from actorllm.model.linear.dense import Dense
from actorllm.model.quantization.checkpoint import CheckpointForm
from actorllm.model.quantization.float8 import Fp8
from actorllm.model.quantization.gguf import GgufForm, GgufWeights
from actorllm.model.quantization.int4 import Int4Weights
from actorllm.model.quantization.int8 import Int8
from actorllm.model.weights import CheckpointWeights, DummyWeights, Weights
from actorllm.types.model_files import overridden, read_model_config
from actorllm.types.quantization import FP8, GGUF, INT4_GROUPS, read_checkpoint


def form_of(model: ModelConfig, *, keeps_floats: bool = False) -> Form:
    """What the linear layers of this model are read as. Raises ModelError for a scheme that is not known.

    keeps_floats: floats of 8 bits stay what they are; else they become integers.
    """
    if model.quantization is None:
        return Dense
    checkpoint = read_checkpoint(overridden(read_model_config(Path(model.path)), model.overrides))
    if checkpoint is None or model.load_format == "dummy":
        if keeps_floats and model.quantization == FP8:
            return Fp8
        group = INT4_GROUPS.get(model.quantization)
        return Int8 if group is None else Int4Weights(group)
    return GgufForm() if checkpoint.method == GGUF else CheckpointForm(checkpoint, keeps_floats=keeps_floats)


def open_weights(
    model: ModelConfig, dtype: torch.dtype, show_progress: bool | None, device: torch.device | None = None
) -> Weights:
    """Those of the version that the configuration names. device: where they are wanted; None: on the CPU."""
    source = model.weights
    if model.load_format == "dummy" and source.is_first:
        return DummyWeights(model.seed, dtype, device)
    if model.quantization == GGUF:
        checkpoint = read_checkpoint(read_model_config(Path(model.path)))
        assert checkpoint is not None
        return GgufWeights(Path(checkpoint.file), dtype)
    is_complete = model.load_format == "dummy" and source.folder is None  # random ones are never mixed with others
    return CheckpointWeights(
        Path(source.folder or model.path),
        dtype,
        show_progress,
        device,
        overlays=source.overlays,
        is_complete=is_complete,
        is_update=not source.is_first,
    )


def rounding_of(model: ModelConfig) -> Form:
    """What plain weights would be rounded to, to be computed as those of this quantized model are."""
    form = form_of(model)
    if not isinstance(form, CheckpointForm):
        return form
    return Int4Weights() if form.scheme.bits == 4 else Int8
