"""Prefix caching in the scheduler. The scripted worker checks every block that a request begins with against its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actorllm.messages import StepFailed, StepResult
from actorllm.messages.logit_rules import SamplingRules
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policy import Decision, KeyPolicy
from actorllm.scheduling.sequence import State
from actorllm.scheduling.step_packing import KeyPlanner
from tests.scheduling.chained_tokens import reference_stream
from tests.scheduling.conftest import Engine

PROMPT = range(20, 33)  # three full blocks and one token


def cached(engine: Any, rid: int) -> int:
    count: int = engine.ends[rid].sequence.num_cached_tokens
    return count


def statistics(engine: Any) -> Any:
    return engine.scheduler.statistics().prefix_cache


@pytest.mark.parametrize("depth", [1, 2])
def test_a_second_request_computes_the_rest_only(
    build_engine: Callable[..., Any], reference: Callable[..., list[int]], depth: int
) -> None:
    engine = build_engine(depth=depth)
    for rid in (1, 2):
        engine.submit(rid, PROMPT, ignore_eos=True)
        engine.run()
        assert engine.streams[rid] == reference(PROMPT, rid, 8)
    assert (cached(engine, 1), cached(engine, 2)) == (0, 12)
    assert [plan.prefill_counts.tolist() for plan in engine.plans if plan.prefill_counts.size] == [[13], [1]]
    assert engine.plans[-8].new["num_computed"].tolist() == [12]
    counts = statistics(engine)
    assert (counts.requests, counts.queries, counts.hits) == (2, 26, 12)
    assert counts.preempted_requests == 0


def test_one_token_is_always_computed(engine: Any, reference: Callable[..., list[int]]) -> None:
    for rid in (1, 2):
        engine.submit(rid, range(12), ignore_eos=True)
        engine.run()
        assert engine.streams[rid] == reference(range(12), rid, 8)
    assert cached(engine, 2) == 8, "the last block is computed again, for the logits of its last token"


def test_what_a_waiting_request_had_found_is_not_taken_over_once_it_is_forgotten(
    build_engine: Callable[..., Any], reference: Callable[..., list[int]]
) -> None:
    engine = build_engine(max_num_seqs=1)
    engine.submit(1, PROMPT, ignore_eos=True)
    engine.run()
    engine.submit(2, range(8), max_tokens=4, ignore_eos=True)
    engine.launch()
    engine.submit(3, PROMPT, ignore_eos=True)
    waiting = engine.scheduler.sequence((0, 3))
    assert engine.scheduler.remaining(waiting) == 1
    engine.scheduler.reset_prefix_cache(engine.now)
    assert engine.scheduler.remaining(waiting) == 13
    engine.run()
    assert cached(engine, 3) == 0
    assert engine.streams[3] == reference(PROMPT, 3, 8)


def test_equal_prompts_of_one_step_are_both_computed_and_the_next_finds_one(engine: Any) -> None:
    engine.submit(1, range(8), max_tokens=20, ignore_eos=True)
    engine.submit(2, range(8), max_tokens=20, ignore_eos=True)
    engine.launch()
    assert engine.plans[0].prefill_counts.tolist() == [8, 8]
    engine.complete()
    engine.submit(3, range(9), ignore_eos=True)
    engine.run()
    assert [cached(engine, rid) for rid in (1, 2, 3)] == [0, 0, 8]


@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_is_found_before_the_step_that_computed_it_is_reported(
    build_engine: Callable[..., Any], depth: int
) -> None:
    engine = build_engine(depth=depth, max_num_batched_tokens=32)
    engine.submit(1, PROMPT, max_tokens=20, ignore_eos=True)
    engine.launch()
    engine.submit(2, PROMPT, ignore_eos=True)
    second = engine.launch()
    if depth == 2:
        assert second.new["num_computed"].tolist() == [0]
    engine.complete()
    engine.submit(3, PROMPT, ignore_eos=True)
    engine.run()
    assert [cached(engine, rid) for rid in (2, 3)] == ([0, 12] if depth == 2 else [12, 12])


def test_chunks_are_found_as_they_are_reported(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(depth=1, prefill_chunk=6)
    engine.submit(1, PROMPT, ignore_eos=True)
    engine.launch()
    engine.complete()
    engine.submit(2, PROMPT, ignore_eos=True)
    assert engine.launch().new["num_computed"].tolist() == [4], "of six tokens one block is full"
    engine.run()


def test_of_a_failed_step_nothing_is_found(engine: Any, reference: Callable[..., list[int]]) -> None:
    engine.submit(1, PROMPT, ignore_eos=True)
    plan = engine.launch()
    engine.results.clear()
    engine.apply(engine.scheduler.fail(StepFailed(step=plan.step, error="planted"), engine.now))
    engine.submit(2, PROMPT, ignore_eos=True)
    engine.run()
    assert cached(engine, 2) == 0
    assert engine.streams[2] == reference(PROMPT, 2, 8)


def test_an_abort_in_flight_leaves_what_was_reported(engine: Any, reference: Callable[..., list[int]]) -> None:
    engine.submit(1, PROMPT, max_tokens=20, ignore_eos=True)
    engine.launch()
    engine.abort(1)
    engine.complete()
    engine.submit(2, PROMPT, max_tokens=20, ignore_eos=True)
    for _ in range(5):
        engine.launch()
        engine.complete()
    engine.launch()
    engine.abort(2)
    engine.submit(3, PROMPT, ignore_eos=True)
    engine.submit(4, [*PROMPT, *engine.streams[2]], ignore_eos=True)
    engine.run()
    assert (cached(engine, 2), cached(engine, 3)) == (0, 12)
    assert cached(engine, 4) == (13 + len(engine.streams[2]) - 1) // 4 * 4, "output that was known is found, too"
    assert engine.streams[3] == reference(PROMPT, 3, 8)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_turn_finds_prompt_and_output(
    build_engine: Callable[..., Any], reference: Callable[..., list[int]], depth: int
) -> None:
    engine = build_engine(depth=depth, max_model_len=80)
    history: list[int] = [3]
    for rid in range(1, 6):
        engine.submit(rid, history, max_tokens=9, ignore_eos=True)
        engine.run()
        assert engine.streams[rid] == reference(history, rid, 9)
        assert cached(engine, rid) == (len(history) - 2) // 4 * 4 if rid > 1 else cached(engine, rid) == 0
        history = [*history, *engine.streams[rid], rid]


def test_a_preempted_request_finds_its_own_blocks(
    build_engine: Callable[..., Any], reference: Callable[..., list[int]]
) -> None:
    class Choosy(KeyPlanner):
        victim: Any = None

        def plan(self, view: Any) -> Decision:
            if self.victim is None:
                return super().plan(view)
            victim, self.victim = self.victim, None
            return Decision(preempt=[victim])

    planner = Choosy(KeyPolicy())
    engine = build_engine(policy=planner)
    engine.submit(1, PROMPT, max_tokens=20, ignore_eos=True)
    for _ in range(9):
        engine.launch()
        engine.complete()
    engine.launch()  # a token is in flight when it has to go
    planner.victim = engine.scheduler.sequence((0, 1))
    engine.launch()
    assert engine.scheduler.sequence((0, 1)).state is State.PREEMPTED, "not before the last step that named it"
    engine.run()
    assert engine.streams[1] == reference(PROMPT, 1, 20)
    assert cached(engine, 1) == 0, "what is reported is what it found when it came"
    counts = statistics(engine)
    assert (counts.preempted_requests, counts.preempted_queries) == (1, 23)
    assert counts.preempted_hits == 20


def test_room_is_counted_without_what_it_finds(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(num_blocks=10, max_num_seqs=4, max_num_batched_tokens=32)
    engine.submit(1, range(24), max_tokens=12, ignore_eos=True)
    engine.launch()
    engine.complete()
    for rid in (2, 3):  # each would need seven blocks of the three that are left, and finds six of them
        engine.submit(rid, [*range(24), rid], max_tokens=2, ignore_eos=True)
    engine.launch()
    assert engine.scheduler.statistics().num_running == 3
    assert engine.scheduler.statistics().kv.num_free == 1
    engine.run()
    assert engine.scheduler.statistics().num_preemptions == 0


def test_a_long_prompt_waits_although_it_would_find_what_is_free(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(num_blocks=10)
    engine.submit(1, range(16), max_tokens=1)
    engine.run()
    engine.submit(2, range(40, 60), max_tokens=8, ignore_eos=True)  # six of ten blocks; four are cached
    engine.submit(3, range(20), max_tokens=4, ignore_eos=True)  # finds those four and needs two more
    engine.launch()
    assert engine.scheduler.statistics().num_running == 1
    engine.run()
    assert len(engine.streams[3]) == 4


def test_a_reset_hides_what_runs_and_what_rests(engine: Any, reference: Callable[..., list[int]]) -> None:
    engine.submit(1, range(8), max_tokens=1)
    engine.submit(2, PROMPT, max_tokens=12, ignore_eos=True)
    for _ in range(4):
        engine.launch()
        engine.complete()
    engine.launch()
    engine.scheduler.reset_prefix_cache(engine.now)
    engine.scheduler.check_integrity()
    assert engine.scheduler.statistics().kv.num_cached == 0
    engine.run()
    assert engine.streams[2] == reference(PROMPT, 2, 12)
    for rid, prompt in ((3, range(9)), (4, PROMPT)):
        engine.submit(rid, prompt, ignore_eos=True)
        engine.run()
        assert cached(engine, rid) == 0, "what ran over the reset leaves nothing behind"
    engine.submit(5, PROMPT, ignore_eos=True)
    engine.run()
    assert cached(engine, 5) == 12
    assert statistics(engine).num_resets == 1


@pytest.mark.parametrize("running", ["recompute", "keep", "abort"])
def test_blocks_of_weights_before_are_handed_out_again_before_others(
    build_engine: Callable[..., Any], reference: Callable[..., list[int]], running: Any
) -> None:
    """No request finds them any more. Kept, they would be the last to be taken, and memory that was never used be taken first."""
    engine = build_engine()
    for rid in range(1, 4):
        engine.submit(rid, range(10 * rid, 10 * rid + 9), max_tokens=1)
        engine.run()
    engine.submit(4, PROMPT, max_tokens=12, ignore_eos=True)
    for _ in range(3):
        engine.launch()
        engine.complete()
    kv = engine.scheduler.kv
    assert kv.pool.num_unkept < kv.num_free
    engine.scheduler.change_weights("others", running, engine.now)
    engine.scheduler.check_integrity()
    assert engine.scheduler.statistics().kv.num_cached == 0
    assert kv.pool.num_unkept == kv.num_free
    engine.run()
    if running != "abort":
        assert engine.streams[4] == reference(PROMPT, 4, 12)
    for rid, num_cached in ((5, 0), (6, 8)):
        engine.submit(rid, range(10, 19), ignore_eos=True)
        engine.run()
        assert engine.streams[rid] == reference(range(10, 19), rid, 8)
        assert cached(engine, rid) == num_cached


@pytest.mark.parametrize("depth", [1, 2])
def test_a_reset_can_compute_running_requests_again(
    build_engine: Callable[..., Any], reference: Callable[..., list[int]], depth: int
) -> None:
    engine = build_engine(depth=depth)
    engine.submit(1, PROMPT, max_tokens=12, ignore_eos=True)
    for _ in range(3):
        engine.launch()
        engine.complete()
    engine.launch()
    engine.scheduler.reset_prefix_cache(engine.now, reset_running_requests=True)
    engine.scheduler.check_integrity()
    engine.run()
    assert engine.streams[1] == reference(PROMPT, 1, 12)
    assert engine.ends[1].sequence.num_preemptions == 1
    assert statistics(engine).preempted_hits == 0
    engine.submit(2, PROMPT, ignore_eos=True)
    engine.run()
    assert cached(engine, 2) == 12, "computed after the reset"


def test_blocks_of_a_request_without_finite_logits_are_not_found(
    engine: Any, reference: Callable[..., list[int]]
) -> None:
    engine.submit(1, PROMPT, max_tokens=20, ignore_eos=True)
    for _ in range(3):
        engine.launch()
        engine.complete()
    engine.launch()
    engine.submit(2, PROMPT, ignore_eos=True)  # takes over in the step that is in flight when the other turns out bad
    plan = engine.launch()
    assert plan.new["num_computed"].tolist() == [12]
    good = engine.results.pop(0)
    bad = StepResult(step=good.step, tokens=good.tokens, nonfinite_rows=np.array([0], np.int32))
    engine.apply(engine.scheduler.update(bad, engine.now))
    assert "not finite" in engine.ends[1].error
    engine.results.clear()  # of a step that is void by now
    engine.run()
    assert engine.streams[2] == reference(PROMPT, 2, 8)
    engine.submit(3, PROMPT, ignore_eos=True)
    engine.run()
    assert cached(engine, 3) == 12, "of the one that was computed again"
    assert engine.scheduler.statistics().kv.num_free == 40


def test_an_ended_request_whose_last_row_turns_out_bad_is_forgotten(engine: Any) -> None:
    engine.submit(1, PROMPT, max_tokens=20, ignore_eos=True)
    for _ in range(6):
        engine.launch()
        engine.complete()
    engine.launch()
    engine.abort(1)
    good = engine.results.pop()
    bad = StepResult(step=good.step, tokens=good.tokens, nonfinite_rows=np.array([0], np.int32))
    engine.apply(engine.scheduler.update(bad, engine.now))
    engine.submit(2, [*PROMPT, *engine.streams[1]], ignore_eos=True)
    engine.run()
    assert cached(engine, 2) == 0


def test_reading_can_be_skipped_and_hashes_must_fit(engine: Any) -> None:
    engine.submit(1, PROMPT, ignore_eos=True)
    engine.run()
    engine.submit(2, PROMPT, ignore_eos=True, skip_reading_prefix_cache=True)
    engine.submit(3, PROMPT, ignore_eos=True, cache_salt="x")
    engine.submit(4, PROMPT, ignore_eos=True, is_chunkable=False)
    engine.submit(5, PROMPT, ignore_eos=True, block_hashes=np.zeros(0, np.uint8))
    engine.submit(6, PROMPT, ignore_eos=True, block_hashes=np.zeros(64, np.uint8))
    engine.run()
    assert [cached(engine, rid) for rid in (2, 3, 4, 5)] == [0, 0, 0, 0]
    assert "64 bytes of block hashes" in engine.ends[6].error
    assert statistics(engine).queries == 2 * 13, "who does not look is not counted"


def test_who_has_log_probabilities_of_a_prompt_to_tell_computes_it_and_siblings_need_not() -> None:
    rules = SamplingRules(num_prompt_logprobs=1).to_fields()
    for skips in (False, True):
        engine = Engine(max_num_seqs=1)
        engine.submit(9, PROMPT, ignore_eos=True)
        engine.run()
        engine.submit_several(1, 3, PROMPT, ignore_eos=True, rules=rules, skip_reading_prefix_cache=skips)
        engine.run()
        assert [cached(engine, rid) for rid in (1, 2, 3)] == ([0, 0, 0] if skips else [0, 12, 12])


def test_who_has_told_them_all_finds_what_it_had_computed() -> None:
    """After a preemption it has nothing more to tell."""
    engine = Engine(max_num_seqs=1, policy=load_policy("priority"))
    engine.submit(1, PROMPT, ignore_eos=True, rules=SamplingRules(num_prompt_logprobs=1).to_fields())
    for _ in range(2):
        engine.launch()
        engine.complete()
    sequence = engine.scheduler.sequence((0, 1))
    assert sequence is not None
    sequence.num_prompt_logprobs = len(PROMPT) - 1  # the scripted worker reports none
    engine.submit(2, [1], max_tokens=1, priority=-1)
    engine.run()
    assert engine.ends[1].sequence.num_preemptions == 1
    assert statistics(engine).preempted_hits == 12
    assert engine.streams[1] == reference_stream(PROMPT, 1, 8)


def test_without_caching_nothing_is_kept(build_engine: Callable[..., Any], reference: Callable[..., list[int]]) -> None:
    engine = build_engine(enable_prefix_caching=False)
    for rid in (1, 2):
        engine.submit(rid, PROMPT, ignore_eos=True)
        engine.run()
        assert engine.streams[rid] == reference(PROMPT, rid, 8)
        assert cached(engine, rid) == 0
    assert statistics(engine) is None
    assert engine.scheduler.statistics().kv.num_cached == 0


def test_simulated_output_is_not_hashed(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(depth=1, max_model_len=80)
    engine.submit(1, PROMPT, max_tokens=40, ignore_eos=True)
    engine.launch()
    engine.complete()
    assert engine.scheduler.advance(20, 1.0) == 20
    engine.abort(1)
    engine.submit(2, PROMPT, ignore_eos=True)
    assert engine.scheduler.statistics().kv.num_cached == 3
    assert engine.scheduler.schedule(2.0).new["num_computed"].tolist() == [12]


def test_a_resubmitted_request_finds_what_it_had_emitted(engine: Any, reference: Callable[..., list[int]]) -> None:
    engine.submit(1, PROMPT, max_tokens=20, ignore_eos=True)
    engine.run()
    stream = engine.streams[1]
    engine.submit(2, PROMPT, output=np.array(stream[:10], np.int32), seed=1, max_tokens=20, ignore_eos=True)
    engine.run()
    assert engine.streams[2] == stream
    assert cached(engine, 2) == 20
