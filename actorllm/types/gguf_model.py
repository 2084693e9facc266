"""A GGUF file as a model: a folder with the config.json and the tokenizer that its fields describe.

The folder is made once for each file, in the cache folder of the user (`XDG_CACHE_HOME`). The file's path, size and time are its
name. The weights stay in the file: `quantization_config.file` of that config.json names it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from actorllm.errors import CorruptModelError, ModelError, UnsupportedModelError
from actorllm.types.gguf_file import GgufHeader, read_header

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Of general.architecture."""

PLAIN_FIELDS: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (1.0, 0.0)),
    **dict.fromkeys(("rope.scale_linear", "rope.scaling.attn_factor"), (1.0,)),
}
"""Fields of variants of these models, and what they must say."""

FORMAT = 1
"""Of the folders: others are made when it changes."""

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of the models that have factors of frequencies (rope_freqs.weight); the file itself does not say them."""


def gguf_folder(file: Path) -> Path:
    """The folder of such a model. Raises ModelError with the field that is wrong, or the package that is missing."""
    file = file.expanduser().resolve()
    found = file.stat()
    key = f"{FORMAT}\0{file}\0{found.st_size}\0{found.st_mtime_ns}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "actorllm" / "gguf"
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:32]
    if (folder / "config.json").is_file():
        return folder
    header = read_header(file)
    tree = config_of(header, file)
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = Path(tempfile.mkdtemp(dir=cache))
    except OSError as error:
        raise ModelError(
            f"{cache} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a folder that can"
        ) from error
    try:
        _write_tokenizer(header, file, made)
        (made / "config.json").write_bytes(orjson.dumps(tree, option=orjson.OPT_INDENT_2))
        with contextlib.suppress(OSError):  # another process was first
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def config_of(header: GgufHeader, file: Path) -> dict[str, Any]:
    """A config.json as transformers would have it. Raises ModelError with the field and its value."""
    fields, tensors = header.fields, header.tensors
    if (count := fields.get("split.count", 1)) not in (0, 1):
        raise UnsupportedModelError(
            f"{file}: split.count is {count!r:.80}: the model is in several files; make one of them with llama-gguf-split --merge"
        )
    kind = fields.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(
            f"{file}: general.architecture is {kind!r:.80}, which is not supported; {known} are"
        )
    if fields.get(f"{kind}.expert_count"):
        raise UnsupportedModelError(
            f"{file}: {kind}.expert_count is {fields[f'{kind}.expert_count']!r}: no experts are read"
        )

    def number(name: str, default: int | None = None) -> int:
        value = fields.get(f"{kind}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise CorruptModelError(f"{file}: {kind}.{name} is {value!r:.80}, a positive integer is needed")
        return value

    def decimal(name: str, default: float) -> float:
        value = fields.get(f"{kind}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise CorruptModelError(f"{file}: {kind}.{name} is {value!r:.80}, a positive number is needed")
        return float(value)

    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CorruptModelError(f"{file} has no tensor 'token_embd.weight' of two dimensions")
    num_heads, hidden_size = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", hidden_size // num_heads)
    _check_variant(fields, kind, head_dim, file)
    tree: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": number("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": decimal("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_theta": decimal("rope.freq_base", 10_000.0),
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "gguf", "file": str(file)},
    }
    scaling = fields.get(f"{kind}.rope.scaling.type", "none")
    if scaling == "linear":
        tree["rope_scaling"] = {"rope_type": "linear", "factor": decimal("rope.scaling.factor", 1.0)}
    elif scaling != "none":
        raise UnsupportedModelError(
            f"{file}: {kind}.rope.scaling.type is {scaling!r:.80}; 'none' and 'linear' are read"
        )
    if "rope_freqs.weight" in tensors:
        tree["rope_scaling"] = _llama3(header, file, head_dim, tree["rope_theta"])
    if kind == "llama":
        tree["attention_bias"] = "blk.0.attn_q.bias" in tensors
    for name in ("bos", "eos"):
        token = fields.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token, int) and not isinstance(token, bool):
            tree[f"{name}_token_id"] = token
    return tree


def _check_variant(fields: Mapping[str, Any], kind: str, head_dim: int, file: Path) -> None:
    """Raises UnsupportedModelError for fields of variants that are computed otherwise."""
    same = dict.fromkeys(("attention.value_length", "rope.dimension_count"), (head_dim,))
    for name, plain in (PLAIN_FIELDS | same).items():
        value = fields.get(f"{kind}.{name}", plain[0])
        if value not in plain:
            raise UnsupportedModelError(f"{file}: {kind}.{name} is {value!r:.80}; {plain[0]!r} is read")


def _llama3(header: GgufHeader, file: Path, head_dim: int, theta: float) -> dict[str, Any]:
    """What the factors of the file are made by. Raises UnsupportedModelError for others than those of Llama 3."""
    tensor = header.tensors["rope_freqs.weight"]
    if tensor.shape != (head_dim // 2,) or tensor.name_of_kind != "F32":
        raise CorruptModelError(
            f"{file}: tensor 'rope_freqs.weight' has shape {tensor.shape}, F32 of {head_dim // 2} is needed"
        )
    with file.open("rb") as data:
        data.seek(tensor.start)
        factors = struct.unpack(f"<{head_dim // 2}f", data.read(tensor.num_bytes))
    largest, length = max(factors), LLAMA3["original_max_position_embeddings"]
    for i, factor in enumerate(factors):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        if wavelength < length / LLAMA3["high_freq_factor"]:
            expected = 1.0
        elif wavelength > length / LLAMA3["low_freq_factor"]:
            expected = largest
        else:
            smooth = (length / wavelength - LLAMA3["low_freq_factor"]) / (
                LLAMA3["high_freq_factor"] - LLAMA3["low_freq_factor"]
            )
            expected = 1 / ((1 - smooth) / largest + smooth)
        if not math.isclose(factor, expected, rel_tol=1e-3):
            raise UnsupportedModelError(
                f"{file}: tensor 'rope_freqs.weight' has other factors than Llama 3 ({factor:g} at {i}, {expected:g} expected)"
            )
    return {"rope_type": "llama3", "factor": largest, **LLAMA3}


def _write_tokenizer(header: GgufHeader, file: Path, folder: Path) -> None:
    """What transformers makes of the file's fields; nothing if the file has no tokenizer."""
    fields: Mapping[str, Any] = header.fields
    if "tokenizer.ggml.model" not in fields:
        return
    check_package()
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
        template = fields.get("tokenizer.chat_template")
        if isinstance(template, str):
            tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
    except Exception as error:  # the fields of a stranger's file go through another's reader
        raise CorruptModelError(f"{file}: the tokenizer (fields tokenizer.ggml.*) cannot be read: {error}") from error


def check_package() -> None:
    """Raises UnsupportedModelError where the package that reads blocks is not there."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UnsupportedModelError("GGUF files need the package gguf: pip install 'actorllm[quant]'") from error
