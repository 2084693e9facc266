"""What the first of several ranks has drafted, told to all: they compute the same rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import I32
from actorllm.model.inputs import Drafts
from actorllm.model.parallel import Ranks


def agreed_drafts(ranks: Ranks, drafts: Drafts | None, num_rows: int, most: int) -> Drafts | None:
    """Those of the first rank, on every rank, which waits for the others here.

    Arguments:
        drafts: of the first rank; elsewhere they are passed over.
        num_rows: of the step, drafts apart.
        most: how many drafts a row may have.
    """
    told = np.zeros((num_rows, 1 + max(0, most)), np.int32)  # how many, and which
    if drafts is not None:
        told[:, 0] = drafts.counts
        told[:, 1:][firsts(drafts.counts, told.shape[1] - 1)] = drafts.tokens
    told = ranks.agree(told)
    counts = told[:, 0].copy()
    if not counts.any():
        return None
    return Drafts(counts, told[:, 1:][firsts(counts, told.shape[1] - 1)])


def firsts(counts: I32, width: int) -> NDArray[np.bool_]:
    """[num_rows, width]: the first ones of each row, so many as it counts."""
    mask: NDArray[np.bool_] = np.arange(width) < counts[:, None]
    return mask
