"""The tensors of a head that drafts, by the names of its kind: what its layers are, and what stands around them.

All of it is read at once, whole: a head has one rank. Called by the heads of all backends.
"""

from __future__ import annotations

import torch

from actorllm.errors import CorruptModelError
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.families.tensors import DecoderTensors, LayerTensors
from actorllm.model.linear import Form, LinearPart, LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.parallel import Ranks
from actorllm.model.pipeline.part import LayerPart
from actorllm.model.speculation.head_shape import HeadShape, MtpLayout
from actorllm.model.weights import Weights
from actorllm.types.quantization import KV_SCALES
from actorllm.types.speculation import EAGLE, EAGLE3

IGNORABLE = ("t2d", "mask_hidden")
"""Tensors of published heads that nothing here needs."""


class HeadTensors:
    """See the module docstring.

    Arguments:
        shape: of the head.
        weights: with its tensors, all of which are taken.
        target: shape of the target.
        embedding: of the target, which the head shares where it has none of its own.
        form: of the linear layers.

    Raises CorruptModelError.
    """

    def __init__(
        self,
        shape: HeadShape,
        weights: Weights,
        target: DecoderConfig,
        embedding: torch.Tensor,
        form: Form = Dense,
    ) -> None:
        self._shape, self._weights, self._target, self._form = shape, weights, target, form
        c, method, mtp = shape.layers, shape.method, shape.mtp
        base = "model." if mtp is None else mtp.prefix
        first = f"{base}layers.0." if mtp is None else base
        if method == EAGLE3 and weights.stored(f"{base}midlayer.hidden_norm.weight") is not None:
            first = f"{base}midlayer."
        self.layers: list[LayerTensors] = []
        for index in range(c.num_layers):
            is_first = index == 0
            if mtp is not None and mtp.layer is not None:
                part = LayerPart(first_layer=mtp.layer)
                self.layers.append(DecoderTensors(c, weights, Ranks(), form, part).layer(0))
                continue
            self.layers.append(
                self._layer(
                    first if is_first else f"{base}layers.{index}.",
                    num_inputs=2 * c.hidden_size if is_first and method == EAGLE3 else c.hidden_size,
                    has_input_norm=not (is_first and method == EAGLE),
                )
            )
        self.hidden_norm: torch.Tensor | None = None
        self.token_norm: torch.Tensor | None = None
        self.norm: torch.Tensor | None = None
        """Behind the layers."""
        self.input_norm: torch.Tensor | None = None
        """Of all states that are joined."""
        self.fc_norms: list[torch.Tensor] = []
        """Of the states of each layer of the target."""
        self.fc = self._read_inputs(base, first)
        """What joins a token and a state, or states of several layers."""
        self.embedding: torch.Tensor | None = None
        """None: the target's."""
        self.lm_head: LinearWeight | None = None
        """None: the target's."""
        self.ids: torch.Tensor | None = None
        """int64, on the CPU: of the target, for each of the head's; None: the same ones."""
        if mtp is not None:
            self._read_copies(mtp, embedding)
        else:
            self._read_vocabulary(embedding)
            weights.close(lambda name: name.endswith(("rotary_emb.inv_freq", *KV_SCALES)) or name in IGNORABLE)

    def _has(self, name: str) -> bool:
        return self._weights.stored(name) is not None

    def _layer(self, prefix: str, *, num_inputs: int, has_input_norm: bool) -> LayerTensors:
        """num_inputs: of query, key and value."""
        c, names, size = self._shape.layers, self._shape.layers.names, self._shape.layers.hidden_size

        def read(name: str, outputs: int, inputs: int, has_bias: bool) -> LinearWeight:
            return self._form.sharded(self._weights, LinearPart(prefix + name, outputs, inputs, has_bias=has_bias))

        def norm(name: str, width: int = size) -> torch.Tensor:
            return self._weights.take(f"{prefix}{name}.weight", width)

        heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
        qkv = [
            read(name, number * c.head_dim, num_inputs, c.has_qkv_bias)
            for name, number in zip(names.qkv, heads, strict=True)
        ]
        inner = c.intermediate_size
        return LayerTensors(
            qkv=self._form.fused(qkv),
            output=read(names.output, size, c.num_heads * c.head_dim, c.has_output_bias),
            gate_up=self._form.fused([read(name, inner, size, c.has_mlp_bias) for name in names.gate_up]),
            down=read(names.down, size, inner, c.has_mlp_bias),
            experts=None,
            input_norm=norm(names.input_norm) if has_input_norm else None,
            output_norm=None,
            mlp_norm=norm(names.mlp_norm),
            mlp_output_norm=None,
            qk_norms=(norm(names.qk_norms[0], c.head_dim), norm(names.qk_norms[1], c.head_dim))
            if c.qk_norm == "head"
            else None,
            sinks=None,
        )

    def _read_inputs(self, base: str, first: str) -> LinearWeight:
        """The norms around the layers, and what joins a token and a state. first: what names of the first layer begin with."""
        shape, size = self._shape, self._shape.layers.hidden_size

        def norm(name: str, width: int = size) -> torch.Tensor:
            return self._weights.take(f"{name}.weight", width)

        if (mtp := shape.mtp) is not None:
            self.hidden_norm, self.token_norm = norm(base + mtp.hidden_norm), norm(base + mtp.token_norm)
            self.norm = norm(base + mtp.norm)
            return self._form.sharded(self._weights, LinearPart(base + mtp.joins, size, 2 * size))
        width = 2 * size
        if shape.method == EAGLE3:
            width = shape.state_size
            self.hidden_norm, self.norm = norm(f"{first}hidden_norm"), norm(f"{base}norm")
            if shape.norm_before_fc:
                self.input_norm = norm(f"{base}input_norm", width)
            if shape.has_fc_norms:
                each = width // len(shape.taps)
                self.fc_norms = [norm(f"{base}fc_norm.{i}", each) for i in range(len(shape.taps))]
        has_bias = self._has(f"{base}fc.bias")
        return self._form.sharded(self._weights, LinearPart(f"{base}fc", size, width, has_bias=has_bias))

    def _read_copies(self, mtp: MtpLayout, embedding: torch.Tensor) -> None:
        """The embedding and the head of a layer for further tokens, unless they are the target's."""
        weights, size, vocab_size = self._weights, self._shape.layers.hidden_size, self._target.vocab_size
        if mtp.embedding is not None and self._has(mtp.embedding):
            own = weights.take(mtp.embedding, vocab_size, size)
            self.embedding = None if torch.equal(own, embedding) else weights.own(own)
        if mtp.head is None or not self._has(f"{mtp.head}.weight"):
            return
        of_target = "model.embed_tokens" if self._target.ties_embeddings else "lm_head"
        head = weights.take(f"{mtp.head}.weight", vocab_size, size)
        if not torch.equal(head, weights.take(f"{of_target}.weight", vocab_size, size)):
            self.lm_head = self._form.head_of(head.contiguous())

    def _read_vocabulary(self, embedding: torch.Tensor) -> None:
        shape, weights, size = self._shape, self._weights, self._shape.layers.hidden_size
        vocab_size = self._target.vocab_size
        if self._has("model.embed_tokens.weight"):
            own = weights.take("model.embed_tokens.weight", vocab_size, size)
            is_same = own.shape == embedding.shape and torch.equal(own, embedding)
            self.embedding = None if is_same else own
        is_narrow = shape.draft_vocab_size != vocab_size
        if is_narrow or self._has("lm_head.weight"):
            self.lm_head = self._form.sharded(weights, LinearPart("lm_head", shape.draft_vocab_size, size))
        if is_narrow:
            offsets = torch.zeros(shape.draft_vocab_size, dtype=torch.int64)
            if self._has("d2t"):
                offsets = weights.take("d2t", shape.draft_vocab_size, dtype=torch.int64).cpu()
            ids = offsets + torch.arange(shape.draft_vocab_size)
            if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
                raise CorruptModelError(f"d2t leads to ids beyond the target's vocabulary of {vocab_size}")
            self.ids = ids
