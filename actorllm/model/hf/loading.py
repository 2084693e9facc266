"""Models of transformers: their configuration, the modules without weights, and the weights, read or drawn.

`auto` is the class of transformers that makes them (`AutoModelForCausalLM`, `AutoModel`). No code of a model's folder is ever run,
and nothing is downloaded. Called by `transformers_backend` and `encoder`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from actorllm.config import ModelConfig
from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.weights import UPDATE, progress_is_shown, stable_hash, tensor_files
from actorllm.types.quantization import GGUF, MXFP4, read_checkpoint
from actorllm.types.quiet_transformers import quiet

LANGUAGE_PARTS = ("language_model", "text_model")
"""What models that take more than text call the decoder within them; all beside it makes rows of images or audio."""

LOWEST_RELEASE = (5, 8)
"""Of transformers, to run models through it: older ones make other masks, and their rotations do not run on the meta device."""


def refused(architecture: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"architecture {architecture!r} is not supported: {reason}")


def check_release(architecture: str) -> None:
    """Raises UnsupportedModelError where the installed transformers is too old for models that run through it."""
    installed = transformers.__version__
    if tuple(int(part) for part in installed.split(".")[:2]) < LOWEST_RELEASE:
        lowest = ".".join(map(str, LOWEST_RELEASE))
        raise refused(
            architecture,
            f"it runs through transformers, which must be {lowest} or newer for that; {installed} is installed: "
            f"pip install 'transformers>={lowest}'",
        )


def read_config(model: ModelConfig, hf: dict[str, Any], *, takes_quantized: bool = False) -> Any:
    """The transformers configuration, without what it says of quantized weights: they are read here.

    takes_quantized: linear layers may be as quantized checkpoints have them. Raises UnsupportedModelError or CorruptModelError.
    """
    architecture, kind = model.architecture, hf.get("model_type")
    scheme = read_checkpoint(hf)
    if scheme is not None or hf.get("quantization_config"):
        method = MXFP4 if scheme is None else scheme.method
        if method in (MXFP4, GGUF):
            raise UnsupportedModelError(
                f"quantized weights ({method}) are not supported through transformers; leave model_impl at 'auto', or use the "
                f"original model"
            )
        if not takes_quantized:
            raise UnsupportedModelError(
                f"quantized weights ({method}) of {architecture} are not supported: through transformers, decoders of text have "
                f"them; use the original model"
            )
    if kind not in CONFIG_MAPPING:
        if hf.get("auto_map"):
            reason = "it needs the code in its folder (auto_map), and no code of a model is run"
        elif kind is None:
            reason = "config.json says no model_type"
        else:
            reason = f"this version of transformers knows no model_type {kind!r}"
        raise refused(architecture, reason)
    try:
        with quiet():
            if model.overrides:
                config = CONFIG_MAPPING[str(kind)].from_dict(copy.deepcopy(hf))
            else:
                config = AutoConfig.from_pretrained(model.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise CorruptModelError(f"{model.path}/config.json cannot be used: {' '.join(str(error).split())}") from error
    vars(config).pop("quantization_config", None)
    return config


def built(auto: Any, config: Any, attention: str, dtype: torch.dtype, device: torch.device | None = None) -> Any:
    """The modules, with whatever weights the architecture starts with. device: None: the CPU."""
    device = device or torch.device("cpu")
    # On the meta device nothing is drawn. Elsewhere what other threads of the process draw meanwhile is drawn once more.
    draws = torch.random.fork_rng(devices=[], enabled=device.type != "meta")
    with quiet(), draws, device:
        return auto.from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )


def drawn(
    auto: Any, config: Any, attention: str, dtype: torch.dtype, seed: int, device: torch.device | None = None
) -> Any:
    """The same with random weights from a seed, by the names of the parameters: on each kind of device others.

    They are scaled as `weights.DummyWeights` does, so that what is sampled depends on them.
    """
    model = built(auto, config, attention, dtype, device)
    outer = {
        id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part is not None
    }
    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed((seed * 1_000_003 + stable_hash(name)) % 2**63)
        if parameter.ndim < 2:  # a norm or a bias: near what the architecture starts it with
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator))
        else:
            gain = 3.0 if id(parameter) in outer else 1.0
            parameter.normal_(0.0, gain / parameter.shape[-1] ** 0.5, generator=generator)
    return model


def from_checkpoint(
    auto: Any, config: Any, attention: str, dtype: torch.dtype, path: str, show_progress: bool | None, **how: Any
) -> tuple[Any, dict[str, Any]]:
    """The modules with the weights of a folder, and transformers' report of them. Raises ModelError."""
    tensor_files(Path(path))  # raises what is wrong with the files
    with quiet(shows_progress=progress_is_shown(show_progress)):
        try:
            model, report = auto.from_pretrained(
                path,
                config=copy.deepcopy(config),
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # they are in the report, by name
                output_loading_info=True,
                **how,
            )
        except Exception as error:
            raise CorruptModelError(f"{path}: the weights cannot be loaded: {error}") from error
    return model, report


def from_tensors(
    kind: Any, config: Any, attention: str, dtype: torch.dtype, tensors: dict[str, torch.Tensor], place: str = UPDATE
) -> tuple[Any, dict[str, Any]]:
    """The modules of a class with these weights, and transformers' report of them. Raises CorruptModelError.

    place: where the tensors are from, for messages.
    """
    with quiet(shows_progress=False):
        try:
            model, report = kind.from_pretrained(
                None,
                config=copy.deepcopy(config),
                state_dict=tensors,
                dtype=dtype,
                attn_implementation=attention,
                ignore_mismatched_sizes=True,  # they are in the report, by name
                output_loading_info=True,
            )
        except Exception as error:
            raise CorruptModelError(f"{place} cannot be loaded: {error}") from error
    return model, report


def check_tensors(
    path: str, missing: Iterable[str], unexpected: Iterable[str], mismatched: Iterable[tuple[str, Any, Any]]
) -> None:
    """Raises CorruptModelError for a checkpoint that is not of the model that config.json describes."""
    for name in sorted(missing):
        raise CorruptModelError(f"{path} has no tensor {name!r}, which this architecture needs")
    for name in sorted(unexpected):
        raise CorruptModelError(
            f"{path} has a tensor {name!r} that this architecture does not know: config.json describes another model"
        )
    for name, shape, wanted in sorted(mismatched):
        raise CorruptModelError(
            f"{path}: tensor {name!r} has shape {tuple(shape)}, config.json asks for {tuple(wanted)}"
        )
