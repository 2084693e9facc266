"""The base of attention that is exchanged: what it calls, and what it says of its scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import torch

AttentionFunction: TypeAlias = Callable[..., tuple[torch.Tensor, None]]
"""As those of transformers' AttentionInterface; it is given `scaling` and `by_position`."""


class ExchangedAttention:
    """Beside the class of transformers that it takes the place of."""

    exchanges: ClassVar[type[torch.nn.Module]]
    """That class."""
    attention: AttentionFunction | None
    """What it calls; None: it attends as transformers does."""
    window: int | None
    """A token sees itself and the window - 1 tokens before it. None: all."""
    by_position: torch.Tensor | None
    """As of `cpu.attention.Scoring`."""

    @classmethod
    def scores_by_position(cls, config: Any, max_positions: int) -> torch.Tensor | None:
        """What is added to the scores of keys, float32 [num_heads, max_positions]; None: nothing. The same in all layers."""
        return None

    @staticmethod
    def own_name(config: Any) -> str:
        """Which of transformers' own ways counts as what the model computes."""
        return "eager"

    @staticmethod
    def prepare(part: torch.nn.Module) -> None:
        """What else of a model is exchanged."""

    def begin(self, by_position: torch.Tensor | None) -> None:
        """Once it is of this class."""
        self.attention, self.window, self.by_position = None, None, by_position

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, **given: Any
    ) -> torch.Tensor:
        """query, key and value: [1, heads of each, num_tokens, head_dim]. given: what else the attention is told.

        Returns [1, num_tokens, num_heads * head_dim].
        """
        assert self.attention is not None
        if self.by_position is not None:
            given["by_position"] = self.by_position
        attended, _ = self.attention(self, query, key, value, scaling=scaling, **given)
        return attended.flatten(2)


class ByDistance:
    """What is added to scores by how far apart two tokens are, in all layers of a step."""

    def __init__(self, compute: Callable[[int], torch.Tensor]) -> None:
        """compute: [1, num_heads, num_tokens, num_tokens] for so many tokens in a row."""
        self._compute = compute
        self._known: torch.Tensor | None = None

    def between(self, num_tokens: int, most: int) -> torch.Tensor:
        """Of a prompt of so many tokens, as `compute` makes it. most: of the longest prompt of the step."""
        if self._known is None:
            self._known = self._compute(most)
        return self._known[:, :, :num_tokens, :num_tokens]
