"""A roofline from data sheets: what a step takes on a GPU that is not there, of a model whose shape is known.

`roofline_of` reads a config.json of Hugging Face. What data sheets promise is not reached: `ARITHMETIC` and `MEMORY` say how much
of it is. Tensor parallelism divides weights, KV heads and arithmetic, and adds two all-reduces for each layer. Of experts, a step
reads those that its tokens are expected to choose if they choose evenly. That number is of a step of `EXPERT_TOKENS` tokens,
since a roofline has one amount of weights. A model like this is a first guess, with no error that is known. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actorllm.errors import ConfigError, nearest_name
from actorllm.scheduling.cost_model import RooflineModel

ARITHMETIC, MEMORY = 0.6, 0.8
"""Shares of a data sheet that good kernels reach."""
EXPERT_TOKENS = 64
STEP_S = 5e-4
"""Of every step: launches and the sampler."""
REDUCE_S = 8e-6
"""Of an all-reduce of few bytes."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Dense 16-bit operations and bytes per second; bytes per second between two of them, in one direction."""

    flops: float
    bytes_per_s: float
    link_bytes_per_s: float


GPUS = {
    "A10G": Gpu(70e12, 600e9, 32e9),
    "A100": Gpu(312e12, 2.039e12, 300e9),
    "L4": Gpu(121e12, 300e9, 32e9),
    "L40S": Gpu(362e12, 864e9, 32e9),
    "H100": Gpu(989e12, 3.35e12, 450e9),
    "H200": Gpu(989e12, 4.8e12, 450e9),
    "B200": Gpu(2250e12, 8e12, 900e9),
    "B300": Gpu(2250e12, 7.75e12, 900e9),
    "GB200": Gpu(2500e12, 8e12, 900e9),
    "MI300X": Gpu(1307e12, 5.3e12, 64e9),
    "RTX4090": Gpu(165e12, 1.008e12, 32e9),
    "RTXPRO6000": Gpu(468e12, 1.792e12, 64e9),
}
"""SXM boards of 80 GB and more where there are several; without sparsity."""


def gpu_named(gpu: str) -> Gpu:
    """Raises ConfigError naming the nearest data sheet."""
    device = GPUS.get(gpu.upper())
    if device is None:
        raise ConfigError(
            f"there is no data sheet of gpu={gpu!r}{nearest_name(gpu, GPUS)}; there are {', '.join(GPUS)}"
        )
    return device


def roofline_of(
    gpu: str, config: Mapping[str, Any], *, tp: int = 1, name: str = "", weight_bits: int = 16
) -> RooflineModel:
    """gpu: one of GPUS. config: of config.json. tp: GPUs that share every layer. weight_bits: of a weight.

    Raises ConfigError naming the GPU, the key that is missing, or the number that does not divide.
    """
    device = gpu_named(gpu)
    shape = config.get("text_config", config)
    hidden, layers, heads = (_size(shape, key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    kv_heads = int(shape.get("num_key_value_heads") or heads)
    head = int(shape.get("head_dim") or hidden // heads)
    if tp < 1 or heads % tp:
        raise ConfigError(f"tp={tp} must be 1 or more and divide the {heads} attention heads")
    if weight_bits not in (4, 8, 16, 32):
        raise ConfigError(f"weight_bits={weight_bits} must be 4, 8, 16 or 32")
    attention = hidden * head * (2 * heads + 2 * kv_heads)
    cached, per_pair, holders = 2 * kv_heads * head, 4.0 * heads * head, max(1.0, tp / kv_heads)
    if shape.get("kv_lora_rank"):  # one latent for all heads, whole on every GPU; products of heads are absorbed
        rank, rotary, value = (_size(shape, key) for key in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"))
        query = heads * (_size(shape, "qk_nope_head_dim") + rotary)
        from_rank = int(shape.get("q_lora_rank") or 0)
        attention = hidden * (rank + rotary + heads * value) + rank * (query + heads * (value - rotary))
        attention += from_rank * (hidden + query) if from_rank else hidden * query
        cached, per_pair, holders = rank + rotary, 2.0 * heads * (2 * rank + rotary), float(tp)
    experts = int(shape.get("num_local_experts") or shape.get("num_experts") or shape.get("n_routed_experts") or 0)
    if experts:
        chosen = _size(shape, "num_experts_per_tok")
        each = 3 * hidden * int(shape.get("moe_intermediate_size") or _size(shape, "intermediate_size"))
        always = int(shape.get("n_shared_experts") or 0) * each
        read = experts * (1 - (1 - chosen / experts) ** EXPERT_TOKENS) * each + always
        active = chosen * each + always + hidden * experts
    else:
        read = active = 3 * hidden * _size(shape, "intermediate_size")
    output = hidden * _size(shape, "vocab_size")
    flops, memory = tp * ARITHMETIC * device.flops, tp * MEMORY * device.bytes_per_s
    reduces = 2 * layers if tp > 1 else 0
    return RooflineModel(
        name or f"{gpu.lower()}{f'-tp{tp}' if tp > 1 else ''}-roofline",
        flops=flops,
        bytes_per_s=memory,
        weight_bytes=(layers * (attention + read) + output) * weight_bits / 8,
        flops_per_token=2.0 * (layers * (attention + active) + output),
        # Beyond one KV head for each GPU, they hold the same.
        kv_bytes_per_token=2.0 * layers * cached * holders,
        flops_per_pair=layers * per_pair,
        fixed_s=STEP_S + reduces * REDUCE_S,
        reduce_s_per_token=reduces * 2 * (tp - 1) / tp * 2 * hidden / device.link_bytes_per_s,
    )


def _size(shape: Mapping[str, Any], key: str) -> int:
    value = shape.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {key}={value!r} must be a positive number")
    return value


def read_config(path: str | Path) -> Mapping[str, Any]:
    """A config.json, or the folder of a model that has one. Raises ConfigError naming what is wrong."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model={str(path)!r} must be a config.json, or a folder with one: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model={str(path)!r} must hold a JSON object")
    return config
