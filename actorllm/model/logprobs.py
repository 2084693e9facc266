"""Log-probabilities of chosen tokens and of the most likely ones, from the logits as the model gave them.

As vLLM's raw logprobs: log_softmax of the float32 logits before anything is done to them. The rank of a token is the number
of tokens at least as likely. Among equally likely ones the smaller id comes first. Called by the runner, for the rows that
asked only.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.logprobs import LogprobSpan
from actorllm.messages import I32


def gather(logits: torch.Tensor, tokens: I32, num_top: int, row: int = 0, position: int = 0) -> LogprobSpan:
    """A span over the rows of logits, float32 [count, vocab_size]: of tokens [count], and of the num_top most likely.

    row and position: what the span says of itself.
    """
    chosen = torch.from_numpy(tokens.astype(np.int64)).unsqueeze(1)
    ranks = torch.sum(logits >= logits.gather(1, chosen), 1, dtype=torch.int32)
    ids = chosen
    if num_top == logits.shape[1]:
        ids = torch.cat((chosen, torch.sort(logits, dim=1, descending=True, stable=True).indices), 1)
    elif num_top:
        ids = torch.cat((chosen, _in_order(*torch.topk(logits, num_top, 1))), 1)
    values = torch.log_softmax(logits, 1).gather(1, ids)
    return LogprobSpan(row, position, ids.int().numpy(), values.numpy(), ranks.numpy())


def gather_ids(logits: torch.Tensor, token: int, ids: NDArray[np.int64], row: int) -> LogprobSpan:
    """A span over one row of logits, float32 [1, vocab_size]: of its token, and of these ids in their order."""
    wanted = torch.from_numpy(np.concatenate(([token], ids))).unsqueeze(0)
    ranks = torch.sum(logits >= logits[:, token : token + 1], 1, dtype=torch.int32)
    values = torch.log_softmax(logits, 1).gather(1, wanted)
    return LogprobSpan(row, 0, wanted.int().numpy(), values.numpy(), ranks.numpy())


def _in_order(top: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The ids, those of equal values rising; topk leaves their order open."""
    ids, order = torch.sort(ids, 1)
    return ids.gather(1, torch.sort(top.gather(1, order), dim=1, descending=True, stable=True).indices)
