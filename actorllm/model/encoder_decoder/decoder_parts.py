"""The parts of a decoder of transformers, by what they are for: BART and its like (mBART, Marian, M2M100, Pegasus, Blenderbot,
Whisper), and T5.

`DecoderParts.of` finds them in the loaded modules. What it takes for granted of a module is checked when the model is loaded, by
its logits (`cross_loading`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from actorllm.model.cpu.layers import RMSNorm
from actorllm.model.linear import Form, LinearWeight
from actorllm.model.linear.dense import Dense


class LayerNorm:
    """Of rows, with mean and variance (Ba et al., arXiv:1607.06450)."""

    __slots__ = ("_bias", "_eps", "_shape", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self._weight, self._bias, self._eps, self._shape = weight, bias, eps, tuple(weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_layer_norm(x, self._shape, self._weight, self._bias, self._eps)[0]


Norm = LayerNorm | RMSNorm


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer; norms are those of self attention, cross attention and MLP."""

    qkv: LinearWeight
    output: LinearWeight
    cross_query: LinearWeight
    cross_key_value: LinearWeight
    """Of the encoder's rows."""
    cross_output: LinearWeight
    up: LinearWeight
    """With the gate before it, where the MLP has one."""
    down: LinearWeight
    norms: tuple[Norm, Norm, Norm]


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """What is around the layers, and how they are computed."""

    layers: list[LayerParts]
    embedding: torch.Tensor
    embedding_scale: float
    positions: torch.Tensor | None
    """[max_target, hidden_size], of the first position on; None: attention knows distances."""
    embedding_norm: Norm | None
    norm: Norm | None
    norms_inputs: bool
    """Norms are before attention and MLP; else behind what is added."""
    scale: float
    """Of scores."""
    distances: torch.Tensor | None
    """[num_buckets, num_heads]: what is added to scores, by bucket of the distance (`distance_table`); None: nothing."""
    activation: Any
    is_gated: bool
    head: LinearWeight
    head_scale: float

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype) -> DecoderParts:
        """model: with its head, of transformers."""
        decoder = model.get_decoder()
        return (_of_t5 if hasattr(decoder, "block") else _of_bart)(model, decoder, dtype)

    def rounded(self, form: Form) -> DecoderParts:
        """The same with the weights of all products in this form."""
        layers = []
        for layer in self.layers:
            products = ((field.name, getattr(layer, field.name)) for field in fields(layer))
            changes: dict[str, Any] = {
                name: form.of(one.weight, one.bias) for name, one in products if isinstance(one, Dense)
            }
            layers.append(replace(layer, **changes))
        assert isinstance(self.head, Dense)
        return replace(self, layers=layers, head=form.head_of(self.head.weight, self.head.bias))


def _dense(dtype: torch.dtype, *linears: Any, bias: torch.Tensor | None = None) -> Dense:
    """Linear modules as one, side by side; those without a bias have one of zeros where another has one."""
    weight = torch.cat([one.weight for one in linears]).to(dtype)
    if bias is None and any(one.bias is not None for one in linears):
        parts = [one.weight.new_zeros(len(one.weight)) if one.bias is None else one.bias for one in linears]
        bias = torch.cat(parts)
    return Dense(weight, None if bias is None else bias.to(dtype))


def _norm(module: Any, dtype: torch.dtype) -> Norm:
    weight = module.weight.to(dtype)
    if isinstance(module, torch.nn.LayerNorm):
        return LayerNorm(weight, None if module.bias is None else module.bias.to(dtype), module.eps)
    return RMSNorm(weight, module.variance_epsilon)


def _of_bart(model: Any, decoder: Any, dtype: torch.dtype) -> DecoderParts:
    layers = []
    for layer in decoder.layers:
        own, cross = layer.self_attn, layer.encoder_attn
        norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
        first, second, third = (_norm(one, dtype) for one in norms)
        layers.append(
            LayerParts(
                qkv=_dense(dtype, own.q_proj, own.k_proj, own.v_proj),
                output=_dense(dtype, own.out_proj),
                cross_query=_dense(dtype, cross.q_proj),
                cross_key_value=_dense(dtype, cross.k_proj, cross.v_proj),
                cross_output=_dense(dtype, cross.out_proj),
                up=_dense(dtype, layer.fc1),
                down=_dense(dtype, layer.fc2),
                norms=(first, second, third),
            )
        )
    embedding, places = decoder.embed_tokens, decoder.embed_positions
    scale = getattr(embedding, "embed_scale", None) or getattr(decoder, "embed_scale", None) or 1.0
    head, bias = model.get_output_embeddings(), getattr(model, "final_logits_bias", None)
    final, inner = getattr(decoder, "layer_norm", None), getattr(decoder, "layernorm_embedding", None)
    return DecoderParts(
        layers=layers,
        embedding=embedding.weight.to(dtype),
        embedding_scale=float(scale),
        positions=_positions(places).to(dtype),
        embedding_norm=None if inner is None else _norm(inner, dtype),
        norm=None if final is None else _norm(final, dtype),
        norms_inputs=final is not None,
        scale=float(decoder.layers[0].self_attn.head_dim) ** -0.5,
        distances=None,
        activation=ACT2FN[model.config.activation_function],
        is_gated=False,
        head=_dense(dtype, head, bias=None if bias is None else bias.reshape(-1)),
        head_scale=1.0,
    )


def _positions(places: Any) -> torch.Tensor:
    """Of every position, [num_positions, hidden_size]."""
    if not hasattr(places, "weights"):
        return places.weight[int(getattr(places, "offset", 0)) :]  # type: ignore[no-any-return]
    # Of M2M100, which computes them; the first one is that behind the padding token.
    first = int(places.padding_idx) + 1
    count = len(places.weights) - int(places.offset)
    table: torch.Tensor = places.get_embedding(first + count, places.embedding_dim, places.padding_idx)
    return table[first:]


def _of_t5(model: Any, decoder: Any, dtype: torch.dtype) -> DecoderParts:
    layers = []
    for block in decoder.block:
        own, cross, mlp = block.layer[0].SelfAttention, block.layer[1].EncDecAttention, block.layer[2].DenseReluDense
        up = (mlp.wi_0, mlp.wi_1) if hasattr(mlp, "wi_0") else (mlp.wi,)
        first, second, third = (_norm(one.layer_norm, dtype) for one in block.layer)
        layers.append(
            LayerParts(
                qkv=_dense(dtype, own.q, own.k, own.v),
                output=_dense(dtype, own.o),
                cross_query=_dense(dtype, cross.q),
                cross_key_value=_dense(dtype, cross.k, cross.v),
                cross_output=_dense(dtype, cross.o),
                up=_dense(dtype, *up),
                down=_dense(dtype, mlp.wo),
                norms=(first, second, third),
            )
        )
    config = model.config
    # Of the first T5 alone; later releases of transformers say so, earlier ones go by its tied embeddings.
    scales_output = getattr(config, "scale_decoder_outputs", config.model_type == "t5" and config.tie_word_embeddings)
    return DecoderParts(
        layers=layers,
        embedding=decoder.embed_tokens.weight.to(dtype),
        embedding_scale=1.0,
        positions=None,
        embedding_norm=None,
        norm=_norm(decoder.final_layer_norm, dtype),
        norms_inputs=True,
        scale=1.0,
        distances=decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.to(dtype),
        activation=ACT2FN[config.dense_act_fn],
        is_gated=bool(config.is_gated_act),
        head=_dense(dtype, model.get_output_embeddings()),
        head_scale=float(config.d_model) ** -0.5 if scales_output else 1.0,
    )


def distance_table(distances: torch.Tensor, max_distance: int, most: int) -> torch.Tensor:
    """What is added to the scores of each distance to a token before, [most + 1, num_heads]; the last row hides a token.

    Half of the buckets are of one distance each. The others grow with the logarithm up to `max_distance`, and the last one has all
    that are farther (Raffel et al., arXiv:1910.10683).
    """
    num_buckets = len(distances)
    exact = num_buckets // 2
    where = torch.arange(most)
    far = (
        exact
        + (
            torch.log(where.clamp_min(1).float() / exact)
            / torch.log(torch.tensor(max_distance / exact))
            * (num_buckets - exact)
        ).long()
    )
    buckets = torch.where(where < exact, where, far.clamp_max(num_buckets - 1))
    return functional.pad(distances.index_select(0, buckets), (0, 0, 0, 1), value=-torch.inf)
