"""Steps that fail: who is at fault is found, everybody else gets the stream that he would have had."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from actorllm.messages import INVALID, StepFailed, StepPlan, StepResult
from actorllm.scheduling.policy import Admit, KeyPolicy
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.supervision.blame.memory_backoff import STEPS_BEFORE_MORE, MemoryBackoff
from actorllm.supervision.blame.step_failures import MAX_FAILURES
from tests.scheduling.chained_tokens import ScriptedWorker, reference_stream
from tests.scheduling.conftest import Engine

Fault = Callable[[list[tuple[list[int], int]], int], str | None]
"""([(tokens of a request in the step, how many of them computed before)], tokens of the step) -> the error, or None."""


class FaultyWorker(ScriptedWorker):
    """Raises where `fault` says so, before or after it has applied the plan."""

    fault: Fault
    is_lost_before = False

    def run(self, plan: StepPlan, late: Any = None) -> StepResult:
        if self.is_lost_before:
            probe = ScriptedWorker(self.block_size, self.num_blocks)
            probe.rows = copy.deepcopy(self.rows)
            probe.kv, probe.decode_of_lane = dict(self.kv), dict(self.decode_of_lane)
            probe._apply(plan)
        else:
            self._apply_once(plan)
            probe = self
        slots = [*probe.decode, *plan.prefill_slots.tolist()]
        rows = [(probe.rows[slot].tokens, probe.rows[slot].computed) for slot in slots]
        error = self.fault(rows, len(probe.decode) + int(plan.prefill_counts.sum()))
        if error is not None:
            if self.is_lost_before:
                for slot in plan.freed.tolist():  # a real worker drops them before anything can go wrong
                    self.rows.pop(slot, None)
            raise RuntimeError(error)
        if self.is_lost_before:
            self._apply_once(plan)
        return super().run(plan, late)

    def _apply_once(self, plan: StepPlan) -> None:
        super()._apply(plan)
        self._applied = plan.step

    def _apply(self, plan: StepPlan) -> None:
        if getattr(self, "_applied", 0) != plan.step:
            super()._apply(plan)


class FailingEngine(Engine):
    """Steps of it may fail; their results are StepFailed."""

    def __init__(self, fault: Fault, is_lost_before: bool = False, **overrides: Any) -> None:
        super().__init__(**overrides)
        self.worker: FaultyWorker = FaultyWorker(self.scheduler.kv.block_size, self.scheduler.kv.pool.num_blocks)
        self.worker.fault = fault
        self.worker.is_lost_before = is_lost_before
        self.has_failed = False

    def launch(self) -> StepPlan | None:
        self.now += 0.01
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.plans.append(plan)
            result: Any
            try:
                result = self.worker.run(plan) if not self.has_failed else StepFailed(step=plan.step, error="void")
            except RuntimeError as error:
                is_memory = "memory" in str(error)
                result = StepFailed(step=plan.step, error=str(error), is_out_of_memory=is_memory)
                self.has_failed = True  # what runs on top of a failed step comes to nothing
            self.results.append(result)
        self.scheduler.check_integrity()
        return plan

    def complete(self) -> None:
        result: Any = self.results.pop(0)
        self.now += 0.01
        if isinstance(result, StepFailed):
            events = self.scheduler.fail(result, self.now)
            self.has_failed = any(isinstance(other, StepFailed) and other.error != "void" for other in self.results)
            self.apply(events)
        else:
            self.apply(self.scheduler.update(result, self.now))


def prompt_of(rid: int, length: int = 5) -> list[int]:
    return [rid % 97, *(position % 97 for position in range(length - 1))]


def submit_all(engine: Engine, count: int, **overrides: Any) -> None:
    for rid in range(1, count + 1):
        engine.submit(rid, prompt_of(rid), **{"max_tokens": 6, "ignore_eos": True} | overrides)


def expect_streams(engine: Engine, rids: Sequence[int], count: int = 6) -> None:
    for rid in rids:
        assert engine.ends[rid].reason == "length", engine.ends[rid]
        assert engine.streams[rid] == reference_stream(prompt_of(rid), rid, count)


def poison(*bad: int, at: int = 0) -> Fault:
    """Fails whenever one of these requests computes its token number `at` or a later one."""

    def fault(rows: list[tuple[list[int], int]], num_tokens: int) -> str | None:
        found = [tokens[0] for tokens, _ in rows if tokens[0] in bad and len(tokens) >= 5 + at]
        return f"poisoned by {found}" if found else None

    return fault


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_lost_before", [False, True])
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("num_blocks", [128, 24])
def test_the_one_at_fault_ends_and_nobody_else(depth: int, is_lost_before: bool, at: int, num_blocks: int) -> None:
    engine = FailingEngine(
        poison(7, at=at),
        is_lost_before,
        depth=depth,
        max_num_seqs=16,
        max_num_batched_tokens=80,
        num_blocks=num_blocks,
    )
    submit_all(engine, 16)
    engine.run()
    assert engine.ends[7].reason == "error"
    assert engine.ends[7].error == "poisoned by [7]"
    assert engine.streams[7] == reference_stream(prompt_of(7), 7, at)
    expect_streams(engine, [rid for rid in range(1, 17) if rid != 7])
    statistics = engine.scheduler.statistics()
    assert statistics.num_failed_steps <= math.log2(16) + 1 + (num_blocks == 24) * 8
    assert (statistics.num_retrying, statistics.kv.num_free) == (0, num_blocks)


def test_several_at_fault_are_found(build_engine: Callable[..., Any]) -> None:
    engine = FailingEngine(poison(2, 3, 11), max_num_seqs=12, max_num_batched_tokens=80, num_blocks=128)
    submit_all(engine, 12)
    engine.run()
    assert {rid for rid, end in engine.ends.items() if end.reason == "error"} == {2, 3, 11}
    expect_streams(engine, [rid for rid in range(1, 13) if rid not in (2, 3, 11)])


def test_a_failure_that_does_not_come_again_ends_nobody() -> None:
    left = [3]

    def fault(rows: list[tuple[list[int], int]], num_tokens: int) -> str | None:
        left[0] -= 1
        return "once" if not left[0] else None

    engine = FailingEngine(fault, max_num_seqs=8, max_num_batched_tokens=80, num_blocks=128)
    submit_all(engine, 8)
    engine.run()
    expect_streams(engine, range(1, 9))


def test_who_comes_during_a_search_waits_for_its_end_and_is_served() -> None:
    engine = FailingEngine(poison(3), max_num_seqs=8, max_num_batched_tokens=80, num_blocks=128)
    submit_all(engine, 4)
    engine.launch()
    engine.complete()
    assert engine.scheduler.statistics().num_retrying == 4
    engine.submit(9, prompt_of(9), max_tokens=6, ignore_eos=True)
    engine.abort(1)
    engine.run()
    assert engine.ends[1].reason == "abort"
    assert engine.ends[3].reason == "error"
    expect_streams(engine, [2, 4, 9])


def test_a_model_that_always_fails_ends_every_request_with_its_error() -> None:
    engine = FailingEngine(lambda rows, _: "broken", max_num_seqs=16, max_num_batched_tokens=80, num_blocks=128)
    submit_all(engine, 16)
    engine.run()
    assert {end.error for end in engine.ends.values()} == {"broken"}
    assert len(engine.ends) == 16
    assert engine.scheduler.statistics().num_failed_steps <= 2 * 16


class Reluctant(KeyPolicy):
    """Admits one particular request only, and nobody beside others."""

    def admit(self, sequence: Any, view: Any) -> Admit:
        return Admit.ADMIT if not view.running() or len(view.running()) >= 2 else Admit.WAIT


@pytest.mark.parametrize("bad", [(3,), (1, 2, 3, 4)])
def test_a_policy_that_does_not_play_along_keeps_nobody_waiting_for_ever(bad: tuple[int, ...]) -> None:
    policy = KeyPlanner(Reluctant())
    engine = FailingEngine(
        poison(*bad), max_num_seqs=8, max_num_batched_tokens=80, num_blocks=128, policy=policy, depth=1
    )
    submit_all(engine, 6)
    engine.run()
    assert {rid for rid, end in engine.ends.items() if end.reason == "error"} == set(bad)
    expect_streams(engine, [rid for rid in range(1, 7) if rid not in bad])


def test_failures_in_a_row_are_bounded_whatever_is_planned() -> None:
    """Somebody whose step fails with company only is never alone at fault, and ends all the same."""

    def fault(rows: list[tuple[list[int], int]], num_tokens: int) -> str | None:
        return "only in company" if len(rows) > 1 else None

    engine = FailingEngine(fault, max_num_seqs=4, max_num_batched_tokens=80, num_blocks=128, depth=1)
    submit_all(engine, 4, max_tokens=6)
    engine.run()
    assert len(engine.ends) == 4
    assert all(end.sequence.num_failures <= MAX_FAILURES + 1 for end in engine.ends.values())
    expect_streams(engine, range(1, 5))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ends_by", ["abort", "deadline", "stop string"])
@pytest.mark.parametrize("is_memory", [False, True])
def test_who_was_beside_one_that_ended_meanwhile_is_not_at_fault(depth: int, ends_by: str, is_memory: bool) -> None:
    """The step had two requests in it, and only one is left when it turns out to have failed."""

    def fault(rows: list[tuple[list[int], int]], num_tokens: int) -> str | None:
        error = "not enough memory" if is_memory else "poisoned"
        return error if any(tokens[0] == 2 and len(tokens) == 7 for tokens, _ in rows) else None

    engine = FailingEngine(fault, depth=depth, max_num_seqs=4, max_num_batched_tokens=80, num_blocks=128)
    engine.submit(1, prompt_of(1), max_tokens=6, ignore_eos=True)
    engine.submit(2, prompt_of(2), max_tokens=6, ignore_eos=True, deadline=100.0)
    while not engine.has_failed:
        engine.launch()
        if len(engine.results) == depth and not engine.has_failed:
            engine.complete()
    scheduler = engine.scheduler
    (sequence,) = [s for s in scheduler.running() if s.key[1] == 2]
    match ends_by:
        case "abort":
            engine.abort(2)
        case "deadline":
            engine._ended(scheduler.expire(100.0))
        case "stop string":
            engine._ended(scheduler.finish([(sequence, "stop", "x")], engine.now))
    while engine.results:
        engine.complete()
    engine.run()
    expect_streams(engine, [1])
    assert engine.ends[2].reason != "error"
    assert scheduler.statistics().num_retrying == 0


def test_who_is_tried_once_more_fails_when_it_is_alone() -> None:
    engine = FailingEngine(poison(1), depth=1, max_num_seqs=4, max_num_batched_tokens=80, num_blocks=128)
    submit_all(engine, 2)
    engine.launch()
    engine.abort(2)
    engine.run()
    assert engine.ends[1].error == "poisoned by [1]"
    assert engine.scheduler.statistics().num_failed_steps == 2


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("most_rows", "most_tokens"), [(5, 1000), (100, 22), (3, 9), (1, 6)])
def test_smaller_steps_take_the_place_of_those_without_memory(depth: int, most_rows: int, most_tokens: int) -> None:
    def fault(rows: list[tuple[list[int], int]], num_tokens: int) -> str | None:
        return "not enough memory" if len(rows) > most_rows or num_tokens > most_tokens else None

    engine = FailingEngine(fault, max_num_seqs=16, max_num_batched_tokens=80, num_blocks=128, depth=depth)
    submit_all(engine, 16)
    engine.run()
    expect_streams(engine, range(1, 17))
    statistics = engine.scheduler.statistics()
    assert 0 < statistics.num_memory_failures <= 8
    assert statistics.num_retrying == 0


def test_a_request_that_has_no_memory_alone_ends() -> None:
    def fault(rows: list[tuple[list[int], int]], num_tokens: int) -> str | None:
        return "not enough memory" if any(tokens[0] == 2 for tokens, _ in rows) else None

    engine = FailingEngine(fault, max_num_seqs=4, max_num_batched_tokens=80, num_blocks=128)
    submit_all(engine, 4)
    engine.run()
    assert engine.ends[2].error == "not enough memory"
    expect_streams(engine, [1, 3, 4])


def test_a_long_prompt_goes_through_in_smaller_chunks() -> None:
    def fault(rows: list[tuple[list[int], int]], num_tokens: int) -> str | None:
        return "not enough memory" if num_tokens > 100 else None

    long = {"max_model_len": 700, "num_blocks": 200, "max_num_batched_tokens": 512}
    engine = FailingEngine(fault, **long)
    engine.submit(1, prompt_of(1, 600), max_tokens=3, ignore_eos=True)
    engine.run()
    assert engine.streams[1] == reference_stream(prompt_of(1, 600), 1, 3)
    assert engine.scheduler.statistics().num_memory_failures == 3
    engine = FailingEngine(fault, **long)
    engine.submit(1, prompt_of(1, 600), max_tokens=3, ignore_eos=True, is_chunkable=False)
    engine.submit(2, prompt_of(2, 30), max_tokens=3, ignore_eos=True)
    engine.run()
    assert engine.ends[1].reason == "error"
    assert engine.ends[2].reason == "length"


def test_a_prompt_in_one_piece_gets_through_however_small_steps_have_become() -> None:
    def fault(rows: list[tuple[list[int], int]], num_tokens: int) -> str | None:
        return "not enough memory" if len(rows) > 1 else None

    engine = FailingEngine(fault, max_num_seqs=4, max_num_batched_tokens=40, num_blocks=128)
    submit_all(engine, 2, max_tokens=2)
    engine.submit(3, prompt_of(3, 30), max_tokens=2, ignore_eos=True, is_chunkable=False)
    engine.run()
    assert engine.ends[3].reason == "length"
    assert engine.streams[3] == reference_stream(prompt_of(3, 30), 3, 2)


def test_limits_come_back_step_by_step() -> None:
    memory = MemoryBackoff(16, 2048)
    assert not memory.is_active
    memory.shrink(16, 600)
    assert (memory.max_seqs, memory.max_tokens) == (8, 300)
    memory.shrink(8, 300)
    assert (memory.max_seqs, memory.max_tokens) == (4, 150)
    for _ in range(2 * STEPS_BEFORE_MORE - 1):
        memory.on_good_step()
    assert memory.max_seqs == 4
    memory.on_good_step()
    assert (memory.max_seqs, memory.max_tokens) == (8, 300)
    for _ in range(4 * 2 * STEPS_BEFORE_MORE):
        memory.on_good_step()
    assert not memory.is_active
    memory.shrink(1, 1)
    assert (memory.max_seqs, memory.max_tokens) == (1, 1)


# What is left behind --------------------------------------------------------------------------------------------------


def test_blocks_that_a_lost_plan_was_to_clear_are_cleared_by_the_next() -> None:
    engine = Engine()
    engine.submit(1, range(6), ignore_eos=True)
    engine.submit(2, range(7, 10), ignore_eos=True)
    engine.submit(3, range(9, 12), ignore_eos=True)
    engine.launch()
    result = engine.results.pop()
    blocks = engine.scheduler.kv.tables[0, 0, : engine.scheduler.kv.num_blocks[0]].tolist()
    bad = StepResult(step=result.step, tokens=result.tokens, nonfinite_rows=np.array([0], np.int32))
    engine.apply(engine.scheduler.update(bad, engine.now))
    for _ in range(2):
        lost = engine.scheduler.schedule(engine.now)
        assert lost is not None
        assert lost.zero_blocks.tolist() == blocks
        engine.apply(engine.scheduler.fail(StepFailed(step=lost.step, error="lost"), engine.now))
    engine.run()
    assert engine.worker.zeroed == blocks
    assert engine.ends[2].error == "lost"
    assert engine.ends[3].reason == "length"


def test_a_slot_whose_release_was_lost_with_a_plan_is_free_for_a_new_request(
    build_engine: Callable[..., Any],
) -> None:
    engine = build_engine(depth=1, max_num_seqs=2)
    engine.submit(1, prompt_of(1), max_tokens=1, ignore_eos=True)
    engine.submit(2, prompt_of(2), max_tokens=6, ignore_eos=True)
    engine.launch()
    engine.complete()  # the slot of request 1 is released with the next plan
    lost = engine.scheduler.schedule(engine.now)
    assert lost.freed.size == 1
    engine.apply(engine.scheduler.fail(StepFailed(step=lost.step, error="lost"), engine.now))
    engine.submit(3, prompt_of(3), max_tokens=6, ignore_eos=True)
    engine.run()
    assert engine.ends[2].error == "lost"
    expect_streams(engine, [3])


def test_a_prompt_that_is_not_finite_ends_with_the_chunk_that_shows_it(
    build_engine: Callable[..., Any], reference: Callable[..., list[int]]
) -> None:
    """Its later chunks are not waited for: meanwhile others would find what the worker has cleared."""
    engine = build_engine(max_num_batched_tokens=8)
    engine.submit(1, range(20), ignore_eos=True)
    engine.launch()
    engine.complete()
    engine.launch()
    engine.submit(2, [*range(8), 50], ignore_eos=True)  # begins with the chunk that was good
    engine.launch()
    result = engine.results.pop(0)
    bad = StepResult(step=result.step, tokens=result.tokens, nonfinite_prefills=np.array([0], np.int32))
    engine.apply(engine.scheduler.update(bad, engine.now))
    assert "not finite" in engine.ends[1].error
    statistics = engine.scheduler.statistics()
    assert (statistics.num_corrupted_requests, statistics.num_nonfinite) == (1, 8)
    for stale in engine.results:
        engine.scheduler.update(stale, engine.now)
    engine.results.clear()
    for key in [key for key in engine.worker.kv if key[0] in set(range(40))]:
        del engine.worker.kv[key]  # all of it, as nothing of it may be read again
    engine.run()
    assert engine.streams[2] == reference([*range(8), 50], 2, 8)
    engine.submit(3, range(20), ignore_eos=True)
    engine.run()
    assert engine.streams[3] == reference(range(20), 3, 8)


def test_what_an_aborted_prompt_left_behind_is_forgotten_when_it_turns_out_not_to_be_finite(
    build_engine: Callable[..., Any], reference: Callable[..., list[int]]
) -> None:
    engine = build_engine(max_num_batched_tokens=8)
    engine.submit(1, range(20), ignore_eos=True)
    engine.launch()
    engine.complete()
    engine.launch()
    engine.abort(1)
    engine.submit(2, [*range(8), 50], ignore_eos=True)
    engine.launch()  # takes the good chunk over, which the worker clears in the step before
    result = engine.results.pop(0)
    bad = StepResult(step=result.step, tokens=result.tokens, nonfinite_prefills=np.array([0], np.int32))
    engine.apply(engine.scheduler.update(bad, engine.now))
    engine.results.clear()
    engine.worker.kv.clear()
    engine.run()
    assert engine.streams[2] == reference([*range(8), 50], 2, 8)
    assert engine.scheduler.sequence((0, 2)) is None


def test_values_that_are_not_finite_are_counted_per_request(engine: Any) -> None:
    engine.submit(1, [1, 2], ignore_eos=True)
    engine.submit(2, [3, 4], min_tokens=1, ignore_eos=True)
    engine.launch()
    result = engine.results.pop()
    bad = StepResult(
        step=result.step,
        tokens=result.tokens,
        nonfinite_rows=np.array([0, 1], np.int32),
        nonfinite_counts=np.array([42, 0], np.int32),
    )
    engine.apply(engine.scheduler.update(bad, engine.now))
    assert [engine.ends[rid].sequence.num_nonfinite for rid in (1, 2)] == [42, 0]
    statistics = engine.scheduler.statistics()
    assert (statistics.num_corrupted_requests, statistics.num_nonfinite) == (1, 42)
    assert (engine.ends[1].error, engine.ends[1].details) == ("the model's logits are not finite", None)
    assert engine.ends[2].error == "min_tokens leaves no token to choose"
    assert engine.ends[2].details == {"kind": INVALID}, "its caller's fault"
