"""Ids below zero: chunks that cut no run, and what is counted of them."""

from __future__ import annotations

import numpy as np
import pytest

from actorllm.messages.embeds import LOWEST_ID, MAX_COLUMNS, WHOLE, chunk_of_items, grid_id, longest_whole
from actorllm.messages.schema import SCHEMA
from actorllm.model.grid_positions import grid_positions

PROMPT = np.array([5, 5, WHOLE, WHOLE, WHOLE, 5, WHOLE, WHOLE], np.int32)


@pytest.mark.parametrize(
    ("first", "size", "most", "expected"),
    [
        (0, 2, 8, 2),  # up to the run
        (0, 5, 8, 5),  # with the run
        (0, 4, 8, 2),  # the run is left for later
        (2, 1, 8, 3),  # nothing else is there to compute: the run, though it is more
        (2, 1, 2, 0),  # no room for it
        (3, 1, 2, 2),  # its beginning is in the cache
        (0, 7, 8, 6),
        (6, 1, 2, 2),  # up to the end of the prompt
        (0, 8, 8, 8),
        (7, 1, 1, 1),
        (8, 3, 3, 3),  # output, computed again
    ],
)
def test_a_chunk_ends_where_a_run_ends(first: int, size: int, most: int, expected: int) -> None:
    assert chunk_of_items(PROMPT, first, size, most) == expected


def test_the_longest_run_is_known() -> None:
    assert longest_whole(PROMPT) == 3
    assert longest_whole(PROMPT[:2]) == longest_whole(PROMPT[:0]) == 0


def test_the_lowest_id_is_that_of_the_schema() -> None:
    assert grid_id(MAX_COLUMNS) == LOWEST_ID
    assert SCHEMA["StepPlan"].fields["new_tokens"].low == LOWEST_ID


def test_positions_in_a_grid_go_on_behind_its_longer_side() -> None:
    grid = grid_id(3)
    positions, shift = grid_positions(np.array([7, 7, *[grid] * 6, 8, *[grid_id(1)] * 4, 9], np.int32))
    assert positions[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 6, 6, 10]
    assert positions[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10]
    assert positions[2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 6, 6, 10]
    assert shift == 14 - 11
