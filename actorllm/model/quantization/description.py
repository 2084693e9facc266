"""What each part of a model becomes in memory, and how many bytes of it. Asked by `actorllm info`, without any weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from actorllm.config import EngineConfig, ModelConfig
from actorllm.errors import ModelNotFoundError
from actorllm.model.cpu.int8_cache import block_bytes
from actorllm.model.cpu.latent import check_latent
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.families.recurrent_shapes import state_bytes
from actorllm.model.linear import Form, LinearPart
from actorllm.model.linear.dense import Dense
from actorllm.model.quantization import form_of, open_weights
from actorllm.model.quantization.checkpoint import CheckpointForm
from actorllm.model.quantization.gguf import PLAIN, SPLIT, GgufForm, layer_name
from actorllm.model.quantization.int4 import Int4, Int4Weights, fitting
from actorllm.model.quantization.int8 import Int8
from actorllm.model.weights import FLOATS, tensor_files
from actorllm.types.gguf_file import read_header
from actorllm.types.model_files import read_model_config
from actorllm.types.quantization import GGUF, ROUNDING, is_head, read_checkpoint

if TYPE_CHECKING:
    from actorllm.model.registry import Plan


def described(plan: Plan, model: ModelConfig) -> dict[str, str]:
    """By part of the model; empty if nothing is quantized. Raises ModelError for a scheme that is not known."""
    if model.quantization is None:
        return {}
    if not isinstance(plan, DecoderConfig):
        return {"linear layers": model.quantization, "all else": model.dtype}
    form, width = form_of(model), 4 if model.dtype == "float32" else 2
    stored = stored_kinds(form, model)

    def kind_of(name: str, num_inputs: int) -> str:
        return stored[name] if name in stored else becomes(form, name, num_inputs)

    def told(parts: list[tuple[str, int, int]]) -> str:
        """parts: names, outputs and inputs of layers."""
        sizes: dict[str, int] = {}
        for name, num_outputs, num_inputs in parts:
            kind = kind_of(name, num_inputs)
            if kind.startswith("int4"):
                num_bytes = num_outputs * (num_inputs // 2 + 4 * num_inputs // int(kind.rpartition("g")[2]))
            elif kind == "int8":
                num_bytes = num_outputs * (num_inputs + 4)
            else:
                kind, num_bytes = model.dtype, num_outputs * num_inputs * width
            sizes[kind] = sizes.get(kind, 0) + num_bytes
        return ", ".join(f"{kind}, {size / 1e6:.1f} MB" for kind, size in sizes.items())

    # Every layer by its names in the checkpoint. Experts are layers of their own, since each has its scales.
    c, names = plan, plan.names
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    # Every layer by its name, as `DecoderTensors` reads it: a checkpoint may leave single ones out.
    layers: list[tuple[str, int, int]] = []
    wide: list[tuple[tuple[str, ...], tuple[int, ...]]]
    for index in range(c.num_layers):
        prefix = f"{names.model}.layers.{index}."
        wide, narrow = [], []
        if c.attends(index):
            wide, narrow = [(names.qkv, (q_size * (1 + c.gates_attention), kv_size, kv_size))], [(names.output, q_size)]
        if c.recurrent is not None and c.recurs(index):
            products = c.recurrent.products(c.hidden_size)
            layers += [(prefix + name, outputs, inputs) for name, outputs, inputs in products]
        if c.experts is not None and c.experts.layers[index]:
            for number in range(c.experts.num_experts):
                base, size = f"{c.experts.experts}.{number}.", c.experts.intermediate_size
                wide.append((tuple(base + name for name in c.experts.gate_up), (size,) * (1 + c.experts.has_gate)))
                narrow.append((base + c.experts.down, size))
        elif c.adds_mlp(index):
            wide.append((names.gate_up, (c.intermediate_size,) * (1 + c.has_gate)))
            narrow.append((names.down, c.intermediate_size))
        for found, sizes in wide:
            parts = zip(found, sizes, strict=True) if len(found) > 1 else [(found[0], sum(sizes))]
            layers += [(prefix + name, size, c.hidden_size) for name, size in parts]
        layers += [(prefix + name, c.hidden_size, size) for name, size in narrow]
    # The head may be the embedding, which only a checkpoint leaves as it is: else its codes are a copy.
    rows = {"linear layers": told(layers)}
    # What a worker may keep besides is measured when it starts.
    if model.quantization_twin is not False and "int4" in rows["linear layers"]:
        twins = sum(
            outputs * (inputs + 4) for name, outputs, inputs in layers if kind_of(name, inputs).startswith("int4")
        )
        rows["for prompts"] = (
            f"int8 besides, {twins / 1e6:.1f} MB, where that is faster and there is memory (not with quantization_twin=False)"
        )
    if c.has_head:
        is_copy = c.ties_embeddings and isinstance(form, CheckpointForm)
        rows["head"] = "the embedding" if is_copy else told([(names.head, c.vocab_size, c.hidden_size)])
    rows["embedding"] = f"{model.dtype}, {c.vocab_size * c.hidden_size * width / 1e6:.1f} MB"
    return rows


def described_changes(plan: Plan, model: ModelConfig) -> str | None:
    """How far the weights of the first layer are from those of the files, by what they become. Reads that layer.

    None: no weight is quantized, or the layer has experts, or layers are recurrent. Raises ModelError.
    """
    if model.quantization is None or not isinstance(plan, DecoderConfig):
        return None
    if (plan.experts is not None and plan.experts.layers[0]) or plan.recurrent is not None:
        return None  # whose names a rank reads by itself
    form, c, names = form_of(model), plan, plan.names
    q_size, kv_size, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    wide = [(names.qkv, (q_size, kv_size, kv_size)), (names.gate_up, (inner, inner))]
    layers = [
        (name, size, c.hidden_size)
        for found, sizes in wide
        for name, size in (zip(found, sizes, strict=True) if len(found) > 1 else [(found[0], sum(sizes))])
    ]
    layers += [(names.output, c.hidden_size, q_size), (names.down, c.hidden_size, inner)]
    changes: dict[str, list[float]] = {}
    with open_weights(model, torch.float32, False) as weights:
        for name, num_outputs, num_inputs in layers:
            full = f"{names.model}.layers.0.{name}"
            made = form.sharded(weights, LinearPart(full, num_outputs, num_inputs))
            kind = {Int8: "int8", Int4: "int4"}.get(type(made), "the type of the model")
            change = made.change if isinstance(made, Int8) else None  # of what is rounded while it is read
            if model.quantization in ROUNDING and isinstance(made, Int8 | Int4):
                exact = Dense.sharded(weights, LinearPart(full, num_outputs, num_inputs)).weight.float()
                change = float((made.dense() - exact).norm() / exact.norm())
            changes.setdefault(kind, []).append(change or 0.0)
    told = [
        f"{kind} by {100 * max(each):.2g} %" if max(each) else f"{kind}: codes and numbers of the files"
        for kind, each in changes.items()
    ]
    return f"{'; '.join(told)} (root mean square, at most, in the first layer)"


def described_cache(plan: Plan, config: EngineConfig) -> str:
    """What a token takes in the KV cache, and how that compares with the type of the model."""
    size, width = config.cache.block_size, 4 if config.model.dtype == "float32" else 2
    plain = plan.num_layers * 2 * plan.num_kv_heads * plan.head_dim * width
    if isinstance(plan, DecoderConfig) and plan.latent is not None:
        check_latent(config)
        plain = plan.num_layers * plan.latent.width * width
    if isinstance(plan, DecoderConfig) and plan.recurrent is not None:
        plain = plain // plan.num_layers * len(plan.attention_layers)
        size = state_bytes(plan.recurrent, len(plan.recurrent_layers), width)
        return f"{config.model.dtype}, {plain:,} bytes a token, and {size:,} bytes a sequence for states"
    if config.cache.dtype == "auto":
        return f"{config.model.dtype}, {plain:,} bytes a token"
    small = plan.num_layers * block_bytes(plan.num_kv_heads, plan.head_dim, size) / size
    most, last = config.scheduler.max_num_seqs, plain * size / 1e6
    return (
        f"{config.cache.dtype}, {small:,.0f} bytes a token, {plain / small:.2f} times as many tokens as in {config.model.dtype}; "
        f"besides, for the last block of each sequence that runs, {last:.1f} MB (at most {most} sequences)"
    )


def becomes(form: Form, name: str, num_inputs: int) -> str:
    """What the layer of this name is computed as: "int8", "int4 g32", or "" for the type of the model."""
    if isinstance(form, CheckpointForm):
        scheme = form.scheme
        if not scheme.quantizes(name):
            return ""
        found = fitting(scheme.group or num_inputs, num_inputs) if scheme.bits == 4 else None
        return "int8" if found is None else f"int4 g{found}"
    group = fitting(form.group, num_inputs) if isinstance(form, Int4Weights) and not is_head(name) else None
    return "int8" if group is None else f"int4 g{group}"


def weight_files(folder: Path, hf: Mapping[str, Any]) -> Iterator[Path]:
    """Those that hold the tensors."""
    tree = hf.get("quantization_config")
    if isinstance(tree, dict) and tree.get("quant_method") == GGUF:
        yield Path(tree["file"])
    else:
        yield from folder.glob("*.safetensors")


def stored_kinds(form: Form, model: ModelConfig) -> dict[str, str]:
    """What layers become, by name, as `becomes` says it, where the files say more of them than `form` does."""
    if isinstance(form, GgufForm):
        return gguf_kinds(model)
    return dict.fromkeys(plain_layers(model), "") if isinstance(form, CheckpointForm) else {}


def plain_layers(model: ModelConfig) -> list[str]:
    """Layers of a quantized checkpoint that its files have in floats; empty where there are no files."""
    try:
        names = [name for name in tensor_files(Path(model.path)) if name.endswith(".weight")]
    except ModelNotFoundError:
        return []
    with open_weights(model, torch.bfloat16, False) as weights:
        found = {name: weights.stored(name) for name in names}
    return [name.removesuffix(".weight") for name, one in found.items() if one is not None and one.kind in FLOATS]


def gguf_kinds(model: ModelConfig) -> dict[str, str]:
    """What each layer of a GGUF file becomes, as `becomes` says it; 8 bits where rounding is near enough."""
    checkpoint = read_checkpoint(read_model_config(Path(model.path)))
    assert checkpoint is not None
    found = {}
    for name, tensor in read_header(Path(checkpoint.file)).tensors.items():
        kind = tensor.name_of_kind
        found[layer_name(name)] = "int4 g32" if kind in SPLIT else "" if kind in PLAIN else "int8"
    return found
