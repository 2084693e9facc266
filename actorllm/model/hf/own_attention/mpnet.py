"""MPNet, an encoder: scores to which a number is added for each distance of two tokens and each head."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.mpnet import modeling_mpnet

from actorllm.model.hf.own_attention.exchanged import ByDistance, ExchangedAttention

modeling: Any = modeling_mpnet  # it is typed in some releases only


class ExchangedMPNetAttention(ExchangedAttention, modeling.MPNetSelfAttention):  # type: ignore[misc]
    exchanges = modeling.MPNetSelfAttention

    @staticmethod
    def prepare(part: torch.nn.Module) -> None:
        if isinstance(part, modeling.MPNetEncoder):
            part.__class__ = DistancesInEncoder

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, position_bias: Any = None, **named: Any
    ) -> Any:
        if self.attention is None:
            return super().forward(hidden_states, attention_mask, position_bias, **named)
        sizes = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        query, key, value = (made(hidden_states).view(sizes).transpose(1, 2) for made in (self.q, self.k, self.v))
        return (self.o(self.attend(query, key, value, self.attention_head_size**-0.5, by_distance=position_bias)),)


class DistancesInEncoder(modeling.MPNetEncoder):  # type: ignore[misc]
    """Prompts are packed into a row, in which pairs of all tokens would be too many: layers make those of a prompt."""

    def compute_position_bias(self, x: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if self.layer[0].attention.attn.attention is None:
            return super().compute_position_bias(x, *arguments, **named)
        compute = super().compute_position_bias
        return ByDistance(lambda num_tokens: compute(x[:, :num_tokens]))


ATTENTION = ExchangedMPNetAttention
