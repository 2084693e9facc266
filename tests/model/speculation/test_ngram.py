"""Prompt lookup: the longest n-gram that came before counts, and of its places the latest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorllm.model.speculation.ngram import NgramDrafter, find_repeat
from actorllm.types.drafter import Speculation
from tests.effort import examples


def drafts(tokens: list[int], most: int, least_lookup: int = 1, most_lookup: int = 3) -> list[int]:
    options = Speculation("ngram", 8, least_lookup, most_lookup)
    return list(NgramDrafter(options, 100).draft(np.array(tokens, np.int32), most))


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 4, [3, 4, 1, 2]),
        ([7, 7], 3, [7, 7, 7]),
        ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
        ([5, 1, 2, 9, 8, 2, 3, 1, 2], 2, [9, 8]),  # two tokens agree before 9, one before 3
        ([1, 5, 6, 1, 7, 8, 1], 2, [7, 8]),  # the latest of equal ones
        ([1, 2, 3], 3, []),
        ([1], 3, []),
    ],
)
def test_drafts_are_what_followed_before(tokens: list[int], most: int, expected: list[int]) -> None:
    assert drafts(tokens, most) == expected


def test_short_matches_do_not_count() -> None:
    assert drafts([1, 2, 9, 3, 2], 2, least_lookup=2) == []
    assert drafts([1, 2, 9, 3, 1, 2], 2, least_lookup=2) == [9, 3]


def plain_repeat(tokens: list[int], least: int, most: int) -> int:
    """The definition, length by length and place by place."""
    for length in range(most, least - 1, -1):
        for end in range(len(tokens) - 2, length - 2, -1):
            if length <= len(tokens) and tokens[end + 1 - length : end + 1] == tokens[-length:]:
                return len(tokens) - 1 - end
    return 0


@settings(max_examples=examples(100, 300), deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.integers(1, 4), st.integers(0, 4))
def test_a_repeat_is_found_as_defined(tokens: list[int], least: int, more: int) -> None:
    array: Any = np.array(tokens, np.int32)
    assert find_repeat(array, least, least + more) == plain_repeat(tokens, least, least + more)
