"""Small decoders of transformers, by their config.json."""

from __future__ import annotations

from typing import Any

GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "sliding_window": 24,
    "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 15.0,
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
}


GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "sliding_window": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
