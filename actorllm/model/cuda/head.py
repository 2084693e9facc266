"""`DeviceHead`: the layers of a head that drafts, on a device: from tokens and states of the target to logits.

A token is computed with the state of the token before it. The head knows no state before the first token. So no token attends to
that one (`AttentionShape.skipped`). The second one stands at position 0 of its rotation, as in training.

A decode step reads what it is given of each row from `kept`, by slot. It leaves there what the next step is to be given. So passes
of a draft are graphs, one behind the other, and the host has no part in them. Steps with several tokens of a row read `fed`, which
the caller fills before, token by token. What they leave is taken by `keep`. Owned by the runner of the head.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from actorllm.model.cuda import ops
from actorllm.model.cuda.cache import DeviceCache
from actorllm.model.cuda.collectives import Collectives
from actorllm.model.cuda.decoder import (
    Activations,
    DeviceDecoder,
    DeviceDecodeRows,
    HeadActivations,
    PagedAttention,
    StepTokens,
)
from actorllm.model.cuda.device import Device
from actorllm.model.cuda.linear import DeviceLinear
from actorllm.model.cuda.quantized import Workspaces, linear
from actorllm.model.cuda.sampling import LMHead
from actorllm.model.cuda.state import StateTable
from actorllm.model.families.head_tensors import HeadTensors
from actorllm.model.linear import Form, LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.speculation.head_shape import HeadShape
from actorllm.model.weights import Weights
from actorllm.types.speculation import EAGLE, EAGLE3

NOT_THERE = -1.0e30
"""Logit of an id that the head does not have: finite, as a row without finite logits is void."""


class DeviceHead(DeviceDecoder):
    """See the module docstring.

    Arguments:
        shape: of the head.
        weights: with its tensors, on the device.
        target: whose embedding and head it shares where it has none of its own.
        max_positions: how long a sequence may get.
        form: of the linear layers.
        device: of the target.

    Raises ModelError.
    """

    head: LMHead | None = None  # it takes a norm and every id
    kept: torch.Tensor
    """[1 + num_slots, hidden_size]: what the next pass is given of each slot; the first row is of no slot."""
    fed: torch.Tensor
    """[max_tokens, hidden_size]: the same of each token of a step with several tokens of a row."""

    def __init__(
        self,
        shape: HeadShape,
        weights: Weights,
        target: DeviceDecoder,
        max_positions: int,
        device: Device,
        form: Form = Dense,
    ) -> None:
        self.head_shape, self.target = shape, target
        self.collectives = Collectives()
        self._begin(shape.layers, weights.dtype, device)
        self.vocab_size = target.vocab_size
        self.shape = replace(self.shape, skipped=1)
        tensors = HeadTensors(shape, weights, target.config, target.embedding, form)
        workspaces, rope = (
            Workspaces(weights.dtype, device.torch_device),
            self._rope(shape.layers.rope, max_positions, 1),
        )

        def product(name: str, weight: LinearWeight) -> DeviceLinear:
            return linear(weight, workspaces)

        self.layers = [self._layer(layer, 0, rope, product, workspaces) for layer in tensors.layers]
        self.fc = linear(tensors.fc, workspaces)
        self.hidden_norm, self.token_norm, self.norm, self.input_norm = (
            None if norm is None else norm.float()
            for norm in (tensors.hidden_norm, tensors.token_norm, tensors.norm, tensors.input_norm)
        )
        self.fc_norms = [norm.float() for norm in tensors.fc_norms]
        self._own_embedding = tensors.embedding
        self.lm_head = None if tensors.lm_head is None else linear(tensors.lm_head, workspaces)
        self._ids = None if tensors.ids is None else tensors.ids.to(device.torch_device)
        self._narrow = torch.empty(0)
        of_head = [] if self.lm_head is None else [self.lm_head]
        products = [*of_head, self.fc, *(part for layer in self.layers for part in layer.linears)]
        self.num_bytes = sum(layer.num_bytes for layer in self.layers) + sum(p.num_bytes for p in (*of_head, self.fc))
        forms = {form for layer in self.layers for form in layer.forms}
        forms |= {f"{part.out_features} x {part.in_features}, {part.form}" for part in products}
        self.forms = (f"a head that drafts ({shape.method})", *sorted(forms))

    def make_room(self, num_slots: int, max_tokens: int) -> None:
        """For what passes are given: of slots, and of tokens of a step with several tokens of a row."""
        size, on = self.hidden_size, self.device.torch_device
        self.kept = torch.zeros(1 + num_slots, size, dtype=self.dtype, device=on)
        self.fed = torch.zeros(max_tokens, size, dtype=self.dtype, device=on)

    def allocate(self, num_rows: int, attention: PagedAttention) -> None:
        self._attention = attention
        self._activations = self._new_activations(num_rows)
        if self._ids is not None:
            self._narrow = torch.empty(num_rows, len(self._ids), device=self.device.torch_device)

    def _new_activations(self, num_tokens: int) -> Activations:
        made = super()._new_activations(num_tokens)
        made.joined = HeadActivations(num_tokens, self.hidden_size, self.dtype, self.device.torch_device)
        return made

    # What it is given -------------------------------------------------------------------------------------------------

    def combined(self, states: torch.Tensor) -> torch.Tensor:
        """What a pass is given of these states of the target: [num_tokens, state_size] to [num_tokens, hidden_size]."""
        if self.head_shape.method != EAGLE3:
            return states
        eps = self.config.rms_norm_eps
        if self.input_norm is not None:
            normed = torch.empty_like(states)
            ops.rmsnorm(states, self.input_norm, eps, normed)
            states = normed
        if self.fc_norms:
            normed = torch.empty_like(states)
            for norm, part, out in zip(
                self.fc_norms, states.chunk(len(self.fc_norms), 1), normed.chunk(len(self.fc_norms), 1), strict=True
            ):
                ops.rmsnorm(part, norm, eps, out)
            states = normed
        return self.fc(states)

    def keep(self, states: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Let the next pass of some slots be given what `forward` has left of some tokens.

        Arguments:
            states: what it returned.
            rows: int64, which tokens.
            slots: int64, 1 more than the slots.
        """
        chosen = self.select(states, rows) if self.head_shape.chains_normed else states.index_select(0, rows)
        ops.keep_rows(chosen, slots, self.kept)

    # Passes -----------------------------------------------------------------------------------------------------------

    def decode(
        self,
        rows: DeviceDecodeRows,
        cache: DeviceCache,
        state: StateTable,
        *,
        is_adapted: bool = False,
        pdl: bool = False,
    ) -> torch.Tensor:
        hidden = super().decode(rows, cache, state, is_adapted=is_adapted, pdl=pdl)
        a = self._activations.first(rows.num_rows)
        assert a.joined is not None
        given = hidden
        if self.head_shape.chains_normed:
            assert self.norm is not None
            given = a.x
            ops.rmsnorm(hidden, self.norm, self.config.rms_norm_eps, given)
        ops.keep_rows(given, a.joined.places, self.kept)
        return hidden

    def _enter(self, a: Activations, tokens: StepTokens, *, pdl: bool) -> torch.Tensor | None:
        shape, eps, size, joined = self.head_shape, self.config.rms_norm_eps, self.hidden_size, a.joined
        assert joined is not None
        if tokens.decodes is not None and tokens.prefills is None:
            ops.take_rows(self.kept, tokens.decodes.rows, joined.places, joined.given)
            given = joined.given
        else:
            given = self.fed[: a.num_tokens]
        if self._own_embedding is None:
            self.target.vocabulary.embed(tokens.ids, self.target.embedding, a.h, pdl=pdl)
        else:
            ops.embed(tokens.ids, self._own_embedding, a.h, pdl=pdl)
        first, second = joined.both[:, :size], joined.both[:, size:]
        if shape.method == EAGLE3:
            norm = self.layers[0].input_norm
            assert norm is not None
            assert self.hidden_norm is not None
            ops.rmsnorm(a.h, norm, eps, first)
            ops.rmsnorm(given, self.hidden_norm, eps, second)
            ops.copy(second if shape.norm_before_residual else given, a.h)
            return joined.both
        if shape.mtp is not None:
            assert self.hidden_norm is not None
            assert self.token_norm is not None
            if shape.mtp.has_state_first:
                first, second = second, first
            ops.blank_first(a.h, tokens.positions, 1, joined.is_first)  # of the second token, the first one of the head
            ops.rmsnorm(a.h, self.token_norm, eps, first)
            ops.rmsnorm(given, self.hidden_norm, eps, second)
        else:
            assert shape.method == EAGLE
            ops.copy(a.h, first)
            ops.copy(given, second)
        self.fc(joined.both, a.h)
        return None

    # Logits -----------------------------------------------------------------------------------------------------------

    def select(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return hidden.index_select(0, rows) if self.norm is None else super().select(hidden, rows)

    def logits(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        if self.norm is None:
            self.logits_of_final(hidden, logits)
        else:
            super().logits(hidden, logits)

    def logits_of_final(self, final: torch.Tensor, logits: torch.Tensor) -> None:
        if self.lm_head is None:
            assert self.target.lm_head is not None
            self.target.vocabulary.logits(final, self.target.lm_head, logits)
        elif self._ids is None:
            self.lm_head.wide(final, logits)
        else:
            narrow = self._narrow[: len(final)]
            self.lm_head.wide(final, narrow)
            ops.spread(narrow, self._ids, NOT_THERE, logits)
