"""GGUF files with random weights, written by the package `gguf`, and the same models in plain numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from actorllm.config import BUNDLED_MODELS
from actorllm.types.gguf_file import KINDS

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 256, 512, 8, 4, 2

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
HALVES |= dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"), (0,))
"""Where a block of a type that the package does not write has its numbers of 16 bits."""


def blocks(weight: np.ndarray[Any, Any], kind: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A tensor of this type, and its values; of types that the package does not write, random ones."""
    number = GGMLQuantizationType[kind]
    if kind in HALVES:
        _, size, num_bytes = KINDS[number.value]
        random = np.random.default_rng(weight.size)
        made = random.integers(0, 256, (weight.shape[0], weight.shape[1] // size, num_bytes), np.uint8)
        for at in HALVES[kind]:
            scales = (random.random(made.shape[:2]) * 0.4 + 0.1) / 1000
            made[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
        made = made.reshape(weight.shape[0], -1)
    else:
        made = quantize(weight, number)
    return made, dequantize(made, number)


def permuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """As llama.cpp writes queries and keys of Llama."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def save_gguf(folder: Path, kind: str = "Q4_K", architecture: str = "llama", other: str = "Q6_K") -> tuple[Path, Path]:
    """The file, and the folder of the same in plain numbers. other: the type of values and down, as in files called Q4_K_M."""
    random = np.random.default_rng(0)
    tree = json.loads((BUNDLED_MODELS["storyteller"] / "tokenizer.json").read_text())
    vocab = tree["model"]["vocab"] | {token["content"]: token["id"] for token in tree["added_tokens"]}
    size, head_dim = len(vocab), HIDDEN // HEADS
    added = {token["id"] for token in tree["added_tokens"]}
    folder.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(folder / "model.gguf", architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=lambda token: vocab[token]))
    writer.add_token_types([3 if i in added else 1 for i in range(size)])
    writer.add_token_merges([y if isinstance(y, str) else " ".join(y) for y in tree["model"]["merges"]])
    writer.add_eos_token_id(min(added))
    writer.add_bos_token_id(min(added))
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    exact: dict[str, torch.Tensor] = {}

    def add(name: str, outer: str, shape: tuple[int, ...], kind: str, heads: int = 0) -> None:
        weight = (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        if len(shape) == 1:
            weight = weight + 1
            made, values = weight, weight
        else:
            made, values = blocks(weight, kind)
        if heads and architecture == "llama":  # `values` has the order of transformers
            made, values = permuted(made, heads), values
        writer.add_tensor(name, made, raw_dtype=GGMLQuantizationType["F32" if len(shape) == 1 else kind])
        exact[outer] = torch.from_numpy(np.array(values, np.float32))

    add("token_embd.weight", "model.embed_tokens.weight", (size, HIDDEN), "Q8_0")
    add("output.weight", "lm_head.weight", (size, HIDDEN), other)
    add("output_norm.weight", "model.norm.weight", (HIDDEN,), "F32")
    for i in range(LAYERS):
        file, prefix = f"blk.{i}.", f"model.layers.{i}."
        kv = KV_HEADS * head_dim
        for inner, outer, shape, one, heads in (
            ("attn_q", "self_attn.q_proj", (HIDDEN, HIDDEN), kind, HEADS),
            ("attn_k", "self_attn.k_proj", (kv, HIDDEN), kind, KV_HEADS),
            ("attn_v", "self_attn.v_proj", (kv, HIDDEN), other, 0),
            ("attn_output", "self_attn.o_proj", (HIDDEN, HIDDEN), kind, 0),
            ("ffn_gate", "mlp.gate_proj", (INNER, HIDDEN), kind, 0),
            ("ffn_up", "mlp.up_proj", (INNER, HIDDEN), kind, 0),
            ("ffn_down", "mlp.down_proj", (HIDDEN, INNER), other, 0),
        ):
            add(f"{file}{inner}.weight", f"{prefix}{outer}.weight", shape, one, heads)
            if architecture == "qwen2" and inner in ("attn_q", "attn_k", "attn_v"):
                add(f"{file}{inner}.bias", f"{prefix}{outer}.bias", shape[:1], "F32")
        norms = [("attn_norm", "input_layernorm", HIDDEN), ("ffn_norm", "post_attention_layernorm", HIDDEN)]
        if architecture == "qwen3":
            norms += [("attn_q_norm", "self_attn.q_norm", head_dim), ("attn_k_norm", "self_attn.k_norm", head_dim)]
        for inner, outer, width in norms:
            add(f"{file}{inner}.weight", f"{prefix}{outer}.weight", (width,), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": size,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head_dim,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (folder / "plain").mkdir()
    save_file(exact, folder / "plain" / "model.safetensors")
    (folder / "plain" / "config.json").write_text(json.dumps(config))
    return folder / "model.gguf", folder / "plain"
