"""What each part of a model becomes in memory, and how many bytes of it. Asked by `actorllm info`, without any weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actorllm.config import ModelConfig
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.quantization import form_of
from actorllm.model.quantization.compressed_tensors import CompressedTensors

if TYPE_CHECKING:
    from actorllm.model.registry import Plan


def described(plan: Plan, model: ModelConfig) -> dict[str, str]:
    """By part of the model; empty if nothing is quantized. Raises ModelError for a scheme that is not known."""
    if model.quantization is None:
        return {}
    if not isinstance(plan, DecoderConfig):
        return {"linear layers": "int8", "all else": model.dtype}
    form, width = form_of(model), 4 if model.dtype == "float32" else 2

    def told(parts: list[tuple[str, int, int]]) -> str:
        """parts: names, outputs and inputs of layers."""
        sizes: dict[str, int] = {}
        for name, num_outputs, num_inputs in parts:
            if not isinstance(form, CompressedTensors) or form.quantizes(name):
                kind, num_bytes = "int8", num_outputs * (num_inputs + 4)
            else:
                kind, num_bytes = model.dtype, num_outputs * num_inputs * width
            sizes[kind] = sizes.get(kind, 0) + num_bytes
        return ", ".join(f"{kind}, {size / 1e6:.1f} MB" for kind, size in sizes.items())

    c, names = plan, plan.names
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layers: list[tuple[str, int, int]] = []
    wide: list[tuple[tuple[str, ...], tuple[int, ...]]]
    for index in range(c.num_layers):
        prefix = f"model.layers.{index}."
        wide = [(names.qkv, (q_size, kv_size, kv_size))]
        narrow = [(names.output, q_size)]
        if c.experts is not None and c.experts.layers[index]:
            for number in range(c.experts.num_experts):
                base, size = f"{c.experts.experts}.{number}.", c.experts.intermediate_size
                wide.append((tuple(base + name for name in c.experts.gate_up), (size, size)))
                narrow.append((base + c.experts.down, size))
        else:
            wide.append((names.gate_up, (c.intermediate_size,) * 2))
            narrow.append((names.down, c.intermediate_size))
        for found, sizes in wide:
            parts = zip(found, sizes, strict=True) if len(found) > 1 else [(found[0], sum(sizes))]
            layers += [(prefix + name, size, c.hidden_size) for name, size in parts]
        layers += [(prefix + name, c.hidden_size, size) for name, size in narrow]
    rows = {"linear layers": told(layers)}
    if c.has_head:
        is_copy = c.ties_embeddings and isinstance(form, CompressedTensors)
        rows["head"] = "the embedding" if is_copy else told([("lm_head", c.vocab_size, c.hidden_size)])
    rows["embedding"] = f"{model.dtype}, {c.vocab_size * c.hidden_size * width / 1e6:.1f} MB"
    return rows
