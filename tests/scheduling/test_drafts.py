"""Rows that check drafts: whatever the drafts are, a stream is that of its request, and ends where it would have."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorllm.messages import StepResult, pack
from actorllm.scheduling.draft_budget import DraftBudget
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.results import NEAR, ContradictionError
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.telemetry.recording import RecordedScheduler, replay
from tests.effort import examples
from tests.scheduling.chained_tokens import EOS, SIBLING, reference_stream
from tests.scheduling.conftest import Engine

ALL = ((1, 100, 15),)


def drafting(dice: random.Random, most: int, depth: int = 2, **more: Any) -> Engine:
    """An engine whose worker drafts as the dice say."""
    arguments: dict[str, Any] = {
        "depth": depth,
        "block_size": 16,
        "num_lookahead_tokens": most,
        "draft_ranges": ALL,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
    }
    engine = Engine(**(arguments | more))
    engine.worker.drafts_per_row = lambda slot, index: (dice.randint(0, 2 * most), dice.randint(0, 2 * most))
    return engine


def expected_of(seed: int, prompt: list[int], most: int, *, ignore_eos: bool) -> list[int]:
    stream = reference_stream(prompt, seed, min(most, 64 - len(prompt)))
    return stream if ignore_eos or EOS not in stream else stream[: stream.index(EOS) + 1]


@settings(max_examples=examples(25, 300), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 7]), st.sampled_from([1, 2]), st.sampled_from([13, 16, 60]))
def test_streams_do_not_depend_on_drafts(seed: int, most: int, depth: int, num_blocks: int) -> None:
    """With preemptions, forks, aborts, deadlines and lost workers in the middle."""
    dice = random.Random(seed)
    engine = drafting(dice, most, depth, num_blocks=num_blocks, max_num_seqs=dice.randint(1, 6))
    requests: dict[int, tuple[int, list[int], int, bool]] = {}
    for first in range(1, 28, 3):
        prompt = [dice.randrange(97) for _ in range(dice.randint(1, 40))]
        number, ignore_eos = dice.randint(1, 40), dice.random() < 0.5
        arguments: dict[str, Any] = {"max_tokens": number, "ignore_eos": ignore_eos}
        if dice.random() < 0.2:
            arguments["deadline"] = dice.uniform(0.01, 1.0)
        rids = [first]
        if dice.random() < 0.3:
            rids = engine.submit_several(first, 3, prompt, **arguments)
        else:
            engine.submit(first, prompt, **arguments)
        requests |= {rid: (first + SIBLING * i, prompt, number, ignore_eos) for i, rid in enumerate(rids)}
    aborted = set()
    for _ in range(400):
        while engine.scheduler.may_plan and engine.launch() is not None:
            pass
        if not engine.results:
            break
        event = dice.random()
        if event < 0.01:
            drafts = engine.worker.drafts_per_row
            engine.lose_workers()
            engine.worker.drafts_per_row = drafts
        elif event < 0.05:
            rid = dice.choice(list(requests))
            aborted.add(rid)
            engine.abort(rid)
        else:
            engine.complete()
        engine._ended(engine.scheduler.expire(engine.now))
    engine.run()
    for rid, (stream_seed, prompt, most_tokens, ignore_eos) in requests.items():
        expected = expected_of(stream_seed, prompt, most_tokens, ignore_eos=ignore_eos)
        end = engine.ends[rid]
        if end.reason in ("abort", "error"):  # or the workers died of it, as far as the scheduler can tell
            assert rid in aborted or end.stop_reason == "deadline" or "workers" in str(end.error)
            assert engine.streams[rid] == expected[: len(engine.streams[rid])]
        else:
            assert engine.streams[rid] == expected
            assert end.reason == ("stop" if expected[-1] == EOS and not ignore_eos else "length")
    statistics = engine.scheduler.statistics()
    assert statistics.kv.num_free == num_blocks
    assert statistics.speculation is not None


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("most", [1, 3, 7])
def test_right_drafts_save_steps(most: int, depth: int) -> None:
    steps = []
    for right in (0, most):
        engine = drafting(random.Random(0), most, depth)
        engine.worker.drafts_per_row = lambda slot, index, right=right: (most, right)  # type: ignore[misc]
        for rid in (1, 2):
            engine.submit(rid, [rid, 3], max_tokens=32, ignore_eos=True)
        engine.run()
        for rid in (1, 2):
            assert engine.streams[rid] == reference_stream([rid, 3], rid, 32)
        steps.append(engine.scheduler.statistics().num_steps)
    assert steps[1] <= 1 + -(-31 // (1 + most)) + (depth - 1)
    assert steps[0] >= 32


def test_rows_that_were_far_from_their_limits_end_there() -> None:
    """They are not looked at in each step before."""
    engine = drafting(random.Random(3), 7, max_model_len=600, num_blocks=120)
    for rid, most in ((1, 300), (2, 411), (3, 290)):
        engine.submit(rid, [rid, 3], max_tokens=most, ignore_eos=True)
    engine.run()
    assert NEAR < 290
    for rid, most in ((1, 300), (2, 411), (3, 290)):
        assert engine.streams[rid] == reference_stream([rid, 3], rid, most)
        assert engine.ends[rid].reason == "length"


def test_a_cached_prefix_has_nothing_of_wrong_drafts() -> None:
    """The scripted worker holds the KV of each hit against its tokens."""
    engine = drafting(random.Random(1), 3, num_blocks=30)
    prompt = list(range(20))
    for rid in range(1, 7):
        engine.submit(rid, prompt, max_tokens=7, ignore_eos=True)
        engine.run()
        prompt += engine.streams[rid]
    statistics = engine.scheduler.statistics()
    assert statistics.prefix_cache is not None
    assert statistics.prefix_cache.hits == sum((20 + 7 * n - 1) // 16 * 16 for n in range(1, 6))
    assert statistics.speculation is not None
    assert statistics.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_what_lies_behind_the_end_is_cut_off_and_counted(max_tokens: int) -> None:
    engine = drafting(random.Random(0), 7, depth=1)
    engine.worker.drafts_per_row = lambda slot, index: (7, 7)
    engine.submit(1, [1, 2], max_tokens=max_tokens, ignore_eos=True)
    engine.run()
    assert engine.streams[1] == reference_stream([1, 2], 1, max_tokens)
    assert engine.ends[1].reason == "length"
    sampled = 1 if max_tokens == 1 else 9 if max_tokens <= 9 else 17
    assert engine.ends[1].sequence.num_wasted_tokens == sampled - max_tokens
    assert engine.scheduler.statistics().num_output_tokens == max_tokens


@pytest.mark.parametrize("stop_at", range(3, 9))
def test_a_stop_id_within_a_run_ends_it(stop_at: int) -> None:
    stream = reference_stream([1, 2], 1, 20)
    stop = stream[stop_at]
    first = stream.index(stop)
    engine = drafting(random.Random(0), 7, depth=1)
    engine.worker.drafts_per_row = lambda slot, index: (7, 7)
    engine.submit(1, [1, 2], max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    engine.submit(2, [1, 3], max_tokens=20, ignore_eos=True)
    engine.run()
    assert engine.streams[1] == stream[: first + 1]
    assert (engine.ends[1].reason, engine.ends[1].stop_reason) == ("stop", stop)
    assert engine.streams[2] == reference_stream([1, 3], 2, 20)


def test_statistics_count_drafts_by_position() -> None:
    engine = drafting(random.Random(0), 3, depth=1)
    script = iter([(3, 3), (3, 1), (2, 0), (0, 0), (3, 2)])
    engine.worker.drafts_per_row = lambda slot, index: next(script)
    engine.submit(1, [1, 2], max_tokens=12, ignore_eos=True)
    engine.run()
    found = engine.scheduler.statistics().speculation
    assert found is not None
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (4, 11, 6)
    assert found.num_accepted_tokens_per_pos == (3, 2, 1)
    assert engine.ends[1].sequence.accepted_per_position == (3, 2, 1)
    assert Engine().scheduler.statistics().speculation is None


def test_a_request_has_positions_once_it_has_left_a_slot_with_or_without_drafts_of_its_own() -> None:
    engine = drafting(random.Random(1), 3, depth=1, max_num_seqs=1)
    engine.worker.drafts_per_row = lambda slot, index: (0, 0)
    for rid in (1, 2):
        engine.submit(rid, [rid, 2], max_tokens=4, ignore_eos=True)
    engine.launch()
    engine.complete()
    engine.abort(2)
    assert engine.scheduler.sequence((0, 1)).accepted_per_position == ()
    engine.run()
    assert engine.ends[1].sequence.accepted_per_position == (0, 0, 0)
    assert engine.ends[2].sequence.accepted_per_position == (), "it had no slot"
    plain = Engine()
    plain.submit(1, [1, 2], max_tokens=4, ignore_eos=True)
    plain.run()
    assert plain.ends[1].sequence.accepted_per_position == ()


def test_prompts_go_before_drafts() -> None:
    engine = drafting(random.Random(0), 3, max_num_batched_tokens=20, num_blocks=40, depth=1)
    engine.worker.drafts_per_row = lambda slot, index: (3, 3)
    for rid in (1, 2):
        engine.submit(rid, [rid], max_tokens=30, ignore_eos=True)
    engine.launch()
    engine.complete()
    engine.submit(3, range(30), max_tokens=2)
    plan = engine.launch()
    assert plan is not None
    assert (plan.prefill_counts.tolist(), plan.max_drafts) == ([18], 0)
    engine.complete()
    plan = engine.launch()
    assert plan is not None
    assert (plan.prefill_counts.tolist(), plan.max_drafts) == ([12], 3)
    record = engine.scheduler.ledger.newest
    assert (record.num_tokens, record.num_decode, record.max_drafts) == (14, 2, 3)


def test_models_of_step_times_see_a_draft_as_a_row() -> None:
    """A step of 2 rows with 6 drafts is no slow step of 2 rows."""
    from actorllm.scheduling.policy import StepDone
    from actorllm.scheduling.step_time import Pace

    scheduler = drafting(random.Random(0), 3).scheduler
    slots = np.arange(2, dtype=np.int32)
    pace = Pace()
    for number in range(60):
        drafts = 6 * (number % 2)
        ended = 0.001 + 0.0005 * (2 + drafts)
        pace.on_step(StepDone(number, slots, 0, 0.0, 0.0, ended, np.array([drafts], np.int32)), scheduler)
    assert pace.step_time.seconds(0, 2, 0) == pytest.approx(0.002, rel=0.01)
    assert pace.step_time.seconds(0, 8, 0) == pytest.approx(0.005, rel=0.01)


def test_steps_are_planned_with_the_drafts_that_they_will_have() -> None:
    """By those of the last steps: a budget until some point in time is for prompts, rows and drafts together."""
    from actorllm.scheduling.policy import StepDone
    from actorllm.scheduling.step_time import Pace

    class Milliseconds:
        def seconds(self, p: float, d: float, *context: float) -> float:
            return 1e-3 * (p + d)

    slots = np.arange(40, dtype=np.int32)
    batch = SimpleNamespace(num_computed=np.zeros(40, np.int32))
    limits = SimpleNamespace(max_tokens=512)
    view: Any = SimpleNamespace(decode_slots=slots, batch=batch, prefilling=(), limits=limits, num_in_flight=0, now=0.0)
    pace = Pace(Milliseconds(), safety=1.0)
    assert pace.largest(view, until=0.3) == 256
    for number in range(60):
        pace.on_step(StepDone(number, slots, 0, 0.0, 0.0, 0.2, np.full(40, 3, np.int32)), view)
    assert pace.largest(view, until=0.3) == 128
    for number in range(60):
        pace.on_step(StepDone(number, slots, 0, 0.0, 0.0, 0.2), view)
    assert pace.largest(view, until=0.3) == 256


@pytest.mark.parametrize(
    ("num_rows", "room", "expected"),
    [(1, 100, 3), (2, 100, 3), (3, 100, 1), (4, 100, 1), (5, 100, 0), (0, 100, 0), (2, 5, 2), (2, 1, 0), (2, -4, 0)],
)
def test_the_budget_goes_by_rows_and_room(num_rows: int, room: int, expected: int) -> None:
    assert DraftBudget(((1, 2, 7), (3, 4, 1)), 3).most(num_rows, room) == expected


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"num_drafted": [1]}, "drafts of 1 rows for a plan of 2"),
        ({"num_drafted": [4, 0]}, "4 drafts of one row in a plan of 3 at most"),
        ({"num_drafted": [1, 0], "counts": [3, 1], "tokens": [1] * 4}, "3 tokens of row 0, which had 1 drafts"),
    ],
)
def test_results_that_cannot_be_are_not_believed(columns: dict[str, list[int]], message: str) -> None:
    engine = drafting(random.Random(0), 3, depth=1)
    for rid in (1, 2):
        engine.submit(rid, [rid], max_tokens=30, ignore_eos=True)
    engine.launch()
    engine.complete()
    engine.launch()
    step = engine.results.pop().step
    made = {"tokens": [1, 1]} | columns
    result = StepResult(step=step, **{name: np.array(column, np.int32) for name, column in made.items()})
    with pytest.raises(ContradictionError, match=message):
        engine.scheduler.update(result, 1.0)


def test_both_ways_to_append_runs_agree(monkeypatch: pytest.MonkeyPatch, build_engine: Callable[..., Any]) -> None:
    """The path by column and the one by row."""
    from actorllm.scheduling.results import Results

    def run() -> tuple[Any, Any, Any]:
        engine = drafting(random.Random(5), 7, num_blocks=60, max_num_seqs=6)
        for rid in range(1, 20):
            engine.submit(rid, [rid, 2], max_tokens=3 * rid, ignore_eos=rid % 2 == 0)
        engine.run()
        statistics = engine.scheduler.statistics()
        return engine.streams, statistics, {rid: end.sequence.num_wasted_tokens for rid, end in engine.ends.items()}

    by_column = run()
    monkeypatch.setattr(Results, "_append_runs", lambda self, record, *rest: self._append_rows(record, self.result))
    apply = Results.apply

    def keeping(self: Any, result: Any, *rest: Any) -> Any:
        self.result = result
        return apply(self, result, *rest)

    monkeypatch.setattr(Results, "apply", keeping)
    assert run() == by_column


def test_a_recording_with_drafts_replays_to_the_same_plans() -> None:
    arguments: dict[str, Any] = {
        "num_blocks": 13,
        "block_size": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "vocab_size": 97,
        "eos_token_ids": (5,),
        "num_lookahead_tokens": 7,
        "draft_ranges": ALL,
    }
    entries: list[Any] = []
    engine = drafting(random.Random(3), 7, num_blocks=13)
    engine.scheduler = RecordedScheduler(sink=entries.append, policy=load_policy("fcfs"), **arguments)
    for rid in range(1, 9):
        engine.submit(rid, range(rid, rid + 2 * rid), max_tokens=40, ignore_eos=True)
    engine.run()
    assert any(plan.max_drafts for plan in engine.plans)

    def encoded(plan: Any) -> Any:
        kind, scalars, arrays = pack(plan)
        return kind, scalars, [a.tobytes() for a in arrays]

    fresh = Scheduler(policy=load_policy("fcfs"), **arguments)
    assert [encoded(p) for p in replay(entries, fresh)] == [encoded(p) for p in engine.plans]
