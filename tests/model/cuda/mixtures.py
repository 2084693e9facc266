"""Small mixtures of experts by their config.json, and steps that their runners make."""

from __future__ import annotations

from typing import Any

from tests.model.cuda.decoders import GPT_OSS
from tests.model.cuda.twins import Twins, prompt

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 40,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
OLMOE: dict[str, Any] = {"architectures": ["OlmoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "rope_interleave": True,
}
DEEPSEEK_V2: dict[str, Any] = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "q_lora_rank": None,
    "topk_method": "group_limited_greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.7,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "original_max_position_embeddings": 32,
    },
}
FAMILIES = {"qwen3": QWEN3, "mixtral": MIXTRAL, "olmoe": OLMOE, "gpt-oss": GPT_OSS}


def follow(twins: Twins) -> None:
    """Prompts of few tokens and of many, chunks beside decode rows, and rows that come and go."""
    twins.add(0, prompt(90, 1), temperature=0.8, seed=7)
    twins.step({0: 70}, decode=[])
    twins.add(1, prompt(9, 2))
    twins.add(3, prompt(80, 3))
    twins.step({0: 20, 1: 9, 3: 80})
    for _ in range(3):
        twins.step(decode=[0, 1, 3])
    twins.remove(1)
    for _ in range(2):
        twins.step(decode=[0, 3])
