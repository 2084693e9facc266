"""Suffix decoding: the longest suffix that came before, and what followed it most often."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorllm.model.speculation.finished import MAX_TOKENS_OF_SALT, FinishedOutputs
from actorllm.model.speculation.suffix import SuffixDrafter, longest_match
from actorllm.types.drafter import Speculation
from tests.effort import examples


def drafts(tokens: list[int], most: int = 8, *, depth: int = 24, factor: float = 9.0, share: float = 0.1) -> list[int]:
    options = Speculation("suffix", 8, 5, 5, depth, factor, share)
    return list(SuffixDrafter(options, 100).draft(np.array(tokens, np.int32), most))


@pytest.mark.parametrize(
    ("tokens", "more", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 9, 1, 2], {"depth": 2}, [4, 9, 1, 2]),  # two of three places go on with 4
        ([1, 2, 3, 4, 5, 1, 2], {"most": 2}, [3, 4]),
        ([7, 8, 1, 2, 3, 6, 7, 8, 1, 2], {"factor": 0.5}, [3, 6]),  # half as many as the suffix has tokens
        ([1, 2, 9, 1, 3, 9, 1, 4, 9, 1], {"share": 0.5, "depth": 1}, []),  # no third of the places is enough
        ([1, 2, 3], {}, []),
        ([1], {}, []),
    ],
)
def test_drafts_are_what_most_places_go_on_with(tokens: list[int], more: dict[str, Any], expected: list[int]) -> None:
    assert drafts(tokens, **more)[: len(expected) or 8] == expected


@settings(max_examples=examples(100, 300), deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 6))
def test_the_longest_suffix_is_found_at_all_its_places(tokens: list[int], most: int) -> None:
    ends, length = longest_match(np.array(tokens, np.int32), np.array(tokens, np.int32), most)

    def places(size: int) -> list[int]:
        return [end for end in range(size - 1, len(tokens) - 1) if tokens[end + 1 - size : end + 1] == tokens[-size:]]

    expected = max((size for size in range(1, most + 1) if size < len(tokens) and places(size)), default=0)
    assert length == expected
    assert ends.tolist() == (places(length) if length else [])


@settings(max_examples=examples(67, 200), deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 8))
def test_drafts_are_tokens_of_the_sequence_and_not_too_many(tokens: list[int], most: int) -> None:
    found = drafts(tokens, most)
    assert len(found) <= most
    assert set(found) <= set(tokens)


def int32(*values: int) -> Any:
    return np.array(values, np.int32)


def test_finished_outputs_count_where_they_have_more_of_the_suffix() -> None:
    drafter = SuffixDrafter(Speculation("suffix", 8), 100)
    others = int32(1, 2, 3, 4, 5, -1, 9, 3, 7, -1)
    assert drafter.draft(int32(50, 1, 2, 3), 8, others) == [4, 5], (
        "as many as the suffix has tokens, up to the end of the output"
    )
    assert drafter.draft(int32(3, 8, 3), 8, others) == [8], "its own text has as much of it"
    assert drafter.draft(int32(50, 5), 8, others) == [], "nothing follows"
    assert drafter.draft(int32(50, -1), 8, others) == [9], "at most a wrong guess"


def test_outputs_are_found_by_their_salt_alone_and_the_oldest_make_room() -> None:
    outputs = FinishedOutputs(3)
    outputs.add(b"a", int32(1, 2))
    outputs.add(b"b", int32(3))
    assert outputs.of(b"a").tolist() == [1, 2, -1]
    assert outputs.of(b"c").tolist() == []
    outputs.add(b"b", int32(4, 5))
    outputs.add(b"b", int32(6))
    assert outputs.of(b"a").tolist() == [], "its salt was used longest ago"
    assert (outputs.num_requests, outputs.num_tokens) == (3, 7)
    outputs.add(b"b", int32(7))
    assert outputs.of(b"b").tolist() == [4, 5, -1, 6, -1, 7, -1]


def test_what_is_kept_is_bounded_in_tokens() -> None:
    outputs = FinishedOutputs(10_000)
    for number in range(200):
        outputs.add(b"", np.full(1000, number, np.int32))
    tokens = outputs.of(b"")
    assert tokens.size <= MAX_TOKENS_OF_SALT
    assert tokens[-2] == 199
    assert outputs.num_tokens == tokens.size == 1001 * outputs.num_requests
    for number in range(200):
        outputs.add(str(number).encode(), np.zeros(100_000, np.int32))
    assert outputs.num_tokens <= 1 << 20
    assert outputs.of(b"").size == 0
