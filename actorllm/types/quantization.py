"""What is quantized: the values of `quantization=`, and what `quantization_config` of a config.json says. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actorllm.errors import ConfigError, CorruptModelError, UnsupportedModelError

INT8 = "int8"
COMPRESSED_TENSORS = "compressed-tensors"
INT4_GROUPS = {"int4": 32, "int4-g64": 64, "int4-g128": 128}
"""Inputs that share a scale, by the methods that round to 4 bits."""
ROUNDING = (INT8, *INT4_GROUPS)
"""Methods that round the weights of a plain model while it is loaded."""
METHODS = (*ROUNDING, COMPRESSED_TENSORS)

FIELDS: dict[str, Any] = {
    "format": "int-quantized",
    "weights.num_bits": 8,
    "weights.type": "int",
    "weights.symmetric": True,
    "weights.strategy": "channel",
    "weights.dynamic": False,
    "input_activations.num_bits": 8,
    "input_activations.type": "int",
    "input_activations.symmetric": True,
    "input_activations.strategy": "token",
    "input_activations.dynamic": True,
}
"""What a group of a compressed-tensors checkpoint must say, by the names of its fields."""

OPTIONAL = ("weights.dynamic",)
"""Fields that a checkpoint may leave out."""


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """A checkpoint with int8 weights, one scale for each output, and activations that are quantized by token."""

    ignored: tuple[str, ...]
    """Layers that are not quantized: names, or patterns behind "re:"."""

    def quantizes(self, name: str) -> bool:
        """Whether the linear layer of this name is quantized."""
        return not any(
            re.match(each[3:], name) is not None if each.startswith("re:") else each == name for each in self.ignored
        )


def bits_of(method: str) -> int:
    """Of the weights that this method makes of plain ones."""
    return 4 if method in INT4_GROUPS else 8


def read_checkpoint(hf: Mapping[str, Any]) -> QuantizedCheckpoint | None:
    """What a config.json says of its weights; None: they are not quantized.

    Raises UnsupportedModelError with the field for a scheme that is not known, CorruptModelError for what is no scheme.
    """
    tree = hf.get("quantization_config")
    if tree is None:
        return None
    if not isinstance(tree, dict):
        raise CorruptModelError(f"config.json: quantization_config is {tree!r}, an object is needed")
    method = tree.get("quant_method", "unknown")
    if method != COMPRESSED_TENSORS:
        raise UnsupportedModelError(
            f"quantized weights ({method}) are not supported; use the original model (config.json says so in "
            f"quantization_config.quant_method; {COMPRESSED_TENSORS!r} is read)"
        )
    ignored = _ignored(tree)
    groups = tree.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise CorruptModelError(f"config.json: quantization_config.config_groups is {groups!r}, objects are needed")
    if len(groups) > 1:
        raise UnsupportedModelError(
            f"quantized weights ({method}) are not supported: quantization_config.config_groups has {len(groups)} schemes; "
            f"one is read"
        )
    ((name, group),) = groups.items()
    _check_group(f"quantization_config.config_groups.{name}", group, tree)
    for field in ("kv_cache_scheme", "sparsity_config"):
        inner = tree.get(field)
        if inner and not (isinstance(inner, dict) and inner.get("format") == "dense"):
            raise _unknown(f"quantization_config.{field}", inner, None)
    return QuantizedCheckpoint(ignored)


def _ignored(tree: Mapping[str, Any]) -> tuple[str, ...]:
    ignored = tree.get("ignore") or []
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise CorruptModelError(f"config.json: quantization_config.ignore is {ignored!r}, a list of names is needed")
    for pattern in (name[3:] for name in ignored if name.startswith("re:")):
        try:
            re.compile(pattern)
        except re.error as error:
            raise CorruptModelError(
                f"config.json: quantization_config.ignore has {pattern!r}, which is no pattern: {error}"
            ) from error
    return tuple(ignored)


def _check_group(where: str, group: Mapping[str, Any], tree: Mapping[str, Any]) -> None:
    if group.get("targets") != ["Linear"]:
        raise _unknown(f"{where}.targets", group.get("targets"), ["Linear"])
    for field, wanted in FIELDS.items():
        part, _, key = field.partition(".")
        if key:
            scheme = group.get(part)
            found, place = scheme.get(key) if isinstance(scheme, dict) else None, f"{where}.{field}"
        else:  # of the group, or of all of them
            found, place = group.get(part) or tree.get(part), f"quantization_config.{field}"
        if found is None and field in OPTIONAL:
            continue
        if found != wanted or type(found) is not type(wanted):
            raise _unknown(place, found, wanted)


def _unknown(field: str, found: Any, wanted: Any) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"quantized weights ({COMPRESSED_TENSORS}) are not supported: {field} is {found!r}, {wanted!r} is read"
    )


def read_method(wanted: Any, hf: Mapping[str, Any], has_module: bool) -> str | None:
    """How the weights of a model are quantized: by `quantization=`, or None there and by its config.json.

    Raises ConfigError for a value that is not known, or that contradicts the checkpoint.
    """
    if wanted is not None and wanted not in METHODS:
        known = f"{', '.join(map(repr, METHODS[:-1]))} or {METHODS[-1]!r}"
        raise ConfigError(f"quantization={wanted!r} is not supported; use {known}, or leave it at None")
    if has_module:
        return None
    method: str | None = wanted
    tree = hf.get("quantization_config")
    if tree is None:
        if wanted == COMPRESSED_TENSORS:
            raise ConfigError(
                f"quantization={wanted!r}: config.json has no quantization_config, so the weights are not quantized; use "
                f"{INT8!r}, or leave it at None"
            )
        return method
    if wanted in ROUNDING:
        found = tree.get("quant_method", "unknown") if isinstance(tree, dict) else "unknown"
        raise ConfigError(
            f"quantization={wanted!r}: the weights of this model are quantized already ({found}); leave it at None"
        )
    return COMPRESSED_TENSORS if isinstance(tree, dict) and tree.get("quant_method") == COMPRESSED_TENSORS else None
