"""`SuffixDrafter`: what followed the longest repeated suffix of a sequence, most often (suffix decoding).

It looks at all places of the longest suffix, and goes on with what most of them go on with. It does so token by token, as long as
enough of them agree. A longer suffix drafts more. The places are of the sequence itself, or of finished outputs of other requests,
where these have more of the suffix. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import I32, NO_I32
from actorllm.types.drafter import Drafter


class SuffixDrafter(Drafter):
    """See the module docstring. Keeps nothing between calls."""

    def draft(self, tokens: NDArray[np.int32], most: int, others: I32 = NO_I32) -> Sequence[int]:
        """As every drafter. others: finished outputs (`FinishedOutputs.of`)."""
        options = self.options
        depth = options.suffix_decoding_max_tree_depth
        text, (ends, length) = tokens, longest_match(tokens, tokens, depth)
        if others.size:
            found = longest_match(others, tokens, depth)
            if found[1] > length:
                text, (ends, length) = others, found
        most = min(most, int(options.suffix_decoding_max_spec_factor * length))
        drafts: list[int] = []
        places = ends + 1
        num_places = places.size
        while len(drafts) < most:
            places = places[text[places] >= 0]  # neither behind the end of an output, nor at an embedding
            if not places.size:
                break
            followers = text[places]
            ids, counts = np.unique(followers, return_counts=True)
            best = int(counts.argmax())
            # The share of all places: it falls with each token on which they disagree.
            if counts[best] < options.suffix_decoding_min_token_prob * num_places:
                break
            drafts.append(int(ids[best]))
            places = places[followers == ids[best]] + 1
            places = places[places < text.size]
        return drafts


def longest_match(text: NDArray[np.int32], tokens: NDArray[np.int32], most: int) -> tuple[NDArray[np.intp], int]:
    """Where the longest suffix of the tokens that the text has, with something behind it, ends there; and its length.

    most: tokens of it. The text may be the tokens themselves.
    """
    last = tokens.size - 1
    ends = np.flatnonzero(text[:-1] == tokens[last])
    length = int(ends.size > 0)
    while length and length < min(most, tokens.size):
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == tokens[last - length]]
        if not longer.size:
            break
        ends, length = longer, length + 1
    return ends, length
