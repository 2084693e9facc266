"""`Logprob`: the log-probability of one token at one position."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Logprob:
    """The log-probability of one token at one position."""

    logprob: float
    rank: int | None = None
    """1 for the most likely; of equally likely ones the chosen token counts as the last."""
    decoded_token: str | None = None
    """Its text; None without detokenizing."""
