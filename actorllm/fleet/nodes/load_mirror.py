"""What routers are told of a replica on another machine: its row and table of the load board there, copied here as they change.

The scheduler on the node writes the board of its agent (`actors.load_board`). The agent looks at it a few times a second and
sends what has changed, in pages. A router here reads the copy as it reads the rows of this machine. What is late is a hint as
good as any.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.actors.load_board import LoadBoard
from actorllm.errors import CorruptLinkError

PERIOD_S = 0.2
PAGE_WORDS = 512
MAX_PAGES = 64
"""Of one look; the others follow with the next."""


class LoadReader:
    """On the node: finds what has changed."""

    def __init__(self, board: LoadBoard, row: int) -> None:
        self._row = board.load_row(row)
        self._words = board.hash_words(row)
        self._sent_row = np.zeros_like(self._row)
        self._sent = np.zeros(0, np.uint64)
        self._has_more = False

    def forget(self) -> None:
        """What the copy holds is of a scheduler before: it is told anew."""
        self._sent = np.zeros(0, np.uint64)

    def changes(self, num_words: int) -> tuple[bool, list[int], list[NDArray[Any]]] | None:
        """Whether the copy is to begin with an empty table, the numbers of pages that have changed, and as arrays the row and
        these pages. None: nothing has changed.

        num_words: how many words of the table are in use.
        """
        row = self._row.copy()
        if row.tobytes() == self._sent_row.tobytes() and self._sent.size and not self._has_more:
            return None
        self._sent_row = row
        size = -(-num_words // PAGE_WORDS) * PAGE_WORDS
        words = self._words[:size].copy()
        is_anew = self._sent.size != size
        if is_anew:
            before = np.zeros(size, np.uint64)
            before[0] = ~words[0]  # the header is always told
            self._sent = before
        changed = np.flatnonzero((words.reshape(-1, PAGE_WORDS) != self._sent.reshape(-1, PAGE_WORDS)).any(axis=1))
        self._has_more = len(changed) > MAX_PAGES
        pages = changed[:MAX_PAGES].tolist()
        for page in pages:
            self._sent[page * PAGE_WORDS : (page + 1) * PAGE_WORDS] = words[page * PAGE_WORDS : (page + 1) * PAGE_WORDS]
        body = words.reshape(-1, PAGE_WORDS)[pages].reshape(-1).view(np.uint8)
        return is_anew, pages, [row, body]


def apply_changes(
    board: LoadBoard, row: int, is_anew: object, pages: Iterable[Any], arrays: list[NDArray[Any]]
) -> None:
    """On the machine of the router. Raises CorruptLinkError: no agent of this version sends this."""
    cells, words = board.load_row(row), board.hash_words(row)
    numbers = list(pages)
    if len(arrays) != 2 or arrays[0].dtype != np.float64 or arrays[0].shape != cells.shape:
        raise CorruptLinkError("a frame of loads without a row")
    if arrays[1].size != 8 * PAGE_WORDS * len(numbers) or arrays[1].dtype != np.uint8:
        raise CorruptLinkError(f"a frame of {len(numbers)} pages with {arrays[1].size} bytes")
    found = arrays[1].view(np.uint64).reshape(-1, PAGE_WORDS)
    if is_anew:
        words[:] = 0  # what a scheduler before had there is cached no more
    for page, content in zip(numbers, found, strict=True):
        if not isinstance(page, int) or not 0 <= page < words.size // PAGE_WORDS:
            raise CorruptLinkError(f"page {page!r} of a table of {words.size // PAGE_WORDS}")
        words[page * PAGE_WORDS : (page + 1) * PAGE_WORDS] = content
    cells[:] = arrays[0]
