"""Log-probabilities of chosen tokens and of the most likely ones, from the logits as the model gave them.

As vLLM's raw logprobs: log_softmax of the float32 logits before anything is done to them; `shown_logits` has other modes. The
rank of a token is the number of tokens at least as likely. Among equally likely ones the smaller id comes first. Called by the
runner, for the rows that asked only.

Only three things look at every logit: the maxima of tiles, the normalizer and the rank. They do so a few rows at a time,
because what they make then stays in the caches. They use 2 ** x, which takes torch a quarter of the time of e ** x.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.messages import I32
from actorllm.messages.logprobs import LogprobSpan

TILE = 64
"""Ids of which only the largest logit is looked at, unless that is one of the largest maxima. They lie as far apart as there are
tiles: then all maxima are found at once, a vector of them per instruction."""

CHUNK_ELEMENTS = 1 << 20
"""Logits worked on at a time."""

LOG2_E = math.log2(math.e)


def gather(
    logits: torch.Tensor, tokens: I32, num_top: int, row: int = 0, position: int = 0, *, as_logits: bool = False
) -> LogprobSpan:
    """A span over the rows of logits [count, vocab_size]: of tokens [count], and of the num_top most likely.

    logits: in the type of the model or widened to float32; the result is the same. row and position: what the span says
    of itself. as_logits: its values are the logits themselves.
    """
    num_rows, vocab_size = logits.shape
    chosen = torch.from_numpy(tokens.astype(np.int64)).unsqueeze(1)
    ids = torch.empty(num_rows, 1 + num_top, dtype=torch.int64)
    values = torch.empty(num_rows, 1 + num_top)
    ranks = torch.empty(num_rows)  # whole numbers below 2 ** 24, exact in float32
    most = max(1, CHUNK_ELEMENTS // vocab_size)
    scratch = torch.empty(min(most, num_rows), vocab_size)
    wide = None if logits.dtype is torch.float32 else torch.empty_like(scratch)
    for start in range(0, num_rows, most):
        part = slice(start, start + most)
        rows = logits[part] if wide is None else wide[: len(logits[part])].copy_(logits[part])
        work = scratch[: len(rows)]
        ids[part, :1] = chosen[part]
        top = most_likely(rows, num_top, ids[part, 1:]) if num_top else rows.amax(1, keepdim=True)
        raw = rows.gather(1, ids[part])
        ranks[part] = torch.ge(rows, raw[:, :1], out=work).sum(1)
        if as_logits:
            values[part] = raw
            continue
        mass = torch.sub(rows, top, out=work).mul_(LOG2_E).exp2_().sum(1, keepdim=True)
        values[part] = raw.sub_(top).sub_(mass.log_())  # in this order: large logits have no digits to spare
    return LogprobSpan(row, position, ids.int().numpy(), values.numpy(), ranks.int().numpy())


def gather_ids(
    logits: torch.Tensor, token: int, ids: NDArray[np.int64], row: int, *, as_logits: bool = False
) -> LogprobSpan:
    """A span over one row of logits, float32 [1, vocab_size]: of its token, and of these ids in their order."""
    wanted = torch.from_numpy(np.concatenate(([token], ids))).unsqueeze(0)
    ranks = torch.sum(logits >= logits[:, token : token + 1], 1, dtype=torch.int32)
    values = (logits if as_logits else torch.log_softmax(logits, 1)).gather(1, wanted)
    return LogprobSpan(row, 0, wanted.int().numpy(), values.numpy(), ranks.numpy())


def most_likely(logits: torch.Tensor, count: int, ids: torch.Tensor) -> torch.Tensor:
    """Writes the ids of the largest logits of every row, in order, to ids [num_rows, count]; returns the largest [num_rows, 1].

    Where equal logits compete for the last places, any of them gets it.
    """
    num_rows, vocab_size = logits.shape
    if 2 * count * TILE > vocab_size:
        ids.copy_(torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :count])
        return logits.gather(1, ids[:, :1])
    whole = vocab_size // TILE
    maxima = logits[:, : whole * TILE].view(num_rows, TILE, whole).amax(1)  # [num_rows, num_tiles]
    has_rest = whole * TILE < vocab_size
    if has_rest:  # the last ids are a tile of their own
        maxima = torch.cat((maxima, logits[:, whole * TILE :].amax(1, keepdim=True)), 1)
    tiles = torch.topk(maxima, count, 1).indices.unsqueeze(2)
    members = torch.arange(TILE)
    places = tiles + whole * members  # [num_rows, count, TILE]
    if has_rest:
        places = torch.where(tiles == whole, whole * TILE + members, places)
    places = places.view(num_rows, -1)  # [num_rows, count * TILE]
    candidates = logits.gather(1, places.clamp_max(vocab_size - 1) if has_rest else places)
    if has_rest:
        candidates.masked_fill_(places >= vocab_size, -torch.inf)
    found, where = torch.topk(candidates, count, 1)
    where = places.gather(1, where)
    if count > 1:
        order = np.lexsort((where.numpy(), -found.numpy()))  # topk leaves the order of equal ones open
        where = where.gather(1, torch.from_numpy(order))
    ids.copy_(where)
    return found[:, :1]
