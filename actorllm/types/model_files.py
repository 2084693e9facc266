"""The JSON files of a model's folder. Standard library and orjson only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from actorllm.errors import ConfigError, CorruptModelError, ModelNotFoundError
from actorllm.types.quantization import AWQ, COMPRESSED_TENSORS, GPTQ, MODELOPT

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
"""Which of several files holds which tensor."""
MAX_LAYERS = 4096
"""Of a model, or of a head that drafts for one."""
MAX_HEADS = 1 << 16
"""Of a layer."""
MAX_POSITIONS = 1 << 24
"""Of a sequence: the longest of a released model is some 10 million."""
MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), MAX_LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "n_head", "n_heads"), MAX_HEADS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"), MAX_POSITIONS),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), MAX_POSITIONS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1 << 14),
    **dict.fromkeys(
        ("head_dim", "state_size", "mamba_d_state", "conv_kernel", "mamba_d_conv", "conv1d_width"), 1 << 13
    ),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "lru_width", "time_step_rank"), 1 << 20),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_dim"), 1 << 22),
    "vocab_size": 1 << 24,
}
"""Of the sizes in a config.json, far above those of any model: what is made of a larger one takes all memory, or does not end."""


def check_sizes(hf: Mapping[str, Any]) -> None:
    """Raises CorruptModelError for an absurd size of config.json. Whether it is a number at all is asked where it is read."""
    for key, most in MOST.items():
        value = hf.get(key)
        if isinstance(value, int) and value > most:
            raise CorruptModelError(f"config.json: {key} is {value!r:.40}, a number from 1 to {most} is needed")


def check_weights_exist(folder: Path) -> None:
    """Raises ModelNotFoundError where the folder has no weights that can be read here. What is in them is not looked at."""
    if not (folder / INDEX_FILE).is_file() and not (folder / SINGLE_FILE).is_file():
        raise ModelNotFoundError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; convert the weights to safetensors, or use "
            f"load_format='dummy' for random ones"
        )


def read_json(file: Path) -> Any:
    """What it holds. Raises CorruptModelError.

    Infinity and NaN are numbers, though not of JSON: Python writes them, and config.json of many state-space models has the former.
    """
    try:
        data = file.read_bytes()
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            if b"Infinity" not in data and b"NaN" not in data:
                raise
            tree = json.loads(data)
            orjson.dumps(tree)  # its texts and its other numbers are those of JSON
            return tree
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CorruptModelError(f"{file} cannot be read: {error}") from error


def read_object(file: Path, *, is_optional: bool = False) -> dict[str, Any]:
    """A JSON object. is_optional: without such a file, an empty one. Raises CorruptModelError."""
    if is_optional and not file.is_file():
        return {}
    tree = read_json(file)
    if not isinstance(tree, dict):
        raise CorruptModelError(f"{file} must hold a JSON object, not {type(tree).__name__}")
    return tree


def read_model_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model. Raises CorruptModelError.

    Some writers say in another place how weights are stored. It is put where the others have it, `quantization_config`.
    """
    tree = read_object(folder / "config.json")
    if tree.get("quantization_config") in (None, {}):
        found = _said_elsewhere(tree) or _said_beside(folder)
        tree.pop("quantization_config", None)
        if found:
            tree["quantization_config"] = found
    return tree


def _said_elsewhere(tree: Mapping[str, Any]) -> dict[str, Any]:
    """How weights are stored, by other fields of config.json; empty: they do not say."""
    older, within, of_mlx = tree.get("compression_config"), tree.get("text_config"), tree.get("quantization")
    if isinstance(older, dict) and older:
        return {"quant_method": COMPRESSED_TENSORS, **older}
    inner = within.get("quantization_config") if isinstance(within, dict) else None
    if isinstance(inner, dict) and inner:
        return inner
    return of_mlx if isinstance(of_mlx, dict) and "bits" in of_mlx else {}


def _said_beside(folder: Path) -> dict[str, Any]:
    """The same, by files that older releases of ModelOpt, AutoGPTQ and AutoAWQ write."""
    beside = read_object(folder / "hf_quant_config.json", is_optional=True)
    inner = beside.get("quantization")
    if (inner if isinstance(inner, dict) else beside).get("quant_algo") is not None:  # else of the KV cache alone
        return {"quant_method": MODELOPT, **beside}
    for name in ("quantize_config.json", "quant_config.json"):
        found = read_object(folder / name, is_optional=True)
        if "bits" in found or "w_bit" in found:
            return {"quant_method": AWQ if "w_bit" in found or "zero_point" in found else GPTQ, **found}
    return {}


def read_overrides(given: Any) -> dict[str, Any]:
    """`hf_overrides`, a mapping or that as JSON; None: an empty one. Raises ConfigError."""
    if isinstance(given, str):
        try:
            given = orjson.loads(given)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"hf_overrides={given!r:.200} is not valid JSON: {error}") from error
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"hf_overrides={given!r:.200} must be a mapping of fields of config.json")
    try:
        orjson.dumps(dict(given))
    except TypeError as error:
        raise ConfigError(f"hf_overrides={given!r:.200} must hold what JSON knows: {error}") from error
    return dict(given)


def overridden(tree: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with other values; objects within it are merged field by field."""
    merged = dict(tree)
    for name, value in overrides.items():
        within = merged.get(name)
        merges = isinstance(value, Mapping) and isinstance(within, dict)
        merged[name] = overridden(within or {}, value) if merges else value
    # The older name of this object counts where it is the one that is overridden.
    if "rope_scaling" in overrides and "rope_parameters" not in overrides and merged.get("rope_parameters"):
        merged["rope_parameters"] = {**merged["rope_parameters"], **(merged.pop("rope_scaling") or {})}
    if "rope_theta" in overrides and "rope_parameters" not in overrides and merged.get("rope_parameters"):
        merged["rope_parameters"] = {**merged["rope_parameters"], "rope_theta": overrides["rope_theta"]}
    return merged
