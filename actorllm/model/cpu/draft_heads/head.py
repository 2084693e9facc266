"""`DraftHead`: the layers of a head that drafts, and its forward: from tokens and states of the target to logits.

A token is computed with the state of the token before it. The head knows no state before the first token, so that its cache
begins with the second one. That stands at position 0 of the head's rotation, as in training. Plain weights, read under inference
mode by the drafter that owns the head.
"""

from __future__ import annotations

import numpy as np
import torch

from actorllm.model.cpu.attention import AttentionBatch, PagedCache
from actorllm.model.cpu.decoder import DecoderLayer
from actorllm.model.cpu.draft_heads.ends import Ends
from actorllm.model.cpu.layers import RMSNorm, RotaryEmbedding, linear
from actorllm.model.families.head_tensors import HeadTensors
from actorllm.model.inputs import StepInputs
from actorllm.model.parallel import HeadShare, Ranks
from actorllm.model.quantization import form_of
from actorllm.model.rope import rotation_angles, rotation_length
from actorllm.model.speculation.head_shape import HeadShape
from actorllm.model.weights import Weights
from actorllm.types.speculation import EAGLE, EAGLE3


class DraftHead:
    """See the module docstring.

    Arguments:
        shape: of the head.
        weights: with its tensors, all of which are taken.
        target: whose embedding and head it shares where it has none of its own, and whose states it reads.
        max_positions: how long a sequence may get.

    Raises CorruptModelError.
    """

    def __init__(self, shape: HeadShape, weights: Weights, target: Ends, max_positions: int) -> None:
        self.shape, self.target = shape, target
        c = shape.layers
        tensors = HeadTensors(shape, weights, target.config, target.embedding, form_of(shape.model))
        share = HeadShare(c.num_heads, c.num_kv_heads, c.head_dim, Ranks())
        self.layers = [DecoderLayer(c, layer, index, Ranks(), share) for index, layer in enumerate(tensors.layers)]

        def norm(weight: torch.Tensor | None) -> RMSNorm | None:
            return None if weight is None else RMSNorm(weight, c.rms_norm_eps)

        self.hidden_norm, self.token_norm = norm(tensors.hidden_norm), norm(tensors.token_norm)
        self.norm, self.input_norm = norm(tensors.norm), norm(tensors.input_norm)
        self.fc_norms = [RMSNorm(weight, c.rms_norm_eps) for weight in tensors.fc_norms]
        self.fc = linear(tensors.fc)
        self._rotary = RotaryEmbedding(
            rotation_angles(c.rotary_dim, c.rope, c.max_position_embeddings, max_positions), rotation_length(c.rope)
        )
        self._fold = share.num_heads // (share.num_kv_heads if c.latent is None else 1)
        self._embedding = tensors.embedding
        self._lm_head = None if tensors.lm_head is None else linear(tensors.lm_head)
        self._ids = tensors.ids
        """Of the target, for each of the head's; None: the same ones."""

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
