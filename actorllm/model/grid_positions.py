"""Positions on three axes (M-RoPE): of rows that stand in a grid, and of the text around them.

A token of text has one number on all axes, one more than the largest before it. The rows of an item in a grid have the number
where it begins. To it the second axis adds the row of the grid, and the third the column. Called by `inputs`.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import I32
from actorllm.messages.embeds import GRID


def grid_positions(ids: I32) -> tuple[NDArray[np.int64], int]:
    """[3, num_tokens], and how far the position of the next token lags behind the number of tokens."""
    columns = np.where(ids < GRID, GRID - ids, 0)
    positions = np.empty((3, ids.size), np.int64)
    following = 0
    for first, last in pairwise([0, *(np.flatnonzero(np.diff(columns)) + 1).tolist(), ids.size]):
        span, width = np.arange(last - first), int(columns[first])
        positions[:, first:last] = following
        if width:
            positions[1, first:last] += span // width
            positions[2, first:last] += span % width
            following += max(-(-span.size // width), width)
        else:
            positions[:, first:last] += span
            following += span.size
    return positions, ids.size - following
