"""`FlatLogprobs`: the log-probabilities of many positions in a few flat lists, as `SamplingParams(flat_logprobs=True)` asks.

It reads as a list with one mapping per position, and what it holds are numbers and strings: the garbage collector has six
lists to look at, however long an output is. Fields and behaviour are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, overload

from actorllm.request import Logprob


@dataclass
class FlatLogprobs(MutableSequence[dict[int, Logprob] | None]):
    """Of position i, the entries from start_indices[i] to end_indices[i] (exclusive) of the other four lists.

    It grows at its end; nothing in it is changed or taken out. A position without entries (None, when it was appended) is
    an empty mapping.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, value: dict[int, Logprob] | None) -> None:
        """The next position."""
        entries = value or {}
        self.append_fast(
            entries,
            [entry.logprob for entry in entries.values()],
            [entry.rank for entry in entries.values()],
            [entry.decoded_token for entry in entries.values()],
        )

    def append_fast(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """The next position, in columns; the shortest of them says how many entries it has."""
        self.start_indices.append(len(self.logprobs))
        for token_id, logprob, rank, decoded in zip(token_ids, logprobs, ranks, decoded_tokens, strict=False):
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            self.ranks.append(rank)
            self.decoded_tokens.append(decoded)
        self.end_indices.append(len(self.logprobs))

    def extend(self, values: Iterable[dict[int, Logprob] | None]) -> None:
        """Several positions."""
        for value in list(values) if values is self else values:
            self.append(value)

    def __len__(self) -> int:
        """How many positions."""
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | FlatLogprobs:
        """The mapping of a position, or several positions in flat lists of their own."""
        if isinstance(index, slice):
            return self._part(self.start_indices[index], self.end_indices[index])
        if not isinstance(index, int):
            raise TypeError(f"positions are integers or slices, not {type(index).__name__}")
        part = slice(self.start_indices[index], self.end_indices[index])
        entries = map(Logprob, self.logprobs[part], self.ranks[part], self.decoded_tokens[part])
        return dict(zip(self.token_ids[part], entries, strict=True))

    def _part(self, starts: list[int], ends: list[int]) -> FlatLogprobs:
        found = FlatLogprobs()
        for start, end in zip(starts, ends, strict=True):
            part = slice(start, end)
            found.append_fast(self.token_ids[part], self.logprobs[part], self.ranks[part], self.decoded_tokens[part])
        return found

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        return (self[position] for position in range(len(self)))

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError("FlatLogprobs grow at their end; nothing in them can be set")

    def __delitem__(self, index: Any) -> NoReturn:
        raise TypeError("FlatLogprobs grow at their end; nothing in them can be deleted")

    def insert(self, index: int, value: dict[int, Logprob] | None) -> NoReturn:
        raise TypeError("FlatLogprobs grow at their end; use append")
