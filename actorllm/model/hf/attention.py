"""Our attention in the modules of transformers: the way from a layer to the step under way.

`attention` is registered under the name ATTENTION for every kind of model. Keyword arguments do not reach the attention of all
models, so a layer finds its step in a context variable. transformers makes no masks for an attention of this name. Called by the
decoders and the encoder of `hf`, and by `cuda.transformers_model`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface

from actorllm.errors import EngineError

ATTENTION = "actorllm"
"""The name of our attention in transformers' AttentionInterface."""

IGNORED = {
    "attention_mask",
    "cache_position",
    "dropout",
    "is_causal",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}
"""What models hand to attention without meaning for it."""


class AttentionStep(ABC):
    """What the attention of every layer needs to know of one step."""

    def __init__(self) -> None:
        self.num_calls = 0

    @abstractmethod
    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any
    ) -> torch.Tensor:
        """One layer. query: [1, num_heads, num_tokens, width]; key and value alike. given: the other arguments of a layer.

        Returns [1, num_tokens, num_heads, width of values].
        """

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Layers that are called meanwhile are of this step."""
        token = _under_way.set(self)
        try:
            yield
        finally:
            _under_way.reset(token)

    def check_calls(self, num_layers: int) -> None:
        """Raises EngineError where attention was called more or less often than once in every layer."""
        if self.num_calls != num_layers:
            raise EngineError(f"attention was called {self.num_calls} times in a step of {num_layers} layers")


_under_way: ContextVar[AttentionStep | None] = ContextVar("actorllm_step", default=None)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer."""
    step = _under_way.get()
    if step is None:
        raise EngineError("the paged attention was called outside of a step")
    step.num_calls += 1
    return step.attend(module, query, key, value, attention_mask=attention_mask, **given), None


AttentionInterface.register(ATTENTION, attention)
