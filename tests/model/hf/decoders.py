"""Small random decoders of transformers, saved to folders, and the logits that transformers gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.model.hf.releases import INSTALLED, config_values

TOLERANCE = 1e-3

"""Of logits whose standard deviation is above 1; float32 rounding is some 1e-5."""


VOCAB = 97


WINDOW = 6


CHUNK = 37
"""Of attention in chunks; no multiple of a block."""


SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 9, **ALTERNATING}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "opt": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "gpt2": ("GPT2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt-neox": ("GPTNeoX", {}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    "gemma3": ("Gemma3Text", GEMMA),
    "phi": ("Phi", {"qk_layernorm": True}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {"attention_multiplier": 0.1, "logits_scaling": 0.5, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW, "use_bias": True}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.5, "use_parallel_residual": True, "qk_layernorm": True}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 16, "num_experts": 4, **EXPERTS}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": ("GptOss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **ALTERNATING}),
    "olmo3": ("Olmo3", ALTERNATING),
    "cohere2": ("Cohere2", {"logit_scale": 1.0, **ALTERNATING}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "gpt-bigcode": ("GPTBigCode", {}),
    "deepseek-v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 12,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            **EXPERTS,
        },
    ),
}
MODELS["mamba2"] = (
    "Mamba2",
    {"num_heads": 8, "head_dim": 12, "n_groups": 2, "state_size": 16, "chunk_size": 16, "pad_token_id": 0},
)
MODELS["granite-hybrid"] = (
    "GraniteMoeHybrid",
    {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 12,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 3.0,
    },
)
MODELS["falcon-h1"] = (
    "FalconH1",
    {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.8,
        "key_multiplier": 0.5,
        "attention_in_multiplier": 0.7,
        "attention_out_multiplier": 1.3,
        "ssm_in_multiplier": 0.8,
        "ssm_out_multiplier": 0.6,
        "ssm_multipliers": [0.5, 1.2, 0.9, 1.1, 0.7],
        "mlp_multipliers": [0.7, 1.4],
    },
)
MODELS["qwen3-next"] = (
    "Qwen3Next",
    {
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        **EXPERTS,
    },
)
MODELS["mamba"] = ("Mamba", {"intermediate_size": 96, "state_size": 8, "time_step_rank": 5, "pad_token_id": 0})
MODELS["falcon-mamba"] = ("FalconMamba", MODELS["mamba"][1])
MODELS["recurrent-gemma"] = (
    "RecurrentGemma",
    {
        "block_types": ["recurrent", "attention"],
        "attention_window_size": WINDOW,
        "lru_width": 64,
        "logits_soft_cap": 8.0,
    },
)
LINEAR_PARTS = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
MODELS["lfm2-moe"] = (
    "Lfm2Moe",
    {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 4, **EXPERTS},
)
RECURRENT = {
    "jamba",
    "nemotron-h",
    "lfm2-moe",
    "qwen3.5",
    "qwen3.5-moe",
    "mamba2",
    "granite-hybrid",
    "falcon-h1",
    "qwen3-next",
    "mamba",
    "falcon-mamba",
    "recurrent-gemma",
    "lfm2",
}
"""Which run by a fused forward only."""
MODELS["lfm2"] = ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16})
QWEN3_5: dict[str, Any] = {
    key: MODELS["qwen3-next"][1][key]
    for key in ("layer_types", "head_dim", *(f"linear_{part}" for part in LINEAR_PARTS))
}
MODELS["qwen3.5"] = ("Qwen3_5Text", QWEN3_5)
MODELS["qwen3.5-moe"] = (
    "Qwen3_5MoeText",
    {**QWEN3_5, "num_experts": 4, "shared_expert_intermediate_size": 24, **EXPERTS},
)
MODELS["jamba"] = (
    "Jamba",
    {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 5,
        "pad_token_id": 0,
    },
)
MODELS["nemotron-h"] = (
    "NemotronH",
    {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
        "num_hidden_layers": 5,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "time_step_min": 1e-9,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 24,
        **EXPERTS,
    },
)
MODELS["llama4"] = (
    "Llama4Text",
    {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "intermediate_size": 32,
        "intermediate_size_mlp": 64,
        "attention_chunk_size": CHUNK,
        "no_rope_layers": [1, 0],
        "floor_scale": 8,
        "attn_scale": 0.3,
    },
)
MODELS["falcon"] = ("Falcon", {"bias": True})
MODELS["falcon, new"] = ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2})
MODELS["falcon, alibi"] = ("Falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True})
MODELS["bloom"] = ("Bloom", {"n_head": 6, "n_layer": 2})
MODELS["openai-gpt"] = ("OpenAIGPT", {})
MODELS["mpt"] = (
    "Mpt",
    {"max_seq_len": 128, "attn_config": {"clip_qkv": 2.0}, "d_model": 48, "n_heads": 6, "n_layers": 2},
)
MODELS["gpt-neo"] = (
    "GPTNeo",
    {"num_heads": 4, "num_layers": 2, "attention_types": [[["local", "global"], 1]], "window_size": WINDOW},
)
MODELS |= {
    "gptj": ("GPTJ", {"rotary_dim": 8, "n_embd": 48, "n_layer": 2, "n_head": 4}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "cohere": ("Cohere", {"logit_scale": 1.0}),
    "glm4-moe": (
        "Glm4Moe",
        {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 16, **EXPERTS},
    ),
    "nemotron": ("Nemotron", {}),
    "mimo-v2": ("MiMoV2Flash", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, **EXPERTS}),
    "gemma4": ("Gemma4Text", {"global_head_dim": 32, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}),
}
MODELS["gemma4"][1].update(
    num_hidden_layers=4,
    head_dim=16,
    vocab_size_per_layer_input=VOCAB,
    layer_types=ALTERNATING["layer_types"] * 2,
    sliding_window=WINDOW,
)
ALSO = {
    "codegen": ("CodeGen", {"rotary_dim": 8, "n_embd": 48, "n_layer": 2, "n_head": 4}),
    "glm": ("Glm", {"head_dim": 16}),
    "olmo": ("Olmo", {}),
    "qwen2-moe": ("Qwen2Moe", {"num_experts": 4, "shared_expert_intermediate_size": 32, **EXPERTS}),
    "granite-moe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": ("SmolLM3", {}),
    "exaone4": ("Exaone4", ALTERNATING),
    "ernie4.5": ("Ernie4_5", {"head_dim": 12}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 12}),
    "minimax-m2": ("MiniMaxM2", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8}),
    "seed-oss": ("SeedOss", {"head_dim": 12}),
    "apertus": ("Apertus", {}),
    "phimoe": ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""Compared in slow tests, since they are many."""
MODELS |= ALSO
MODELS["deepseek-v2"] = ("DeepseekV2", MODELS["deepseek-v3"][1])
MODELS["glm4-moe-lite"] = (
    "Glm4MoeLite",
    {key: value for key, value in MODELS["deepseek-v3"][1].items() if key != "first_k_dense_replace"},
)


def save(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, *, architecture: str | None = None, **more: Any
) -> Any:
    """A random model of that name, with biases and norms that matter, saved to the folder.

    architecture: that transformers does not have, and that computes the same.
    """
    family, differences = MODELS[name]
    if (name in RECURRENT and INSTALLED < (5, 0)) or not hasattr(transformers, f"{family}Config"):
        pytest.skip(
            f"transformers {transformers.__version__} has no {family} with these arguments, or does not save it"
        )
    config = getattr(transformers, f"{family}Config")(**config_values(SHAPE | differences | more))
    torch.manual_seed(1)
    attention = "sdpa" if getattr(config, "alibi", False) else "eager"  # where Falcon adds ALiBi twice
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
        for tensor_name, buffer in model.named_buffers():
            if tensor_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    model = model.to(dtype)
    model.save_pretrained(folder)
    if architecture is not None:
        tree = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(tree | {"architectures": [architecture]}))
    return model


def reference(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def difference(driver: Any, model: Any) -> float:
    """Largest error of the last step's logits, over its rows."""
    worst = 0.0
    for row, slot in enumerate(driver.rows):
        computed = driver.requests[slot].num_computed
        expected = reference(model, driver.requests[slot].tokens[:computed])[-1]
        worst = max(worst, float((driver.logits[row] - expected).abs().max()))
    return worst
