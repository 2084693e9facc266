"""Output that is not due yet: for requests that want fewer outputs than tokens, or one at their end.

Owns the new tokens and the text of such requests until they are sent, so that output which is not waited for crosses no ring. A
request that is not here has every token sent at once and costs nothing. Called by the scheduler actor, which finds stop
strings token by token all the same.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from actorllm.scheduling.sequence import Key

MAX_HELD_LOGPROBS = 1 << 16
"""A request that holds back so many sends them, due or not: about 1 MiB. What is joined here must still fit into a message."""

Row: TypeAlias = tuple[int, list[int], str, list[Any]]
"""Output index of the first token (-1: no token), tokens, text, log-probabilities."""


class HeldOutput:
    """What one request holds back."""

    __slots__ = ("index", "interval", "is_first", "logprobs", "num_logprobs", "text", "tokens")

    def __init__(self, interval: int, is_first: bool) -> None:
        self.interval = interval
        """New tokens per output; 0: none before the end."""
        self.is_first = is_first
        self.index = -1
        self.tokens: list[int] = []
        self.text: list[str] = []
        self.logprobs: list[Any] = []
        self.num_logprobs = 0
        """Entries of all of them."""

    def add(self, row: Row) -> None:
        index, tokens, text, logprobs = row
        if tokens and not self.tokens:
            self.index = index
        self.tokens += tokens
        self.text.append(text)
        if logprobs:
            self.logprobs += logprobs
            self.num_logprobs += sum(span.ids.size for span, _ in logprobs)

    @property
    def is_due(self) -> bool:
        if not self.tokens:
            return False
        is_enough = self.interval > 0 and (self.is_first or len(self.tokens) >= self.interval)
        return is_enough or self.num_logprobs >= MAX_HELD_LOGPROBS

    def take(self) -> Row:
        row = self.index, self.tokens, "".join(self.text), self.logprobs
        self.is_first, self.index, self.tokens, self.text, self.logprobs = False, -1, [], [], []
        self.num_logprobs = 0
        return row


class OutputBuffer:
    """The requests that hold output back."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: dict[Key, HeldOutput] = {}
        """By request. Only the methods here change it."""

    def add(self, key: Key, interval: int, *, is_first: bool) -> None:
        """From now on the request's output is due every `interval` tokens (0: at its end); is_first: none was sent."""
        self.held[key] = HeldOutput(interval, is_first)

    def due(self, key: Key, row: Row, is_end: bool) -> Row | None:
        """The row to send now, with what was held back before it; None: nothing yet. After the end the key is unknown."""
        held = self.held.get(key)
        if held is None:
            return row
        held.add(row)
        if is_end:
            del self.held[key]
        elif not held.is_due:
            return None
        return held.take()

    def drop(self, key: Key) -> int:
        """Forget a request, if it is here. Returns how many tokens it held back."""
        held = self.held.pop(key, None)
        return 0 if held is None else len(held.tokens)

    def drop_frontend(self, frontend: int) -> None:
        """The output of these requests is not taken any more."""
        for key in [key for key in self.held if key[0] == frontend]:
            del self.held[key]
