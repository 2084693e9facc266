"""Of which logits the log-probabilities of a request are told: vLLM's `logprobs_mode`, which an engine is built with.

"raw" modes tell of the logits as the model gave them. "processed" modes tell of those that the token was drawn from. These have
biases, penalties and masks in them, and are divided by the temperature. What top_k, top_p and min_p take out is -inf. Modes that
end in "logits" tell the logits themselves, the others their log_softmax. Prompts are never drawn, and so never processed. Plain
torch for every backend: only rows that ask come here, and only those with filters are sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ShownLogits:
    """See the module docstring."""

    is_processed: bool
    as_logits: bool

    @classmethod
    def of(cls, mode: str) -> ShownLogits:
        """By the name of the mode."""
        return cls(is_processed=mode.startswith("processed"), as_logits=mode.endswith("logits"))

    @property
    def is_plain(self) -> bool:
        """The default: log-probabilities of the logits as they were."""
        return not self.is_processed and not self.as_logits


def drawn_from(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: F32, top_k: NDArray[np.int32], top_p: F32, min_p: F32
) -> torch.Tensor:
    """The logits that tokens were drawn from, float32 [num_rows, vocab_size]; temperature 0 counts as 1.

    logits: [num_rows, vocab_size], with everything else that changes them. tokens: int64 [num_rows], the ones that were chosen:
    they are kept, however the mass of a nucleus is rounded here. The other columns have one number a row.
    """
    vocab_size = logits.shape[1]
    divisor = np.where(temperature > 0, temperature, np.float32(1))
    shown = logits.float() / torch.from_numpy(divisor).to(logits.device).unsqueeze(1)
    is_filtered = ((top_k > 0) & (top_k < vocab_size) | (top_p < 1) | (min_p > 0)) & (temperature > 0)
    where = np.flatnonzero(is_filtered)
    if not len(where):
        return shown
    rows = torch.from_numpy(where).to(logits.device)
    k, p, least = (torch.from_numpy(column[where]).to(logits.device).unsqueeze(1) for column in (top_k, top_p, min_p))
    # As the sampler does, which subtracts the maximum before it divides.
    y = logits.float().index_select(0, rows)
    y = (y - y.amax(1, keepdim=True)) / torch.from_numpy(divisor[where]).to(logits.device).unsqueeze(1)
    ordered = torch.sort(y, dim=1, descending=True).values
    rank = torch.where((k > 0) & (k < vocab_size), k, vocab_size).long() - 1
    threshold = torch.maximum(least.log(), ordered.gather(1, rank))
    mass = (ordered.exp() * (ordered >= threshold)).double().cumsum(1)
    last = (mass < p.double() * mass[:, -1:]).sum(1, keepdim=True).clamp_max(vocab_size - 1)
    threshold = torch.where(p < 1, torch.maximum(threshold, ordered.gather(1, last)), threshold)
    is_out = y < threshold
    is_out.scatter_(1, tokens.index_select(0, rows).unsqueeze(1), False)
    shown[rows] = shown.index_select(0, rows).masked_fill_(is_out, -torch.inf)
    return shown
