"""What `capabilities` shows: small models of every kind that an engine computes on a GPU, and what it can do with them.

Each is a config.json and arguments of the engine. Weights are drawn once, rounded to the type of the model, and written as a
checkpoint. So a runner on a GPU and one on the CPU read the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from actorllm.config import EngineConfig
from actorllm.model.cuda.decoder import DeviceDecoder
from actorllm.model.cuda.rehearsal import MetaDevice, MetaWeights
from actorllm.model.cuda.runner import CudaRunner
from actorllm.model.linear.dense import Dense
from actorllm.model.weights import DummyWeights

from .clock import Bench

Tensors = dict[str, torch.Tensor]

BASE = "bfloat16"
"""The case that others are timed beside."""

TOLERANCE = 0.06
"""Of logits, in standard deviations of a row: bfloat16 through some layers costs about 0.02, a token that is not seen above 0.1."""
OF_MOST_ROWS = 0.75
"""The share of the rows that must be right where experts are chosen by scores that may be nearly equal."""


@dataclass(frozen=True)
class Case:
    """One row of the stage."""

    name: str
    config: dict[str, Any]
    """config.json."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the engine."""
    beside: str = BASE
    """The case whose steps its own are timed beside; empty: none."""
    tolerance: float = TOLERANCE
    has_experts: bool = False
    """Rows in which a near tie has chosen another expert are off, and do not decide."""
    transform: Callable[[Tensors], Tensors] | None = None
    """From plain weights to the tensors of a quantized checkpoint, whose description is in `config`."""
    is_module: bool = False
    """It runs through transformers, which draws its weights."""
    rules: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By slot, sampling rules beside log-probabilities."""
    has_masks: bool = False
    """One row has late inputs, as of a grammar."""
    drafts: int = 0
    """Tokens that are drafted at a time; 0: logits are compared, and else whole streams."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the process."""

    @property
    def pools(self) -> bool:
        return self.arguments.get("runner") == "pooling"

    @property
    def has_adapters(self) -> bool:
        return bool(self.arguments.get("enable_lora"))

    @property
    def is_timed(self) -> bool:
        """Whether its decode steps are others than those of its plain model."""
        return not (self.pools or self.drafts or self.rules)

    @property
    def dtype(self) -> str:
        return str(self.arguments.get("dtype", "bfloat16"))


def cases(bench: Bench) -> dict[str, Case]:
    """By name, in the order in which they are run: what is likeliest to be used comes first."""
    dense = sized(bench, QWEN3)
    experts, stacked, latent = sized(bench, QWEN3_MOE), sized(bench, GPT_OSS), sized(bench, DEEPSEEK_V2)
    lora = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16}
    w8a8 = {"quantization_twin": True}
    rules: dict[int, dict[str, Any]] = {
        0: {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        1: {"bad_words": ((8,), (5, 6)), "bias_ids": (7,), "biases": (2.0,)},
        2: {"allowed_ids": tuple(range(0, dense["vocab_size"], 3))},
    }
    found = [
        Case(BASE, dense, beside=""),
        *(Case(name, dense, {"quantization": name}) for name in ("int8", "fp8", "int4", "int4-g128")),
        Case("int8, prompts W8A8", dense, {"quantization": "int8", **w8a8}, tolerance=0.12),
        # A number that is nearly between two codes of floats may be off by 6 %.
        Case("fp8, prompts W8A8", dense, {"quantization": "fp8", **w8a8}, tolerance=0.25),
        Case("fp8 KV cache", dense, {"kv_cache_dtype": "fp8"}, tolerance=0.12),
        Case("float16", dense, {"dtype": "float16"}, tolerance=0.03),
        Case("LoRA, two adapters", dense, lora),
        Case("penalties, biases, masks", dense, rules=rules, has_masks=True),
        Case("experts (Qwen3-MoE)", experts, has_experts=True),
        Case("experts, int8", experts, {"quantization": "int8"}, has_experts=True),
        Case("experts (gpt-oss)", stacked, beside="", has_experts=True),
        Case("latents (DeepSeek V2)", latent, beside="", has_experts=True),
        Case("windows (Gemma 3)", sized(bench, GEMMA3), beside=""),
        Case("drafts by ngram", dense, {"speculative_config": {"method": "ngram", "prompt_lookup_max": 3}}, drafts=4),
        Case("drafts by a model", dense, {"speculative_config": {"method": "draft_model"}}, drafts=4),
        Case("pooling", dense, {"runner": "pooling"}),
        Case("nvfp4 checkpoint", dense | {"quantization_config": float4_config("nvfp4", 16)}, transform=nvfp4),
        Case("mxfp4 checkpoint", dense | {"quantization_config": float4_config("mxfp4", 32)}, transform=mxfp4),
        Case(
            "mxfp4 checkpoint by transformers",
            dense | {"quantization_config": float4_config("mxfp4", 32)},
            {"model_impl": "transformers"},
            transform=mxfp4,
        ),
        Case(
            "experts in mxfp4 (gpt-oss)",
            stacked | {"quantization_config": {"quant_method": "mxfp4"}},
            beside="",
            has_experts=True,
            transform=mxfp4_experts,
        ),
        Case("GPT-2 by transformers", sized(bench, GPT2), beside="", is_module=True),
        Case("GPT-2 by transformers, int8", sized(bench, GPT2), {"quantization": "int8"}, beside="", is_module=True),
        Case("Gemma 2 by transformers (soft caps)", sized(bench, GEMMA2), beside="", is_module=True),
        Case(
            "GPT-2 by transformers, recorded",
            sized(bench, GPT2),
            beside="",
            is_module=True,
            environment={"ACTORLLM_EXPERIMENTAL": "recorded-modules"},
        ),
    ]
    return {case.name: case for case in found}


# The models -------------------------------------------------------------------------------------------------------------

COMMON: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""What a walk through the script has instead."""
TINY_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}

QWEN3: dict[str, Any] = COMMON | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"}
QWEN3_MOE: dict[str, Any] = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
    "tiny": {"num_experts": 8, **TINY_EXPERTS},
}
"""A token's experts have as many weights as the MLP of QWEN3."""
GPT_OSS: dict[str, Any] = COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "intermediate_size": 512,
    "head_dim": 64,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "tiny": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, "intermediate_size": 64},
}
DEEPSEEK_V2: dict[str, Any] = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "intermediate_size": 2816,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 352,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "tiny": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        **TINY_EXPERTS,
    },
}
GEMMA3: dict[str, Any] = COMMON | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "tiny": {"sliding_window": 24, "query_pre_attn_scalar": 32},
}
GEMMA2: dict[str, Any] = COMMON | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 128,
    "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 15.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "tiny": {"sliding_window": 24, "query_pre_attn_scalar": 32},
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 32_000,
    "n_embd": 1024,
    "n_head": 16,
    "n_layer": 4,
    "n_positions": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "tiny": {"vocab_size": 320, "n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 256},
}


def sized(bench: Bench, config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of this run."""
    small = config.get("tiny", {})
    if bench.is_check:
        small = small if "n_embd" in config else TINY | small
        config = config | small
    return {name: value for name, value in config.items() if name != "tiny"}


# Their weights ----------------------------------------------------------------------------------------------------------


class Names(MetaWeights):
    """The names and shapes of all tensors that a model asks for."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def take(self, name: str, *shape: int, **how: Any) -> torch.Tensor:
        self.shapes[name] = shape
        return super().take(name, *shape, **how)


def write(case: Case, folder: Path) -> Path:
    """The folder, with config.json and the weights of a case in it."""
    folder.mkdir(parents=True)
    if case.is_module:
        _write_module(case, folder)
        return folder
    tree = {"dtype": case.dtype} | case.config
    plain = {name: value for name, value in tree.items() if name != "quantization_config"}
    file = folder / "config.json"
    file.write_text(json.dumps(plain))
    config = EngineConfig.from_arguments(
        folder, load_format="dummy", skip_tokenizer_init=True, block_size=64, device="cpu", num_threads=1
    )
    twin, names = CudaRunner(config, show_progress=False, device=MetaDevice(uses_pdl=False)), Names()
    DeviceDecoder(twin.model_config, names, config.model.max_model_len, twin.device, twin.collectives, Dense)  # type: ignore[arg-type]
    draw = DummyWeights(0, getattr(torch, case.dtype))
    tensors = {name: draw.take(name, *shape) for name, shape in names.shapes.items()}
    save_file(tensors if case.transform is None else case.transform(tensors), folder / "model.safetensors")
    file.write_text(json.dumps(tree))
    return folder


def _write_module(case: Case, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**case.config)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.dtype)).save_pretrained(folder)


def write_adapter(folder: Path, config: Mapping[str, Any], seed: int, rank: int) -> None:
    """An adapter of all linear layers, as peft writes it, which adds half of what a layer gives. config: of a dense model."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = dim * config["num_attention_heads"], dim * config["num_key_value_heads"]
    sizes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for i in range(config["num_hidden_layers"]):
        for name, (outputs, inputs) in sizes.items():
            base = f"base_model.model.model.layers.{i}.{name}"
            down = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            up = torch.randn(outputs, rank, generator=generator) * (0.25 / rank**0.5)
            tensors |= {f"{base}.lora_A.weight": down, f"{base}.lora_B.weight": up}
    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "target_modules": sorted(name.rpartition(".")[2] for name in sizes),
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")


# Quantized checkpoints, with random codes -------------------------------------------------------------------------------


def float4_config(form: str, group: int) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors."""
    strategy = "tensor_group" if form == "nvfp4" else "group"
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{form}-pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights | {"dynamic": False}, "input_activations": None}
        },
        "ignore": ["lm_head"],
    }


def nvfp4(tensors: Tensors) -> Tensors:
    """Groups of 16 with scales of 8 bits, and one for all."""

    def scales(outputs: int, inputs: int) -> Tensors:
        eighths = (torch.rand(outputs, inputs // 16) * 200 + 50).to(torch.float8_e4m3fn)
        return {"weight_scale": eighths, "weight_global_scale": torch.tensor([400.0 * inputs**0.5])}

    return _float4(tensors, scales)


def mxfp4(tensors: Tensors) -> Tensors:
    """Groups of 32 whose scales are powers of two."""
    return _float4(tensors, lambda outputs, inputs: {"weight_scale": _exponents(outputs, inputs // 32)})


def mxfp4_experts(tensors: Tensors) -> Tensors:
    """The stacked experts of gpt-oss, as they are published."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 3:
            count, inputs, outputs = tensor.shape
            shape = count, outputs, inputs // 32
            made[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            made[f"{name}_scales"] = _exponents(*shape)
        else:
            made[name] = tensor
    return made


def _exponents(*shape: int) -> torch.Tensor:
    """Of scales of about 0.01, with which hidden states keep their size."""
    return torch.randint(119, 122, shape, dtype=torch.uint8)


def _float4(tensors: Tensors, scales: Callable[[int, int], Tensors]) -> Tensors:
    torch.manual_seed(0)
    made: Tensors = {}
    for name, tensor in tensors.items():
        base = name.removesuffix(".weight")
        if base.endswith("_proj"):
            outputs, inputs = tensor.shape
            codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
            parts = {"weight_packed": codes, **scales(outputs, inputs)}
            made |= {f"{base}.{part}": value for part, value in parts.items()}
        else:
            made[name] = tensor
    return made
