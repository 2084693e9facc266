"""GPT Neo: scores that are not scaled, and a window in every other layer."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.gpt_neo import modeling_gpt_neo

from actorllm.model.hf.own_attention.exchanged import ExchangedAttention

modeling: Any = modeling_gpt_neo  # it is typed in some releases only


class ExchangedGPTNeoAttention(ExchangedAttention, modeling.GPTNeoSelfAttention):  # type: ignore[misc]
    exchanges = modeling.GPTNeoSelfAttention

    def begin(self, by_position: torch.Tensor | None) -> None:
        super().begin(by_position)
        if self.attention_type == "local":
            self.window = self.config.window_size

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if self.attention is None:
            return super().forward(hidden_states, *arguments, **named)
        query, key, value = (
            self._split_heads(made(hidden_states), self.num_heads, self.head_dim)
            for made in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(self.attend(query, key, value, 1.0)), None


ATTENTION = ExchangedGPTNeoAttention
