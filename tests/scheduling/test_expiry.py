"""Requests with a deadline: where they end, what they keep, and what is remembered of those that ended before."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from actorllm.messages import pack
from actorllm.scheduling.expiry import MIN_ENTRIES
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.telemetry.recording import RecordedScheduler, replay


def expire(engine: Any, now: float) -> list[int]:
    """Whose deadline has passed by then."""
    engine.now = now
    ends = engine.scheduler.expire(now)
    engine._ended(ends)
    engine.scheduler.check_integrity()
    assert all((end.reason, end.stop_reason, end.error) == ("abort", "deadline", None) for end in ends)
    return [end.sequence.key[1] for end in ends]


def test_wherever_a_request_is_it_ends_and_its_blocks_are_free(
    build_engine: Callable[..., Any], reference: Callable[..., list[int]]
) -> None:
    engine = build_engine(max_num_seqs=2)
    engine.submit(1, range(10), max_tokens=12, ignore_eos=True, deadline=5.0)
    engine.submit(2, range(20, 28), max_tokens=12, ignore_eos=True)
    for _ in range(3):
        engine.launch()
        engine.complete()
    engine.submit(3, range(4), deadline=4.0)  # waits for a slot
    engine.submit(4, range(4), deadline=6.0, blocked_on="x")
    engine.submit(5, range(4), max_tokens=2, ignore_eos=True)
    engine.launch()  # a step is in flight that names the first
    assert engine.scheduler.expires_at == 4.0
    assert expire(engine, 3.9) == []
    assert expire(engine, 10.0) == [3, 1, 4], "the earliest first"
    assert engine.scheduler.expires_at == math.inf
    engine.run()
    had = engine.streams[1]
    assert had == reference(range(10), 1, 12)[: len(had)]
    assert had
    assert engine.streams[2] == reference(range(20, 28), 2, 12)
    assert engine.ends[5].reason == "length"
    kv = engine.scheduler.kv.statistics()
    assert kv.num_free == kv.num_blocks


def test_a_preempted_request_ends_at_its_deadline(build_engine: Callable[..., Any]) -> None:
    engine = build_engine()
    engine.submit(1, range(10), max_tokens=12, ignore_eos=True, deadline=5.0)
    engine.launch()
    engine.complete()
    engine.launch()
    engine.scheduler.reset_prefix_cache(engine.now, reset_running_requests=True)
    assert engine.scheduler.statistics().num_waiting == 1
    assert expire(engine, 6.0) == [1]
    engine.run()
    assert engine.scheduler.statistics().num_dropped_results == 0


def test_who_comes_too_late_is_told_at_once(engine: Any) -> None:
    engine.now = 5.0
    engine.submit(1, range(4), deadline=5.0)
    assert (engine.ends[1].reason, engine.ends[1].stop_reason) == ("abort", "deadline")
    assert engine.scheduler.expires_at == math.inf
    engine.submit(2, range(4), deadline=5.5, max_tokens=2, ignore_eos=True)
    engine.run()
    assert engine.ends[2].reason == "length"
    assert expire(engine, 6.0) == [], "it has ended by itself"


def test_requests_that_ended_early_are_forgotten_long_before_their_deadline(engine: Any) -> None:
    for rid in range(20 * MIN_ENTRIES):
        engine.submit(rid, [1, 2], deadline=1e9 + rid)
        engine.abort(rid)
    assert len(engine.scheduler._expiry._entries) <= MIN_ENTRIES
    assert expire(engine, 2e9) == []


def test_deadlines_are_part_of_a_recording() -> None:
    from tests.scheduling.conftest import Engine

    arguments: dict[str, Any] = {
        "num_blocks": 12,
        "block_size": 4,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "max_model_len": 40,
        "vocab_size": 97,
        "eos_token_ids": (5,),
    }
    entries: list[Any] = []
    engine = Engine()
    engine.scheduler = RecordedScheduler(sink=entries.append, policy=load_policy("fcfs"), **arguments)
    for rid in range(1, 5):
        engine.submit(rid, range(3 * rid + 4), max_tokens=12, ignore_eos=True, deadline=0.03 * rid)
        engine.launch()
        engine.complete()
        expire(engine, engine.now)
    engine.run()
    assert {end.stop_reason for end in engine.ends.values()} == {"deadline", None}
    plans = [[a.tobytes() for a in pack(plan)[2]] for plan in engine.plans]
    replayed = replay(entries, Scheduler(policy=load_policy("fcfs"), **arguments))
    assert [[a.tobytes() for a in pack(plan)[2]] for plan in replayed] == plans


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_a_paused_scheduler_keeps_deadlines(engine: Any, mode: str) -> None:
    engine.submit(1, range(4), ignore_eos=True, deadline=1.0)
    engine.launch()
    engine.scheduler.pause(mode, engine.now)
    engine.submit(2, range(4), ignore_eos=True, deadline=2.0)
    assert expire(engine, 3.0) == [1, 2]
    engine.run()
