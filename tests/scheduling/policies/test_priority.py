"""The priority policy: who is served first, who gives way, and that nobody loses what he has."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policies.priority import Priority
from actorllm.scheduling.step_packing import KeyPlanner
from tests.scheduling.chained_tokens import reference_stream
from tests.scheduling.conftest import Engine


@pytest.fixture
def build() -> Callable[..., Engine]:
    return lambda **arguments: Engine(policy=load_policy("priority"), **arguments)


def running(engine: Engine) -> set[int]:
    return {s.key[1] for s in engine.scheduler.running()}


def num_preemptions(engine: Engine, rid: int) -> int:
    count: int = engine.ends[rid].sequence.num_preemptions
    return count


def test_lower_is_sooner_and_ties_go_to_the_earlier_arrival(build: Callable[..., Engine]) -> None:
    engine = build(max_num_seqs=1)
    for rid, priority in ((1, 5), (2, 0), (3, 5), (4, -1), (5, 0), (6, 2)):
        engine.submit(rid, [rid], max_tokens=1, priority=priority)
    engine.run()
    assert list(engine.ends) == [4, 2, 5, 6, 1, 3]
    assert engine.scheduler.statistics().num_preemptions == 0


def test_of_equal_priority_the_time_of_arrival_decides(build: Callable[..., Engine]) -> None:
    """Not the order in which they come: frontends submit again what they have when a scheduler has died."""
    engine = build(max_num_seqs=2)
    for rid, arrival in ((1, 4.0), (2, 3.0)):
        engine.submit(rid, [rid], max_tokens=6, ignore_eos=True, arrival=arrival)
    engine.launch()
    for rid, arrival in ((3, 9.0), (4, 8.0), (5, 8.0)):
        engine.submit(rid, [rid], max_tokens=6, ignore_eos=True, arrival=arrival)
    engine.submit(6, [6], max_tokens=2, ignore_eos=True, priority=-1, arrival=10.0)
    engine.launch()
    assert running(engine) == {2, 6}, "the later one has given way"
    engine.run()
    assert [rid for rid in engine.ends if rid not in (2, 6)] == [1, 4, 5, 3]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("size", [3, 30])
def test_the_first_token_of_an_urgent_request_takes_two_steps_and_its_prefill(
    build: Callable[..., Engine], depth: int, size: int
) -> None:
    engine = build(depth=depth, max_num_seqs=4, num_blocks=80, max_num_batched_tokens=16)
    for rid in range(1, 5):
        engine.submit(rid, [rid], max_tokens=30, ignore_eos=True, priority=rid)
    for _ in range(6):
        engine.launch()
        engine.complete()
    while engine.scheduler.may_plan:
        engine.launch()
    before = engine.plans[-1].step
    engine.submit(9, range(size), max_tokens=3, ignore_eos=True, priority=-5)
    while not engine.streams[9]:
        engine.complete()
        while engine.scheduler.may_plan and engine.launch() is not None:
            pass
        done = engine.scheduler.ledger.last_done
    num_prefill_steps = -(-size // 13)  # three of the sixteen tokens of a step are those of the others
    assert done - before <= num_prefill_steps, "it is in the first step that is planned after its arrival"
    assert done - (before - depth + 1) <= 2 + num_prefill_steps
    assert running(engine) == {1, 2, 3, 9}, "the least urgent has gone"
    engine.run()
    for rid in range(1, 5):
        assert engine.streams[rid] == reference_stream([rid], rid, 30), "and has kept its tokens"
        assert num_preemptions(engine, rid) == (rid == 4)
    assert engine.scheduler.statistics().num_wasted_tokens == 0


def test_of_equal_priority_the_latest_gives_way(build: Callable[..., Engine]) -> None:
    engine = build(max_num_seqs=3)
    for rid in (1, 2, 3):
        engine.submit(rid, [rid], max_tokens=12, ignore_eos=True, priority=7)
    engine.launch()
    engine.complete()
    engine.submit(4, [4], max_tokens=2, ignore_eos=True, priority=6)
    engine.launch()
    assert running(engine) == {1, 2, 4}
    engine.run()


def test_equal_priority_never_displaces(build: Callable[..., Engine]) -> None:
    engine = build(max_num_seqs=2)
    for rid in range(1, 7):
        engine.submit(rid, [rid], max_tokens=12, ignore_eos=True, priority=1)
    engine.run()
    assert engine.scheduler.statistics().num_preemptions == 0
    assert list(engine.ends) == [1, 2, 3, 4, 5, 6]


class Ageing(Priority):
    ageing_s = 10.0


def test_who_has_waited_for_long_enough_comes_before_the_more_urgent() -> None:
    engine = Engine(policy=KeyPlanner(Ageing()), max_num_seqs=1)
    engine.submit(1, [1], max_tokens=1, priority=2, arrival=0.0)
    for rid, arrival in ((2, 1.0), (3, 19.0), (4, 21.0), (5, 40.0)):
        engine.submit(rid, [rid], max_tokens=1, priority=0, arrival=arrival)
    engine.run()
    assert list(engine.ends) == [2, 3, 1, 4, 5], "two levels are worth twenty seconds"


@pytest.mark.parametrize(
    ("running_one", "waiting_one", "is_displaced"),
    [((2, 0.0), (0, 19.0), True), ((2, 0.0), (0, 21.0), False), ((0, 30.0), (2, 0.0), False)],
)
def test_age_saves_from_being_displaced_and_displaces_nobody(
    running_one: tuple[int, float], waiting_one: tuple[int, float], is_displaced: bool
) -> None:
    """(priority, arrival) of each."""
    engine = Engine(policy=KeyPlanner(Ageing()), max_num_seqs=1)
    engine.submit(1, [1], max_tokens=9, ignore_eos=True, priority=running_one[0], arrival=running_one[1])
    engine.launch()
    engine.complete()
    engine.submit(2, [2], max_tokens=9, ignore_eos=True, priority=waiting_one[0], arrival=waiting_one[1])
    engine.launch()
    assert running(engine) == ({2} if is_displaced else {1})
    engine.run()
    assert len(engine.streams[1]) == len(engine.streams[2]) == 9


def test_blocks_are_taken_from_as_many_as_it_needs_and_from_none_if_that_is_not_enough(
    build: Callable[..., Engine],
) -> None:
    engine = build(num_blocks=12, max_num_seqs=6, max_num_batched_tokens=48)
    for rid, priority in ((1, 0), (2, 5), (3, 6)):
        engine.submit(rid, range(rid, rid + 14), max_tokens=2, ignore_eos=True, priority=priority)
    engine.launch()
    engine.submit(4, range(40, 70), max_tokens=3, ignore_eos=True, priority=3)
    engine.launch()
    assert running(engine) == {1, 4}, "eight blocks of two others"
    engine.run()
    for rid, (first, size, count) in {1: (1, 14, 2), 2: (2, 14, 2), 3: (3, 14, 2), 4: (40, 30, 3)}.items():
        assert engine.streams[rid] == reference_stream(range(first, first + size), rid, count)
    engine.submit(5, range(14), max_tokens=12, ignore_eos=True, priority=0)
    engine.submit(6, range(20, 34), max_tokens=12, ignore_eos=True, priority=9)
    engine.launch()
    engine.submit(7, range(40, 78), max_tokens=1, ignore_eos=True, priority=3)  # ten blocks, and eight can be had
    engine.launch()
    assert running(engine) == {5, 6}
    assert engine.scheduler.statistics().num_preemptions == 2
    engine.run()


def test_an_urgent_request_passes_a_long_prompt_that_is_being_computed(build: Callable[..., Engine]) -> None:
    engine = build(max_num_seqs=3, max_num_batched_tokens=8)
    engine.submit(1, range(39), max_tokens=1, priority=5)
    engine.launch()
    engine.submit(2, range(50, 57), max_tokens=2, ignore_eos=True, priority=1)
    plan = engine.launch()
    assert plan is not None
    assert dict(zip(plan.prefill_slots.tolist(), plan.prefill_counts.tolist(), strict=True)) == {0: 1, 1: 7}
    engine.run()
    assert list(engine.ends) == [2, 1]


def test_somebody_displaced_is_next_before_less_urgent_ones(build: Callable[..., Engine]) -> None:
    engine = build(max_num_seqs=1)
    engine.submit(1, [1], max_tokens=6, ignore_eos=True, priority=5)
    engine.launch()
    engine.complete()
    engine.submit(2, [2], max_tokens=2, ignore_eos=True, priority=0)
    engine.submit(3, [3], max_tokens=2, ignore_eos=True, priority=6)
    engine.submit(4, [4], max_tokens=2, ignore_eos=True, priority=5)
    engine.run()
    assert list(engine.ends) == [2, 1, 4, 3]
    assert engine.streams[1] == reference_stream([1], 1, 6)


def test_growth_takes_from_the_least_urgent(build: Callable[..., Engine]) -> None:
    engine = build(num_blocks=10, max_num_seqs=3, max_num_batched_tokens=48)
    for rid, priority in ((1, 9), (2, 0), (3, 4)):
        engine.submit(rid, range(rid, rid + 11), max_tokens=16, ignore_eos=True, priority=priority)
    engine.run()
    assert num_preemptions(engine, 1) > 0
    assert num_preemptions(engine, 2) == 0
    assert next(iter(engine.ends)) == 2
    for rid in (1, 2, 3):
        assert engine.streams[rid] == reference_stream(range(rid, rid + 11), rid, 16)


def test_nobody_is_displaced_for_one_who_waits_for_blocks_of_the_more_urgent(build: Callable[..., Engine]) -> None:
    engine = build(max_num_seqs=2)
    engine.submit(1, [1], max_tokens=20, ignore_eos=True, priority=0)
    engine.submit(2, [2], max_tokens=20, ignore_eos=True, priority=0)
    engine.launch()
    engine.submit(3, [3], max_tokens=2, ignore_eos=True, priority=1)
    for _ in range(5):
        engine.complete()
        engine.launch()
        assert running(engine) == {1, 2}
    engine.run()
    assert engine.scheduler.statistics().num_preemptions == 0


@pytest.mark.parametrize("block", range(4))
def test_random_blasts(block: int) -> None:
    """Urgent and other requests with common prefixes arrive while a small cache is full."""
    for seed in range(25 * block, 25 * (block + 1)):
        dice = random.Random(seed)
        engine = Engine(
            policy=load_policy("priority"),
            depth=dice.choice([1, 2]),
            num_blocks=dice.choice([10, 12, 20]),
            max_num_seqs=dice.randint(1, 4),
            max_num_batched_tokens=dice.randint(4, 20),
            max_num_partial_prefills=dice.choice([1, 1, 2]),
            watermark=dice.choice([0.0, 0.2]),
        )
        requests: dict[int, tuple[list[int], int]] = {}
        for rid in range(1, 14):
            prompt = [(dice.randint(0, 1) * 40 + i) % 97 for i in range(dice.randint(1, 30))]
            requests[rid] = prompt, dice.randint(1, min(10, 40 - len(prompt)))
            engine.submit(
                rid,
                prompt,
                max_tokens=requests[rid][1],
                ignore_eos=True,
                priority=dice.randint(-2, 2),
                is_chunkable=dice.random() < 0.9,
            )
            for _ in range(dice.randint(0, 4)):
                engine.launch()
                if engine.results and dice.random() < 0.7:
                    engine.complete()
        engine.run()
        for rid, (prompt, count) in requests.items():
            if engine.ends[rid].reason == "error":
                assert "must not be chunked" in engine.ends[rid].error
                continue
            assert engine.streams[rid] == reference_stream(prompt, rid, count)
        assert engine.scheduler.statistics().kv.num_free == engine.scheduler.kv.pool.num_blocks
        assert engine.scheduler.statistics().num_refused_decisions == 0


def test_an_urgent_request_fits_without_the_headroom_if_that_is_all_there_is(build: Callable[..., Engine]) -> None:
    engine = build(num_blocks=12, max_num_seqs=6, max_num_batched_tokens=48, watermark=0.5)
    engine.submit(1, range(14), max_tokens=2, ignore_eos=True, priority=5)
    engine.launch()
    engine.submit(2, range(20, 46), max_tokens=2, ignore_eos=True, priority=1)
    engine.launch()
    assert running(engine) == {2}
    engine.run()
