"""How much may wait: what counts, who is refused, and that nobody pays for the flood of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.scheduling.conftest import make_submit


def submit(engine: Any, rid: int, length: int = 4, frontend: int = 0, **overrides: Any) -> str | None:
    """Why it is refused, if it is."""
    end = engine.scheduler.submit(frontend, make_submit(rid, range(length), ignore_eos=True, **overrides), engine.now)
    engine.streams.setdefault(rid, [])
    engine.scheduler.check_integrity()
    if end is None:
        return None
    assert (end.reason, end.details["kind"]) == ("error", "overloaded")
    return str(end.error)


def test_without_limits_nobody_is_refused(engine: Any) -> None:
    assert [submit(engine, rid) for rid in range(500)] == [None] * 500
    assert engine.scheduler.statistics().num_waiting == 500


def test_who_finds_a_slot_does_not_wait(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(max_num_seqs=2, max_waiting_requests=3)
    refusals = [submit(engine, rid) for rid in range(7)]  # two slots are free, three may wait
    assert refusals[:5] == [None] * 5
    assert all("5 requests of at most 3 wait already" in str(refusal) for refusal in refusals[5:])
    engine.launch()
    assert engine.scheduler.statistics().num_waiting == 3
    assert submit(engine, 10) is not None, "the slots are taken"
    engine.abort(4)
    assert submit(engine, 11) is None
    engine.complete()
    engine.run()
    assert set(engine.ends) == {0, 1, 2, 3, 4, 11}
    assert engine.scheduler.statistics().num_overloaded == 3


def test_no_place_to_wait_at_all(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(max_num_seqs=1, max_waiting_requests=0)
    assert submit(engine, 1) is None
    assert submit(engine, 2) is not None
    engine.run()
    assert submit(engine, 3) is None


def test_free_slots_count_only_while_they_are_filled(build_engine: Callable[..., Any]) -> None:
    """When the cache is full, requests wait although there are slots."""
    engine = build_engine(num_blocks=10, max_num_seqs=4, max_waiting_requests=1, enable_prefix_caching=False)
    for rid in (1, 2):
        assert submit(engine, rid, length=16) is None
        engine.launch()
        engine.complete()
    assert submit(engine, 3, length=16) is None
    engine.launch()
    assert engine.scheduler.statistics().num_waiting == 1
    assert submit(engine, 4, length=16) is not None


def test_tokens_that_wait(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(max_num_seqs=1, max_waiting_tokens=20)
    assert submit(engine, 1, length=30) is None, "nothing waits: it is taken, however long"
    engine.launch()
    assert submit(engine, 2, length=12) is None
    refusal = submit(engine, 3, length=9)
    assert refusal == (
        "the engine is overloaded: 1 requests and 12 prompt tokens of at most 20 wait already; try again later, or elsewhere"
    )
    assert submit(engine, 4, length=8) is None
    assert engine.scheduler.statistics().num_waiting_tokens == 20


def test_the_sequences_of_a_request_are_taken_or_refused_together(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(max_num_seqs=1, max_waiting_requests=4)
    submit(engine, 1)
    engine.launch()
    siblings = [submit(engine, 10 + i, num_sequences=3, sample_index=i) for i in range(3)]
    assert siblings == [None] * 3
    refused = [submit(engine, 20 + i, num_sequences=2, sample_index=i) for i in range(2)]
    assert all("and this one has 2 sequences" in str(refusal) for refusal in refused)
    assert submit(engine, 30) is None, "one more has room"
    assert submit(engine, 31) is not None
    together = [submit(engine, 40 + i, num_sequences=3, sample_index=i, length=2) for i in range(3)]
    assert None not in together


def test_what_was_taken_once_is_never_refused(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(max_num_seqs=1, max_waiting_requests=0)
    submit(engine, 1, max_tokens=4)
    assert submit(engine, 2) is not None
    assert submit(engine, 3, output=np.array([7, 8], np.int32)) is None
    assert submit(engine, 4, is_resumed=True) is None
    engine.launch()
    engine.complete()
    engine.scheduler.reset_prefix_cache(engine.now, reset_running_requests=True)
    engine.scheduler.check_integrity()
    assert engine.scheduler.statistics().num_waiting == 3


@pytest.mark.parametrize("limit", [8, 9])
def test_frontends_share_the_limit(build_engine: Callable[..., Any], limit: int) -> None:
    """A flood is refused at its share; who comes later finds room for his."""
    engine = build_engine(max_num_seqs=1, max_waiting_requests=limit)
    flood = [submit(engine, rid, frontend=1) for rid in range(50)]
    assert flood.count(None) == limit + 1
    engine.launch()
    polite = [submit(engine, rid, frontend=2) for rid in range(6)]
    assert polite == [None] * 4 + [polite[4]] * 2
    assert f"4 requests of at most {limit // 2}" in str(polite[4])
    engine.scheduler.abort([(1, rid) for rid in range(10)], engine.now)
    taken = [submit(engine, 100 + rid, frontend=1) for rid in range(50)].count(None)
    assert limit // 2 <= taken <= limit // 2 + 1, "a share, and perhaps a slot"
    engine.scheduler.abort_frontend(2, engine.now)
    assert [submit(engine, 200 + rid, frontend=1) for rid in range(50)].count(None) in (
        limit - taken,
        limit - taken + 1,
    )


def test_a_limit_for_one_frontend(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(max_num_seqs=1)
    engine.scheduler.limit_frontend(1, 3)
    assert [submit(engine, rid, frontend=1) for rid in range(9)].count(None) == 4
    assert [submit(engine, rid, frontend=0) for rid in range(99)].count(None) == 99
