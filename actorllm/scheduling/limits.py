"""What a step may hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may hold."""

    max_tokens: int
    max_seqs: int
    max_model_len: int
    prefill_chunk: int | None = None
    """At most this many tokens of one prompt."""
    max_partial_prefills: int = 1
    """At most this many prompts at a time that do not fit into what is left of a step."""
    headroom_blocks: int = 0
    """Blocks that an admission leaves free for the growth of running requests, if there are any."""
