"""Mamba 2 (arXiv:2405.21060): every layer is a state-space mixer behind a norm, and no layer attends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.families.decoder_config import DecoderConfig, TensorNames, number, positive
from actorllm.model.families.recurrent_shapes import Mamba2Shape

DEFAULTS: dict[str, Any] = {
    "num_heads": 128,
    "head_dim": 64,
    "n_groups": 8,
    "state_size": 128,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "expand": 2,
}
NAMES = TensorNames(model="backbone", embedding="embeddings", final_norm="norm_f", input_norm="norm")


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act={hf['hidden_act']!r:.80} is not supported; only 'silu' is")
    num_layers = positive(hf, "num_hidden_layers")
    shape = Mamba2Shape(
        num_heads=positive(hf, "num_heads"),
        head_dim=positive(hf, "head_dim"),
        num_groups=positive(hf, "n_groups"),
        state_size=positive(hf, "state_size"),
        kernel_size=positive(hf, "conv_kernel"),
        has_conv_bias=bool(hf.get("use_conv_bias", True)),
        has_bias=bool(hf.get("use_bias", False)),
        eps=number(hf, "layer_norm_epsilon", least=0),
        limits=limits(hf.get("time_step_limit")),
    )
    if shape.inner_size != number(hf, "expand") * positive(hf, "hidden_size"):
        raise CorruptModelError(
            f"config.json: {shape.num_heads} heads of {shape.head_dim} are not expand={hf['expand']!r:.80} times hidden_size"
        )
    # What attention has heads of there is not: a cache without layers needs some number.
    return DecoderConfig.from_hugging_face(
        {**hf, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 1},
        rope={"rope_theta": 10_000.0},
        rms_norm_eps=shape.eps,
        names=NAMES,
        recurrent=shape,
        mixers=("recurrent",) * num_layers,
        has_mlp=False,
    )


def limits(given: Any) -> tuple[float, float]:
    """Of step sizes, as config.json has them; transformers writes {"__float__": "Infinity"}. Raises CorruptModelError."""
    if given is None:
        return 0.0, float("inf")
    try:
        low, high = (float(one["__float__"] if isinstance(one, Mapping) else one) for one in given)
    except (TypeError, ValueError, KeyError):
        raise CorruptModelError(f"config.json: time_step_limit is {given!r:.80}, two numbers are needed") from None
    return low, high
