"""KV groups, layers that share a block table, and states of recurrent layers: their sizes, and what workers tell of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SNAPSHOT_TOKENS = 64
"""States of recurrent layers are kept behind multiples of so many tokens: prompts are worked off in tiles of this size, which are
the same however a prompt is cut."""


def border_of(block_size: int, tokens: int = SNAPSHOT_TOKENS) -> int:
    """The least multiple of so many tokens that is a number of whole blocks."""
    return math.lcm(block_size, tokens)


def window_of(facts: Mapping[str, Mapping[str, Any]]) -> int | None:
    """The window of the layers that have a group of their own, as a worker tells it (`CacheConfig.window`); None: none has."""
    return next((fact["window"] for fact in facts.values() if fact.get("window")), None)


def snapshots_of(facts: Mapping[str, Mapping[str, Any]]) -> int | None:
    """How many states of prefixes a worker can keep (`CacheConfig.snapshots`); None: its model has no recurrent layers."""
    return next((fact["snapshots"] for fact in facts.values() if "snapshots" in fact), None)


def num_window_blocks(
    num_blocks: int, *, window: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, spare: int
) -> int:
    """How many blocks the group has.

    Arguments:
        num_blocks: of the other group; no more than so many have a partner at a time.
        window: tokens that a token sees, itself included.
        spare: tokens of a slot beyond the one that a step samples.
    """
    per_slot = -(-(window - 1) // block_size) + -(-(1 + spare) // block_size) + 3
    chunks = -(-max_num_batched_tokens // block_size)
    return min(num_blocks, max_num_seqs * per_slot + chunks)
