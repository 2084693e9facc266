"""`SuffixDrafter`: what followed the longest repeated suffix of a sequence, most often (suffix decoding).

It looks at all places of the longest suffix, and goes on with what most of them go on with. It does so token by token, as long as
enough of them agree. A longer suffix drafts more. Outputs of other requests have no part in it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actorllm.types.drafter import Drafter


class SuffixDrafter(Drafter):
    """See the module docstring. Keeps nothing between calls."""

    def draft(self, tokens: NDArray[np.int32], most: int) -> Sequence[int]:
        options = self.options
        ends, length = longest_suffix(tokens, options.suffix_decoding_max_tree_depth)
        most = min(most, int(options.suffix_decoding_max_spec_factor * length))
        drafts: list[int] = []
        places = ends + 1
        num_places = places.size
        while len(drafts) < most and places.size:
            followers = tokens[places]
            ids, counts = np.unique(followers, return_counts=True)
            best = int(counts.argmax())
            # The share of all places: it falls with each token on which they disagree.
            if counts[best] < options.suffix_decoding_min_token_prob * num_places:
                break
            drafts.append(int(ids[best]))
            places = places[followers == ids[best]] + 1
            places = places[places < tokens.size]
        return drafts


def longest_suffix(tokens: NDArray[np.int32], most: int) -> tuple[NDArray[np.intp], int]:
    """Where the longest suffix that occurs before ends, at each of its places, and its length, which is `most` at most."""
    last = tokens.size - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    length = int(ends.size > 0)
    while length and length < most:
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[last - length]]
        if not longer.size:
            break
        ends, length = longer, length + 1
    return ends, length
