"""Several sequences of one prompt: it is computed once, and whoever does not fit as a fork is served like any request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actorllm.messages import StepFailed, StepResult, Submit, sequences_of
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policy import Admit, KeyPolicy
from actorllm.scheduling.sequence import State
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.scheduling.telemetry.recording import Entry, RecordedScheduler, replay
from tests.scheduling.chained_tokens import SIBLING, reference_stream
from tests.scheduling.conftest import Engine, make_scheduler, make_submit

PROMPT = range(20, 30)  # two full blocks and two tokens
BOUNDARY = range(20, 32)


def check(engine: Engine, rids: list[int], prompt: Any, count: int = 8) -> None:
    for i, rid in enumerate(rids):
        assert engine.streams[rid] == reference_stream(prompt, rids[0] + SIBLING * i, count), f"sequence {i}"


def statistics(engine: Engine) -> tuple[int, int]:
    """Prompt tokens computed, and forks."""
    found = engine.scheduler.statistics()
    return found.num_prefill_tokens, found.num_forks


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("prompt", [PROMPT, BOUNDARY, range(3), [7]])
@pytest.mark.parametrize("chunk", [None, 3, 4])
def test_the_prompt_is_computed_once(depth: int, caching: bool, prompt: Any, chunk: int | None) -> None:
    engine = Engine(depth=depth, enable_prefix_caching=caching, prefill_chunk=chunk)
    rids = engine.submit_several(1, 4, prompt, ignore_eos=True)
    engine.run()
    check(engine, rids, prompt)
    assert statistics(engine) == (len(prompt), 3)
    assert [(slot, source) for _, slot, source in engine.worker.shared] == [(1, 0), (2, 0), (3, 0)]
    assert len({step for step, _, _ in engine.worker.shared}) == 1, "all of them in the step in which the prompt ends"
    assert len(engine.worker.copied) == (3 if len(prompt) % 4 else 0), "the block that it ends in, once for each"
    assert engine.scheduler.statistics().kv.num_free == 40


def test_full_blocks_are_shared_and_the_last_one_is_copied_with_the_next_plan() -> None:
    engine = Engine()
    engine.submit_several(1, 3, PROMPT, ignore_eos=True)
    first, second = engine.launch(), engine.launch()
    assert first is not None
    assert second is not None
    assert first.prefill_counts.tolist() == [10]
    assert first.new["source"].tolist() == [-1, 0, 0]
    tables = engine.scheduler.kv.tables[0, :3]
    assert (tables[:, :2] == tables[0, :2]).all()
    assert np.unique(tables[:, 2]).size == 3
    assert first.copy_sources.size == 0, "it is not written yet"
    assert second.copy_sources.tolist() == [tables[0, 2]] * 2
    assert second.copy_targets.tolist() == tables[1:, 2].tolist()
    assert engine.scheduler.statistics().kv.num_free == 40 - 2 - 3
    engine.complete()
    assert [len(engine.streams[rid]) for rid in (1, 2, 3)] == [1, 1, 1], "all first tokens come with one result"


def test_each_sequence_has_its_own_limits() -> None:
    engine = Engine()
    engine.submit(1, PROMPT, ignore_eos=True)
    engine.submit(2, PROMPT, ignore_eos=True, max_tokens=1, fork_of=1)
    engine.submit(3, PROMPT, ignore_eos=True, max_tokens=20, fork_of=1)
    engine.run()
    for rid, count in ((1, 8), (2, 1), (3, 20)):
        assert engine.streams[rid] == reference_stream(PROMPT, rid, count)
        assert engine.ends[rid].reason == "length"
    assert statistics(engine) == (10, 2)


def test_no_more_forks_than_slots_and_blocks() -> None:
    """The others wait like any other request, and find the full blocks."""
    engine = Engine(max_num_seqs=3)
    rids = engine.submit_several(1, 8, PROMPT, ignore_eos=True)
    engine.run()
    check(engine, rids, PROMPT)
    assert statistics(engine) == (10 + 5 * 2, 2)
    few_blocks = Engine(num_blocks=10, max_num_batched_tokens=40)
    rids = few_blocks.submit_several(1, 4, range(18), ignore_eos=True)
    few_blocks.launch()
    assert [sequence.key[1] for sequence in few_blocks.scheduler.running()] == [1, 2, 3, 4]
    assert few_blocks.scheduler.statistics().kv.num_free == 10 - 4 - 4
    few_blocks.run()
    check(few_blocks, rids, range(18))


def test_nobody_who_comes_later_takes_their_slots() -> None:
    """Not in the step that computes the prompt, and not while a long one is computed."""
    engine = Engine(max_num_seqs=8, num_blocks=200, max_num_batched_tokens=64)
    rids = [engine.submit_several(1 + 10 * i, 4, [i, *PROMPT], ignore_eos=True) for i in range(8)]
    engine.launch()
    assert sorted(sequence.key[1] for sequence in engine.scheduler.running()) == [*rids[0], *rids[1]]
    engine.run()
    assert statistics(engine) == (8 * (len(PROMPT) + 1), 8 * 3)
    slow = Engine(max_num_seqs=4, num_blocks=200, max_num_batched_tokens=16)
    first = slow.submit_several(1, 4, range(28), ignore_eos=True)
    for rid in range(11, 17):
        slow.submit(rid, range(rid, rid + 5), ignore_eos=True)
    slow.run()
    check(slow, first, range(28))
    assert slow.scheduler.statistics().num_forks == 3
    started = [slow.ends[rid].sequence.scheduled for rid in (*first, *range(11, 17))]
    assert started == sorted(started)


def test_a_more_urgent_request_takes_a_slot_that_is_kept_for_them() -> None:
    engine = Engine(policy=load_policy("priority"), max_num_seqs=4, num_blocks=200, max_num_batched_tokens=16)
    rids = engine.submit_several(1, 4, range(28), ignore_eos=True, priority=5)
    engine.launch()
    engine.submit(9, range(3), ignore_eos=True, priority=1)
    engine.submit(10, range(4), ignore_eos=True, priority=9)
    engine.launch()
    assert sorted(sequence.key[1] for sequence in engine.scheduler.running()) == [1, 2, 3, 9]
    engine.run()
    check(engine, rids, range(28))
    assert engine.scheduler.statistics().num_preemptions == 0
    assert engine.scheduler.statistics().num_forks >= 2


def test_headroom_is_left(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(num_blocks=10, watermark=0.5)
    engine.submit_several(1, 4, range(10), ignore_eos=True)
    engine.launch()
    assert len(engine.scheduler.running()) == 3
    assert engine.scheduler.statistics().kv.num_free == 5


@pytest.mark.parametrize("depth", [1, 2])
def test_a_leader_that_ends_before_its_prompt_leaves_them_to_themselves(depth: int) -> None:
    engine = Engine(depth=depth, prefill_chunk=4)
    rids = engine.submit_several(1, 3, PROMPT, ignore_eos=True)
    engine.launch()
    assert engine.scheduler.statistics().num_waiting == 2
    engine.abort(1)
    engine.run()
    assert engine.streams[1] == []
    for i in (1, 2):
        assert engine.streams[rids[i]] == reference_stream(PROMPT, 1 + SIBLING * i, 8)


def test_a_displaced_leader_keeps_its_followers() -> None:
    engine = Engine(policy=load_policy("priority"), num_blocks=12, prefill_chunk=8, max_num_batched_tokens=8)
    rids = engine.submit_several(1, 3, range(30), ignore_eos=True, max_tokens=4, priority=5)
    engine.launch()
    engine.submit(9, range(40, 70), ignore_eos=True, priority=1, max_tokens=4)
    engine.run()
    assert engine.ends[1].sequence.num_preemptions == 1
    assert engine.streams[9] == reference_stream(range(40, 70), 9, 4)
    check(engine, rids, range(30), 4)
    assert statistics(engine)[1] == 2


class Ordered(KeyPolicy):
    """By priority, and nobody gives way."""

    def key(self, sequence: Any, view: Any) -> tuple[int]:
        return (sequence.submit.priority,)


@pytest.mark.parametrize("priority", [1, 3])
def test_a_fork_does_not_overtake_who_comes_before_it(priority: int) -> None:
    """Neither for its slot nor for the blocks that it waits for; whoever comes behind waits a little longer."""
    engine = Engine(policy=KeyPlanner(Ordered()), num_blocks=13, prefill_chunk=4)
    engine.submit(9, range(40, 60), ignore_eos=True, max_tokens=20, priority=1)
    for _ in range(6):
        engine.launch()
        engine.complete()
    rids = engine.submit_several(1, 2, PROMPT, ignore_eos=True, priority=2)
    engine.launch()
    engine.submit(8, range(60, 76), ignore_eos=True, priority=priority)  # needs five blocks, and there are fewer
    for _ in range(3):
        engine.complete()
        engine.launch()
    running = [sequence.key[1] for sequence in engine.scheduler.running()]
    assert sorted(running) == ([1, 9] if priority == 1 else [1, 2, 9])
    engine.run()
    check(engine, rids, PROMPT)
    assert engine.streams[8] == reference_stream(range(60, 76), 8, 8)
    fork, other = (engine.ends[rid].sequence.scheduled for rid in (2, 8))
    assert other <= fork if priority == 1 else fork < other


def test_a_policy_may_refuse_a_fork() -> None:
    class AtMostTwo(KeyPolicy):
        running: set[Any]

        def __init__(self) -> None:
            self.running, self.arrived = set(), 0

        def admit(self, sequence: Any, view: Any) -> Admit:
            return Admit.ADMIT if len(self.running) < 2 else Admit.WAIT

        def on_arrival(self, sequence: Any, view: Any) -> None:
            self.arrived += 1

        def on_admit(self, sequence: Any, view: Any) -> None:
            self.running.add(sequence)
            assert len(self.running) <= 2

        def on_end(self, sequence: Any, view: Any) -> None:
            self.running.discard(sequence)

    policy = AtMostTwo()
    engine = Engine(policy=KeyPlanner(policy))
    rids = engine.submit_several(1, 4, PROMPT, ignore_eos=True)
    engine.run()
    check(engine, rids, PROMPT)
    assert policy.arrived == 4, "every sequence arrived once"


def test_a_policy_that_knows_no_forks_sees_every_request() -> None:
    planner = KeyPlanner(KeyPolicy())

    class Plain:
        plan, victim = planner.plan, planner.victim
        on_arrival, on_admit, on_refusal = planner.on_arrival, planner.on_admit, planner.on_refusal
        on_end, on_step = planner.on_end, planner.on_step

    engine = Engine(policy=Plain())
    rids = engine.submit_several(1, 3, PROMPT, ignore_eos=True)
    assert {engine.scheduler.sequence((0, rid)).state for rid in rids} == {State.WAITING}
    engine.run()
    check(engine, rids, PROMPT)
    assert statistics(engine)[1] == 0


def test_no_fork_starts_while_paused() -> None:
    engine = Engine(prefill_chunk=4)
    rids = engine.submit_several(1, 3, PROMPT, ignore_eos=True)
    engine.launch()
    engine.scheduler.pause("wait", engine.now)
    engine.run()
    assert list(engine.ends) == [1]
    engine.scheduler.resume(engine.now)
    engine.run()
    check(engine, rids, PROMPT)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_forks_go_on_where_they_were(depth: int, caching: bool) -> None:
    engine = Engine(depth=depth, num_blocks=12, enable_prefix_caching=caching)
    rids = engine.submit_several(1, 4, PROMPT, ignore_eos=True, max_tokens=24)
    engine.run()
    check(engine, rids, PROMPT, 24)
    assert engine.scheduler.statistics().num_preemptions > 0
    assert statistics(engine)[1] == 3


@pytest.mark.parametrize("rows", [[], [1]])
def test_a_failed_step_ends_only_the_fork_that_is_at_fault(rows: list[int]) -> None:
    """The others compute the prompt for themselves; so do all of them where nobody is."""
    engine = Engine()
    rids = engine.submit_several(1, 3, PROMPT, ignore_eos=True)
    engine.launch()
    engine.launch()
    step = engine.results[0].step
    engine.results.clear()
    failure = StepFailed(step=step, error="planted", rows=np.array(rows, np.int32))
    engine.apply(engine.scheduler.fail(failure, engine.now))
    assert sorted(engine.ends) == ([2] if rows else [])
    engine.run()
    for i, rid in enumerate(rids):
        expected = [] if engine.ends[rid].error else reference_stream(PROMPT, 1 + SIBLING * i, 8)
        assert engine.streams[rid] == expected
    assert engine.scheduler.statistics().kv.num_free == 40


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("accident", ["a failed step", "dead workers", "a dead scheduler"])
def test_accidents_change_no_sequence(accident: str, depth: int, caching: bool) -> None:
    """Whenever they happen, in the middle of the prompt, with forks in flight, or when each goes its own way."""
    for num_before in range(9):
        engine = Engine(depth=depth, prefill_chunk=4, enable_prefix_caching=caching)
        if accident == "a failed step":  # it takes one more in it, or the one that is alone in it is at fault
            engine.submit(9, [7], max_tokens=30)
            engine.launch()
            engine.complete()
        rids = engine.submit_several(1, 3, PROMPT, ignore_eos=True)
        for _ in range(num_before):
            engine.launch()
            if len(engine.results) == depth:
                engine.complete()
        if accident == "a failed step":
            engine.launch()
            failure = StepFailed(step=engine.results[0].step, error="planted")
            engine.results.clear()
            engine.apply(engine.scheduler.fail(failure, engine.now))
        elif accident == "dead workers":
            engine.lose_workers()
        else:
            streams, engine = engine.streams, Engine(depth=depth, prefill_chunk=4, enable_prefix_caching=caching)
            first = make_submit(1, PROMPT, siblings=np.array(rids[1:], np.int32), ignore_eos=True)
            for sequence in sequences_of(first):
                output = np.array(streams[sequence.rid], np.int32)
                again = replace(sequence, output=output, is_resumed=True)
                engine.streams[sequence.rid] = output.tolist()
                assert engine.scheduler.submit(0, again, engine.now) is None
        engine.run()
        check(engine, rids, PROMPT)
        assert {end.reason for end in engine.ends.values()} == {"length"}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("bad", [[0], [1], [0, 1, 2]])
def test_rows_without_a_valid_choice_end_alone(depth: int, bad: list[int]) -> None:
    """What is zeroed for them is not what the others go on from."""
    engine = Engine(depth=depth)
    rids = engine.submit_several(1, 3, PROMPT, ignore_eos=True)
    while engine.scheduler.may_plan and engine.launch():
        pass
    result = engine.results.pop(0)
    void = StepResult(step=result.step, tokens=result.tokens, nonfinite_rows=np.array(bad, np.int32))
    engine.apply(engine.scheduler.update(void, engine.now))
    assert sorted(engine.ends) == [rids[row] for row in bad]
    engine.run()
    for i, rid in enumerate(rids):
        assert engine.streams[rid] == ([] if i in bad else reference_stream(PROMPT, 1 + SIBLING * i, 8))


@pytest.mark.parametrize("leaves", [1, 2])
def test_the_copy_survives_whoever_leaves_before_it(leaves: int) -> None:
    engine = Engine(depth=1)
    rids = engine.submit_several(1, 3, PROMPT, ignore_eos=True)
    engine.launch()
    engine.complete()
    engine.abort(leaves)
    engine.submit(9, range(50, 58), ignore_eos=True)  # gets the blocks that are free now, in the step that copies
    engine.run()
    for i, rid in enumerate(rids):
        if rid != leaves:
            assert engine.streams[rid] == reference_stream(PROMPT, 1 + SIBLING * i, 8)
    assert engine.streams[9] == reference_stream(range(50, 58), 9, 8)
    assert len(engine.worker.copied) == (2 if leaves == 1 else 1)


def test_what_forks_leave_behind_can_be_found() -> None:
    engine = Engine()
    rids = engine.submit_several(1, 3, PROMPT, ignore_eos=True)
    engine.run()
    for i, rid in enumerate(rids):
        turn = [*PROMPT, *engine.streams[rid], 1]
        engine.submit(10 + i, turn, ignore_eos=True, max_tokens=2)
        engine.run()
        assert engine.ends[10 + i].sequence.num_cached_tokens == 16
        assert engine.streams[10 + i] == reference_stream(turn, 10 + i, 2)


def test_cached_tokens_of_a_fork_are_those_of_the_prompt() -> None:
    engine = Engine()
    engine.submit(9, PROMPT, ignore_eos=True)
    engine.run()
    rids = engine.submit_several(1, 3, PROMPT, ignore_eos=True)
    engine.run()
    assert [engine.ends[rid].sequence.num_cached_tokens for rid in (9, *rids)] == [0, 8, 8, 8]
    assert engine.scheduler.statistics().prefix_cache.requests == 2, "a prompt is looked up once"


def test_who_is_no_sibling_shares_nothing() -> None:
    engine = Engine()
    engine.submit(1, PROMPT, ignore_eos=True)
    engine.submit(2, range(21, 31), ignore_eos=True, fork_of=1)
    engine.submit(3, PROMPT, ignore_eos=True, fork_of=1, cache_salt="x")
    engine.submit(4, PROMPT, ignore_eos=True, fork_of=1, adapter="1" * 64)
    engine.submit(5, PROMPT, ignore_eos=True, fork_of=77)
    engine.submit(6, PROMPT, fork_of=1, output=np.array(reference_stream(PROMPT, 6, 2), np.int32), ignore_eos=True)
    engine.submit(7, PROMPT, ignore_eos=True, fork_of=7)
    engine.submit(8, PROMPT, ignore_eos=True, fork_of=1, pooling="last")
    engine.submit(9, PROMPT, ignore_eos=True, fork_of=1, rules={"num_prompt_logprobs": 1})
    engine.run()
    assert statistics(engine)[1] == 0
    for rid in (1, 3, 4, 5, 6, 7):
        assert engine.streams[rid] == reference_stream(PROMPT, rid, 8)
    assert engine.streams[2] == reference_stream(range(21, 31), 2, 8)


def test_a_sibling_that_comes_after_the_prompt_computes_it() -> None:
    engine = Engine()
    engine.submit(1, PROMPT, ignore_eos=True)
    engine.launch()
    engine.submit(2, PROMPT, ignore_eos=True, fork_of=1)
    engine.run()
    assert engine.streams[2] == reference_stream(PROMPT, 2, 8)
    assert statistics(engine)[1] == 0


@pytest.mark.parametrize("skips", [False, True])
def test_only_the_first_sequence_tells_of_the_prompt(skips: bool) -> None:
    submit = Submit(
        rid=4,
        arrival=0.0,
        prompt=np.arange(3, dtype=np.int32),
        max_tokens=2,
        siblings=np.array([7, 9], np.int32),
        rules={"num_logprobs": 2, "num_prompt_logprobs": 1},
        skip_reading_prefix_cache=skips,
    )
    first, *forks = sequences_of(submit)
    assert (first.rid, first.fork_of, first.siblings.size) == (4, None, 0)
    assert first.rules == submit.rules
    assert [(fork.rid, fork.fork_of, fork.sample_index) for fork in forks] == [(7, 4, 1), (9, 4, 2)]
    assert [fork.rules for fork in forks] == [{"num_logprobs": 2}] * 2
    assert [one.skip_reading_prefix_cache for one in (first, *forks)] == [skips] * 3, "what is asked for holds for all"


def test_a_recording_with_forks_replays_byte_for_byte() -> None:
    entries: list[Entry] = []
    arguments: dict[str, Any] = {"num_blocks": 14, "prefill_chunk": 4}
    engine = Engine(**arguments)
    plain = make_scheduler(**arguments)
    engine.scheduler = RecordedScheduler(
        sink=entries.append,
        num_blocks=14,
        prefill_chunk=4,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=40,
        vocab_size=97,
        eos_token_ids=(5,),
        policy=load_policy("fcfs"),
        depth=2,
    )
    for rid in (1, 11, 21):
        engine.submit_several(rid, 3, range(rid, rid + 10), max_tokens=14, ignore_eos=True)
    engine.run()
    assert engine.scheduler.statistics().num_forks > 0
    plans = list(replay(entries, plain))
    assert len(plans) == len(engine.plans)
    for mine, theirs in zip(engine.plans, plans, strict=True):
        for name in mine.__dataclass_fields__:
            a, b = getattr(mine, name), getattr(theirs, name)
            assert a.tobytes() == b.tobytes() if isinstance(a, np.ndarray) else a == b, name
