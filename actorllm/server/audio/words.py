"""The words of a transcription: which of its tokens belong to each, and when it was said.

The rules are those of openai-whisper. A word begins at a token whose text begins with a space, or is a punctuation mark. Marks then
join the word that they stand at. Where a language writes no spaces, each character is a word.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Codes of languages whose words have no spaces between them."""
OPENING = "\"'“¿([{-"
"""Marks that belong to the word behind them."""
CLOSING = "\"'.。,，!！?？:：”)]}、"
"""Marks that belong to the word before them."""
REPLACED = "\ufffd"
"""What an unfinished character is decoded to."""


@dataclass(frozen=True, slots=True)
class TimedWord:
    """Times are in seconds from the beginning of the recording."""

    word: str
    start: float
    end: float

    def tree(self) -> dict[str, Any]:
        """As OpenAI has it."""
        return {"word": self.word, "start": round(self.start, 2), "end": round(self.end, 2)}


def words_of(ids: Sequence[int], decode: Callable[[list[int]], str], *, has_spaces: bool) -> list[tuple[str, int]]:
    """The words of a text in order, and how many tokens each has.

    Arguments:
        ids: of the text.
        decode: makes text of ids.
        has_spaces: words have spaces between them.
    """
    words: list[tuple[str, int]] = []
    for text, count in characters_of(ids, decode):
        is_mark = text.strip() in string.punctuation  # as nothing is
        if words and has_spaces and not text.startswith(" ") and not is_mark:
            before, tokens = words.pop()
            text, count = before + text, tokens + count
        words.append((text, count))
    return joined(words)


def characters_of(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[tuple[str, int]]:
    """The shortest runs of tokens that are whole characters, and how many tokens each has."""
    whole, found, run, length = decode(list(ids)), [], [], 0
    for id in ids:
        run.append(id)
        text = decode(run)
        place = length + text.find(REPLACED)
        # The text itself may hold such a character.
        if REPLACED not in text or place >= len(whole) or whole[place] == REPLACED:
            found.append((text, len(run)))
            run, length = [], length + len(text)
    if run:
        found.append((decode(run), len(run)))
    return found


def joined(words: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The same with marks in the words that they belong to."""
    behind: list[tuple[str, int]] = []
    for text, count in reversed(words):  # opening marks go to what stands behind them
        if behind and text.startswith(" ") and text.strip() in OPENING:
            after, tokens = behind.pop()
            text, count = text + after, count + tokens
        behind.append((text, count))
    found: list[tuple[str, int]] = []
    for text, count in reversed(behind):
        if found and not found[-1][0].endswith(" ") and text in CLOSING:
            before, tokens = found.pop()
            text, count = before + text, tokens + count
        found.append((text, count))
    return found


def timed(words: Sequence[tuple[str, int]], starts: Sequence[float], begin: float, most: float) -> list[TimedWord]:
    """Words with their times.

    Arguments:
        words: as of `words_of`.
        starts: when each token of the text begins, and when the last one ends, from the beginning of the window.
        begin: of the window in the recording.
        most: seconds of the window.
    """
    found, place = [], 0
    for text, count in words:
        first, place = place, place + count
        start, end = (begin + min(starts[at], most) for at in (first, place))
        if word := text.strip():
            found.append(TimedWord(word, start, end))
    return found
