"""What is quantized: the values of `quantization=`, and what `quantization_config` of a config.json says. Free of torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actorllm.errors import ConfigError, CorruptModelError, UnsupportedModelError

INT8 = "int8"
MXFP4 = "mxfp4"
"""Of stacked experts: it is no method for linear layers."""
COMPRESSED_TENSORS, GPTQ, AWQ, FP8, GGUF = "compressed-tensors", "gptq", "awq", "fp8", "gguf"
TORCHAO = "torchao"
MODELOPT = "modelopt"
AUTO_ROUND = "auto-round"
BITSANDBYTES = "bitsandbytes"
INT4_GROUPS = {"int4": 32, "int4-g64": 64, "int4-g128": 128}
"""Inputs that share a scale, by the methods that round to 4 bits."""
ROUNDING = (INT8, *INT4_GROUPS)
"""Methods that round the weights of a plain model while it is loaded; on CUDA, FP8 does as well."""
METHODS = (*ROUNDING, COMPRESSED_TENSORS, GPTQ, AWQ, FP8, GGUF, TORCHAO, MODELOPT, AUTO_ROUND, BITSANDBYTES)

NVFP4_PACKED, MXFP4_PACKED = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
"""Formats of compressed-tensors with floats of 4 bits."""
MODELOPT_FP8, MODELOPT_NVFP4 = "modelopt-fp8", "modelopt-nvfp4"
"""How NVIDIA's ModelOpt stores floats of 8 and of 4 bits."""
MODELOPT_GROUP = 16
"""Inputs that share a scale of ModelOpt's floats of 4 bits."""
KV_SCALES = (
    *(".k_scale", ".v_scale", ".q_scale", ".prob_scale"),
    *(".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale"),  # of older writers
)
"""Of attention over a quantized KV cache, by the ends of their names. The cache here has no scales of a checkpoint."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "int-quantized": {
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
    },
    "pack-quantized": {
        "weights.num_bits": (4, 8),
        "weights.type": "int",
        "weights.symmetric": (True, False),
        "weights.strategy": ("group", "channel"),
        "weights.dynamic": False,
        "input_activations": None,
    },
    "float-quantized": {
        "weights.num_bits": 8,
        "weights.type": "float",
        "weights.symmetric": True,
        "weights.strategy": ("tensor", "channel", "block"),
        "weights.dynamic": False,
    },
    NVFP4_PACKED: {
        "weights.num_bits": 4,
        "weights.type": "float",
        "weights.symmetric": True,
        "weights.strategy": "tensor_group",
        "weights.group_size": 16,
        "weights.dynamic": False,
    },
    MXFP4_PACKED: {
        "weights.num_bits": 4,
        "weights.type": "float",
        "weights.symmetric": True,
        "weights.strategy": "group",
        "weights.group_size": 32,
        "weights.dynamic": False,
    },
}
"""What a group of a compressed-tensors checkpoint must say, by its format and the names of its fields; several values: one of
them."""

OPTIONAL = ("weights.dynamic", "weights.symmetric")
"""Fields that a checkpoint may leave out."""


def scheme_of(facts: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What the first worker has found to be fastest (`ModelConfig.scheme`); None: it had no choice."""
    return next((fact["scheme"] for fact in facts.values() if fact.get("scheme")), None)


PLAIN = ("bfloat16", "float16", "float32")
"""Types that products without quantization are computed in."""


def schemes_of(quantization: str | None, dtype: str) -> tuple[str, ...]:
    """What the products of a model may be computed as (`compute_scheme`), of those that a CPU knows. dtype: of the model."""
    if quantization is None:
        return ("bfloat16", "float32", "bfloat16+float32") if dtype == "bfloat16" else (dtype,)
    if quantization == INT8:
        return (INT8, dtype)
    if quantization in INT4_GROUPS:
        return ("int4", "int4+int8", dtype)
    return () if quantization == FP8 else ("int4", "int4+int8")


def is_twin(scheme: str | None) -> bool:
    """Whether rows of prompts have a scheme of their own."""
    return scheme is not None and "+" in scheme


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """How the linear layers of a checkpoint are stored."""

    method: str
    """quant_method of config.json."""
    layout: str
    """A format of compressed-tensors, or the method."""
    ignored: tuple[str, ...] = ()
    """Layers that are not quantized: names, or patterns behind "re:"."""
    ignored_parts: tuple[str, ...] = ()
    """Layers that are not quantized: what their names have in them."""
    bits: int = 8
    """Of integers; floats of any number of bits become integers of 8."""
    group: int | None = None
    """Inputs that share a scale; None: all of them."""
    is_symmetric: bool = True
    has_order: bool = False
    """Inputs were quantized in another order, so that those of a group are not neighbours (desc_act, actorder)."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale of floats of 8 bits; None: as the shape of the scales says."""
    file: str = ""
    """Of GGUF: where the tensors are."""
    zero_offset: int = 0
    """Added to the zero points of the files."""

    def quantizes(self, name: str) -> bool:
        """Whether the linear layer of this name is quantized."""
        if is_head(name) and "lm_head" in self.ignored:
            return False
        if any(part in name for part in self.ignored_parts):
            return False
        return not any(
            re.match(each[3:], name) is not None if each.startswith("re:") else each == name for each in self.ignored
        )


def is_head(name: str) -> bool:
    """Whether it is that of the head, which beside a tower for images has a prefix."""
    return name.rpartition(".")[2] == "lm_head"


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
    method = _method_of(tree)
    if method == "unknown" and {"bits", "group_size"} <= tree.keys():
        raise UnsupportedModelError(
            "quantized weights of MLX are not supported (config.json has their bits and group_size, and no quant_method); use the "
            "original model, or a GGUF file of it"
        )
    if method == MXFP4 and hf.get("model_type") == "gpt_oss":
        return None  # a form of its stacked experts, which its family reads to floats
    reader = READERS.get(method)
    if reader is None:
        known = ", ".join(map(repr, READERS))
        raise UnsupportedModelError(
            f"quantized weights ({method}) are not supported; use the original model (config.json says so in "
            f"quantization_config.quant_method; {known} are read)"
        )
    return reader(tree)


ALIASES = {"intel/auto-round": AUTO_ROUND, "fbgemm_fp8": FP8}
"""Names of methods whose files are as those of another."""


def _method_of(tree: Mapping[str, Any]) -> str:
    method = str(tree.get("quant_method", "unknown"))
    return ALIASES.get(method, method)


def _compressed_tensors(tree: Mapping[str, Any]) -> QuantizedCheckpoint:
    ignored = _names(tree, "ignore")
    groups = tree.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise CorruptModelError(f"config.json: quantization_config.config_groups is {groups!r}, objects are needed")
    if len(groups) > 1:
        raise UnsupportedModelError(
            f"quantized weights ({COMPRESSED_TENSORS}) are not supported: quantization_config.config_groups has {len(groups)} "
            f"schemes; one is read"
        )
    ((name, group),) = groups.items()
    where = f"quantization_config.config_groups.{name}"
    layout = group.get("format") or tree.get("format")
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise _unknown("quantization_config.format", layout, tuple(LAYOUTS))
    _check_group(where, group, LAYOUTS[layout])
    sparsity = tree.get("sparsity_config")  # kv_cache_scheme is what others may do with the KV cache
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise _unknown("quantization_config.sparsity_config", sparsity, None)
    if tree.get("transform_config"):  # products with rotations, some of them of activations
        raise _unknown("quantization_config.transform_config", tree["transform_config"], None)
    weights = group["weights"]
    size = block = None
    if weights["strategy"] in ("group", "tensor_group"):
        size = _integer(f"{where}.weights.group_size", weights.get("group_size"))
    if weights["strategy"] == "block":
        block = _block(f"{where}.weights.block_structure", weights.get("block_structure"), COMPRESSED_TENSORS)
    return QuantizedCheckpoint(
        COMPRESSED_TENSORS,
        layout,
        ignored,
        bits=8 if weights["type"] == "float" else weights["num_bits"],
        group=size,
        is_symmetric=weights.get("symmetric") is not False,
        has_order=weights.get("actorder") in ("group", "dynamic"),
        block=block,
    )


def _gptq(tree: Mapping[str, Any]) -> QuantizedCheckpoint:
    """Format: https://github.com/ModelCloud/GPTQModel."""
    if tree.get("modules_in_block_to_quantize"):
        field = "modules_in_block_to_quantize"
        raise _unknown(f"quantization_config.{field}", tree[field], None, GPTQ)
    _one_of(tree, "is_marlin_format", (False,), GPTQ, False)
    bits = _one_of(tree, "bits", (4, 8), GPTQ)
    layout = _one_of(tree, _said(tree, "checkpoint_format", "format"), ("gptq", "gptq_v2"), GPTQ, "gptq")
    head = () if _one_of(tree, "lm_head", (True, False), GPTQ, False) else ("lm_head",)
    return QuantizedCheckpoint(
        GPTQ,
        GPTQ,
        (*head, *_left_out_by_rules(tree)),
        bits=bits,
        group=_group_size(tree, "group_size"),
        is_symmetric=_one_of(tree, "sym", (True, False), GPTQ, True),
        has_order=_one_of(tree, "desc_act", (True, False), GPTQ, False),
        zero_offset=int(layout == "gptq"),
    )


def _awq(tree: Mapping[str, Any]) -> QuantizedCheckpoint:
    """Format: https://github.com/casper-hansen/AutoAWQ, "gemm"."""
    bits = _one_of(tree, _said(tree, "w_bit", "bits"), (4,), AWQ)
    version = _said(tree, "version", "checkpoint_format", "format")
    _one_of({**tree, version: str(tree.get(version) or "gemm").lower()}, version, ("gemm",), AWQ)
    return QuantizedCheckpoint(
        AWQ,
        AWQ,
        ("lm_head",),
        _names(tree, "modules_to_not_convert"),
        bits=bits,
        group=_group_size(tree, _said(tree, "q_group_size", "group_size")),
        is_symmetric=not _one_of(tree, "zero_point", (True, False), AWQ, True),
    )


def _fp8(tree: Mapping[str, Any]) -> QuantizedCheckpoint:
    """Floats of 8 bits, with one scale for each tensor, output or block. Activations are not rounded to it here."""
    _one_of(tree, "fmt", ("e4m3", "float8_e4m3fn"), FP8, "e4m3")
    block = _block("quantization_config.weight_block_size", tree.get("weight_block_size"), FP8)
    ignored = _names(tree, "ignored_layers")
    return QuantizedCheckpoint(
        FP8,
        FP8,
        (*ignored, "lm_head"),
        _names(tree, "modules_to_not_convert"),
        block=block,
    )


def _left_out_by_rules(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """Patterns of the layers that `dynamic` of GPTQ leaves out; the first of its rules that a name begins with counts.

    A rule is a pattern behind "-:", or behind "+:" or nothing with changes of the scheme, which must change nothing here.
    """
    field, rules = "quantization_config.dynamic", tree.get("dynamic") or {}
    if not isinstance(rules, dict):
        raise CorruptModelError(f"config.json: {field} is {rules!r:.200}, an object is needed")
    patterns: list[str] = []
    before = ""
    for rule, changes in rules.items():
        pattern = rule.removeprefix("-:").removeprefix("+:")
        _check_pattern(field, pattern)
        if rule.startswith("-:"):
            patterns.append(f"re:{before}(?:{pattern})")
            _check_pattern(field, patterns[-1][3:])  # flags may stand at the beginning only
            continue
        for name, value in (changes if isinstance(changes, dict) else {}).items():
            if name in ("bits", "group_size", "sym") and value != tree.get(name):
                raise _unknown(f"{field}[{rule!r:.80}].{name}", value, tree.get(name), GPTQ)
        before += f"(?!{pattern})"
    return tuple(patterns)


AUTO_ROUND_LAYOUTS = {"auto_round:auto_gptq": GPTQ, "auto_round:auto_awq": AWQ}
"""By packing_format."""


def _auto_round(tree: Mapping[str, Any]) -> QuantizedCheckpoint:
    """The layouts of others. Format: https://github.com/intel/auto-round."""
    field = "packing_format"
    layout = AUTO_ROUND_LAYOUTS[_one_of(tree, field, tuple(AUTO_ROUND_LAYOUTS), AUTO_ROUND, "auto_round:auto_gptq")]
    _one_of(tree, "data_type", ("int",), AUTO_ROUND, "int")
    bits = _one_of(tree, "bits", (4, 8) if layout == GPTQ else (4,), AUTO_ROUND)
    blocks = tree.get(_said(tree, "block_name_to_quantize", "to_quant_block_names"))
    blocks = blocks.split(",") if isinstance(blocks, str) else blocks or []
    if not isinstance(blocks, list) or not all(isinstance(block, str) for block in blocks):
        raise _unknown("quantization_config.block_name_to_quantize", blocks, "a list of names", AUTO_ROUND)
    ignored = ["lm_head"]
    if blocks:
        ignored.append(f"re:(?!{'|'.join(re.escape(block.strip()) for block in blocks)})")
    layers = tree.get("extra_config") or {}
    if not isinstance(layers, dict):
        raise CorruptModelError(
            f"config.json: quantization_config.extra_config is {layers!r:.200}, an object is needed"
        )
    for name, changes in layers.items():
        found = changes if isinstance(changes, dict) else {}
        if isinstance(found.get("bits"), int) and found["bits"] >= 16:
            is_pattern = "*" in name
            if is_pattern:
                _check_pattern("quantization_config.extra_config", name)
            ignored.append(f"re:{name}" if is_pattern else name)
            continue
        if name == "lm_head" and found:
            raise _unknown("quantization_config.extra_config['lm_head'].bits", found.get("bits"), 16, AUTO_ROUND)
        for key in ("bits", "group_size", "sym"):
            if key in found and found[key] != tree.get(key):
                where = f"quantization_config.extra_config[{name!r:.80}].{key}"
                raise _unknown(where, found[key], tree.get(key), AUTO_ROUND)
    return QuantizedCheckpoint(
        AUTO_ROUND,
        layout,
        tuple(ignored),
        bits=bits,
        group=_group_size(tree, "group_size"),
        is_symmetric=False,  # zero points are always there
        zero_offset=int(layout == GPTQ),
    )


def _bitsandbytes(tree: Mapping[str, Any]) -> QuantizedCheckpoint:
    """As transformers writes it. Which layers are quantized, the files say."""
    has_four, has_eight = (tree.get(f"load_in_{bits}bit") or tree.get(f"_load_in_{bits}bit") for bits in (4, 8))
    if bool(has_four) == bool(has_eight):
        raise _unknown("quantization_config.load_in_4bit", has_four, True, BITSANDBYTES)
    _one_of(tree, "bnb_4bit_quant_storage", ("uint8",), BITSANDBYTES, "uint8")
    return QuantizedCheckpoint(BITSANDBYTES, BITSANDBYTES, ("lm_head",))


def _gguf(tree: Mapping[str, Any]) -> QuantizedCheckpoint:
    """What `gguf_model` has written."""
    file = tree.get("file")
    if not isinstance(file, str):
        raise CorruptModelError(
            f"config.json: quantization_config.file is {file!r:.200}, the path of a GGUF file is needed"
        )
    return QuantizedCheckpoint(GGUF, GGUF, file=file)


TORCHAO_TYPES = (
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "IntxWeightOnlyConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Float8WeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
)
"""Whose layers are stored as `model.quantization.torchao` reads them."""


def _torchao(tree: Mapping[str, Any]) -> QuantizedCheckpoint:
    """As transformers writes it, which leaves the head out. Which other layers are quantized, the files say."""
    found = tree.get("quant_type")
    default = found.get("default") if isinstance(found, dict) and len(found) == 1 else None
    kind = default.get("_type") if isinstance(default, dict) else found
    if not _is_one_of(kind, TORCHAO_TYPES):
        raise _unknown("quantization_config.quant_type", kind, TORCHAO_TYPES, TORCHAO)
    _one_of(tree, "include_input_output_embeddings", (False,), TORCHAO, False)
    ignored = _names(tree, "modules_to_not_convert")
    data = default.get("_data") if isinstance(default, dict) else None
    data = data if isinstance(data, dict) else {}
    if data.get("weight_dtype", {}) != {"_type": "torch.dtype", "_data": "int4"}:
        return QuantizedCheckpoint(TORCHAO, TORCHAO, ("lm_head",), ignored)
    granularity = data.get("granularity")
    inner = granularity.get("_data") if isinstance(granularity, dict) else None
    group = None
    if isinstance(inner, dict) and "group_size" in inner:
        group = _integer("quantization_config.quant_type.default._data.granularity", inner["group_size"])
    return QuantizedCheckpoint(TORCHAO, TORCHAO, ("lm_head",), ignored, bits=4, group=group)


MODELOPT_LAYOUTS = {
    "FP8": MODELOPT_FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": MODELOPT_FP8,
    "NVFP4": MODELOPT_NVFP4,
    "W4A16_NVFP4": MODELOPT_NVFP4,
}
"""By quant_algo. They tell how activations are computed by others, and of weights only the bits."""


def _modelopt(tree: Mapping[str, Any]) -> QuantizedCheckpoint:
    """Format: https://github.com/NVIDIA/Model-Optimizer, as config.json or hf_quant_config.json have it."""
    inner = tree.get("quantization")
    tree = inner if isinstance(inner, dict) else tree
    algorithm = _one_of(tree, "quant_algo", tuple(MODELOPT_LAYOUTS), MODELOPT)
    layout = MODELOPT_LAYOUTS[algorithm]
    group = None
    if layout == MODELOPT_NVFP4:
        group = _one_of(tree, "group_size", (MODELOPT_GROUP,), MODELOPT, MODELOPT_GROUP)
    names = (*_names(tree, "ignore"), *_names(tree, "exclude_modules"))
    return QuantizedCheckpoint(MODELOPT, layout, tuple(map(_left_out, names)), group=group)


def _left_out(name: str) -> str:
    """What ModelOpt leaves out, a name or a pattern of shells, with all that is in such a module."""
    if name.startswith("re:"):
        return name
    return f"re:(?:{fnmatch.translate(name)}|{fnmatch.translate(name + '.*')})"


READERS = {
    COMPRESSED_TENSORS: _compressed_tensors,
    GPTQ: _gptq,
    AWQ: _awq,
    FP8: _fp8,
    GGUF: _gguf,
    TORCHAO: _torchao,
    MODELOPT: _modelopt,
    AUTO_ROUND: _auto_round,
    BITSANDBYTES: _bitsandbytes,
}


def _integer(field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CorruptModelError(f"config.json: {field} is {value!r}, a positive integer is needed")
    return value


def _said(tree: Mapping[str, Any], *fields: str) -> str:
    """The first of these names of one field that a writer has used; the last where none has."""
    return next((field for field in fields if tree.get(field) is not None), fields[-1])


def _block(field: str, found: Any, method: str) -> tuple[int, int] | None:
    """Outputs and inputs that share a scale; None: the checkpoint does not say."""
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 2:
        raise _unknown(field, found, [128, 128], method)
    return _integer(field, found[0]), _integer(field, found[1])


def _group_size(tree: Mapping[str, Any], field: str) -> int | None:
    value = tree.get(field, -1)
    return None if value == -1 and not isinstance(value, bool) else _integer(f"quantization_config.{field}", value)


def _one_of(tree: Mapping[str, Any], field: str, known: tuple[Any, ...], method: str, default: Any = None) -> Any:
    value = tree.get(field)
    if value is None:
        value = default
    if not _is_one_of(value, known):
        raise _unknown(f"quantization_config.{field}", value, known, method)
    return value


def _is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    return any(value == one and type(value) is type(one) for one in known)


def _names(tree: Mapping[str, Any], field: str) -> tuple[str, ...]:
    names = tree.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CorruptModelError(f"config.json: quantization_config.{field} is {names!r}, a list of names is needed")
    for pattern in (name[3:] for name in names if name.startswith("re:")):
        _check_pattern(f"quantization_config.{field}", pattern)
    return tuple(names)


def _check_pattern(field: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise CorruptModelError(f"config.json: {field} has {pattern!r:.200}, which is no pattern: {error}") from error


def _check_group(where: str, group: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """fields: what must be there (`LAYOUTS`)."""
    if group.get("targets") != ["Linear"]:
        raise _unknown(f"{where}.targets", group.get("targets"), ["Linear"])
    for field, wanted in fields.items():
        part, _, key = field.partition(".")
        found = group.get(part)
        if key:
            found = found.get(key) if isinstance(found, dict) else None
        if found is None and field in OPTIONAL:
            continue
        if not _is_one_of(found, wanted if isinstance(wanted, tuple) else (wanted,)):
            raise _unknown(f"{where}.{field}", found, wanted)


def _unknown(field: str, found: Any, wanted: Any, method: str = COMPRESSED_TENSORS) -> UnsupportedModelError:
    known = " or ".join(map(repr, wanted)) if isinstance(wanted, tuple) else repr(wanted)
    return UnsupportedModelError(
        f"quantized weights ({method}) are not supported: {field} is {found!r:.200}, {known} is read"
    )


KERNELS_OF_VLLM = {"modelopt_fp4": MODELOPT, "gptq_marlin": GPTQ, "awq_marlin": AWQ}
"""What vLLM calls methods where certain of its kernels compute them."""


def read_method(wanted: Any, hf: Mapping[str, Any], has_module: bool) -> str | None:
    """How the weights of a model are quantized: by `quantization=`, or None there and by its config.json.

    Raises ConfigError for a value that is not known, or that contradicts the checkpoint. FP8 of a plain model is for the device
    to take or to refuse (`not_quantized`).
    """
    if wanted is not None and wanted not in (*METHODS, *KERNELS_OF_VLLM):
        known = f"{', '.join(map(repr, METHODS[:-1]))} or {METHODS[-1]!r}"
        raise ConfigError(f"quantization={wanted!r} is not supported; use {known}, or leave it at None")
    if has_module:
        return None
    wanted = KERNELS_OF_VLLM.get(wanted, wanted)
    method: str | None = wanted
    tree = hf.get("quantization_config")
    if tree is None:
        if wanted in READERS and wanted != FP8:
            raise not_quantized(method)
        return method
    found = _method_of(tree) if isinstance(tree, dict) else "unknown"
    if wanted in ROUNDING:
        raise ConfigError(
            f"quantization={wanted!r}: the weights of this model are quantized already ({found}); leave it at None"
        )
    if wanted is not None and wanted != found:
        raise ConfigError(f"quantization={wanted!r}: config.json says {found!r}; leave it at None")
    return found if found in READERS else None


def not_quantized(method: str | None) -> ConfigError:
    """The method reads quantized weights, and these are plain."""
    return ConfigError(
        f"quantization={method!r}: config.json has no quantization_config, so the weights are not quantized; use {INT8!r}, or "
        f"leave it at None"
    )
