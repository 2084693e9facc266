"""BLOOM (arXiv:2211.05100): ALiBi, and a residual that its attention adds."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.bloom import modeling_bloom

from actorllm.model.hf.own_attention.exchanged import ExchangedAttention

modeling: Any = modeling_bloom  # it is typed in some releases only


class ExchangedBloomAttention(ExchangedAttention, modeling.BloomAttention):  # type: ignore[misc]
    exchanges = modeling.BloomAttention

    @classmethod
    def scores_by_position(cls, config: Any, max_positions: int) -> torch.Tensor:
        every = torch.ones(1, max_positions, dtype=torch.long, device="cpu")
        scores: torch.Tensor = modeling.build_alibi_tensor(every, config.n_head, torch.float32)
        return scores.squeeze(1)

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if self.attention is None:
            return super().forward(hidden_states, residual, *arguments, **named)
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        return residual + self.dense(self.attend(query, key, value, self.inv_norm_factor)), None


ATTENTION = ExchangedBloomAttention
