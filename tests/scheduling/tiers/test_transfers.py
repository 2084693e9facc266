"""What is stored in a tier, what is loaded from it, and which requests wait for that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actorllm.scheduling.tiers.transfers import MAX_WAIT_S, BlockLoad, BlockStore
from tests.scheduling.chained_tokens import reference_stream
from tests.scheduling.conftest import make_submit
from tests.scheduling.tiers.tiered_engine import Tier, TieredEngine

PREFIX = list(range(16))
"""Four blocks."""


def other(number: int, length: int = 20) -> list[int]:
    """A prompt that shares nothing with those of other numbers."""
    return [(40 + number * 7 + i * (number + 1)) % 97 for i in range(length)]


def run(engine: TieredEngine, rid: int, prompt: list[int], **arguments: Any) -> None:
    engine.submit(rid, prompt, **{"max_tokens": 4, "ignore_eos": True} | arguments)
    engine.run()
    assert engine.streams[rid] == reference_stream(prompt, rid, 4)


def fill(engine: TieredEngine, first_rid: int) -> None:
    """Have everything evicted that was cached."""
    for number in range(12):
        run(engine, first_rid + number, other(first_rid + number))


def test_what_was_never_used_again_is_never_stored() -> None:
    engine = TieredEngine(num_blocks=20)
    run(engine, 1, [*PREFIX, 50])
    fill(engine, 2)
    assert engine.scheduler.statistics().transfers.num_stores == 0
    assert not engine.tier.contents


def test_what_was_used_again_is_stored_when_nothing_is_to_be_computed_and_loaded_after_its_eviction() -> None:
    engine = TieredEngine(num_blocks=20)
    run(engine, 1, [*PREFIX, 50])
    run(engine, 2, [*PREFIX, 51])
    assert len(engine.tier.contents) == 4
    fill(engine, 3)
    run(engine, 20, [*PREFIX, 52])
    statistics = engine.scheduler.statistics().transfers
    assert statistics.num_loaded_blocks == 4
    assert statistics.num_waiting == 0


def test_blocks_are_stored_before_their_eviction_while_requests_run() -> None:
    engine = TieredEngine(num_blocks=32)
    engine.submit(1, other(1, 8), max_tokens=30, ignore_eos=True)
    for rid in (2, 3):
        engine.submit(rid, [*PREFIX, 50 + rid], max_tokens=2, ignore_eos=True)
        while rid not in engine.ends:
            engine.launch()
            engine.complete()
    assert not engine.moves, "nothing is evicted soon"
    engine.transfers._max_store = 4
    for rid in range(4, 9):
        engine.submit(rid, other(rid), max_tokens=2, ignore_eos=True)
        while rid not in engine.ends:
            engine.launch()
            engine.complete()
            while engine.moves:
                engine.finish_move()
    assert 1 not in engine.ends
    assert len(engine.tier.contents) == 4, "what is evicted soon was stored"
    engine.run()
    assert engine.streams[1] == reference_stream(other(1, 8), 1, 30)


def test_a_new_engine_finds_what_another_one_has_stored() -> None:
    tier = Tier()
    first = TieredEngine(tier)
    run(first, 1, [*PREFIX, 50])
    run(first, 2, [*PREFIX, 51])
    second = TieredEngine(tier)
    run(second, 3, [*PREFIX, 52])
    assert second.scheduler.statistics().transfers.num_loaded_blocks == 4


def stored() -> Tier:
    """A tier that has PREFIX."""
    engine = TieredEngine()
    run(engine, 1, [*PREFIX, 50])
    run(engine, 2, [*PREFIX, 51])
    return engine.tier


def test_requests_that_want_one_run_follow_one_load() -> None:
    engine = TieredEngine(stored())
    for rid in range(3, 7):
        engine.submit(rid, [*PREFIX, 50 + rid], max_tokens=4, ignore_eos=True)
    engine.begin_moves()
    assert [type(move) for move in engine.moves] == [BlockLoad]
    assert engine.scheduler.statistics().num_blocked == 4
    assert engine.launch() is None, "what is being loaded is not computed"
    engine.run()
    assert engine.scheduler.statistics().transfers.num_loads == 1
    assert engine.scheduler.statistics().prefix_cache.hits == 4 * 16
    for rid in range(3, 7):
        assert engine.streams[rid] == reference_stream([*PREFIX, 50 + rid], rid, 4)


def test_a_load_that_finds_less_than_was_promised_is_finished_by_computing() -> None:
    tier = stored()
    engine = TieredEngine(tier)
    engine.submit(3, [*PREFIX, 52], max_tokens=4, ignore_eos=True)
    engine.begin_moves()
    tier.contents.pop(list(tier.contents)[2])
    engine.finish_move()
    assert engine.transfers.waiting == {}, "it waits for nothing any more"
    engine.launch()
    engine.run()
    assert engine.streams[3] == reference_stream([*PREFIX, 52], 3, 4)
    statistics = engine.scheduler.statistics()
    assert (statistics.transfers.num_short_loads, statistics.transfers.num_loaded_blocks) == (1, 2)


def test_a_request_waits_for_no_longer_than_computing_would_take() -> None:
    engine = TieredEngine(stored())
    engine.submit(3, [*PREFIX, 52], max_tokens=4, ignore_eos=True)
    engine.begin_moves()
    engine.now = engine.transfers.next_deadline
    assert engine.now <= MAX_WAIT_S
    assert engine.launch() is not None, "the disk hangs, and the request is computed"
    while engine.scheduler.statistics().num_running:
        engine.complete()
        engine.launch()
    assert engine.streams[3] == reference_stream([*PREFIX, 52], 3, 4)
    engine.finish_move()
    assert engine.scheduler.statistics().transfers.num_given_up == 1


def test_no_request_gives_up_while_there_are_no_workers() -> None:
    engine = TieredEngine(stored())
    engine.transfers.costs.observe_step(100, 100, 10.0)
    engine.lose_workers()
    engine.submit(3, [*PREFIX, 52], max_tokens=4, ignore_eos=True)
    engine.now += 100.0  # until others are there
    engine.run()
    assert engine.streams[3] == reference_stream([*PREFIX, 52], 3, 4)
    statistics = engine.scheduler.statistics().transfers
    assert (statistics.num_loads, statistics.num_given_up) == (1, 0)


def test_what_is_slower_to_load_than_to_compute_is_computed() -> None:
    engine = TieredEngine(stored())
    engine.transfers.costs.observe_load(4, 40.0, 40.0)
    engine.transfers.costs.observe_step(100, 100, 1.0)
    run(engine, 3, [*PREFIX, 52])
    assert engine.scheduler.statistics().transfers.num_loads == 0
    for _ in range(100):  # a faster one than before
        engine.transfers.costs.observe_load(4, 0.0001, 0.0001)
    second = TieredEngine(engine.tier)
    second.transfers.costs = engine.transfers.costs
    run(second, 3, [*PREFIX, 52])
    assert second.scheduler.statistics().transfers.num_loads == 1


def test_preempted_requests_are_stored_first_and_loaded_first() -> None:
    engine = TieredEngine(num_blocks=16, max_num_seqs=4)
    for rid in range(1, 5):
        engine.submit(rid, other(rid, 12), max_tokens=24, ignore_eos=True)
    while not engine.scheduler.statistics().num_preemptions:
        engine.launch()
        engine.complete()
    engine.run()
    for rid in range(1, 5):
        assert engine.streams[rid] == reference_stream(other(rid, 12), rid, 24)
    assert engine.tier.contents, "what it had computed was stored"


def test_preempted_requests_are_loaded_before_those_that_come_first() -> None:
    engine = TieredEngine(stored(), max_num_seqs=2)
    for rid in (1, 2):
        run(engine, rid, [*other(7, 16), 50 + rid])
    assert len(engine.tier.contents) == 8
    engine.submit(3, [*PREFIX, 52], max_tokens=8, ignore_eos=True)
    engine.begin_moves()
    engine.finish_move()
    engine.launch()
    engine.complete()
    assert engine.streams[3], "it has started"
    engine.transfers.costs.observe_step(100, 100, 10.0)  # loading is faster
    engine.lose_workers()
    engine.submit(4, [*other(7, 16), 53], max_tokens=4, ignore_eos=True, priority=-1)
    engine.begin_moves()
    first, second = engine.moves
    assert isinstance(first, BlockLoad)
    assert isinstance(second, BlockLoad)
    assert first.hashes == engine.scheduler.sequence((0, 3)).hashes[: len(first.hashes)]
    assert second.hashes == engine.scheduler.sequence((0, 4)).hashes[: len(second.hashes)]
    engine.run()
    assert engine.streams[3] == reference_stream([*PREFIX, 52], 3, 8)
    assert engine.streams[4] == reference_stream([*other(7, 16), 53], 4, 4)


def test_what_preempted_requests_leave_is_stored_before_what_was_used_again() -> None:
    engine = TieredEngine()
    prompts = {rid: [*other(rid, 16), 50] for rid in (1, 2)}
    for rid, prompt in prompts.items():
        engine.submit(rid, prompt, max_tokens=4, ignore_eos=True)
        super(TieredEngine, engine).run()
    used, left = (engine.transfers._index.find(make_submit(9, p).block_hashes.tobytes(), 4) for p in prompts.values())
    engine.transfers.reused(used)
    engine.transfers.preempted(left)
    stores: list[int] = []
    for _ in range(6):
        engine.begin_moves()
        for move in engine.moves:
            assert isinstance(move, BlockStore)
            stores += move.blocks.tolist()
        while engine.moves:
            engine.finish_move()
    assert (stores[:4], sorted(stores[4:])) == (left.tolist(), sorted(used.tolist()))


@pytest.mark.parametrize("what", ["reset", "forget"])
def test_what_is_forgotten_while_it_moves_is_not_found(what: str) -> None:
    engine = TieredEngine(stored())
    engine.submit(3, [*PREFIX, 52], max_tokens=4, ignore_eos=True)
    engine.begin_moves()
    sequence = engine.scheduler.sequence((0, 3))
    if what == "reset":
        engine.scheduler.reset_prefix_cache(engine.now)
    else:
        engine.scheduler._cache.forget(sequence)
        assert not engine.tier.contents
    (load,) = engine.moves
    engine.moves.clear()
    engine.transfers.loaded(load, load.blocks.size, 0.1, engine.now)  # of nothing that a request may rely on
    engine.run()
    assert engine.streams[3] == reference_stream([*PREFIX, 52], 3, 4)
    assert engine.scheduler.statistics().prefix_cache.hits == 0


def test_what_is_forgotten_while_it_is_stored_leaves_the_tier() -> None:
    engine = TieredEngine()
    for rid in (1, 2):
        engine.submit(rid, [*PREFIX, 49 + rid], max_tokens=4, ignore_eos=True)
        super(TieredEngine, engine).run()
    engine.begin_moves()
    (store,) = engine.moves
    assert isinstance(store, BlockStore)
    engine.scheduler.reset_prefix_cache(engine.now)
    engine.run()
    assert not engine.tier.contents


def test_what_is_being_stored_is_not_evicted() -> None:
    engine = TieredEngine(num_blocks=20)
    for rid in (1, 2):
        engine.submit(rid, [*PREFIX, 49 + rid], max_tokens=4, ignore_eos=True)
        super(TieredEngine, engine).run()
    engine.begin_moves()
    for rid in range(3, 12):
        engine.submit(rid, other(rid), max_tokens=2, ignore_eos=True)
        super(TieredEngine, engine).run()
    assert engine.scheduler.statistics().kv.num_evicted
    engine.run()
    assert engine.tier.contents
    second = TieredEngine(engine.tier)
    run(second, 3, [*PREFIX, 52])
    assert second.scheduler.statistics().transfers.num_loaded_blocks


def test_moves_leave_room_for_what_runs() -> None:
    engine = TieredEngine(stored(), num_blocks=12, max_num_seqs=2)
    engine.submit(3, other(3, 30), max_tokens=8, ignore_eos=True)
    engine.launch()
    engine.submit(4, [*PREFIX, 52], max_tokens=4, ignore_eos=True)
    engine.begin_moves()
    assert not engine.moves
    engine.run()
    assert engine.streams[3] == reference_stream(other(3, 30), 3, 8)
    assert engine.streams[4] == reference_stream([*PREFIX, 52], 4, 4)
    assert engine.scheduler.statistics().num_preemptions == 0


def test_lost_workers_take_what_moves_with_them() -> None:
    engine = TieredEngine(stored())
    engine.submit(3, [*PREFIX, 52], max_tokens=4, ignore_eos=True)
    engine.begin_moves()
    (load,) = engine.moves
    engine.lose_workers()
    engine.transfers.loaded(load, 4, 0.1, engine.now)  # said too late
    engine.run()
    assert engine.streams[3] == reference_stream([*PREFIX, 52], 3, 4)
    assert engine.scheduler.statistics().transfers.num_loads == 1, "it was loaded once more"
    assert np.count_nonzero(engine.scheduler.kv.num_held) == 0
