"""Falcon H1 (arXiv:2507.22448): attention and a state-space mixer side by side in every layer, with scales of what each makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.families.decoder_config import DecoderConfig, TensorNames, number, positive
from actorllm.model.families.granite_hybrid import mamba2_shape

DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_d_ssm": None,
    "mamba_expand": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "embedding_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
}
NAMES = TensorNames(
    final_norm="final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")
"""Which the scales of products would not reach alike; no released model has them."""


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    for name in BIASES:
        if hf.get(name):
            raise UnsupportedModelError(f"{name}={hf[name]!r:.80} is not supported for this architecture")
    inner = positive(hf, "mamba_d_ssm", positive(hf, "mamba_expand") * positive(hf, "hidden_size"))
    gate, x, b, c, steps = (number(hf, "ssm_in_multiplier") * one for one in numbers(hf, "ssm_multipliers", 5))
    shape = mamba2_shape(
        hf,
        inner,
        has_norm=bool(hf.get("mamba_rms_norm", False)),
        gates_first=not hf.get("mamba_norm_before_gate", True),
        scales=(gate, x, b, c, steps),
        output_scale=number(hf, "ssm_out_multiplier"),
    )
    attention_in = number(hf, "attention_in_multiplier")
    dim = positive(hf, "head_dim", positive(hf, "hidden_size") // positive(hf, "num_attention_heads"))
    first, last = numbers(hf, "mlp_multipliers", 2)
    return DecoderConfig.from_hugging_face(
        hf,
        names=NAMES,
        # Scores are products of queries and keys, and what is attended to is a sum of values.
        attention_scale=dim**-0.5 * attention_in**2 * number(hf, "key_multiplier"),
        attention_output_scale=attention_in * number(hf, "attention_out_multiplier"),
        embedding_scale=number(hf, "embedding_multiplier"),
        scales_given_rows=True,  # as in vLLM; the module of transformers scales those of ids alone
        logits_scale=number(hf, "lm_head_multiplier"),
        mlp_scales=(first, last),
        recurrent=shape,
        mixers=("both",) * positive(hf, "num_hidden_layers"),
    )


def numbers(hf: Mapping[str, Any], name: str, count: int) -> list[float]:
    """A list of so many; ones where config.json has none. Raises CorruptModelError."""
    given = hf.get(name)
    if given is None:
        return [1.0] * count
    if not isinstance(given, list | tuple) or len(given) != count:
        raise CorruptModelError(f"config.json: {name} is {given!r:.80}, a list of {count} numbers is needed")
    return [number({name: one}, name) for one in given]
