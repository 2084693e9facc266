"""A loaded model, as the runner of the CPU sees it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from actorllm.errors import EngineError
from actorllm.model.cpu.attention import PagedCache
from actorllm.model.inputs import StepInputs


class CausalLM(Protocol):
    """A loaded model, as the runner sees it. The hidden states between the calls are the model's own."""

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that one decode step reads."""

    @property
    def num_kv_heads(self) -> int:
        """Of this rank."""

    def forward(self, inputs: StepInputs, cache: PagedCache) -> torch.Tensor:
        """Hidden states, [num_tokens, hidden_size]; keys and values go to the cache."""

    def select(self, hidden: torch.Tensor, rows: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """The final hidden states of some rows, [num_rows, hidden_size]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, vocab_size] for what `select` returned; the caller may change it."""

    def narrow_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same before they are widened, in the type that the model gives them."""


class AbsentModel:
    """In the place of a model whose weights were given back: it computes nothing."""

    def __init__(self, num_kv_heads: int) -> None:
        self.num_kv_heads = num_kv_heads
        self.num_bytes = 0

    def _absent(self, *_: Any) -> Any:
        raise EngineError("the weights of this worker were given back; wake_up() reads them again")

    forward = select = logits = narrow_logits = _absent
