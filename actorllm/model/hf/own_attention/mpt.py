"""MPT: ALiBi, and values of queries, keys and values that are clipped in some models."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.mpt import modeling_mpt

from actorllm.model.hf.own_attention.exchanged import ExchangedAttention

modeling: Any = modeling_mpt  # it is typed in some releases only


class ExchangedMptAttention(ExchangedAttention, modeling.MptAttention):  # type: ignore[misc]
    exchanges = modeling.MptAttention

    @classmethod
    def scores_by_position(cls, config: Any, max_positions: int) -> torch.Tensor:
        scores: torch.Tensor = modeling.build_mpt_alibi_tensor(config.n_heads, max_positions, device="cpu")
        return scores.squeeze(1).float()

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if self.attention is None:
            return super().forward(hidden_states, *arguments, **named)
        made = self.Wqkv(hidden_states)
        if self.clip_qkv:
            made = made.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        # [1, num_tokens, 3, num_heads, head_dim]
        query, key, value = made.unflatten(2, (3, self.n_heads, self.head_dim)).transpose(1, 3).unbind(2)
        return self.out_proj(self.attend(query, key, value, self.softmax_scale)), None


ATTENTION = ExchangedMptAttention
