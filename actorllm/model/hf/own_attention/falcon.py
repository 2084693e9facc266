"""Falcon (arXiv:2311.16867): all its versions, with rotation or ALiBi, and keys of one head, of some, or of all."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.models.falcon import modeling_falcon

from actorllm.model.hf.own_attention.exchanged import ExchangedAttention

modeling: Any = modeling_falcon  # it is typed in some releases only


class ExchangedFalconAttention(ExchangedAttention, modeling.FalconAttention):  # type: ignore[misc]
    exchanges = modeling.FalconAttention

    @classmethod
    def scores_by_position(cls, config: Any, max_positions: int) -> torch.Tensor | None:
        """As the model has them: slopes and scores are rounded to bfloat16, and scaled as products are."""
        if not config.alibi:
            return None
        every = torch.ones(1, max_positions, dtype=torch.long, device="cpu")
        scores: torch.Tensor = modeling.build_alibi_tensor(every, config.num_attention_heads, torch.float32)
        head_dim: int = config.hidden_size // config.num_attention_heads
        return scores.squeeze(1) * math.sqrt(1 / head_dim)

    @staticmethod
    def own_name(config: Any) -> str:
        """Where transformers attends step by step, some releases add ALiBi twice."""
        return "sdpa" if config.alibi else "eager"

    @staticmethod
    def prepare(part: torch.nn.Module) -> None:
        """A product without bias is that of any linear layer, which is packed (`packing`)."""
        if type(part) is modeling.FalconLinear and part.bias is None:
            part.__class__ = torch.nn.Linear

    def forward(
        self,
        hidden_states: torch.Tensor,
        alibi: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        *arguments: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **named: Any,
    ) -> Any:
        if self.attention is None:
            return super().forward(
                hidden_states, alibi, attention_mask, *arguments, position_embeddings=position_embeddings, **named
            )
        query, key, value = (heads.transpose(1, 2) for heads in self._heads(self.query_key_value(hidden_states)))
        if position_embeddings is not None and alibi is None:
            query, key = modeling.apply_rotary_pos_emb(query, key, *position_embeddings)
        return self.dense(self.attend(query, key, value, self.inv_norm_factor)), None

    def _heads(self, made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, [1, num_tokens, heads of each, head_dim]."""
        if not self.new_decoder_architecture:
            split: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self._split_heads(made)
            return split
        # The queries of a key head, then its key and its value. transformers would repeat keys and values for each query.
        groups = made.view(*made.shape[:2], self.num_kv_heads, -1, self.head_dim)
        return groups[:, :, :, :-2].flatten(2, 3), groups[:, :, :, -2], groups[:, :, :, -1]


ATTENTION = ExchangedFalconAttention
