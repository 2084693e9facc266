"""What users of the scheduler rely on: streams that do not depend on what happens around them, and honest accounts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actorllm.messages import StepFailed, StepResult
from actorllm.scheduling.policy import Budget, KeyPolicy
from actorllm.scheduling.results import ContradictionError
from actorllm.scheduling.sequence import State
from actorllm.scheduling.step_packing import KeyPlanner
from tests.scheduling.conftest import make_scheduler, make_submit

EOS = 5


def ended(engine: Any, rid: int) -> tuple[str, Any]:
    end = engine.ends[rid]
    return end.reason, end.stop_reason


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("num_blocks", [10, 14, 40])
def test_streams_do_not_depend_on_depth_chunks_or_preemption(
    build_engine: Callable[..., Any], reference: Callable[..., list[int]], depth: int, chunk: int, num_blocks: int
) -> None:
    class Chunked(KeyPolicy):
        def budget(self, view: Any) -> Budget:
            return Budget(view.limits.max_tokens, prefill_chunk=chunk)

    engine = build_engine(depth=depth, policy=KeyPlanner(Chunked()), num_blocks=num_blocks)
    prompts = {rid: list(range(10 + rid, 10 + rid + 3 * rid)) for rid in range(1, 8)}
    for rid, prompt in prompts.items():
        engine.submit(rid, prompt, max_tokens=12, ignore_eos=True)
    engine.run()
    for rid, prompt in prompts.items():
        assert engine.streams[rid] == reference(prompt, rid, 12)
        assert ended(engine, rid) == ("length", None)
    statistics = engine.scheduler.statistics()
    assert statistics.kv.num_free == num_blocks
    assert max(n for plan in engine.plans for n in [0, *plan.prefill_counts.tolist()]) <= chunk
    if num_blocks == 10:
        assert statistics.num_preemptions > 0
    if num_blocks == 40:
        assert statistics.num_preemptions == 0
    assert statistics.num_wasted_tokens == 0, "a length is known in advance and wastes nothing"


def test_eos_ends_a_request_and_wastes_at_most_one_token(
    build_engine: Callable[..., Any], reference: Callable[..., list[int]]
) -> None:
    seed = next(s for s in range(1000) if EOS in reference([1, 2], s, 6)[2:5] and EOS not in reference([1, 2], s, 2))
    expected = reference([1, 2], seed, 6)
    expected = expected[: expected.index(EOS) + 1]
    for depth, wasted in ((1, 0), (2, 1)):
        engine = build_engine(depth=depth)
        engine.submit(1, [1, 2], seed=seed, max_tokens=20)
        engine.run()
        assert engine.streams[1] == expected
        assert ended(engine, 1) == ("stop", None)
        assert engine.ends[1].sequence.num_wasted_tokens == wasted
        assert engine.scheduler.statistics().num_wasted_tokens == wasted


def test_stop_token_is_named_and_min_tokens_holds_it_off(engine: Any, reference: Callable[..., list[int]]) -> None:
    stream = reference([3], 1, 10)
    stop = stream[4]
    first = stream.index(stop)
    engine.submit(1, [3], seed=1, max_tokens=10, stop_token_ids=[stop], ignore_eos=True)
    engine.submit(2, [3], seed=1, max_tokens=10, stop_token_ids=[stop], min_tokens=first + 1, ignore_eos=True)
    engine.run()
    assert engine.streams[1] == stream[: first + 1]
    assert ended(engine, 1) == ("stop", stop)
    assert len(engine.streams[2]) > first + 1


def test_the_model_length_is_a_limit(engine: Any) -> None:
    engine.submit(1, range(35), max_tokens=1000, ignore_eos=True)
    engine.run()
    assert len(engine.streams[1]) == 5
    assert ended(engine, 1) == ("length", None)


def test_abort_frees_blocks_at_once_and_other_streams_go_on(engine: Any, reference: Callable[..., list[int]]) -> None:
    engine.submit(1, range(20, 30), max_tokens=20, ignore_eos=True)
    engine.submit(2, range(30, 36), max_tokens=20, ignore_eos=True)
    for _ in range(3):
        engine.launch()
        engine.complete()
    engine.launch()
    used = engine.scheduler.statistics().kv
    engine.abort(1)
    after = engine.scheduler.statistics().kv
    assert after.num_free > used.num_free
    assert ended(engine, 1) == ("abort", None)
    engine.submit(3, range(40, 52), max_tokens=6, ignore_eos=True)  # may take the freed blocks while the step runs
    engine.run()
    assert engine.streams[2] == reference(range(30, 36), 2, 20)
    assert engine.streams[3] == reference(range(40, 52), 3, 6)
    assert engine.scheduler.statistics().num_wasted_tokens == engine.ends[1].sequence.num_wasted_tokens == 1


def test_a_preempted_request_keeps_the_token_in_flight(
    build_engine: Callable[..., Any], reference: Callable[..., list[int]]
) -> None:
    engine = build_engine(num_blocks=10, max_num_seqs=2)
    engine.submit(1, range(16), max_tokens=20, ignore_eos=True)
    engine.submit(2, range(20, 34), max_tokens=20, ignore_eos=True)
    saw_preempted_with_step_in_flight = False
    for _ in range(200):
        while engine.scheduler.may_plan and engine.launch() is not None:
            pass
        waiting = [s for s in engine.scheduler._table.preempted if s.state is State.PREEMPTED]
        saw_preempted_with_step_in_flight |= bool(waiting)
        if not engine.results:
            break
        engine.complete()
    assert saw_preempted_with_step_in_flight
    assert engine.streams[2] == reference(range(20, 34), 2, 20)
    assert engine.ends[2].sequence.num_preemptions >= 1
    assert engine.scheduler.statistics().num_wasted_tokens == 0


def test_resubmission_continues_at_the_next_token(engine: Any, reference: Callable[..., list[int]]) -> None:
    stream = reference([7, 8, 9], 4, 10)
    engine.submit(4, [7, 8, 9], output=np.array(stream[:6], np.int32), max_tokens=10, ignore_eos=True)
    engine.run()
    assert engine.streams[4] == stream


def test_the_token_budget_holds_and_decode_goes_first(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(max_num_batched_tokens=8)
    engine.submit(1, [1, 2], max_tokens=20, ignore_eos=True)
    engine.launch()
    engine.complete()
    engine.submit(2, range(30), max_tokens=2, ignore_eos=True)
    sizes = []
    while engine.scheduler.may_plan and (plan := engine.launch()) is not None:
        sizes.append(plan.prefill_counts.tolist())
        engine.complete()
        assert len(engine.worker.decode) + sum(sizes[-1]) <= 8
        if len(engine.streams[2]):
            break
    assert sizes[:4] == [[7], [7], [7], [7]], "the running row keeps its token in every step, the prompt gets the rest"
    assert len(engine.streams[1]) == 6


def test_refused_requests_say_why(engine: Any) -> None:
    engine.submit(1, [], max_tokens=4)
    engine.submit(2, range(40), max_tokens=4)
    engine.submit(3, [1, 97], max_tokens=4)
    engine.submit(4, range(20), max_tokens=4, is_chunkable=False)
    for rid, message in ((1, "empty"), (2, "max_model_len is 40"), (3, "vocabulary of 97"), (4, "must not be chunked")):
        assert engine.ends[rid].reason == "error"
        assert message in engine.ends[rid].error
    assert engine.scheduler.statistics().num_waiting == 0


def test_submitting_twice_is_idempotent(engine: Any, reference: Callable[..., list[int]]) -> None:
    for _ in range(2):
        engine.submit(1, [1, 2, 3], ignore_eos=True)
    engine.run()
    assert engine.streams[1] == reference([1, 2, 3], 1, 8)


def test_results_of_unknown_steps_are_dropped_and_counted(engine: Any) -> None:
    engine.submit(1, [1, 2, 3], ignore_eos=True)
    engine.launch()
    before = engine.scheduler.statistics()
    for step in (0, 2, 99):
        events = engine.scheduler.update(StepResult(step=step, tokens=np.array([1], np.int32)), 1.0)
        assert not events.sequences.size
    assert engine.scheduler.statistics().num_dropped_results == before.num_dropped_results + 3
    engine.run()
    assert len(engine.streams[1]) == 8


@pytest.mark.parametrize(
    "result",
    [
        {"tokens": [1, 2]},
        {"tokens": []},
        {"tokens": [97]},
        {"tokens": [-1]},
        {"tokens": [1], "counts": [2]},
        {"tokens": [1], "counts": [1, 0]},
        {"tokens": [1, 2], "counts": [2]},
        {"tokens": [], "counts": [-1]},
        {"tokens": [1], "nonfinite_rows": [1]},
        {"tokens": [1], "nonfinite_rows": [-1]},
        {"tokens": [1], "nonfinite_prefills": [1]},
        {"tokens": [1], "nonfinite_prefills": [-1]},
        {"tokens": [1], "nonfinite_rows": [0], "nonfinite_counts": [1, 2]},
        {"tokens": [1], "vector_rows": [-1]},
        {"tokens": [1], "vector_rows": [0], "vectors": [1.0]},
        {"tokens": [1], "vectors": [1.0]},
        {"tokens": [1], "nonfinite_rows": [-5]},
        {"tokens": [1], "nonfinite_rows": [0, 0]},
        {"tokens": [1], "nonfinite_rows": [0], "nonfinite_counts": [-5]},
        {"tokens": None},
        {"tokens": [1], "counts": None},
        {"tokens": [1], "nonfinite_prefills": None},
        {"tokens": [1], "logprob_spans": None},
        {"tokens": [1], "started": "x"},
        {"tokens": [1], "started": float("nan")},
        {"tokens": [1], "ended": [1]},
    ],
    ids=str,
)
def test_a_result_that_contradicts_its_plan_changes_nothing(
    engine: Any, reference: Callable[..., list[int]], result: dict[str, list[Any]]
) -> None:
    """Nothing of it is believed; with other workers everybody gets what he would have had."""
    engine.submit(1, [1, 2, 3], ignore_eos=True)
    plan = engine.launch()
    engine.results.clear()
    engine.submit(2, [4, 5], ignore_eos=True)
    kinds = {"vectors": np.float32}
    is_scalar = {"started", "ended"}
    columns = {k: v if v is None or k in is_scalar else np.array(v, kinds.get(k, np.int32)) for k, v in result.items()}
    with pytest.raises(ContradictionError, match=f"step {plan.step}: "):
        engine.scheduler.update(StepResult(step=plan.step, **columns), engine.now)
    assert (engine.streams[1], engine.scheduler.num_in_flight) == ([], 1)
    engine.lose_workers()
    engine.run()
    assert engine.streams == {1: reference([1, 2, 3], 1, 8), 2: reference([4, 5], 2, 8)}


@pytest.mark.parametrize(
    "result",
    [
        {"vector_rows": [0], "vectors": [0.5, 0.5], "tokens": [1]},
        {"vector_rows": [0], "vectors": [0.5, 0.5], "tokens": [1], "counts": [1]},
        {"tokens": [1]},
        {"counts": [0]},
        {"counts": [0], "vector_rows": [0]},
        {"counts": [0], "vector_rows": [0], "vectors": []},
        {"counts": [0], "vector_rows": [0], "vectors": [0.5]},
        {"counts": [0], "vector_rows": [0], "vectors": [0.5, 0.5, 0.5]},
        {"counts": [0], "vector_rows": [0, 0], "vectors": [0.5, 0.5]},
        {"counts": [0], "vector_rows": [0], "vectors": [0.5, np.nan]},
        {"counts": [0], "vector_rows": [0], "vectors": [np.inf, 0.5]},
        {"counts": [0], "vector_rows": [0], "vectors": None},
    ],
    ids=str,
)
def test_a_prompt_that_is_pooled_has_one_finite_vector_and_no_token(engine: Any, result: dict[str, list[Any]]) -> None:
    engine.submit(1, [1, 2, 3], pooling="last")
    plan = engine.launch()
    engine.results.clear()
    columns = {
        k: v if v is None else np.array(v, np.float32 if k == "vectors" else np.int32) for k, v in result.items()
    }
    with pytest.raises(ContradictionError, match=f"step {plan.step}: "):
        engine.scheduler.update(StepResult(step=plan.step, **columns), engine.now)
    assert (engine.ends, engine.scheduler.num_in_flight) == ({}, 1)
    engine.lose_workers()
    engine.run()
    assert engine.vectors[1] == [1.0, 3.0]


def test_a_pooled_prompt_that_is_not_finite_ends_alone(engine: Any) -> None:
    """Its vector is there, and void."""
    engine.submit(1, [1, 2, 3], pooling="last")
    engine.submit(2, [4, 5], pooling="last")
    engine.launch()
    result = replace(
        engine.results.pop(),
        vectors=np.array([np.nan, 0.5, 0.25, 0.5], np.float32),
        nonfinite_rows=np.array([0], np.int32),
    )
    engine.apply(engine.scheduler.update(result, engine.now))
    assert engine.ends[1].error == "the model's logits are not finite"
    assert engine.vectors == {2: [0.25, 0.5]}


@pytest.mark.parametrize(
    "failure",
    [
        {"rows": np.array([99], np.int32)},
        {"rows": np.array([-1], np.int32)},
        {"rows": np.array([0, 0], np.int32)},
        {"rows": np.array([0], np.int64)},
        {"rows": None},
        {"error": None},
        {"is_out_of_memory": 1},
    ],
    ids=str,
)
def test_a_failure_that_contradicts_its_plan_changes_nothing(
    engine: Any, reference: Callable[..., list[int]], failure: dict[str, Any]
) -> None:
    engine.submit(1, [1, 2, 3], ignore_eos=True)
    plan = engine.launch()
    engine.results.clear()
    with pytest.raises(ContradictionError, match=f"step {plan.step}: "):
        engine.scheduler.fail(StepFailed(**{"step": plan.step, "error": "planted"} | failure), engine.now)
    assert (engine.ends, engine.scheduler.num_in_flight) == ({}, 1)
    assert engine.scheduler.statistics().num_failed_steps == 0
    engine.lose_workers()
    engine.run()
    assert engine.streams[1] == reference([1, 2, 3], 1, 8)


def test_a_late_result_that_no_worker_would_send_is_a_contradiction_too(engine: Any) -> None:
    """Of a step that is void: its rows are not looked at, its fields are."""
    engine.submit(1, [1, 2, 3], ignore_eos=True)
    plan = engine.launch()
    engine.results.clear()
    engine.scheduler.fail(StepFailed(step=plan.step, error="planted"), engine.now)
    with pytest.raises(ContradictionError, match=r"StepResult\.started='x'"):
        engine.scheduler.update(StepResult(step=plan.step, started="x"), engine.now)  # type: ignore[arg-type]


def test_a_failed_step_voids_the_later_ones_and_others_are_computed_again(
    engine: Any, reference: Callable[..., list[int]]
) -> None:
    for rid in (1, 2, 3):
        engine.submit(rid, [rid, rid], max_tokens=10, ignore_eos=True)
    for _ in range(3):
        engine.launch()
        engine.complete()
    first, second = engine.launch(), engine.launch()
    assert first is not None
    assert second is not None
    row = engine.worker.decode.index(0)
    victim = engine.scheduler.batch.sequences[0].key[1]
    engine.apply(
        engine.scheduler.fail(StepFailed(step=first.step, error="boom", rows=np.array([row], np.int32)), engine.now)
    )
    assert engine.ends[victim].error == "boom"
    stale = engine.results.pop()
    engine.results.clear()
    dropped = engine.scheduler.statistics().num_dropped_results
    engine.scheduler.update(stale, engine.now)
    assert engine.scheduler.statistics().num_dropped_results == dropped + 1
    engine.run()
    for rid in {1, 2, 3} - {victim}:
        assert engine.streams[rid] == reference([rid, rid], rid, 10)


def test_a_failed_step_with_no_known_culprit_ends_all_that_it_named(engine: Any) -> None:
    engine.submit(1, [1, 2], ignore_eos=True)
    plan = engine.launch()
    engine.results.clear()
    engine.apply(engine.scheduler.fail(StepFailed(step=plan.step, error="out of memory"), engine.now))
    assert engine.ends[1].error == "out of memory"
    assert engine.scheduler.statistics().num_failed_steps == 1
    assert engine.scheduler.statistics().kv.num_free == 40


def test_text_stops_end_before_the_next_schedule(engine: Any) -> None:
    engine.submit(1, [1, 2], ignore_eos=True, max_tokens=30)
    engine.launch()
    engine.complete()
    sequence = engine.scheduler.sequence((0, 1))
    engine._ended(engine.scheduler.finish([(sequence, "stop", "END")], engine.now))
    engine._ended(engine.scheduler.finish([(sequence, "stop", "END")], engine.now))
    assert ended(engine, 1) == ("stop", "END")
    assert engine.launch() is None


def test_waiting_requests_are_served_in_order_of_arrival(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(max_num_seqs=1, max_num_batched_tokens=16)
    for rid in (3, 1, 2):
        engine.submit(rid, [rid], max_tokens=2, ignore_eos=True)
    engine.run()
    assert list(engine.ends) == [3, 1, 2]


def test_nothing_is_planned_when_there_is_nothing_to_do(engine: Any) -> None:
    assert not engine.scheduler.may_plan
    assert engine.launch() is None
    engine.submit(1, [1], max_tokens=1)
    engine.launch()
    assert engine.launch() is None, "the only token is in flight"
    engine.run()
    assert engine.ends[1].reason in ("length", "stop")


def test_steady_decode_sends_no_rows_and_no_tokens(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(max_model_len=160, num_blocks=200)
    for rid in range(1, 5):
        engine.submit(rid, [rid, rid], max_tokens=40, ignore_eos=True)
    engine.run()
    steady = engine.plans[4:30]
    assert all(plan.decode_slots is None for plan in steady)
    assert sum(plan.extended_slots.size for plan in steady) <= len(steady) + 4, "a block per row and block_size steps"
    assert all(plan.new_tokens.size == 0 and plan.prefill_slots.size == 0 for plan in steady)


@pytest.mark.parametrize(
    ("arguments", "pooling", "told"),
    [
        ({"vector_size": 0}, "last", "this engine generates text and makes no vectors"),
        ({"pools_only": True}, None, "this engine makes vectors and does not generate"),
    ],
)
def test_a_request_of_the_other_kind_is_refused(arguments: dict[str, Any], pooling: str | None, told: str) -> None:
    """A program that has joined the engine may send what its front door would not."""
    end = make_scheduler(**arguments).submit(0, make_submit(1, [1, 2, 3], pooling=pooling), 0.0)
    assert end is not None
    assert end.error == told


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"pooling": "all"}, "a vector of every token needs the prompt as a whole"),
        ({"pooling": "all", "is_chunkable": False, "wide": True}, "may be more than one message holds"),
        ({"pooling": "last", "pair_start": 3}, "pair_start=3 is no place in a pooled prompt of 3 tokens"),
        ({"pair_start": 1}, "pair_start=1 is no place in a pooled prompt of 3 tokens"),
    ],
    ids=str,
)
def test_what_no_front_door_asks_of_pooling_is_refused(fields: dict[str, Any], told: str) -> None:
    size = 1 << 20 if "wide" in fields else 2
    fields = {name: value for name, value in fields.items() if name != "wide"}
    end = make_scheduler(vector_size=size).submit(0, make_submit(1, [1, 2, 3], **fields), 0.0)
    assert end is not None
    assert told in str(end.error)
