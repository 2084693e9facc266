"""KV that one scheduler leases and another one copies: whatever happens meanwhile, the tokens are those of an undisturbed run."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from actorllm.actors.tiers.lease_board import SLOTS, LeaseBoard, Lender
from actorllm.scheduling.policy_monitor import PolicyMonitor
from actorllm.scheduling.tiers.leases import GRACE_S, TERM_S
from actorllm.scheduling.tiers.transfers import MIN_PULL_WAIT_S
from tests.effort import examples
from tests.scheduling.chained_tokens import reference_stream
from tests.scheduling.tiers.lending import Pair, Replica


def prompt_of(number: int, length: int) -> list[int]:
    return [(7 * number + i * (number % 5 + 1)) % 90 for i in range(length)]


def assert_right(pair: Pair) -> None:
    for rid, prompt in pair.prompts.items():
        stream = pair.streams()[rid]
        assert stream == reference_stream(prompt, rid, len(stream)), rid


def test_a_prompt_is_computed_once_and_its_blocks_are_copied() -> None:
    pair = Pair()
    for rid in range(1, 4):
        pair.submit(rid, prompt_of(rid, 15))
    pair.run()
    assert_right(pair)
    told = pair.second.transfers.statistics()
    assert (told.num_pulls, told.num_pulled_blocks, told.num_lost_leases) == (3, 9, 0)
    assert pair.second.scheduler.statistics().num_prefill_tokens < 3 * 12, "what is behind the last whole block"
    pair.first.transfers.next(pair.first.now, True)
    assert pair.first.transfers.statistics().num_leases == 0, "the reader has said that it has them"
    assert pair.first.transfers.statistics().num_expired_leases == 0


def test_leased_blocks_are_not_reused_until_the_lease_is_over() -> None:
    pair = Pair(num_blocks=11)
    pair.submit(1, prompt_of(1, 15))
    while not (offers := pair.first.offers()):
        pair.turn(pair.first)
    pair.first.abort(1)
    held = set(offers[0].blocks.tolist())
    for rid in range(2, 8):
        pair.first.submit(rid, prompt_of(rid, 20), max_tokens=4, ignore_eos=True)
        pair.first.run()
        assert not held & set(pair.first.plans[-1].extended_blocks.tolist())
    assert pair.board.read(*offers[0].lease.tolist()[:3], pair_digest(pair, 1)) is not None
    pair.first.now += TERM_S + 1
    pair.first.transfers.next(pair.first.now, True)
    assert pair.first.transfers.statistics().num_expired_leases == 1
    assert pair.board.read(*offers[0].lease.tolist()[:3], pair_digest(pair, 1)) is None
    assert pair.first.scheduler.kv.num_free == 11


def test_a_request_that_ends_before_it_could_copy_leaves_nothing() -> None:
    """It waits for its grammar or its adapter first."""
    pair = Pair()
    pair.submit(1, prompt_of(1, 15))
    while not (offers := pair.first.offers()):
        pair.turn(pair.first)
    second = pair.second
    pair.prompts[2] = prompt_of(1, 15)
    for rid in (2, 3):
        second.submit(
            rid, prompt_of(1, 15), max_tokens=6, ignore_eos=True, kv_lease=offers[0].lease, blocked_on="grammar"
        )
    second.abort(3)
    second.scheduler.check_integrity()
    second.scheduler.unblock((0, 2), None, second.now)
    second.begin_copies()
    second.finish_copy(pair.first)
    second.run()
    assert second.streams[2] == reference_stream(prompt_of(1, 15), 2, 6)
    assert second.transfers.statistics().num_pulled_blocks == 3


def lent(pair: Pair, **options: Any) -> Any:
    """A lease on the three whole blocks of a prompt, which request 1 of the first replica has left."""
    pair.submit(1, prompt_of(1, 15))
    while not (offers := pair.first.offers()):
        pair.turn(pair.first)
    pair.first.abort(1)
    pair.first.run()
    return offers[0].lease


def pass_time(pair: Pair, seconds: float) -> None:
    for replica in (pair.second, pair.first):
        replica.now += seconds
        replica.begin_copies()


def test_a_lease_lasts_as_long_as_its_request_waits_for_something_else() -> None:
    pair = Pair()
    lease = lent(pair)
    pair.second.submit(2, prompt_of(1, 15), max_tokens=6, ignore_eos=True, kv_lease=lease, blocked_on="grammar")
    for _ in range(10):
        pass_time(pair, TERM_S / 3)
    assert pair.first.transfers.leases.num_leases == 1
    pair.second.scheduler.unblock((0, 2), None, pair.second.now)
    pair.second.begin_copies()
    pair.second.finish_copy(pair.first)
    pair.second.run()
    assert pair.second.streams[2] == reference_stream(prompt_of(1, 15), 2, 6)
    assert pair.second.transfers.statistics().num_pulled_blocks == 3
    assert pair.second.transfers.next_renewal == math.inf


def test_a_reader_that_says_nothing_keeps_no_lease() -> None:
    pair = Pair()
    lease = lent(pair)
    pair.second.submit(2, prompt_of(1, 15), max_tokens=6, ignore_eos=True, kv_lease=lease, blocked_on="grammar")
    pass_time(pair, 1.0)
    pair.first.now += TERM_S - 0.5
    pair.first.begin_copies()
    assert pair.first.transfers.leases.num_leases == 1, "it said so not a term ago"
    pair.first.now += 1.0
    pair.first.begin_copies()
    assert pair.first.transfers.leases.num_leases == 0
    assert pair.first.transfers.statistics().num_expired_leases == 1


def test_a_lease_that_siblings_share_lasts_until_the_last_has_copied() -> None:
    pair = Pair()
    lease = lent(pair)
    for rid in (2, 3):
        pair.second.submit(rid, prompt_of(1, 15), max_tokens=6, ignore_eos=True, kv_lease=lease, blocked_on="grammar")
    pair.second.abort(2)
    pass_time(pair, TERM_S / 2)
    pass_time(pair, TERM_S / 2)
    assert pair.first.transfers.leases.num_leases == 1
    pair.second.abort(3)
    pass_time(pair, TERM_S / 2)
    pass_time(pair, 0.0)
    assert pair.first.transfers.leases.num_leases == 0
    assert pair.first.transfers.statistics().num_expired_leases == 0, "it was given back"


@pytest.mark.parametrize("has_room_in_time", [True, False])
def test_a_copy_waits_for_room_for_longer_than_computing_would_take(has_room_in_time: bool) -> None:
    """It could not be computed either. It does not wait for ever: others might always be before it."""
    pair = Pair(num_blocks=11)
    lease = lent(pair)
    second = pair.second
    second.transfers.costs.observe_step(1000, 1000, 1e-3)
    second.submit(5, prompt_of(3, 30), max_tokens=8, ignore_eos=True)  # 10 of 11 blocks
    second.launch()
    second.submit(2, prompt_of(1, 15), max_tokens=6, ignore_eos=True, kv_lease=lease)
    for _ in range(8):
        pass_time(pair, MIN_PULL_WAIT_S)
    assert (len(second.transfers.waiting), second.transfers.statistics().num_given_up) == (1, 0)
    if has_room_in_time:
        second.abort(5)
        second.run()
    else:
        for _ in range(4):
            pass_time(pair, MIN_PULL_WAIT_S)
        assert second.transfers.statistics().num_given_up == 1
    while second.has_work():
        pair.turn(second)
        if second.copies:
            second.finish_copy(pair.first)
    assert second.streams[2] == reference_stream(prompt_of(1, 15), 2, 6)
    assert second.transfers.statistics().num_pulled_blocks == (3 if has_room_in_time else 0)


def test_old_leases_end_where_requests_lack_blocks_the_oldest_first() -> None:
    """A gateway that takes nothing stops the lender for no longer than the grace, and its policy is not to blame."""
    pair = Pair(num_blocks=11)
    first = pair.first
    offers, granted = [], []
    for rid in (1, 2, 3):
        pair.submit(rid, prompt_of(rid, 15))
        while not (found := first.offers()):
            pair.turn(first)
        offers += found
        granted.append(first.now)
        first.abort(rid)
        first.run()
    first.submit(4, prompt_of(4, 16), max_tokens=2, ignore_eos=True)  # 5 blocks, and 9 of 11 are lent
    assert first.launch() is None
    assert PolicyMonitor().stall(first.scheduler) is None
    until = first.transfers.next_deadline
    assert until == pytest.approx(granted[0] + GRACE_S)
    first.now = max(until, first.now)
    first.transfers.next(first.now, False)
    assert [first.transfers.leases.num_leases, first.scheduler.kv.num_free] == [2, 5]
    first.run()
    assert first.streams[4] == reference_stream(prompt_of(4, 16), 4, 2)
    assert pair.board.read(*offers[0].lease.tolist()[:3], pair_digest(pair, 1)) is None
    assert pair.board.read(*offers[2].lease.tolist()[:3], pair_digest(pair, 3)) is not None
    first.scheduler.check_integrity()


def pair_digest(pair: Pair, rid: int) -> bytes:
    """Of the last whole block of a prompt."""
    from tests.scheduling.conftest import make_submit

    return make_submit(rid, pair.prompts[rid]).block_hashes.tobytes()[-32:]


def test_a_lease_that_is_over_costs_a_prompt_that_is_computed_twice() -> None:
    pair = Pair()
    pair.submit(1, prompt_of(1, 15))
    while not pair.move():
        pair.turn(pair.first)
    pair.second.begin_copies()
    pair.first.transfers.leases.drop_all()
    pair.second.finish_copy(pair.first)
    pair.run()
    assert_right(pair)
    assert pair.second.transfers.statistics().num_lost_leases == 1
    assert len(pair.streams()[1]) == 6


@pytest.mark.parametrize("what", ["another prompt", "no such lease", "no such replica", "too long", "negative"])
def test_a_lease_of_something_else_is_not_believed(what: str) -> None:
    """A program that has joined may say anything."""
    pair = Pair()
    pair.submit(1, prompt_of(1, 15))
    while not (offers := pair.first.offers()):
        pair.turn(pair.first)
    replica, slot, number, size = offers[0].lease.tolist()
    lease = {
        "another prompt": [replica, slot, number, size],
        "no such lease": [replica, slot, number + 1, size],
        "no such replica": [1000, slot, number, size],
        "too long": [replica, SLOTS, number, 10**12],
        "negative": [-1, -1, -1, -1],
    }[what]
    pair.prompts[2] = prompt_of(2, 15)
    pair.second.submit(2, pair.prompts[2], max_tokens=6, ignore_eos=True, kv_lease=np.array(lease, np.int64))
    pair.run()
    assert_right(pair)
    assert pair.second.transfers.statistics().num_pulled_blocks == 0


def test_workers_that_died_lend_nothing_of_what_they_had() -> None:
    """The next ones clear the memory before their scheduler has heard of the death."""
    pair = Pair()
    pair.submit(1, prompt_of(1, 15))
    while not pair.move():
        pair.turn(pair.first)
    pair.second.begin_copies()
    pair.board.begin_era(0)
    pair.first.worker.kv.clear()
    pair.second.finish_copy(pair.first)
    pair.first.lose_workers()
    pair.run()
    assert_right(pair)
    assert pair.second.transfers.statistics().num_pulled_blocks == 0


def test_a_table_without_room_leaves_the_request_where_it_is() -> None:
    pair = Pair()
    pair.first.lender._free.clear()
    pair.submit(1, prompt_of(1, 15))
    pair.run()
    assert_right(pair)
    assert pair.second.transfers.statistics().num_pulls == 0


def run_at_random(seed: int) -> Pair:
    """Requests are handed off while leases end, workers die, caches are reset, clients give up, and requests of both compete."""
    draw = random.Random(seed)
    pair = Pair(num_blocks=14, max_num_batched_tokens=12)
    for rid in range(1, 40):
        if draw.random() < 0.5:
            pair.submit(rid, prompt_of(draw.randrange(6), draw.randrange(5, 24)), draw.randrange(2, 8))
        else:
            own = draw.choice((pair.first, pair.second))
            pair.prompts[rid] = prompt_of(draw.randrange(6), draw.randrange(5, 24))
            own.submit(rid, pair.prompts[rid], max_tokens=4, ignore_eos=True)
        for _ in range(draw.randrange(12)):
            event = draw.random()
            replica: Replica = draw.choice((pair.first, pair.second))
            if event < 0.6:
                pair.turn(replica)
            elif event < 0.75:
                pair.move()
            elif event < 0.88 and pair.second.copies:
                pair.second.finish_copy(pair.first)
            elif event < 0.91:
                pair.first.now += draw.choice((0.1, TERM_S))
            elif event < 0.93:
                replica.scheduler.reset_prefix_cache(replica.now)
            elif event < 0.95:
                replica.lose_workers()
            elif event < 0.98:
                alive = [key[1] for key in replica.scheduler._table.alive]
                if alive:
                    replica.abort(draw.choice(alive))
            pair.first.scheduler.check_integrity()
            pair.second.scheduler.check_integrity()
    pair.run()
    assert_right(pair)
    return pair


def run_all(number: int) -> tuple[int, int]:
    """Blocks that were copied in so many runs, and leases that were over before."""
    told = [run_at_random(seed).second.transfers.statistics() for seed in range(number)]
    return sum(one.num_pulled_blocks for one in told), sum(one.num_lost_leases for one in told)


def test_random_runs_have_the_tokens_of_undisturbed_ones() -> None:
    assert min(run_all(examples(10, 400))) > 0


PLANTED: dict[str, tuple[type, str, Any]] = {
    "blocks are free before the lease is over": (Lender, "end", lambda self, lease: self._free.append(int(lease[1]))),
    "the lease is not looked at after the copy": (LeaseBoard, "is_valid", lambda self, lent: True),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, name, wrong = PLANTED[mistake]
    monkeypatch.setattr(cls, name, wrong)
    with pytest.raises((AssertionError, KeyError)):
        run_all(60)
