"""What routers are told of a replica elsewhere is what its scheduler has now, and nothing of the one before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from actorllm.actors.load_board import LoadBoard
from actorllm.actors.memory_file import MemoryFile
from actorllm.errors import CorruptLinkError
from actorllm.fleet.nodes.load_mirror import MAX_PAGES, LoadReader, apply_changes


@pytest.fixture
def boards() -> Iterator[list[LoadBoard]]:
    """Of the node, and of the router."""
    files = [MemoryFile("loads", LoadBoard.NUM_BYTES) for _ in range(2)]
    yield [LoadBoard(file.path) for file in files]
    for file in files:
        file.close()


def hashes(number: int) -> bytes:
    return np.random.default_rng(number).integers(1, 1 << 63, 2 * 8, np.uint64).tobytes()


def mirror(reader: LoadReader, there: LoadBoard, here: LoadBoard) -> int:
    """Everything that there is to tell; how many looks that took."""
    number = 0
    while (changes := reader.changes(there.hashes(1).num_words_used)) is not None:
        apply_changes(here, 1, *changes)
        number += 1
        assert number < 1000
    return number


def test_a_life_begins_with_an_empty_copy(boards: list[LoadBoard]) -> None:
    there, here = boards
    table, copy = there.hashes(1), here.hashes(1)
    reader = LoadReader(there, 1)
    table.begin(5000)
    old, new = [hashes(n) for n in range(300)], [hashes(n) for n in range(300, 310)]
    for one in old:
        table.add(one)
    mirror(reader, there, here)
    assert all(copy.find(one) == table.find(one) for one in old)
    assert sum(copy.find(one) for one in old) > 500
    copy.end()  # its scheduler died
    reader.forget()
    table.begin(5000)
    for one in new:
        table.add(one)
    mirror(reader, there, here)
    assert all(copy.find(one) == table.find(one) for one in new)
    assert sum(copy.find(one) for one in old) == 0


def test_a_large_table_is_told_whole_also_when_nothing_happens_any_more(boards: list[LoadBoard]) -> None:
    there, here = boards
    table = there.hashes(1)
    table.begin(1 << 16)
    for number in range(600):
        table.add(hashes(number))
    assert mirror(LoadReader(there, 1), there, here) > 1
    used = table.num_words_used
    assert used > MAX_PAGES * 512
    assert bool((here.hash_words(1)[:used] == there.hash_words(1)[:used]).all())


def test_a_page_that_does_not_exist_is_refused(boards: list[LoadBoard]) -> None:
    there, here = boards
    row, page = there.load_row(1).copy(), np.zeros(8 * 512, np.uint8)
    for number in (-1, 1 << 20, "0", None):
        with pytest.raises(CorruptLinkError, match="page"):
            apply_changes(here, 1, False, [number], [row, page])
    with pytest.raises(CorruptLinkError, match="without a row"):
        apply_changes(here, 1, False, [0], [page])
