"""Writers of quantized checkpoints, after their published layouts, with random codes; and a Llama whose layers are all such.

Each writer returns the tensors of a layer, and its weight as plain numbers, which is the oracle.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Written = tuple[dict[str, torch.Tensor], torch.Tensor]


def words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes side by side, packed into int32 along the last dimension; order: which code comes at which place of a word."""
    per_word = 32 // bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per_word)).view(codes.shape[0], -1, per_word)
    packed = torch.zeros(codes.shape[:2], dtype=torch.int64)
    for place in range(per_word):
        packed |= codes[:, :, place if order is None else order[place]] << (bits * place)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def random_groups(outputs: int, inputs: int, group: int, bits: int, is_symmetric: bool) -> tuple[torch.Tensor, ...]:
    codes = torch.randint(0, 1 << bits, (outputs, inputs))
    scales = (torch.rand(outputs, inputs // group) + 0.5).half() / (inputs**0.5 * (1 << (bits - 2)))
    zeros = torch.randint(1, (1 << bits) - 1, scales.shape)
    return codes, scales, torch.full_like(zeros, 1 << (bits - 1)) if is_symmetric else zeros


def plain(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return (codes - zeros[:, groups]).float() * scales.float()[:, groups]


def gptq(
    outputs: int, inputs: int, *, group: int = 32, bits: int = 4, desc_act: bool = False, version: int = 1
) -> Written:
    codes, scales, zeros = random_groups(outputs, inputs, group, bits, is_symmetric=False)
    groups = torch.arange(inputs) // group
    if desc_act:
        groups = groups[torch.randperm(inputs)]
    tensors = {
        "qweight": words(codes, bits).T.contiguous(),
        "qzeros": words((zeros - int(version == 1)).T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": groups.to(torch.int32),
    }
    return tensors, plain(codes, scales, zeros, groups)


def awq(outputs: int, inputs: int, *, group: int = 32) -> Written:
    codes, scales, zeros = random_groups(outputs, inputs, group, 4, is_symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(codes.T, 4, order),
        "qzeros": words(zeros.T, 4, order),
        "scales": scales.T.contiguous(),
    }
    return tensors, plain(codes, scales, zeros, torch.arange(inputs) // group)


def packed(
    outputs: int, inputs: int, *, group: int = 32, bits: int = 4, is_symmetric: bool = True, has_order: bool = False
) -> Written:
    codes, scales, zeros = random_groups(outputs, inputs, group, bits, is_symmetric)
    groups = torch.arange(inputs) // group
    if has_order:
        groups = groups[torch.randperm(inputs)]
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    if has_order:
        tensors["weight_g_idx"] = groups.to(torch.int32)
    return tensors, plain(codes, scales, zeros, groups)


def fp8(outputs: int, inputs: int, *, kind: str = "tensor", block: int = 128) -> Written:
    """kind: tensor, channel or block."""
    weight = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    if kind == "block":
        scales = torch.rand(-(-outputs // block), -(-inputs // block)) / inputs**0.5 + 0.01
        exact = scales.repeat_interleave(block, 0)[:outputs].repeat_interleave(block, 1)[:, :inputs]
        return {"weight": weight, "weight_scale_inv": scales}, weight.float() * exact
    scales = torch.rand(outputs, 1) / inputs**0.5 + 0.01 if kind == "channel" else torch.tensor(1 / inputs**0.5)
    return {"weight": weight, "weight_scale": scales}, weight.float() * scales


def float4(outputs: int, inputs: int, *, is_nvidia: bool, group: int = 0) -> Written:
    """nvfp4 or mxfp4, whose groups have 16 and 32 inputs."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.randint(0, 16, (outputs, inputs))
    signed = torch.where(codes < 8, grid[codes & 7], -grid[codes & 7])
    packed_codes = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    size = 16 if is_nvidia else 32
    shape = outputs, inputs // size
    if not is_nvidia:
        exponents = torch.randint(122, 125, shape)
        scales = torch.pow(2.0, exponents - 127)
        stored = {"weight_scale": exponents.to(torch.uint8)}
    else:
        eighths, whole = (torch.rand(shape) * 200 + 50).to(torch.float8_e4m3fn), torch.tensor([400.0 * inputs**0.5])
        scales = eighths.float() / whole
        stored = {"weight_scale": eighths, "weight_global_scale": whole, "input_global_scale": torch.tensor([3.0])}
    return {"weight_packed": packed_codes, **stored}, signed * scales.repeat_interleave(size, 1)


def modelopt_float4(outputs: int, inputs: int, *, group: int = 16) -> Written:
    """As `float4`, with the scale of all to multiply by."""
    tensors, weight = float4(outputs, inputs, is_nvidia=True)
    whole = 1 / tensors["weight_global_scale"][0]
    return {
        "weight": tensors["weight_packed"],
        "weight_scale": tensors["weight_scale"],
        "weight_scale_2": whole,
        "input_scale": torch.tensor(3.0),
    }, weight


def torchao(outputs: int, inputs: int, *, kind: str, group: int = 32) -> Written:
    """kind: int8, fp8 or int4: Int8Tensor, Float8Tensor and IntxUnpackedToInt8Tensor of torchao 0.18."""
    if kind == "fp8":
        tensors, weight = fp8(outputs, inputs, kind="channel")
        return {"_weight_qdata": tensors["weight"], "_weight_scale": tensors["weight_scale"]}, weight
    if kind == "int8":
        codes, group = torch.randint(-128, 128, (outputs, inputs)), inputs
        scales, zeros = (torch.rand(outputs, 1) + 0.5) / (inputs**0.5 * 64), torch.zeros(outputs, 1, dtype=torch.int64)
    else:
        codes = torch.randint(-8, 8, (outputs, inputs))
        scales = ((torch.rand(outputs, inputs // group) + 0.5) / (inputs**0.5 * 4)).bfloat16()
        zeros = torch.randint(-3, 4, scales.shape)
    tensors = {
        "_weight_qdata": codes.to(torch.int8),
        "_weight_scale": scales,
        "_weight_zero_point": zeros.to(torch.int8),
    }
    return tensors, plain(codes, scales, zeros, torch.arange(inputs) // group)


def bitsandbytes4(outputs: int, inputs: int, *, is_nested: bool = True, **_: Any) -> Written:
    """is_nested: scales have 8 bits."""
    numbers, unit = outputs * inputs, inputs**-0.5
    count = -(-numbers // 64)
    levels, codes = torch.rand(16).sort().values * 2 - 1, torch.randint(0, 16, (numbers,))
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [outputs, inputs]}
    if is_nested:
        places, scale_levels = torch.randint(0, 256, (count,)), torch.linspace(-1, 1, 256)
        outer = (torch.rand(-(-count // 256)) + 0.5) * unit
        scales = scale_levels[places] * outer.repeat_interleave(256)[:count] + 2 * unit
        stored = {"absmax": places.to(torch.uint8), "nested_absmax": outer, "nested_quant_map": scale_levels}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 2 * unit}
    else:
        scales = (torch.rand(count) + 0.5) * unit
        stored = {"absmax": scales}
    stored |= {"quant_map": levels, "quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()))}
    tensors = {
        f"weight.{name}": tensor if tensor.is_floating_point() else tensor.byte() for name, tensor in stored.items()
    }
    tensors["weight"] = ((codes[::2] << 4) | codes[1::2]).to(torch.uint8).unsqueeze(1)
    return tensors, (levels[codes] * scales.repeat_interleave(64)[:numbers]).view(outputs, inputs)


def bitsandbytes8(outputs: int, inputs: int, **_: Any) -> Written:
    codes, largest = torch.randint(-127, 128, (outputs, inputs)), (torch.rand(outputs) + 0.5) * 2 / inputs**0.5
    tensors = {"weight": codes.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * (largest / 127).unsqueeze(1)


def torchao_config(kind: str, **data: Any) -> dict[str, Any]:
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}},
        "modules_to_not_convert": None,
        "include_input_output_embeddings": False,
    }


TORCHAO_INT4 = torchao_config(
    "IntxWeightOnlyConfig",
    weight_dtype={"_type": "torch.dtype", "_data": "int4"},
    granularity={"_type": "PerGroup", "_version": 1, "_data": {"group_size": 32}},
)

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "group_size": 16}
AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "data_type": "int",
    "bits": 4,
    "group_size": 32,
    "sym": False,
    "block_name_to_quantize": "model.layers",
}
BITSANDBYTES: dict[str, Any] = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": "uint8",
    "llm_int8_skip_modules": None,
}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def compressed(**weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    group = {"targets": ["Linear"], "weights": scheme | weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def compressed_float4(form: str, **weights: Any) -> dict[str, Any]:
    """form: "nvfp4" or "mxfp4"."""
    kind = {"strategy": "tensor_group", "group_size": 16} if form == "nvfp4" else {"group_size": 32}
    return compressed(type="float", **kind | weights) | {"format": f"{form}-pack-quantized"}


WRITERS: dict[str, tuple[dict[str, Any], Callable[..., Written]]] = {
    "gptq": (GPTQ, gptq),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda o, i, **k: gptq(o, i, version=2, **k)),
    "gptq-desc_act": (GPTQ | {"desc_act": True}, lambda o, i, **k: gptq(o, i, desc_act=True, **k)),
    "gptq-8": (GPTQ | {"bits": 8}, lambda o, i, **k: gptq(o, i, bits=8, **k)),
    "awq": (AWQ, awq),
    "auto-round": (AUTO_ROUND, gptq),
    "auto-round-awq": (AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, awq),
    "packed": (compressed(), packed),
    "packed-zeros": (compressed(symmetric=False), lambda o, i, **k: packed(o, i, is_symmetric=False, **k)),
    "packed-order": (compressed(actorder="group"), lambda o, i, **k: packed(o, i, has_order=True, **k)),
    "packed-8": (compressed(num_bits=8), lambda o, i, **k: packed(o, i, bits=8, **k)),
    "nvfp4": (compressed_float4("nvfp4"), lambda o, i, **k: float4(o, i, is_nvidia=True)),
    "mxfp4": (compressed_float4("mxfp4"), lambda o, i, **k: float4(o, i, is_nvidia=False)),
    "modelopt-nvfp4": (MODELOPT, modelopt_float4),
    "modelopt-fp8": (MODELOPT | {"quant_algo": "FP8"}, fp8),
    "torchao-int8": (torchao_config("Int8WeightOnlyConfig"), lambda o, i, **k: torchao(o, i, kind="int8", **k)),
    "torchao-int4": (TORCHAO_INT4, lambda o, i, **k: torchao(o, i, kind="int4", **k)),
    "torchao-fp8": (torchao_config("Float8WeightOnlyConfig"), lambda o, i, **k: torchao(o, i, kind="fp8", **k)),
    "bnb-nf4": (BITSANDBYTES, bitsandbytes4),
    "bnb-nf4-plain": (BITSANDBYTES, lambda o, i, **k: bitsandbytes4(o, i, is_nested=False)),
    "bnb-int8": (BITSANDBYTES | {"load_in_4bit": False, "load_in_8bit": True}, bitsandbytes8),
    "fp8": (FP8, fp8),
    "fp8-channel": (FP8, lambda o, i: fp8(o, i, kind="channel")),
    "fp8-block": (FP8 | {"weight_block_size": [128, 128]}, lambda o, i: fp8(o, i, kind="block")),
}

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}

LAYERS = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (192, 128),
    "mlp.up_proj": (192, 128),
    "mlp.down_proj": (128, 192),
}


def save_both(name: str, folder: Path) -> tuple[Path, Path]:
    """The folders of a quantized Llama and of the same in plain numbers."""
    torch.manual_seed(0)
    scheme, writer = WRITERS[name]
    outer = {
        "model.embed_tokens.weight": torch.randn(97, 128),
        "lm_head.weight": torch.randn(97, 128) / 4,
        "model.norm.weight": torch.ones(128),
    }
    quantized, exact = dict(outer), dict(outer)
    for index in range(2):
        prefix = f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            exact[f"{prefix}{norm}.weight"] = quantized[f"{prefix}{norm}.weight"] = torch.rand(128) + 0.5
        for layer, shape in LAYERS.items():
            tensors, weight = writer(*shape)
            quantized |= {f"{prefix}{layer}.{key}": tensor for key, tensor in tensors.items()}
            exact[f"{prefix}{layer}.weight"] = weight
    for where, tensors, config in (
        ("quantized", quantized, SHAPE | {"quantization_config": scheme}),
        ("plain", exact, SHAPE),
    ):
        (folder / where).mkdir(parents=True)
        save_file(tensors, folder / where / "model.safetensors")
        (folder / where / "config.json").write_text(json.dumps(config))
    return folder / "quantized", folder / "plain"
