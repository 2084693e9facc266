"""The first GPT of OpenAI: norms behind attention and MLP, and a body that does not know that there are caches."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.openai import modeling_openai

from actorllm.model.hf.own_attention.exchanged import ExchangedAttention

modeling: Any = modeling_openai  # it is typed in some releases only


class ExchangedOpenAIGPTAttention(ExchangedAttention, modeling.Attention):  # type: ignore[misc]
    exchanges = modeling.Attention

    @staticmethod
    def prepare(part: torch.nn.Module) -> None:
        if isinstance(part, modeling.OpenAIGPTModel):
            part.__class__ = BodyWithoutCache

    def forward(self, x: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if self.attention is None:
            return super().forward(x, *arguments, **named)
        # [1, num_tokens, 3, num_heads, head_dim]
        query, key, value = self.c_attn(x).unflatten(2, (3, self.n_head, -1)).transpose(1, 3).unbind(2)
        scaling = value.shape[3] ** -0.5 if self.scale else 1.0
        return [self.c_proj(self.attend(query, key, value, scaling))]


class BodyWithoutCache(modeling.OpenAIGPTModel):  # type: ignore[misc]
    """Its own forward has no `use_cache`, which bodies are called with."""

    def forward(self, *arguments: Any, use_cache: bool | None = None, **named: Any) -> Any:
        return super().forward(*arguments, **named)


ATTENTION = ExchangedOpenAIGPTAttention
