"""`ThoughtCount`: how many tokens of one sequence are its thought, without the tokens of the marks around it.

A parser of its own reads the text of one token at a time, so the number depends on the ids alone. A stream and a whole answer
have the same. Pure; called by the shapes of answers, for `reasoning_tokens`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from actorllm.text.reasoning.parsers import Part, ReasoningParser, Thought

MAX_HELD = 8192
"""Characters in which the text of a part is looked for: more than any parser holds back."""
PORTION = 64
"""Tokens of a thought that are counted at once, where no mark can begin in them."""


class ThoughtCount:
    """Of one sequence: `push` its ids as they come, `finish` after the last; then `num`."""

    def __init__(self, parser: ReasoningParser, decode: Callable[[list[int]], str]) -> None:
        """parser: fresh, of this sequence. decode: ids to text, marks included."""
        self.num = 0
        self._parser = parser
        self._text_of = lru_cache(maxsize=4096)(lambda token: decode([token]))
        self._text = ""
        """Of the tokens that the parser holds back, or has taken for a mark."""
        self._ends: list[int] = []
        """Where each of these tokens ends in that text."""

    def push(self, token_ids: Sequence[int]) -> None:
        for at in range(0, len(token_ids), PORTION):
            if self._parser.is_over:
                return
            texts = list(map(self._text_of, token_ids[at : at + PORTION]))
            if not self._ends and self._parser.is_all_thought("".join(texts)):
                self.num += sum(map(bool, texts))
            else:
                self._read(texts)

    def _read(self, texts: Iterable[str]) -> None:
        parser = self._parser
        for text in texts:
            parts = parser.push(text)
            if not self._ends and len(parts) == 1 and parts[0].text == text:  # as nearly always
                self.num += isinstance(parts[0], Thought)
                continue
            self._text += text
            self._ends.append(len(self._text))
            if parts:
                self._take(parts)
            elif len(self._text) > 2 * MAX_HELD:  # what a parser drops, as between two messages
                self._keep_from(len(self._text) - MAX_HELD)

    def finish(self) -> None:
        if not self._parser.is_over:
            self._take(self._parser.finish())

    def _take(self, parts: list[Part]) -> None:
        """Find these parts in the text, from its end: a mark comes before what it marks, and may have the same words."""
        before, behind = len(self._text), -1
        thoughts: list[tuple[int, int]] = []
        for part in reversed(parts):
            begin = self._text.rfind(part.text, 0, before)
            if begin < 0:  # part of it is of a token that was taken before
                begin = max(0, before - len(part.text))
            end = min(before, begin + len(part.text))
            if isinstance(part, Thought):
                thoughts.append((begin, end))
            before, behind = begin, max(behind, end)
        start = 0
        for end in self._ends:
            if end <= behind or start < behind:
                self.num += any(begin < end and start < last for begin, last in thoughts)
            start = end
        # What lies behind the parts is held back still. A token that reaches into it has been counted.
        self._keep_from(behind)

    def _keep_from(self, place: int) -> None:
        """Forget the tokens that begin before this place."""
        number = bisect_left(self._ends, place) + 1
        first = self._ends[number - 1] if number <= len(self._ends) else len(self._text)
        self._text = self._text[first:]
        self._ends = [end - first for end in self._ends[number:]]
