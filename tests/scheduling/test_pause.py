"""Pausing the scheduler: what goes on, what waits, and when it is drained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actorllm.messages import pack
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policy import Decision, KeyPolicy
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.scheduling.telemetry.recording import RecordedScheduler, replay
from tests.scheduling.conftest import Engine


def step(engine: Any) -> bool:
    engine.launch()
    if engine.results:
        engine.complete()
        return True
    return False


@pytest.mark.parametrize("depth", [1, 2])
def test_keep_leaves_everything_where_it_is(
    build_engine: Callable[..., Any], reference: Callable[..., list[int]], depth: int
) -> None:
    engine = build_engine(depth=depth, max_num_seqs=1)
    engine.submit(1, range(10), max_tokens=12, ignore_eos=True)
    engine.submit(2, range(5), ignore_eos=True)
    for _ in range(4):
        step(engine)
    engine.launch()
    assert engine.scheduler.pause("keep", engine.now) == []
    assert not engine.scheduler.is_drained, "a step is in flight"
    assert not engine.scheduler.may_plan
    engine.run()
    assert engine.scheduler.is_drained
    before = len(engine.streams[1])
    engine.submit(3, [3], ignore_eos=True)
    assert engine.launch() is None
    engine.scheduler.resume(engine.now)
    assert not engine.scheduler.is_drained
    engine.run()
    assert 0 < before < 12
    assert engine.streams[1] == reference(range(10), 1, 12)
    assert list(engine.ends) == [1, 2, 3]


def test_wait_lets_those_finish_that_have_started_also_when_they_are_preempted(
    build_engine: Callable[..., Any], reference: Callable[..., list[int]]
) -> None:
    engine = build_engine(num_blocks=10, max_num_seqs=2)
    engine.submit(1, range(16), max_tokens=20, ignore_eos=True)
    engine.submit(2, range(20, 34), max_tokens=20, ignore_eos=True)
    for _ in range(3):
        step(engine)
    engine.submit(3, [3], max_tokens=2, ignore_eos=True)
    engine.scheduler.pause("wait", engine.now)
    engine.submit(4, [4], max_tokens=2, ignore_eos=True)
    engine.run()
    assert engine.scheduler.is_drained
    assert sorted(engine.ends) == [1, 2]
    assert engine.ends[2].sequence.num_preemptions > 0
    assert engine.streams[2] == reference(range(20, 34), 2, 20)
    assert engine.scheduler.statistics().pause_state == "nothing new"
    assert engine.scheduler.statistics().num_waiting == 2
    engine.scheduler.resume(engine.now)
    engine.run()
    assert sorted(engine.ends) == [1, 2, 3, 4]
    assert engine.scheduler.statistics().num_refused_decisions == 0


def test_who_waits_for_the_end_of_a_pause_is_not_looked_at_in_every_step(
    build_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While somebody who was preempted waits for room, however many others do."""
    engine = build_engine(num_blocks=10, max_num_seqs=2)
    engine.submit(1, range(16), max_tokens=20, ignore_eos=True)
    engine.submit(2, range(20, 34), max_tokens=20, ignore_eos=True)
    for _ in range(3):
        step(engine)
    rids = range(3, 53)
    for rid in rids:
        engine.submit(rid, [rid], max_tokens=1)
    engine.scheduler.pause("wait", engine.now)
    asked: list[int] = []
    may_start = Scheduler.may_start
    monkeypatch.setattr(Scheduler, "may_start", lambda self, s: asked.append(s.key[1]) or may_start(self, s))
    engine.run()
    assert engine.ends[2].sequence.num_preemptions > 0
    assert sorted(engine.ends) == [1, 2]
    assert len(asked) < 2 * len(rids), "most of them once"
    engine.abort(30)
    engine.scheduler.resume(engine.now)
    engine.run()
    assert [rid for rid in engine.ends if rid > 2] == [30, *(rid for rid in rids if rid != 30)]


def test_abort_ends_everything_and_takes_new_requests_for_later(engine: Any) -> None:
    engine.submit(1, range(10), max_tokens=12, ignore_eos=True)
    engine.submit(2, range(10), blocked_on="x")
    for _ in range(3):
        step(engine)
    engine.launch()
    engine._ended(engine.scheduler.pause("abort", engine.now))
    assert [end.reason for end in engine.ends.values()] == ["abort", "abort"]
    engine.submit(3, range(10), ignore_eos=True)
    engine.run()
    assert engine.scheduler.is_drained
    assert engine.streams[3] == []
    engine.scheduler.resume(engine.now)
    engine.run()
    assert len(engine.streams[3]) == 8


def test_a_policy_that_admits_all_the_same_is_refused(build_engine: Callable[..., Any]) -> None:
    class Stubborn(KeyPlanner):
        """Wants everybody in, whatever it may."""

        def __init__(self) -> None:
            super().__init__(KeyPolicy())
            self.arrived: list[Any] = []

        def on_arrival(self, sequence: Any, view: Any) -> None:
            self.arrived.append(sequence)
            super().on_arrival(sequence, view)

        def plan(self, view: Any) -> Decision:
            if view.num_waiting:
                return super().plan(view)
            return Decision(prefill=[(sequence, 1) for sequence in self.arrived])

    engine = build_engine(policy=Stubborn())
    engine.scheduler.pause("wait", engine.now)
    engine.submit(1, range(5), ignore_eos=True)
    assert engine.launch() is None
    assert engine.scheduler.statistics().num_refused_decisions == 1
    engine.scheduler.abort([(0, 1)], engine.now)


def test_pauses_and_resets_are_part_of_a_recording() -> None:
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
    engine.scheduler = RecordedScheduler(sink=entries.append, policy=load_policy("priority"), **arguments)
    for rid in range(1, 7):
        engine.submit(rid, range(3 * rid + 4), max_tokens=12, ignore_eos=True, priority=-rid)
        step(engine)
    engine.scheduler.reset_prefix_cache(engine.now, reset_running_requests=True)
    step(engine)
    engine.scheduler.pause("wait", engine.now)
    engine.run()
    engine.scheduler.resume(engine.now)
    engine.run()
    fresh = Scheduler(policy=load_policy("priority"), **arguments)

    def encoded(plan: Any) -> Any:
        return [a.tobytes() for a in pack(plan)[2]]

    assert [encoded(plan) for plan in replay(entries, fresh)] == [encoded(plan) for plan in engine.plans]


def test_a_mode_that_does_not_exist(engine: Any) -> None:
    with pytest.raises(ValueError, match="'abort', 'wait', 'keep'"):
        engine.scheduler.pause("stop", 0.0)


@pytest.mark.parametrize("columns", [{"had_slot": True}, {"output": [7, 8]}])
def test_what_had_started_under_another_scheduler_is_waited_for_while_it_is_blocked(
    build_engine: Callable[..., Any], columns: dict[str, Any]
) -> None:
    """Its grammar is being made, say: the pause is not over before it has finished."""
    engine = build_engine(max_num_seqs=2)
    engine.scheduler.pause("wait", engine.now)
    if "output" in columns:
        columns = {"output": np.array(columns["output"], np.int32)}
    engine.submit(1, range(10), max_tokens=6, ignore_eos=True, blocked_on="grammar", is_resumed=True, **columns)
    engine.submit(2, range(5), max_tokens=6, ignore_eos=True, blocked_on="grammar")
    assert not engine.scheduler.is_drained
    for rid in (1, 2):
        engine.scheduler.unblock((0, rid), None, engine.now)
    assert engine.scheduler.started == [(0, 1)]
    engine.run()
    assert engine.scheduler.is_drained
    assert list(engine.ends) == [1]
    engine.scheduler.resume(engine.now)
    engine.run()
    assert list(engine.ends) == [1, 2]
