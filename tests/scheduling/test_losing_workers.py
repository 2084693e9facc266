"""The workers die: every request goes on from its known tokens, and whoever they die of is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actorllm.messages import StepFailed
from actorllm.scheduling.telemetry.recording import RecordedScheduler, replay
from tests.scheduling.chained_tokens import EOS, reference_stream
from tests.scheduling.conftest import Engine, make_scheduler

BuildEngine = Callable[..., Engine]


def prompt_of(rid: int) -> list[int]:
    return [rid + 7 * i for i in range(3 + rid)]


def stream_of(rid: int, count: int = 8) -> list[int]:
    stream = reference_stream(prompt_of(rid), rid, count)
    return stream[: stream.index(EOS) + 1] if EOS in stream else stream


def submit_some(engine: Engine, count: int = 6) -> None:
    for rid in range(1, count + 1):
        engine.submit(rid, prompt_of(rid))


def test_streams_are_those_of_a_run_without_deaths(build_engine: BuildEngine) -> None:
    for num_before in range(12):
        engine = build_engine()
        submit_some(engine)
        for _ in range(num_before):
            engine.launch()
            if len(engine.results) > 1:
                engine.complete()
        engine.lose_workers()
        engine.run()
        assert engine.streams == {rid: stream_of(rid) for rid in range(1, 7)}


def test_what_was_cached_died_with_the_workers(engine: Engine) -> None:
    prompt = list(range(20))
    engine.submit(1, prompt)
    engine.run()
    engine.lose_workers()
    engine.submit(2, prompt, seed=1)
    engine.run()
    assert engine.ends[2].sequence.num_cached_tokens == 0
    assert engine.streams[1] == engine.streams[2]


def test_a_search_after_failed_steps_ends_with_the_workers(engine: Engine) -> None:
    """Two searches at a time would each hold back what the other one probes."""
    submit_some(engine)
    plan = engine.launch()
    assert plan is not None
    engine.apply(engine.scheduler.fail(StepFailed(step=plan.step, error="something"), engine.now))
    engine.results.clear()
    assert engine.scheduler.statistics().num_retrying > 1
    engine.lose_workers()
    assert engine.scheduler.statistics().num_retrying == 0
    engine.run()
    assert engine.streams == {rid: stream_of(rid) for rid in range(1, 7)}


def test_it_is_counted_for_those_it_interrupted(engine: Engine) -> None:
    submit_some(engine, 2)
    engine.launch()
    engine.complete()
    engine.launch()
    engine.lose_workers()
    engine.lose_workers()  # nobody was computing
    lost_at = engine.now
    engine.launch()
    engine.complete()
    statistics = engine.scheduler.statistics()
    assert (statistics.num_worker_losses, statistics.num_recovered) == (2, 2)
    assert statistics.recovery_s > 0
    assert statistics.num_suspects == 0
    engine.run()
    for end in engine.ends.values():
        assert end.sequence.num_recoveries == 1
        assert 0 < end.sequence.recovery_s <= engine.now - lost_at + 0.1
    engine.submit(9, prompt_of(9))
    engine.run()
    assert engine.ends[9].sequence.num_recoveries == 0


def test_whoever_the_workers_die_of_fails_alone(build_engine: BuildEngine) -> None:
    engine = build_engine()
    submit_some(engine)
    num_deaths = 0
    while engine.scheduler.statistics().num_running + engine.scheduler.statistics().num_waiting:
        plan = engine.launch()
        if plan is None:
            if engine.results:
                engine.complete()
            continue
        named = {s.key[1] for record in engine.scheduler.ledger for s in record.rows.sequences}
        named |= {s.key[1] for record in engine.scheduler.ledger for s, _ in record.prefills}
        if 3 in named:
            while len(engine.results) > 1:
                engine.complete()  # the step before was done
            num_deaths += 1
            engine.lose_workers()
        elif len(engine.results) > 1:
            engine.complete()
    assert engine.ends[3].reason == "error"
    assert engine.ends[3].error.startswith("the workers died 2 times while they ran this request alone; the last time")
    assert engine.streams.pop(3) == []
    assert engine.streams == {rid: stream_of(rid) for rid in (1, 2, 4, 5, 6)}
    assert num_deaths <= 7


@pytest.mark.parametrize("budget", [8, 200])
def test_a_sequence_of_which_workers_die_is_not_cleared_by_its_sibling(build_engine: BuildEngine, budget: int) -> None:
    """Which has a token after each death, as its steps come first: the request would kill as often as that is long."""
    engine = build_engine(max_num_batched_tokens=budget, num_blocks=200)
    engine.submit(1, prompt_of(1), ignore_eos=True, max_tokens=40)
    engine.submit(2, prompt_of(2), ignore_eos=True, max_tokens=40)
    engine.submit(3, prompt_of(2), ignore_eos=True, max_tokens=40, fork_of=2)
    num_deaths = 0
    while not engine.scheduler.is_idle:
        while len(engine.results) > 1:
            engine.complete()  # the step before was done
        if engine.launch() is None and not engine.results:
            break
        newest = engine.scheduler.ledger.newest
        named = {s.key[1] for s in (*newest.rows.sequences, *(s for s, _ in newest.prefills))}
        if 3 in named and len(engine.streams.get(3, [])) >= 10:
            num_deaths += 1
            while len(engine.results) > 1:
                engine.complete()
            engine.lose_workers()
        elif engine.results:
            engine.complete()
    assert {rid: end.reason for rid, end in engine.ends.items()} == {1: "length", 2: "error", 3: "error"}
    assert num_deaths <= 6


MAX_IN_A_ROW = 5
"""Deaths without a token or a narrower search that end an engine (`supervision.restart`)."""


@pytest.mark.parametrize("num_requests", [3, 4, 6, 10])
@pytest.mark.parametrize("num_slots", [2, 4, 16])
@pytest.mark.parametrize("depth", [1, 2])
def test_several_that_the_workers_die_of_are_found_before_the_engine_ends(
    build_engine: BuildEngine, num_requests: int, num_slots: int, depth: int
) -> None:
    for killers in ({1, 2}, {1, 3}, {2, num_requests}, {1, 2, num_requests}):
        engine = build_engine(max_num_seqs=num_slots, num_blocks=200, max_num_batched_tokens=32, depth=depth)
        submit_some(engine, num_requests)
        scheduler = engine.scheduler
        num_in_a_row = num_tokens = num_deaths = 0
        while not scheduler.is_idle:
            while scheduler.may_plan and engine.launch() is not None:
                pass
            assert engine.results, "somebody may run"
            record = next(iter(scheduler.ledger))
            named = {s.key[1] for s in (*record.rows.sequences, *(s for s, _ in record.prefills))}
            if not named & killers:
                engine.complete()
                continue
            if num_tokens != (num_tokens := sum(map(len, engine.streams.values()))):
                num_in_a_row = 0
            num_in_a_row += 1
            num_deaths += 1
            assert num_in_a_row < MAX_IN_A_ROW
            engine.lose_workers()
            if scheduler.is_narrowing:
                num_in_a_row = 0
        assert {rid for rid, end in engine.ends.items() if end.reason == "error"} == killers
        for rid in range(1, num_requests + 1):
            assert engine.streams[rid] == ([] if rid in killers else stream_of(rid))
        assert num_deaths <= 4 + len(killers) * (2 + num_requests.bit_length())


def test_two_that_never_were_under_suspicion_are_suspects_when_workers_die_of_them(build_engine: BuildEngine) -> None:
    """While a trial rests for the sake of those that are not suspected, these are found as well."""
    engine = build_engine(max_num_seqs=2, depth=1)
    submit_some(engine, 4)
    for _ in range(3):
        engine.launch()
        engine.lose_workers()
    engine.launch()
    assert {s.key[1] for s in engine.scheduler.running()} == {3, 4}, "the trial of the first two rests"
    engine.lose_workers()
    assert engine.scheduler.statistics().num_suspects == 4
    engine.run()
    assert engine.streams == {rid: stream_of(rid) for rid in range(1, 5)}


def test_who_was_beside_one_that_ended_meanwhile_was_not_alone(build_engine: BuildEngine) -> None:
    engine = build_engine(depth=1)
    engine.submit(1, prompt_of(1))
    for other in (11, 12, 13):
        engine.submit(other, prompt_of(2))
        plan = engine.launch()
        assert plan is not None
        if plan.new.size == 1:  # the first has been acquitted of nothing, and is tried alone: this one works
            engine.complete()
            plan = engine.launch()
            assert plan is not None
        engine.abort(other)
        engine.lose_workers()
    assert 1 not in engine.ends
    engine.run()
    assert engine.streams[1] == stream_of(1)


def test_while_some_are_tried_nobody_else_starts(engine: Engine) -> None:
    submit_some(engine, 4)
    for _ in range(2):
        engine.launch()
        engine.lose_workers()
    engine.submit(5, prompt_of(5))
    plan = engine.launch()
    assert plan is not None
    assert plan.new.size < 4
    assert 0 < engine.scheduler.statistics().num_suspects <= 4
    engine.run()
    assert engine.streams == {rid: stream_of(rid) for rid in range(1, 6)}


def test_a_handed_over_request_has_started_before(engine: Engine) -> None:
    """Paused to let the running ones finish: what another scheduler had started finishes, what is new waits."""
    engine.scheduler.pause("wait", 0.0)
    engine.submit(1, prompt_of(1), output=np.array(stream_of(1)[:3], np.int32))
    engine.submit(2, prompt_of(2))
    engine.run()
    assert engine.streams == {1: stream_of(1), 2: []}
    assert engine.scheduler.is_drained
    engine.scheduler.resume(0.0)
    engine.run()
    assert engine.streams[2] == stream_of(2)


@pytest.mark.parametrize("num_before", [0, 1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_suspects_finish_under_a_pause_that_keeps_everybody_else_waiting(
    build_engine: BuildEngine, num_before: int, depth: int
) -> None:
    """The trial rests for those that are not suspected, but not while these may not start."""
    engine = build_engine(depth=depth)
    submit_some(engine, 3)
    engine.launch()
    for number in range(3):
        if number == num_before:
            engine.scheduler.pause("wait", engine.now)
        if number == 2:
            engine.submit(9, prompt_of(9))
        engine.lose_workers()
        if number == 2 and num_before == 3:
            engine.scheduler.pause("wait", engine.now)
        assert engine.launch() is not None
    engine.run()
    assert engine.scheduler.is_drained
    assert engine.streams == {rid: stream_of(rid) for rid in (1, 2, 3)} | {9: []}
    engine.scheduler.resume(engine.now)
    engine.run()
    assert engine.streams == {rid: stream_of(rid) for rid in (1, 2, 3, 9)}


def test_a_recording_replays_it() -> None:
    entries: list[Any] = []
    limits = make_scheduler().limits
    arguments: dict[str, Any] = {"max_num_seqs": limits.max_seqs}
    engine = Engine()
    kept = make_scheduler()
    engine.scheduler = RecordedScheduler(
        sink=entries.append,
        num_blocks=40,
        block_size=4,
        max_num_batched_tokens=16,
        max_model_len=40,
        vocab_size=97,
        eos_token_ids=(EOS,),
        policy=kept.policy,
        **arguments,
    )
    submit_some(engine)
    engine.launch()
    engine.complete()
    engine.launch()
    engine.lose_workers()
    engine.run()
    plans = list(replay(entries, make_scheduler()))
    assert len(plans) == len(engine.plans)
    for replayed, live in zip(plans, engine.plans, strict=True):
        assert replayed.step == live.step
        assert replayed.new_tokens.tolist() == live.new_tokens.tolist()
        assert replayed.prefill_slots.tolist() == live.prefill_slots.tolist()


@pytest.mark.parametrize("killer", [2, 4, 7])
def test_beside_other_replicas_a_request_is_probed_with_nothing_else_in_flight(
    build_engine: BuildEngine, killer: int
) -> None:
    """Of a small group that died with others. So the next death decides, and those that were cleared wait for it."""
    engine = build_engine(max_num_seqs=16, num_blocks=200, probes_alone=True)
    for rid in range(1, 9):
        engine.submit(rid, prompt_of(rid), ignore_eos=True, max_tokens=20)
    scheduler = engine.scheduler
    deaths: list[set[int]] = []
    while not scheduler.is_idle:
        while scheduler.may_plan and engine.launch() is not None:
            pass
        in_flight = {sequence.key[1] for record in scheduler.ledger for sequence in record.named}
        if killer in in_flight:
            deaths.append(in_flight)
            assert not engine.ends, "the search waits for no request to end"
            engine.lose_workers()
        else:
            engine.complete()
    assert len(deaths) == 3
    assert deaths[-1] == {killer}
    assert {rid for rid, end in engine.ends.items() if end.reason == "error"} == {killer}
    for rid, stream in engine.streams.items():
        assert stream == ([] if rid == killer else reference_stream(prompt_of(rid), rid, 20))
