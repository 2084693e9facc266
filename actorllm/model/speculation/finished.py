"""`FinishedOutputs`: what requests have written that have left the worker, for drafts of later ones with the same cache salt.

How soon a request is done tells something about the texts that its drafts come from. A request therefore finds only outputs of
requests with its own salt, as in the prefix cache. The oldest outputs make room for new ones, and salts that were not used for long
make room for others. Nothing of it is needed for a token. Owned by `Speculator`. Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np

from actorllm.messages import I32, NO_I32

MAX_TOKENS = 1 << 20
"""Of all salts."""
MAX_TOKENS_OF_SALT = 1 << 16
"""A draft looks through all tokens of its salt: for so many that takes some 20 microseconds."""
MAX_TOKENS_OF_OUTPUT = 1 << 13
"""The newest of an output; the others are not kept."""
SEPARATOR = -1
"""Between two outputs. No token."""


class Texts:
    """Of one salt, one after the other."""

    __slots__ = ("_buffer", "_end", "_sizes", "_start")

    def __init__(self) -> None:
        self._buffer: I32 = NO_I32
        self._start = self._end = 0
        self._sizes: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def tokens(self) -> I32:
        """A view that is valid until the next `add`. Each output ends with a separator."""
        return self._buffer[self._start : self._end]

    def drop_first(self) -> None:
        self._start += self._sizes.popleft()

    def add(self, output: I32) -> None:
        size = output.size + 1
        while self._sizes and self._end - self._start + size > MAX_TOKENS_OF_SALT:
            self.drop_first()
        if self._end + size > self._buffer.size:
            kept = self.tokens
            grown = np.empty(max(2 * (kept.size + size), 1024), np.int32)
            grown[: kept.size] = kept
            self._buffer, self._start, self._end = grown, 0, kept.size
        self._buffer[self._end : self._end + size - 1] = output
        self._buffer[self._end + size - 1] = SEPARATOR
        self._end += size
        self._sizes.append(size)


class FinishedOutputs:
    """See the module docstring. max_requests: of all salts."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._of: OrderedDict[bytes, Texts] = OrderedDict()
        self.num_requests = 0
        self.num_tokens = 0

    def of(self, salt: bytes) -> I32:
        """All outputs of a salt, each with a separator behind it; empty: there are none."""
        texts = self._of.get(salt)
        return NO_I32 if texts is None else texts.tokens

    def add(self, salt: bytes, output: I32) -> None:
        """A request has left the worker."""
        texts = self._of.setdefault(salt, Texts())
        self._of.move_to_end(salt)
        self._count(texts, -1)
        texts.add(output[-MAX_TOKENS_OF_OUTPUT:])
        self._count(texts, 1)
        while self.num_requests > self._max_requests or self.num_tokens > MAX_TOKENS:
            oldest, texts = next(iter(self._of.items()))
            self._count(texts, -1)
            texts.drop_first()
            if len(texts):
                self._count(texts, 1)
            else:
                del self._of[oldest]

    def _count(self, texts: Texts, sign: int) -> None:
        self.num_requests += sign * len(texts)
        self.num_tokens += sign * texts.tokens.size
