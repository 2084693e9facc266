"""Log-probabilities on their way from the worker to the caller: columns in messages, spans for their readers.

A span is `count` consecutive positions of one row, each with the same number of tokens. The first token is the one that was
chosen (or that stands in the prompt); the most likely ones follow in order. Position 0 stands for the tokens that the row got in
this message. A larger one is that of the span's first token in the prompt. In a message all spans share four arrays.
`logprob_spans` has row, position, count and size for each span. `logprob_ids` and `logprobs` have count x size entries for each,
and `logprob_ranks` count for each: the rank of the first token. Empty arrays: log-probabilities were not asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import I32
from actorllm.types.flat_logprobs import FlatLogprobs
from actorllm.types.logprob import Logprob

__all__ = ("FlatLogprobs", "Logprob", "LogprobSpan", "columns_of", "joined_runs", "spans_of")

SPAN = 4
"""Integers per span."""


@dataclass(frozen=True, slots=True, eq=False)
class LogprobSpan:
    """See the module docstring."""

    row: int
    position: int
    ids: NDArray[np.int32]  # [count, size]
    values: NDArray[np.float32]  # [count, size]
    ranks: I32  # [count]

    @property
    def is_prompt(self) -> bool:
        return self.position > 0

    def part(self, start: int, stop: int | None = None) -> LogprobSpan:
        """Those of the positions."""
        position = self.position + start if self.position else 0
        part = slice(start, stop)
        return LogprobSpan(self.row, position, self.ids[part], self.values[part], self.ranks[part])

    def of_row(self, row: int, position: int | None = None) -> LogprobSpan:
        """The same of another row, and at another position if one is given."""
        return LogprobSpan(row, self.position if position is None else position, self.ids, self.values, self.ranks)

    def entries(self, texts: Sequence[str] | None) -> list[dict[int, Logprob]]:
        """One mapping per position, as users get them. texts: of every entry, in their order."""
        size = self.ids.shape[1]
        texts_of: Sequence[str | None] = [None] * self.ids.size if texts is None else texts
        found: list[dict[int, Logprob]] = []
        columns = zip(self.ids.tolist(), self.values.tolist(), self.ranks.tolist(), strict=True)
        for position, (ids, values, rank) in enumerate(columns):
            start = position * size
            ranks = [rank, *range(1, size)]
            entries = map(Logprob, values, ranks, texts_of[start : start + size])
            # The chosen token stays first, and has its place among the most likely if it is there again.
            found.append(dict(zip(ids, entries, strict=True)))
        return found


def columns_of(spans: Sequence[LogprobSpan]) -> dict[str, Any]:
    """The message fields of these spans; none for no span."""
    if not spans:
        return {}
    return {
        "logprob_spans": np.array([(s.row, s.position, *s.ids.shape) for s in spans], np.int32).reshape(-1),
        "logprob_ids": np.concatenate([s.ids.reshape(-1) for s in spans]),
        "logprobs": np.concatenate([s.values.reshape(-1) for s in spans]),
        "logprob_ranks": np.concatenate([s.ranks for s in spans]),
    }


def joined_runs(spans: Sequence[LogprobSpan]) -> list[LogprobSpan]:
    """The same with one span for all tokens of a row; those of a row come in the order of its tokens."""
    by_row: dict[int, list[LogprobSpan]] = {}
    found: list[LogprobSpan] = []
    for span in spans:
        if span.is_prompt:
            found.append(span)
        else:
            by_row.setdefault(span.row, []).append(span)
    for row, parts in by_row.items():
        ids, values, ranks = (
            np.concatenate(column) for column in zip(*((s.ids, s.values, s.ranks) for s in parts), strict=True)
        )
        found.append(LogprobSpan(row, 0, ids, values, ranks))
    return found


def spans_of(message: Any) -> list[LogprobSpan]:
    """The spans of a message. Raises ValueError when its arrays contradict each other."""
    table, ids, values, ranks = (
        message.logprob_spans,
        message.logprob_ids,
        message.logprobs,
        message.logprob_ranks,
    )
    if table.size % SPAN or ids.size != values.size:
        raise ValueError(f"logprobs: {table.size} integers for spans, {ids.size} ids and {values.size} values")
    spans: list[LogprobSpan] = []
    at = rank_at = 0
    for row, position, count, size in table.reshape(-1, SPAN).tolist():
        end, rank_end = at + count * size, rank_at + count
        if min(row, position) < 0 or min(count, size) < 1 or end > ids.size or rank_end > ranks.size:
            raise ValueError(f"logprobs: {count} x {size} values of row {row} at {position} do not fit their columns")
        shape = (count, size)
        spans.append(
            LogprobSpan(
                row, position, ids[at:end].reshape(shape), values[at:end].reshape(shape), ranks[rank_at:rank_end]
            )
        )
        at, rank_at = end, rank_end
    if at != ids.size or rank_at != ranks.size:
        raise ValueError(f"logprobs: {ids.size - at} ids and {ranks.size - rank_at} ranks belong to no span")
    return spans
