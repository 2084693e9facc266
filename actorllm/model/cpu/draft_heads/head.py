"""`DraftHead`: the layers of a head that drafts, and its forward: from tokens and states of the target to logits.

A token is computed with the state of the token before it. The head knows no state before the first token, so that its cache
begins with the second one. That stands at position 0 of the head's rotation, as in training. Plain weights, read under inference
mode by the drafter that owns the head.
"""

from __future__ import annotations

import numpy as np
import torch

from actorllm.errors import CorruptModelError
from actorllm.model.cpu.attention import AttentionBatch, PagedCache
from actorllm.model.cpu.decoder import Decoder, DecoderLayer
from actorllm.model.cpu.draft_heads.head_shape import HeadShape, MtpLayout
from actorllm.model.cpu.layers import RMSNorm, RotaryEmbedding, linear
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.families.tensors import DecoderTensors, LayerTensors
from actorllm.model.inputs import StepInputs
from actorllm.model.linear import Linear
from actorllm.model.linear.dense import Dense
from actorllm.model.parallel import HeadShare, Ranks
from actorllm.model.pipeline.part import LayerPart
from actorllm.model.rope import rotation_angles, rotation_length
from actorllm.model.weights import Weights
from actorllm.types.speculation import EAGLE, EAGLE3

IGNORABLE = ("t2d", "mask_hidden")
"""Tensors of published heads that nothing here needs."""


class DraftHead:
    """See the module docstring.

    Arguments:
        shape: of the head.
        weights: with its tensors, all of which are taken.
        target: whose embedding and head it shares where it has none of its own.
        max_positions: how long a sequence may get.

    Raises CorruptModelError.
    """

    def __init__(self, shape: HeadShape, weights: Weights, target: Decoder, max_positions: int) -> None:
        self.shape, self.target = shape, target
        c, method, mtp = shape.layers, shape.method, shape.mtp
        base = "model." if mtp is None else mtp.prefix
        first = f"{base}layers.0." if mtp is None else base
        if method == EAGLE3 and _has(weights, f"{base}midlayer.self_attn.q_proj.weight"):
            first = f"{base}midlayer."
        share = HeadShare(c.num_heads, c.num_kv_heads, c.head_dim, Ranks())
        self.layers: list[DecoderLayer] = []
        for index in range(c.num_layers):
            is_first = index == 0
            if mtp is not None and mtp.layer is not None:
                like_target = DecoderTensors(c, weights, Ranks(), part=LayerPart(first_layer=mtp.layer)).layer(0)
                self.layers.append(DecoderLayer(c, like_target, index, Ranks(), share))
                continue
            tensors = layer_tensors(
                c,
                weights,
                first if is_first else f"{base}layers.{index}.",
                num_inputs=2 * c.hidden_size if is_first and method == EAGLE3 else c.hidden_size,
                has_input_norm=not (is_first and method == EAGLE),
            )
            self.layers.append(DecoderLayer(c, tensors, index, Ranks(), share))
        self.hidden_norm: RMSNorm | None = None
        self.token_norm: RMSNorm | None = None
        self.norm: RMSNorm | None = None
        self.input_norm: RMSNorm | None = None
        self.fc_norms: list[RMSNorm] = []
        self.fc = self._read_inputs(weights, base, first)
        self._rotary = RotaryEmbedding(
            rotation_angles(c.rotary_dim, c.rope, c.max_position_embeddings, max_positions), rotation_length(c.rope)
        )
        self._fold = share.num_heads // (share.num_kv_heads if c.latent is None else 1)
        self._embedding: torch.Tensor | None = None
        self._lm_head: Linear | None = None
        self._ids: torch.Tensor | None = None
        """Of the target, for each of the head's; None: the same ones."""
        if mtp is not None:
            self._read_copies(weights, mtp)
        else:
            self._read_vocabulary(weights)
            weights.close(lambda name: name.endswith("rotary_emb.inv_freq") or name in IGNORABLE)

    def _read_inputs(self, weights: Weights, base: str, first: str) -> Linear:
        """The norms around the layers, and what joins a token and a state. first: what names of the first layer begin with."""
        shape, size = self.shape, self.shape.layers.hidden_size

        def norm(name: str, width: int = size) -> RMSNorm:
            return RMSNorm(weights.take(f"{name}.weight", width), shape.layers.rms_norm_eps)

        if (mtp := shape.mtp) is not None:
            self.hidden_norm, self.token_norm = norm(base + mtp.hidden_norm), norm(base + mtp.token_norm)
            self.norm = norm(base + mtp.norm)
            return linear(Dense.sharded(weights, base + mtp.joins, size, 2 * size))
        width = 2 * size
        if shape.method == EAGLE3:
            width = shape.state_size
            self.hidden_norm, self.norm = norm(f"{first}hidden_norm"), norm(f"{base}norm")
            if shape.norm_before_fc:
                self.input_norm = norm(f"{base}input_norm", width)
            if shape.has_fc_norms:
                each = width // len(shape.taps)
                self.fc_norms = [norm(f"{base}fc_norm.{i}", each) for i in range(len(shape.taps))]
        return linear(Dense.sharded(weights, f"{base}fc", size, width, has_bias=_has(weights, f"{base}fc.bias")))

    def _read_copies(self, weights: Weights, mtp: MtpLayout) -> None:
        """The embedding and the head of a layer for further tokens, unless they are the target's."""
        size, vocab_size = self.shape.layers.hidden_size, self.target.config.vocab_size
        if mtp.embedding is not None and weights.stored(mtp.embedding) is not None:
            own = weights.take(mtp.embedding, vocab_size, size)
            self._embedding = None if torch.equal(own, self.target.embedding) else own
        if mtp.head is None or not _has(weights, f"{mtp.head}.weight"):
            return
        head = Dense.sharded(weights, mtp.head, vocab_size, size)
        of_target = "model.embed_tokens" if self.target.config.ties_embeddings else "lm_head"
        if not torch.equal(head.weight, weights.take(f"{of_target}.weight", vocab_size, size)):
            self._lm_head = linear(head)

    def _read_vocabulary(self, weights: Weights) -> None:
        shape, size = self.shape, self.shape.layers.hidden_size
        vocab_size = self.target.config.vocab_size
        if _has(weights, "model.embed_tokens.weight"):
            own = weights.take("model.embed_tokens.weight", vocab_size, size)
            is_same = own.shape == self.target.embedding.shape and torch.equal(own, self.target.embedding)
            self._embedding = None if is_same else own
        is_narrow = shape.draft_vocab_size != vocab_size
        if is_narrow or _has(weights, "lm_head.weight"):
            self._lm_head = linear(Dense.sharded(weights, "lm_head", shape.draft_vocab_size, size))
        if is_narrow:
            offsets = torch.zeros(shape.draft_vocab_size, dtype=torch.int64)
            if _has(weights, "d2t"):
                offsets = weights.take("d2t", shape.draft_vocab_size, dtype=torch.int64)
            ids = offsets + torch.arange(shape.draft_vocab_size)
            if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
                raise CorruptModelError(f"d2t leads to ids beyond the target's vocabulary of {vocab_size}")
            self._ids = ids

    # The target -------------------------------------------------------------------------------------------------------

    def states_of_target(self, states: torch.Tensor) -> torch.Tensor:
        """What the head reads of a step of the target, [num_tokens, state_size]. states: behind its last layer."""
        mtp = self.shape.mtp
        if self.shape.method == EAGLE or (mtp is not None and mtp.reads_normed):
            assert self.target.norm is not None
            return self.target.norm(states)
        if mtp is not None:
            return states
        tapped = self.target.tapped
        chosen = torch.cat([tapped.get(tap, states) for tap in self.shape.taps], 1)
        tapped.clear()
        return chosen

    def combined(self, states: torch.Tensor) -> torch.Tensor:
        """What a pass is given of these states of the target, [num_tokens, hidden_size]."""
        if self.shape.method != EAGLE3:
            return states
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norms:
            parts = states.chunk(len(self.fc_norms), 1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)], 1)
        return self.fc(states)

    # Passes -----------------------------------------------------------------------------------------------------------

    def forward(self, inputs: StepInputs, cache: PagedCache, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of tokens with the states before them, [num_tokens, ...]: the states for logits, and those for the next pass.

        given: [num_tokens, hidden_size], `combined` states of the target, or what the pass before returned second. Both
        results are [num_tokens, hidden_size].
        """
        shape = self.shape
        ids = torch.from_numpy(inputs.token_ids)
        positions = torch.from_numpy(np.maximum(inputs.positions - 1, 0))
        embedded = self.target.embed(ids) if self._embedding is None else torch.embedding(self._embedding, ids)
        attention = cache.attention(inputs, self._fold, (None,))[None]
        rotations = self._rotary.rotations(positions)
        if shape.method == EAGLE3:
            x = self._eagle3(embedded, given, rotations, attention)
        else:
            both = [embedded, given]
            if shape.mtp is not None:
                assert self.hidden_norm is not None
                assert self.token_norm is not None
                both = [
                    self.token_norm(embedded.masked_fill((positions == 0).unsqueeze(1), 0)),
                    self.hidden_norm(given),
                ]
                if shape.mtp.has_state_first:
                    both.reverse()
            x = self.layers[0](self.fc(torch.cat(both, 1)), rotations, attention)
        for layer in self.layers[1:]:
            x = layer(x, rotations, attention)
        normed = x if self.norm is None else self.norm(x)
        return normed, normed if shape.chains_normed else x

    def _eagle3(
        self, embedded: torch.Tensor, given: torch.Tensor, rotations: torch.Tensor, attention: AttentionBatch
    ) -> torch.Tensor:
        """Behind the first layer, whose attention reads token and state side by side."""
        first = self.layers[0]
        assert self.hidden_norm is not None
        assert first.input_norm is not None
        seen = self.hidden_norm(given)
        residual = seen if self.shape.norm_before_residual else given
        return first(residual, rotations, attention, torch.cat((first.input_norm(embedded), seen), 1))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, vocab_size] of the target's ids; -inf for those that the head does not have."""
        if self._lm_head is None:
            return self.target.logits(states)
        narrow = self._lm_head(states).float()
        if self._ids is None:
            return narrow
        wide = narrow.new_full((len(narrow), self.target.config.vocab_size), -torch.inf)
        wide[:, self._ids] = narrow
        return wide


def _has(weights: Weights, name: str) -> bool:
    return weights.stored(name) is not None


def layer_tensors(
    config: DecoderConfig, weights: Weights, prefix: str, *, num_inputs: int, has_input_norm: bool
) -> LayerTensors:
    """Of one layer of a head, as a whole. num_inputs: of query, key and value."""
    c, names, size = config, config.names, config.hidden_size

    def read(name: str, outputs: int, inputs: int, has_bias: bool) -> Dense:
        return Dense.sharded(weights, prefix + name, outputs, inputs, has_bias=has_bias)

    def norm(name: str, width: int = size) -> torch.Tensor:
        return weights.take(f"{prefix}{name}.weight", width)

    heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
    qkv = [
        read(name, number * c.head_dim, num_inputs, c.has_qkv_bias)
        for name, number in zip(names.qkv, heads, strict=True)
    ]
    inner = c.intermediate_size
    return LayerTensors(
        qkv=Dense.fused(qkv),
        output=read(names.output, size, c.num_heads * c.head_dim, c.has_output_bias),
        gate_up=Dense.fused([read(name, inner, size, c.has_mlp_bias) for name in names.gate_up]),
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
