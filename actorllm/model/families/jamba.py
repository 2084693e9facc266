"""Jamba (arXiv:2403.19887): Mamba layers with norms of what selects, some that attend without rotation; experts in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.families.decoder_config import DecoderConfig, Mixer, TensorNames, number, positive
from actorllm.model.families.expert_shape import expert_shape
from actorllm.model.families.mamba import CHANNELS_PER_RANK
from actorllm.model.families.recurrent_shapes import MambaShape

DEFAULTS: dict[str, Any] = {
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
}
NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")
NAMES = TensorNames(
    final_norm="final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):  # of the convolutions as well
        raise UnsupportedModelError(f"hidden_act={hf['hidden_act']!r:.80} is not supported; only 'silu' is")
    num_layers, hidden_size = positive(hf, "num_hidden_layers"), positive(hf, "hidden_size")
    # transformers 5 may write num_local_experts; the checkpoints of the family have num_experts.
    count = "num_experts" if "num_experts" in hf or "num_local_experts" not in hf else "num_local_experts"
    has_experts = every(hf, "expert_layer", num_layers) if positive(hf, count, 16) > 1 else [False] * num_layers
    experts = None
    if any(has_experts):
        experts = expert_shape(
            {count: 16} | hf,
            count,
            "intermediate_size",
            layers=tuple(has_experts),
            router="feed_forward.router",
            experts="feed_forward.experts",
        )
    attends = every(hf, "attn_layer", num_layers)
    mixers: tuple[Mixer, ...] = tuple("attention" if one else "recurrent" for one in attends)
    if all(attends):
        raise UnsupportedModelError("a model of this architecture without Mamba layers is not supported")
    rank = hf["mamba_dt_rank"]
    shape = MambaShape(
        num_channels=positive(hf, "mamba_expand") * hidden_size,
        state_size=positive(hf, "mamba_d_state"),
        step_rank=-(-hidden_size // CHANNELS_PER_RANK) if rank == "auto" else positive(hf, "mamba_dt_rank"),
        kernel_size=positive(hf, "mamba_d_conv"),
        has_conv_bias=bool(hf.get("mamba_conv_bias", True)),
        has_bias=bool(hf.get("mamba_proj_bias", False)),
        norm_eps=number(hf, "rms_norm_eps", least=0),
        norms=NORMS,
        prefix="mamba",
    )
    return DecoderConfig.from_hugging_face(
        hf, names=NAMES, rope={"rope_theta": 10_000.0}, rotates=False, experts=experts, recurrent=shape, mixers=mixers
    )


def every(hf: Mapping[str, Any], name: str, num_layers: int) -> list[bool]:
    """Which layers are of a kind that comes once in a period. Raises CorruptModelError."""
    period, offset = positive(hf, f"{name}_period"), number(hf, f"{name}_offset", least=0)
    if offset >= period:
        raise CorruptModelError(
            f"config.json: {name}_offset is {offset:g}, which must be less than {name}_period={period}"
        )
    return [i % period == offset for i in range(num_layers)]
