"""`DraftBudget`: how many drafts the decode rows of a step may have. Used by Scheduler.

A prompt goes before a draft: drafts get what decode rows and prompts leave of the tokens of a step. All decode rows may have
equally many, so that a plan says it with one number.
"""

from __future__ import annotations

from actorllm.types.drafter import Ranges


class DraftBudget:
    """most: drafts of a row that there is room for in its blocks. ranges: how many rows may have how many of them."""

    def __init__(self, ranges: Ranges, most: int) -> None:
        self.is_used = bool(ranges)
        """Some step may have drafts."""
        self._ranges = tuple((first, last, min(drafts, most)) for first, last, drafts in ranges)
        self._wanted: dict[int, int] = {}
        """What the ranges say, by rows."""

    def most(self, num_rows: int, room: int) -> int:
        """Drafts of each of so many decode rows, in a step with room for so many tokens more."""
        if not num_rows:
            return 0
        wanted = self._wanted.get(num_rows)
        if wanted is None:
            wanted = next((drafts for first, last, drafts in self._ranges if first <= num_rows <= last), 0)
            self._wanted[num_rows] = wanted
        return wanted if num_rows * wanted <= room else max(0, room // num_rows)
