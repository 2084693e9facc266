"""Log-probabilities in messages: spans go in, the same spans come out, and what users get of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from actorllm.messages.logprobs import LogprobSpan, columns_of, spans_of
from actorllm.types.logprob import Logprob


def span(row: int, position: int, count: int, size: int, seed: int = 0) -> LogprobSpan:
    rng = np.random.default_rng(seed)
    return LogprobSpan(
        row,
        position,
        rng.permutation(1000)[: count * size].reshape(count, size).astype(np.int32),
        -rng.random((count, size)).astype(np.float32),
        rng.integers(1, 50, count).astype(np.int32),
    )


def message_of(*spans: LogprobSpan) -> SimpleNamespace:
    return SimpleNamespace(**columns_of(spans))


def same(a: LogprobSpan, b: LogprobSpan) -> bool:
    return (a.row, a.position) == (b.row, b.position) and all(
        np.array_equal(x, y) for x, y in ((a.ids, b.ids), (a.values, b.values), (a.ranks, b.ranks))
    )


def test_spans_travel() -> None:
    spans = [span(0, 0, 1, 3), span(4, 17, 5, 1), span(2, 0, 2, 6)]
    found = spans_of(message_of(*spans))
    assert len(found) == 3
    assert all(same(a, b) for a, b in zip(found, spans, strict=True))
    assert columns_of([]) == {}


@pytest.mark.parametrize("column", ["logprob_spans", "logprob_ids", "logprobs", "logprob_ranks"])
@pytest.mark.parametrize("change", ["short", "long"])
def test_columns_that_contradict_each_other(column: str, change: str) -> None:
    message = message_of(span(0, 0, 1, 3), span(1, 5, 2, 2))
    values = getattr(message, column)
    setattr(message, column, values[:-1] if change == "short" else np.append(values, values[:1]))
    with pytest.raises(ValueError, match="logprobs"):
        spans_of(message)


def test_negative_counts_are_refused() -> None:
    message = message_of(span(0, 0, 2, 2))
    message.logprob_spans = np.array([0, 0, -2, -2], np.int32)
    with pytest.raises(ValueError, match="logprobs"):
        spans_of(message)


def test_the_chosen_token_is_first_and_has_its_place_among_the_most_likely() -> None:
    one = LogprobSpan(
        0,
        0,
        np.array([[7, 3, 7], [9, 4, 5]], np.int32),
        np.array([[-2, -1, -2], [-8, -1, -2]], np.float32),
        np.array([2, 40], np.int32),
    )
    inside, outside = one.entries(list("abcdef"))
    assert list(inside.items()) == [(7, Logprob(-2.0, 2, "c")), (3, Logprob(-1.0, 1, "b"))]
    assert list(outside.items()) == [
        (9, Logprob(-8.0, 40, "d")),
        (4, Logprob(-1.0, 1, "e")),
        (5, Logprob(-2.0, 2, "f")),
    ]
    assert [entry.decoded_token for entry in one.entries(None)[0].values()] == [None, None]


def test_parts_of_prompts_know_where_they_are() -> None:
    assert span(0, 17, 5, 2).part(2).position == 19
    assert span(0, 17, 5, 2).part(2).ranks.size == 3
    assert span(0, 0, 5, 2).part(0, 2).position == 0
