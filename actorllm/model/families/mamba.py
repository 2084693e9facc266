"""Mamba (arXiv:2312.00752): every layer is a selective state-space mixer behind a norm, and no layer attends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.errors import UnsupportedModelError
from actorllm.model.families.decoder_config import DecoderConfig, number, positive
from actorllm.model.families.mamba2 import NAMES
from actorllm.model.families.recurrent_shapes import MambaShape

DEFAULTS: dict[str, Any] = {
    "state_size": 16,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "expand": 2,
    "time_step_rank": "auto",
    "tie_word_embeddings": True,
}
CHANNELS_PER_RANK = 16
"""Of the hidden states, where config.json says nothing of the rank of step sizes."""


def decoder_config(hf: Mapping[str, Any], norm_eps: float | None = None) -> DecoderConfig:
    """norm_eps: as of the shape."""
    hf = DEFAULTS | dict(hf)
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act={hf['hidden_act']!r:.80} is not supported; only 'silu' is")
    hidden_size = positive(hf, "hidden_size")
    rank = hf["time_step_rank"]
    shape = MambaShape(
        num_channels=positive(hf, "expand") * hidden_size,
        state_size=positive(hf, "state_size"),
        step_rank=-(-hidden_size // CHANNELS_PER_RANK) if rank == "auto" else positive(hf, "time_step_rank"),
        kernel_size=positive(hf, "conv_kernel"),
        has_conv_bias=bool(hf.get("use_conv_bias", True)),
        has_bias=bool(hf.get("use_bias", False)),
        norm_eps=norm_eps,
    )
    # What attention has heads of there is not: a cache without layers needs some number.
    return DecoderConfig.from_hugging_face(
        {**hf, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 1},
        rope={"rope_theta": 10_000.0},
        rms_norm_eps=number(hf, "layer_norm_epsilon", least=0),
        names=NAMES,
        recurrent=shape,
        mixers=("recurrent",) * positive(hf, "num_hidden_layers"),
        has_mlp=False,
    )
