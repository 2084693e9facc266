"""Tiles of prompts: tokens that are worked off together, whose positions begin at multiples of `TILE`.

So the tiles of a sequence are the same, however its prompt is cut into chunks. Where a chunk begins or ends within a tile, zeros
stand for the rest of it: tokens without effect, in every mixer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from actorllm.model.cpu.recurrent.states import Piece
from actorllm.types.kv_groups import SNAPSHOT_TOKENS

TILE = SNAPSHOT_TOKENS
"""States are kept between two tiles only."""

MOST_TILES = 16
"""That are worked off together; a longer row takes several rounds."""


def rounds(piece: Piece) -> Iterator[tuple[slice, int]]:
    """Which tokens of a piece are worked off together, and how many tokens of their first tile come before them."""
    first = 0
    while first < piece.size:
        ahead = (piece.position + first) % TILE
        count = min(piece.size - first, MOST_TILES * TILE - ahead)
        yield slice(first, first + count), ahead
        first += count


def tiled(tensor: torch.Tensor, ahead: int) -> torch.Tensor:
    """[num_tokens, heads, ...] to [num_tiles, heads, TILE, ...]. ahead: as of `rounds`."""
    ends = [0, 0] * (tensor.ndim - 1) + [ahead, -(ahead + len(tensor)) % TILE]
    return torch.nn.functional.pad(tensor, ends).view(-1, TILE, *tensor.shape[1:]).transpose(1, 2)


def untiled(tensor: torch.Tensor, ahead: int, count: int) -> torch.Tensor:
    """[num_tiles, heads, TILE, dim] to [num_tokens, heads, dim]."""
    return tensor.transpose(1, 2).reshape(-1, tensor.shape[1], tensor.shape[3])[ahead : ahead + count]


def decays(passed: torch.Tensor) -> torch.Tensor:
    """How much of each token is left where another one reads, 0 where it comes later.

    passed: logarithms of what is left of the beginning of the tile, [..., TILE]. Returns [..., TILE, TILE].
    """
    return (passed.unsqueeze(-1) - passed.unsqueeze(-2)).exp_().tril_()
