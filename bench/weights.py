"""Random-weight models for the benchmarks, made once: a Hugging Face folder, and the same weights as GGUF in bfloat16.

    python bench/weights.py DIR [SHAPE ...]

The folder is made by transformers; the GGUF file, for llama.cpp, by the writer below: two architectures, a made-up vocabulary.
That of the storyteller has its tokenizer (`storyteller_gguf`).
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

SHAPES: dict[str, dict[str, Any]] = {
    "llama-135M": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
}

MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
    },
}
"""With experts; `intermediate_size` is that of the experts that a token takes together."""

ROPE_THETA = 10_000.0
NORM_EPS = 1e-5


def num_parameters(shape: dict[str, Any]) -> tuple[int, int]:
    """Parameters of the layers' matrices, and of the (tied) embedding."""
    hidden, head = shape["hidden_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * shape["intermediate_size"]
    return shape["num_hidden_layers"] * layer, shape["vocab_size"] * hidden


def make_folder(directory: Path, name: str) -> Path:
    """The model as transformers saves it. Returns the folder; does nothing if it is complete."""
    folder = directory / name
    if (folder / "complete").is_file():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        **(SHAPES | MIXTURES)[name],
        dtype="bfloat16",
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100GB")
    (folder / "complete").touch()
    return folder


W8A8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
}
"""As config.json of a checkpoint of compressed-tensors says it."""


def make_w8a8(folder: Path) -> Path:
    """The same weights with 8 bits for each in the layers, as compressed-tensors stores them. Returns the folder."""
    made = folder.with_name(f"{folder.name}-w8a8")
    if (made / "complete").is_file():
        return made
    import torch
    from safetensors.torch import load_file, save_file

    made.mkdir(exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            scales = tensor.float().abs().amax(1, keepdim=True) / 127
            tensors[name] = (tensor.float() / scales).round().to(torch.int8)
            tensors[f"{name}_scale"] = scales.bfloat16()
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"quantization_config": W8A8}))
    (made / "complete").touch()
    return made


# GGUF version 3: magic, counts, key-value pairs, tensor descriptions, padding, data

ALIGNMENT = 32
UINT32, INT32, FLOAT32, STRING, ARRAY = 4, 5, 6, 8, 9
FORMATS = {UINT32: "<I", INT32: "<i", FLOAT32: "<f"}
NORMAL, CONTROL = 1, 3
"""Types of tokens."""
F32_TENSOR, Q8_0_TENSOR, BF16_TENSOR = 0, 8, 30
TENSOR_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
ARCHITECTURES = {"qwen3_moe": "qwen3moe"}
"""As llama.cpp calls them, where that differs."""


def make_gguf(folder: Path, kind: int = BF16_TENSOR) -> Path:
    """The same weights for llama.cpp: matrices in bfloat16, or rounded to Q8_0; norms in float32. Returns the file."""
    file = folder / f"model-{'q8_0' if kind == Q8_0_TENSOR else 'bf16'}.gguf"
    if file.is_file():
        return file
    shape = (SHAPES | MIXTURES)[folder.name]
    tokens = [f"<{token}>" for token in range(shape["vocab_size"])]
    pairs: list[tuple[str, int, Any]] = [  # xllamacpp starts with no model that has no vocabulary
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.pre", STRING, "gpt-2"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
        ("tokenizer.ggml.token_type", ARRAY, (INT32, [NORMAL] * len(tokens))),
        ("tokenizer.ggml.merges", ARRAY, (STRING, [f"{tokens[0]} {tokens[1]}"])),
        ("tokenizer.ggml.bos_token_id", UINT32, 0),
        ("tokenizer.ggml.eos_token_id", UINT32, 0),
    ]
    write_gguf(file, folder, shape, pairs, kind)
    return file


def storyteller_gguf(file: Path) -> Path:
    """The bundled model for llama.cpp, with its tokenizer. Returns the file."""
    folder = Path(__file__).resolve().parents[1] / "actorllm" / "bundled" / "storyteller"
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    pairs: list[tuple[str, int, Any]] = [
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.pre", STRING, "gpt-2"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
        ("tokenizer.ggml.token_type", ARRAY, (INT32, [CONTROL if token in special else NORMAL for token in tokens])),
        ("tokenizer.ggml.merges", ARRAY, (STRING, [" ".join(pair) for pair in tokenizer["model"]["merges"]])),
        ("tokenizer.ggml.bos_token_id", UINT32, 0),
        ("tokenizer.ggml.eos_token_id", UINT32, 0),
    ]
    write_gguf(file, folder, json.loads((folder / "config.json").read_text()), pairs)
    return file


def write_gguf(
    file: Path, folder: Path, shape: dict[str, Any], tokenizer: list[tuple[str, int, Any]], kind: int = BF16_TENSOR
) -> None:
    """The weights of a folder. shape: its config.json. tokenizer: (key, kind, value) of what is said of it. kind: of matrices."""
    tensors = list(_gguf_tensors(folder, shape, shape["model_type"] == "llama", kind))
    partial = file.with_suffix(".partial")
    with partial.open("wb") as out:
        pairs = [*_gguf_pairs(shape), *tokenizer]
        out.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(pairs)))
        for key, kind, value in pairs:
            _write_string(out, key)
            out.write(struct.pack("<I", kind))
            if kind == ARRAY:
                of, values = value
                out.write(struct.pack("<IQ", of, len(values)))
                for one in values:
                    _write_value(out, of, one)
            else:
                _write_value(out, kind, value)
        offset = 0
        for name, kind, dimensions, data in tensors:
            _write_string(out, name)
            out.write(struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *reversed(dimensions)))
            out.write(struct.pack("<IQ", kind, offset))
            offset += _padded(len(data))
        out.write(b"\0" * (_padded(out.tell()) - out.tell()))
        for _, _, _, data in tensors:
            out.write(data)
            out.write(b"\0" * (_padded(len(data)) - len(data)))
    partial.rename(file)


def _write_value(out: BinaryIO, kind: int, value: Any) -> None:
    if kind == STRING:
        _write_string(out, value)
    else:
        out.write(struct.pack(FORMATS[kind], value))


def _gguf_pairs(shape: dict[str, Any]) -> Iterator[tuple[str, int, Any]]:
    architecture = ARCHITECTURES.get(shape["model_type"], shape["model_type"])
    yield "general.architecture", STRING, architecture
    yield "general.alignment", UINT32, ALIGNMENT
    numbers = {
        "vocab_size": shape["vocab_size"],
        "context_length": shape["max_position_embeddings"],
        "embedding_length": shape["hidden_size"],
        "block_count": shape["num_hidden_layers"],
        "feed_forward_length": shape["intermediate_size"],
        "rope.dimension_count": shape["head_dim"],
        "attention.head_count": shape["num_attention_heads"],
        "attention.head_count_kv": shape["num_key_value_heads"],
        "attention.key_length": shape["head_dim"],
        "attention.value_length": shape["head_dim"],
    }
    if "num_experts" in shape:
        numbers |= {
            "expert_count": shape["num_experts"],
            "expert_used_count": shape["num_experts_per_tok"],
            "expert_feed_forward_length": shape["moe_intermediate_size"],
        }
    for key, number in numbers.items():
        yield f"{architecture}.{key}", UINT32, number
    yield f"{architecture}.rope.freq_base", FLOAT32, ROPE_THETA
    yield f"{architecture}.attention.layer_norm_rms_epsilon", FLOAT32, NORM_EPS


def _gguf_tensors(
    folder: Path, shape: dict[str, Any], is_llama: bool, matrices: int
) -> Iterator[tuple[str, int, list[int], memoryview]]:
    """(name, kind, dimensions with the slowest first, bytes)"""
    import torch
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            if ".experts." in name:
                if ".experts.0." not in name:
                    continue  # the file has those of all experts as one
                parts = [name.replace(".experts.0.", f".experts.{number}.") for number in range(shape["num_experts"])]
                tensor = torch.stack([weights.get_tensor(part) for part in parts])
            else:
                tensor = weights.get_tensor(name)
            if is_llama and name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = tensor.shape[0] // shape["head_dim"]
                # llama.cpp rotates neighbouring pairs where transformers rotates halves
                tensor = tensor.view(heads, 2, shape["head_dim"] // 2, -1).transpose(1, 2).reshape(tensor.shape)
            dimensions = list(tensor.shape)
            if tensor.dim() == 1 or name.endswith("mlp.gate.weight"):
                data, kind = tensor.float().view(torch.uint8), F32_TENSOR
            elif matrices == Q8_0_TENSOR:
                data, kind = _q8_0(tensor), Q8_0_TENSOR
            else:
                data, kind = tensor.contiguous().view(torch.uint8), BF16_TENSOR
            yield _gguf_name(name), kind, dimensions, memoryview(data.numpy()).cast("B")


def _q8_0(tensor: Any) -> Any:
    """Blocks of 32: a scale in float16, and integers of 8 bits. As llama.cpp rounds."""
    import torch

    blocks = tensor.float().view(-1, 32)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    codes = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    return torch.cat((scales.half().view(torch.uint8), codes.view(torch.uint8)), 1)


def _gguf_name(name: str) -> str:
    outside = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outside:
        return outside[name]
    _, _, layer, rest = name.split(".", 3)
    suffix = "_exps" if ".experts.0." in rest else ""
    name = TENSOR_NAMES[rest.replace(".experts.0", "").removesuffix(".weight")]
    return f"blk.{layer}.{name}{suffix}.weight"


def _write_string(out: BinaryIO, text: str) -> None:
    data = text.encode()
    out.write(struct.pack("<Q", len(data)) + data)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def main() -> None:
    directory = Path(sys.argv[1])
    for name in sys.argv[2:] or SHAPES:
        folder = make_folder(directory, name)
        made = {"folder": folder.name, "gguf": make_gguf(folder).name}
        print(json.dumps(made))


if __name__ == "__main__":
    main()
