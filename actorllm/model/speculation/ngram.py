"""`NgramDrafter`: the tokens that followed the newest n tokens when these came last (prompt lookup).

Of n-grams with prompt_lookup_min to prompt_lookup_max tokens the longest that occurs counts, and of its places the latest. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actorllm.types.drafter import Drafter


class NgramDrafter(Drafter):
    """See the module docstring. Keeps nothing between calls."""

    def draft(self, tokens: NDArray[np.int32], most: int) -> Sequence[int]:
        options = self.options
        period = find_repeat(tokens, options.prompt_lookup_min, options.prompt_lookup_max)
        if not period:
            return ()
        # A place near the end has fewer tokens behind it than are wanted. What is copied goes on to be copied from there.
        source: list[int] = tokens[tokens.size - period :][:most].tolist()
        return (source * -(-most // period))[:most]


def find_repeat(tokens: NDArray[np.int32], least: int, most: int) -> int:
    """How many tokens ago the newest n-gram ended before, of `least` to `most` tokens; 0: never.

    The longest n-gram counts, and of its places the latest.
    """
    last = tokens.size - 1
    # Places where the last token stood before; most tokens of a text leave a handful.
    ends = np.flatnonzero(tokens[least - 1 : last] == tokens[last]) + (least - 1) if last >= least else _NOWHERE
    length = 1
    found = ends if least == 1 else _NOWHERE
    while ends.size and length < most:
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[last - length]] if length <= last else _NOWHERE
        length += 1
        if ends.size and length >= least:
            found = ends
    return int(last - found[-1]) if found.size else 0


_NOWHERE: NDArray[np.intp] = np.zeros(0, np.intp)
