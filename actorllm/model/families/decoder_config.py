"""What a family's file makes of a config.json: sizes of a decoder, its switches, and what its tensors are called.

The defaults of all switches are the plain decoder: RMSNorm before attention and before the MLP, grouped heads, one rope, silu.
A backend declares which other values it knows (`DecoderConfig.switches`), so that no backend runs a shape as another one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, TypeAlias

from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.families.recurrent_shapes import RecurrentShape
from actorllm.model.rope import ROPE_TYPES
from actorllm.types.quantization import read_checkpoint

ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


Mixer: TypeAlias = Literal["attention", "recurrent", "both", "none"]
"""both: side by side, each of what the layer reads. none: the layer is its MLP alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """What the parts of a layer are called in a checkpoint, behind `model.layers.N.`."""

    model: str = "model"
    """What the names of all tensors but the head begin with."""
    embedding: str = "embed_tokens"
    final_norm: str = "norm"

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """One name: the three are one tensor, one below the other."""
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """One name: the two are one tensor, or there is no gate."""
    down: str = "mlp.down_proj"
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    input_norm: str = "input_layernorm"
    output_norm: str = "post_attention_layernorm"
    """Of what attention adds to the stream, where `norms_outputs`."""
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = "post_feedforward_layernorm"
    sinks: str = "self_attn.sinks"
    head: str = "lm_head"
    norm_offset: float = 0.0
    """Norms multiply by the tensor of the checkpoint plus this."""
    beside: tuple[str, ...] = ()
    """What the names of tensors begin with that none of the layers needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The MLPs of a layer of which each token takes some (Shazeer et al., arXiv:1701.06538)."""

    num_experts: int
    num_active: int
    """That a token takes: those with the highest scores of the router."""
    intermediate_size: int
    """Of one expert."""
    normalizes: bool
    """The weights of the experts of a token sum to 1; else they are those of a softmax over all experts."""
    layers: tuple[bool, ...]
    """Which layers have experts; the others have one MLP."""
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    """With the number of the expert behind it; where they are stacked, a tensor has that of all."""
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """One name: the two take turns, output by output."""
    down: str = "down_proj"
    is_stacked: bool = False
    """A tensor has a dimension more, for the experts, and inputs before outputs."""
    has_halves: bool = False
    """Of stacked experts: outputs before inputs, all gates before the first up, and no biases."""
    has_inputs_first: bool = False
    """Of experts with halves: inputs before outputs all the same."""
    stacked: str | None = None
    """A tensor that may be there in the place of the gates and ups of each expert: that of all, with halves."""
    suffix: str = ".weight"
    """Of the names of tensors of experts with halves."""
    has_gate: bool = True
    """False: an MLP is an activation between two products. Of the one beside the experts as well."""
    has_bias: bool = False
    has_router_bias: bool = False
    swiglu: tuple[float, float] | None = None
    """alpha and limit of (up + 1) * gate * sigmoid(alpha * gate), gate and up within the limit (gpt-oss); None: the activation of
    the gate, times up."""
    scoring: Literal["softmax", "sigmoid", "inputs"] = "softmax"
    """What makes scores of the router's outputs. sigmoid: a tensor corrects which experts are chosen, and not their weights.
    inputs: a sigmoid, by which what an expert reads is multiplied, in the place of what it makes (Llama 4)."""
    correction: str = "mlp.gate.e_score_correction_bias"
    """That tensor."""
    num_groups: int = 1
    """Of neighbouring experts; a token takes experts of `num_active_groups` of them."""
    num_active_groups: int = 1
    scale: float = 1.0
    """Of the weights of the experts of a token."""
    shared_size: int | None = None
    """Intermediate size of an MLP beside the experts that every token takes; None: there is none."""
    shared: str = "mlp.shared_experts"
    shared_gate: str | None = None
    """What the MLP is multiplied by, as a product of the token whose sigmoid is taken; None: 1."""
    shared_names: tuple[tuple[str, ...], str] | None = None
    """Its products, as `gate_up` and `down`; None: they are called as those of experts."""
    latent_size: int | None = None
    """Experts read so many numbers, which a product makes of a token, and another product reads what they make; None: the token."""
    latents: tuple[str, str] = ("", "")
    """These two products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Attention whose keys and values are products of one vector of each token, the latent (DeepSeek-V2, arXiv:2405.04434).

    Another part of the token, which is rotated, is a part of the keys of all heads.
    """

    query_rank: int | None
    """Queries are products of a vector of that size; None: of the hidden states."""
    rank: int
    """Numbers of a latent."""
    plain_dim: int
    """Of a query or key of one head: what is not rotated."""
    rotary_dim: int
    value_dim: int
    is_interleaved: bool
    """Pairs that are rotated are adjacent in the checkpoint; else half a head apart."""
    eps: float = 1e-6
    """Of the norms of latents and of vectors for queries."""
    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    query: str = "self_attn.q_proj"
    """In their place, where `query_rank` is None."""
    down: str = "self_attn.kv_a_proj_with_mqa"
    norm: str = "self_attn.kv_a_layernorm"
    up: str = "self_attn.kv_b_proj"

    @property
    def width(self) -> int:
        """Numbers of a token in the cache of a layer, whatever the number of heads."""
        return self.rank + self.rotary_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a model and the switches in which the families differ."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    max_position_embeddings: int
    ties_embeddings: bool
    names: TensorNames = TensorNames()
    has_head: bool = True
    """False: only its final hidden states are wanted."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    qk_norm: Literal["none", "head", "all_heads", "plain"] = "none"
    """RMSNorm of queries and keys, before they are rotated: of each head, or of all heads of a token together. plain: of each head,
    without weights, in layers that rotate."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of every layer; a token sees itself and the window - 1 tokens before it. None: all."""
    has_chunks: bool = False
    """Windows do not slide: positions are cut into chunks of that size, and a token sees those of its own before it."""
    window_rope: Mapping[str, Any] | None = None
    """Of the layers with a window, where they rotate otherwise than the others."""
    attention_scale: float | None = None
    """Of products of queries and keys; None: head_dim ** -0.5."""
    norms_inputs: bool = True
    """Attention and MLP read the residual stream through a norm."""
    norms_outputs: bool = False
    """What attention and MLP add to the residual stream goes through a norm."""
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    embedding_scale: float = 1.0
    scales_given_rows: bool = False
    """Embeddings that a prompt brings are multiplied by embedding_scale, as those of its ids are."""
    residual_scale: float = 1.0
    """Of what mixer and MLP add to the residual stream."""
    logits_scale: float = 1.0
    logits_cap: float | None = None
    """Logits x become cap * tanh(x / cap); None: they stay as they are."""
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    """Of the gate, before its activation, and of what the MLP adds to the stream."""
    attention_output_scale: float = 1.0
    """Of what attention adds to the stream."""
    rotary_share: float = 1.0
    """Of the dimensions of a head, from the first one on, which are rotated."""
    gates_attention: bool = False
    """The product for queries makes a gate of each head as well, whose sigmoid what is attended to is multiplied by."""
    rotates: bool = True
    """False: queries and keys of attention say nothing of positions."""
    rotated: tuple[bool, ...] = ()
    """Which layers rotate, where only some do; none: `rotates`."""
    has_adjacent_pairs: bool = False
    """Pairs that are rotated are adjacent in the checkpoint; else half a head apart."""
    query_growth: tuple[float, float] | None = None
    """(interval, rate): queries of layers that do not rotate are multiplied by 1 + rate * log(1 + floor(n / interval)), where n
    counts tokens up to theirs; None: they are not."""
    experts: ExpertShape | None = None
    """Of the layers that have experts in the place of the MLP."""
    has_sinks: bool = False
    """Each head has a score that takes part in the softmax and has no value."""
    latent: LatentShape | None = None
    """In the place of keys and values of heads. `head_dim` is then that of a query."""
    recurrent: RecurrentShape | None = None
    """Of the layers that keep a state of a sequence in the place of its keys and values."""
    mixers: tuple[Mixer, ...] = ()
    """What mixes the tokens of each layer; none: attention in all of them."""
    has_mlp: bool = True
    """False: a layer is its mixer alone."""
    mlps: tuple[bool, ...] = ()
    """Which layers have an MLP, or experts, where only some do; none: `has_mlp`."""
    has_gate: bool = True
    """False: the MLP is an activation between two products."""
    num_draft_layers: int = 0
    """Layers of the checkpoint behind the others that guess tokens; they are not read."""

    def mixer(self, layer: int) -> Mixer:
        """What mixes the tokens of a layer."""
        return self.mixers[layer] if self.mixers else "attention"

    def attends(self, layer: int) -> bool:
        return self.mixer(layer) in ("attention", "both")

    def recurs(self, layer: int) -> bool:
        return self.mixer(layer) in ("recurrent", "both")

    def adds_mlp(self, layer: int) -> bool:
        """Whether an MLP, or experts, follow the mixer of a layer."""
        return self.mlps[layer] if self.mlps else self.has_mlp

    def rotates_in(self, layer: int) -> bool:
        return self.rotated[layer] if self.rotated else self.rotates

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with keys and values, in their order in the cache."""
        return tuple(i for i in range(self.num_layers) if self.attends(i))

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Layers with a state, in their order among states."""
        return tuple(i for i in range(self.num_layers) if self.recurs(i))

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.head_dim * self.rotary_share) if self.latent is None else self.latent.rotary_dim

    @property
    def switches(self) -> frozenset[str]:
        """What a backend must know beyond the plain decoder, as `name` or, of several values, `name='value'`."""
        found = set()
        for field in fields(self):
            value = getattr(self, field.name)
            is_plain = (
                field.default is MISSING or value == field.default or (field.name == "windows" and not any(value))
            )
            if not is_plain and field.name not in NO_SWITCHES:
                found.add(f"{field.name}={value!r}" if isinstance(value, str) else field.name)
        return frozenset(found)

    @classmethod
    def from_hugging_face(cls, hf: Mapping[str, Any], **differences: Any) -> DecoderConfig:
        """The fields that all families name alike. Raises CorruptModelError or UnsupportedModelError."""
        hidden_size, num_heads = positive(hf, "hidden_size"), positive(hf, "num_attention_heads")
        num_kv_heads = positive(hf, "num_key_value_heads", num_heads)
        num_layers = positive(hf, "num_hidden_layers")
        if num_heads % num_kv_heads:
            raise CorruptModelError(
                f"config.json: num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}"
            )
        if hf.get("head_dim") is None and hidden_size % num_heads:
            raise CorruptModelError(
                f"config.json: hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}"
            )
        activation = hf.get("hidden_act", "silu")
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            known = " and ".join(repr(name) for name in ACTIVATIONS if name != "swish")
            raise UnsupportedModelError(f"hidden_act {activation!r:.80} is not supported; only {known} are")
        read_checkpoint(hf)  # raises what is not read of quantized weights
        head_dim = positive(hf, "head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise UnsupportedModelError(f"head_dim={head_dim} is odd; rotary embeddings need pairs")
        rotated = int(head_dim * differences.get("rotary_share", 1.0))
        if rotated % 2 or not 0 < rotated <= head_dim:
            raise UnsupportedModelError(
                f"partial_rotary_factor={differences['rotary_share']}: {rotated} of the {head_dim} dimensions of a head would be "
                f"rotated; rotary embeddings need pairs of them"
            )
        common: dict[str, Any] = {
            "vocab_size": positive(hf, "vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": positive(hf, "intermediate_size"),
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": number(hf, "rms_norm_eps", 1e-6, least=0),
            "max_position_embeddings": positive(hf, "max_position_embeddings", 2048),
            "ties_embeddings": bool(hf.get("tie_word_embeddings", False)),
            "activation": ACTIVATIONS[activation],
            "windows": (None,) * num_layers,
        }
        if "rope" not in differences:
            common["rope"] = rope_parameters(hf)
        return cls(**(common | differences))


NO_SWITCHES = {"names", "has_head", "num_draft_layers", "mixers"}
"""Fields with defaults that are the same to every backend."""


def positive(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer of config.json; CorruptModelError when it is something else."""
    value = hf.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CorruptModelError(f"config.json: {key} is {value!r}, a positive integer is needed")
    return value


def number(hf: Mapping[str, Any], key: str, default: float | None = None, least: float = -math.inf) -> float:
    """A finite number of config.json, no smaller than `least`; CorruptModelError when it is something else."""
    value = hf.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < least:
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise CorruptModelError(f"config.json: {key} is {value!r:.80}, a number{bound} is needed")
    return float(value)


def layer_types(types: Any, num_layers: int) -> list[str]:
    """What config.json says of each layer. Raises CorruptModelError."""
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise CorruptModelError(f"config.json: layer_types is {types!r:.80}, a list of names is needed")
    if len(types) != num_layers:
        raise CorruptModelError(f"config.json: layer_types has {len(types)} entries for {num_layers} layers")
    return types


def rope_tree(hf: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of rotations, by either name. Raises CorruptModelError."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CorruptModelError(f"config.json: rope_parameters is {rope!r:.80}, an object is needed")
    return dict(rope)


def rope_parameters(hf: Mapping[str, Any], types: Sequence[str] = ROPE_TYPES) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 writes it, or the older `rope_theta` and `rope_scaling`. types: those known."""
    rope = rope_tree(hf)
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedModelError("rope parameters that differ between layers are not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in types:
        raise UnsupportedModelError(f"rope type {kind!r} is not supported; supported are {', '.join(types)}")
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = hf.get("rope_theta") or 10_000.0
    rotated = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if rotated not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor={rotated} is not supported; only 1 is")
    return rope


def partial_rope(hf: Mapping[str, Any], share: float) -> tuple[dict[str, Any], float]:
    """`rope_parameters` and the share of a head that is rotated, where that need not be all. share: unless config.json says one."""
    rope = rope_tree(hf)
    own = rope.pop("partial_rotary_factor", None)
    given = hf.get("partial_rotary_factor") if own is None else own
    share = number({"partial_rotary_factor": share if given is None else given}, "partial_rotary_factor", least=0)
    rope = {"rope_theta": hf.get("rope_theta") or 10_000.0} | rope
    return rope_parameters({"rope_parameters": rope}), share


def windows_by_layer_type(num_layers: int, window: int | None, types: Any) -> tuple[int | None, ...]:
    """The window of the layers of type sliding_attention. types: of every layer, as config.json has them."""
    unknown = set(layer_types(types, num_layers)) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(f"attention of type {sorted(unknown)[0]!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def qwen_window(hf: Mapping[str, Any]) -> int | None:
    """Of the layers of Qwen2 and Qwen3 that have one; a size of null is none, although the default is 4096."""
    if not hf.get("use_sliding_window") or hf.get("sliding_window", 4096) is None:
        return None
    return positive(hf, "sliding_window", 4096)


def qwen_windows(hf: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Sliding windows of Qwen2 and Qwen3: off unless use_sliding_window, and then from layer max_window_layers on."""
    window = qwen_window(hf)
    types = hf.get("layer_types")
    if types is None:
        first = hf.get("max_window_layers", 28)
        return tuple(window if i >= first else None for i in range(num_layers))
    return windows_by_layer_type(num_layers, window, types)
