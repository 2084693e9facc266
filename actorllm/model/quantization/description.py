"""What each part of a model becomes in memory, and how many bytes of it. Asked by `actorllm info`, without any weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from actorllm.config import EngineConfig, ModelConfig
from actorllm.errors import ModelNotFoundError
from actorllm.model.cpu.int8_cache import block_bytes
from actorllm.model.cpu.latent import check_latent
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.families.recurrent_shapes import state_bytes
from actorllm.model.families.tensors import DecoderTensors
from actorllm.model.linear import Form, LinearPart, LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.parallel import Ranks
from actorllm.model.quantization import form_of, open_weights
from actorllm.model.quantization.checkpoint import CheckpointForm
from actorllm.model.quantization.gguf import PLAIN, SPLIT, GgufForm, layer_name
from actorllm.model.quantization.int4 import Int4, Int4Weights, fitting
from actorllm.model.quantization.int8 import Int8
from actorllm.model.weights import ALL, FLOATS, Weights, tensor_files
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

    def kind_of(part: LinearPart) -> str:
        if plan.latent is not None and part.name.endswith(plan.latent.up):
            return "float32"  # what is read becomes numbers again, by which queries and results are multiplied
        return stored[part.name] if part.name in stored else becomes(form, part.name, part.in_features)

    def told(parts: list[LinearPart]) -> str:
        sizes: dict[str, int] = {}
        for part in parts:
            kind, num_outputs, num_inputs = kind_of(part), part.out_features, part.in_features
            if kind.startswith("int4"):
                num_bytes = num_outputs * (num_inputs // 2 + 4 * num_inputs // int(kind.rpartition("g")[2]))
            elif kind == "int8":
                num_bytes = num_outputs * (num_inputs + 4)
            elif kind == "float32":
                num_bytes = num_outputs * num_inputs * 4
            else:
                kind, num_bytes = model.dtype, num_outputs * num_inputs * width
            sizes[kind] = sizes.get(kind, 0) + num_bytes
        return ", ".join(f"{kind}, {size / 1e6:.1f} MB" for kind, size in sizes.items())

    layers = [part for layer in range(plan.num_layers) for part in listed(plan, layer)]
    rows = {"linear layers": told(layers)}
    # What a worker may keep besides is measured when it starts.
    may_twin = model.quantization_twin is not False and plan.experts is None and model.pooler is None
    if may_twin and "int4" in rows["linear layers"]:
        twins = sum(part.out_features * (part.in_features + 4) for part in layers if kind_of(part).startswith("int4"))
        rows["for prompts"] = (
            f"int8 besides, {twins / 1e6:.1f} MB, where that is faster and there is memory (not with quantization_twin=False)"
        )
    # The head may be the embedding, which only a checkpoint leaves as it is: else its codes are a copy.
    if plan.has_head:
        is_copy = plan.ties_embeddings and isinstance(form, CheckpointForm)
        rows["head"] = (
            "the embedding" if is_copy else told([LinearPart(plan.names.head, plan.vocab_size, plan.hidden_size)])
        )
    rows["embedding"] = f"{model.dtype}, {plan.vocab_size * plan.hidden_size * width / 1e6:.1f} MB"
    return rows


def described_changes(plan: Plan, model: ModelConfig) -> str | None:
    """How far the weights of the first layer are from those of the files, by what they become. Reads that layer.

    None: no weight is quantized, or the layer has experts. Raises ModelError.
    """
    if model.quantization is None or not isinstance(plan, DecoderConfig):
        return None
    if plan.experts is not None and plan.experts.layers[0]:
        return None  # which may be most of the files
    form = form_of(model)
    changes: dict[str, list[float]] = {}
    with open_weights(model, torch.float32, False) as weights:
        for part in listed(plan, 0):
            made = form.sharded(weights, part)
            kind = {Int8: "int8", Int4: "int4"}.get(type(made), "the type of the model")
            change = made.change if isinstance(made, Int8) else None  # of what is rounded while it is read
            if model.quantization in ROUNDING and isinstance(made, Int8 | Int4):
                exact = Dense.sharded(weights, part).weight.float()
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


def listed(plan: DecoderConfig, layer: int) -> list[LinearPart]:
    """The linear layers that are read of a layer, experts included. Those of stacked experts have no name."""
    listing = Listing()
    read = DecoderTensors(plan, Shapes(torch.bfloat16), Ranks(), listing).layer(layer)
    if read.experts is not None:
        for _ in read.experts:
            pass
    return listing.parts


class Listing:
    """A form (`model.linear.Form`) that reads nothing, and notes which layers are asked for."""

    def __init__(self) -> None:
        self.parts: list[LinearPart] = []

    def of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        self.parts.append(LinearPart("", *weight.shape))
        return Sizes(*weight.shape)

    def head_of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        return self.of(weight)

    def sharded(self, weights: Weights, part: LinearPart) -> LinearWeight:
        self.parts.append(part)
        return Sizes(part.out_features, part.in_features)

    def fused(self, parts: Sequence[Any]) -> LinearWeight:
        return Sizes.fused(parts)


class Sizes(LinearWeight):
    """A weight of which no more is known."""

    __slots__ = ()

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__(out_features, in_features, 0)

    @classmethod
    def fused(cls, parts: Sequence[Self]) -> Self:
        return cls(sum(part.out_features for part in parts), parts[0].in_features)

    def reordered(self, outputs: torch.Tensor) -> Self:
        return self

    def without_bias(self) -> Self:
        return self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("a weight of which only the sizes are known computes nothing")


class Shapes(Weights):
    """Tensors without numbers."""

    def take(
        self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")

    def close(self, is_ignorable: Callable[[str], bool]) -> None:
        return None


def becomes(form: Form, name: str, num_inputs: int) -> str:
    """What the layer of this name is computed as: "int8", "int4 g32", or "" for the type of the model.

    A layer without a name is one of many in a tensor, which a quantized checkpoint has in floats.
    """
    if not name and isinstance(form, CheckpointForm | GgufForm):
        return ""
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
