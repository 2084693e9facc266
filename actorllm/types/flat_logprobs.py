"""`FlatLogprobs`: the log-probabilities of many positions in a few flat lists, as `SamplingParams(flat_logprobs=True)` asks.

It reads as a list with one mapping per position, and holds numbers and strings only. So the garbage collector has six lists to
look at, however long an output is. Fields and behaviour are vLLM's.

The beginning of one (`flat[:n]`) is made without a copy. It is copied when its fields are read or something is appended to it.
Every output of a stream holds everything so far, and most consumers look at the end of it only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, overload

from actorllm.types.logprob import Logprob

FIELDS = frozenset(("start_indices", "end_indices", "token_ids", "logprobs", "ranks", "decoded_tokens"))


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
        """The next position.

        Arguments:
            value: its entries by token id; None: it has none.
        """
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
        """The next position, in columns; the shortest of them says how many entries it has.

        Arguments:
            token_ids, logprobs, ranks, decoded_tokens: the entries.
        """
        self.start_indices.append(len(self.logprobs))
        for token_id, logprob, rank, decoded in zip(token_ids, logprobs, ranks, decoded_tokens, strict=False):
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            self.ranks.append(rank)
            self.decoded_tokens.append(decoded)
        self.end_indices.append(len(self.logprobs))

    def extend(self, values: Iterable[dict[int, Logprob] | None]) -> None:
        """Several positions.

        Arguments:
            values: as in `append`.
        """
        for value in list(values) if values is self else values:
            self.append(value)

    def __getattr__(self, name: str) -> list[Any]:
        """A field that is not there: that of a beginning which was not read yet."""
        beginning = self.__dict__.get("_beginning") if name in FIELDS else None
        if beginning is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        whole, count = beginning
        self.__dict__.update(vars(whole._between(0, count)))
        self.__dict__.pop("_beginning", None)
        found: list[Any] = self.__dict__[name]
        return found

    def __len__(self) -> int:
        """How many positions."""
        beginning = self.__dict__.get("_beginning")
        return beginning[1] if beginning is not None else len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | FlatLogprobs:
        """The mapping of a position, or several positions in flat lists of their own."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return self._part(self.start_indices[index], self.end_indices[index])
            return self._between(start, stop) if start else self._first(stop)
        if not isinstance(index, int):
            raise TypeError(f"positions are integers or slices, not {type(index).__name__}")
        beginning = self.__dict__.get("_beginning")
        if beginning is not None:
            whole, count = beginning
            if not -count <= index < count:
                raise IndexError(f"position {index} of {count}")
            found: dict[int, Logprob] = whole[index % count]
            return found
        part = slice(self.start_indices[index], self.end_indices[index])
        entries = map(Logprob, self.logprobs[part], self.ranks[part], self.decoded_tokens[part])
        return dict(zip(self.token_ids[part], entries, strict=True))

    def _first(self, count: int) -> FlatLogprobs:
        """The beginning. What it is of grows at its end only, so that it stays what it is."""
        found = object.__new__(FlatLogprobs)
        found.__dict__["_beginning"] = self, count
        return found

    def _between(self, first: int, last: int) -> FlatLogprobs:
        """A copy of the positions [first, last)."""
        if first >= last:
            return FlatLogprobs()
        low, high = self.start_indices[first], self.end_indices[last - 1]
        return FlatLogprobs(
            [start - low for start in self.start_indices[first:last]],
            [end - low for end in self.end_indices[first:last]],
            self.token_ids[low:high],
            self.logprobs[low:high],
            self.ranks[low:high],
            self.decoded_tokens[low:high],
        )

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
        """Refused: it grows at its end only.

        Arguments:
            index, value: of a list that could.

        Raises TypeError.
        """
        raise TypeError("FlatLogprobs grow at their end; use append")
