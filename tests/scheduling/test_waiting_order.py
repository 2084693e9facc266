"""The order of the waiting: always what a sort by present keys gives, at a cost that follows what changes."""

from __future__ import annotations

import random
from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import pytest

from actorllm.scheduling.policy import KeyPolicy, SortKey
from actorllm.scheduling.sequence import State
from actorllm.scheduling.waiting_order import WaitingLines, WaitingOrder


class Counted(KeyPolicy):
    def __init__(self) -> None:
        self.num_keys = 0

    def key(self, sequence: Any, view: Any) -> SortKey:
        self.num_keys += 1
        return self.key_of(sequence, view)

    def key_of(self, sequence: Any, view: Any) -> SortKey:
        return (sequence.size,)


class ByTenant(Counted):
    """As vtc: the counters of tenants only grow."""

    keys_grow = True

    def __init__(self) -> None:
        super().__init__()
        self.served = [0] * 4

    def key_of(self, sequence: Any, view: Any) -> SortKey:
        return (self.served[sequence.tenant],)

    def group(self, sequence: Any, view: Any) -> tuple[Hashable, SortKey]:
        return sequence.tenant, ()


class Relegating(Counted):
    """As qoserve: at a certain time a request goes behind."""

    def key_of(self, sequence: Any, view: Any) -> SortKey:
        return (view.now >= sequence.late_at, sequence.size)

    def key_horizon(self, sequence: Any, view: Any) -> float:
        return sequence.late_at if sequence.late_at > view.now else float("inf")


class Ratio(Counted):
    """As hrrn: every key changes all the time; of equal work the one that came first is first."""

    def key_of(self, sequence: Any, view: Any) -> SortKey:
        return (-(view.now - sequence.arrival) / sequence.size,)

    def key_horizon(self, sequence: Any, view: Any) -> float:
        return view.now  # good for no time at all

    def group(self, sequence: Any, view: Any) -> tuple[Hashable, SortKey]:
        return sequence.size, (sequence.arrival,)


def request(number: int, rng: random.Random, now: float) -> Any:
    return SimpleNamespaceWithIdentity(
        arrival_index=number,
        state=State.WAITING,
        size=rng.randint(1, 5),
        tenant=rng.randrange(4),
        late_at=now + rng.randint(1, 30),
        arrival=now,
    )


class SimpleNamespaceWithIdentity(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


@pytest.mark.parametrize("policy_class", [Counted, ByTenant, Relegating, Ratio])
@pytest.mark.parametrize("seed", range(5))
def test_it_is_a_sort_by_present_keys(policy_class: type[Any], seed: int) -> None:
    rng, policy, view = random.Random(seed), policy_class(), SimpleNamespace(now=0.0)
    order, alive = WaitingOrder(policy), list[Any]()

    def place(sequence: Any) -> tuple[SortKey, int]:
        return policy.key_of(sequence, view), sequence.arrival_index

    for number in range(600):
        view.now += rng.random()
        if rng.random() < 0.6:
            alive.append(request(number, rng, view.now))
            order.push(alive[-1], view)
        if alive and rng.random() < 0.2:
            alive.pop(rng.randrange(len(alive))).state = State.FINISHED
        if isinstance(policy, ByTenant):
            policy.served[rng.randrange(4)] += rng.randint(0, 9)
        if rng.random() < 0.05:
            order.clean(view)
        head = order.head(view)
        assert head is min(alive, key=place, default=None)
        if head is None:
            continue
        assert order.head_key == policy.key_of(head, view)
        middle = place(rng.choice(alive))
        found = sorted(s.arrival_index for s in order.before(middle, view))
        assert found == sorted(s.arrival_index for s in alive if place(s) < middle)
        if rng.random() < 0.4:
            order.pop(view)
            if rng.random() < 0.5:
                order.push(head, view)  # it was skipped
            else:
                alive.remove(head)
                head.state = State.RUNNING
    assert len(order) <= 600
    order.clean(view)
    assert len(order) == len(alive)


@pytest.mark.parametrize("policy_class", [Counted, ByTenant, Relegating])
def test_what_a_step_costs_does_not_depend_on_how_many_wait(policy_class: type[Any]) -> None:
    """Of 4 tenants with thousands of requests each, one is served in every step; now and then a request is late."""
    rng, policy, view = random.Random(1), policy_class(), SimpleNamespace(now=0.0)
    order = WaitingOrder(policy)
    for number in range(20_000):
        order.push(request(number, rng, 3.0 * number), view)
    policy.num_keys = 0
    for step in range(500):
        view.now += 1.0
        assert order.head(view) is not None
        order.pop(view)
        if isinstance(policy, ByTenant):
            policy.served[step % 4] += 10
    assert policy.num_keys < 5 * 500


class Lined(Relegating):
    def line(self, sequence: Any, view: Any) -> Hashable:
        return sequence.tenant or None


@pytest.mark.parametrize("seed", range(5))
def test_the_first_one_of_the_lines_that_are_not_closed_is_next(seed: int) -> None:
    rng, policy, view = random.Random(seed), Lined(), SimpleNamespace(now=0.0)
    lines, alive = WaitingLines(policy), list[Any]()

    def place(sequence: Any) -> tuple[SortKey, int]:
        return policy.key_of(sequence, view), sequence.arrival_index

    for number in range(300):
        view.now += rng.random()
        for _ in range(rng.randrange(3)):
            alive.append(request(len(alive) + 10 * number, rng, view.now))
            lines.push(alive[-1], view)
        lines.reopen()
        closed: set[int] = set()
        while True:
            head = lines.head(view)
            assert head is min((s for s in alive if s.tenant not in closed), key=place, default=None)
            if head is None:
                break
            assert lines.head_key == policy.key_of(head, view)
            found = sorted(s.arrival_index for s in lines.before(place(head), view))
            assert found == sorted(s.arrival_index for s in alive if place(s) < place(head))
            if rng.random() < 0.5:
                lines.close()
                closed.add(head.tenant)
            else:
                lines.pop(view)
                alive.remove(head)
                head.state = State.RUNNING
    lines.clean(view)
    assert len(lines) == len(alive)


def test_lines_without_anybody_do_not_pile_up() -> None:
    policy, view = Lined(), SimpleNamespace(now=0.0)
    lines = WaitingLines(policy)
    for number in range(1000):
        one = request(number, random.Random(number), view.now)
        one.tenant = number
        lines.push(one, view)
        assert lines.head(view) is one
        lines.pop(view)
        one.state = State.RUNNING
    assert len(lines._lines) <= 2


def test_old_entries_do_not_pile_up() -> None:
    """Where every key is made anew all the time."""
    rng, policy, view = random.Random(1), Ratio(), SimpleNamespace(now=0.0)
    order = WaitingOrder(policy)
    for number in range(1000):
        view.now += 1.0
        order.push(request(number, rng, view.now), view)
        order.head(view)
    assert len(order._heap) + len(order._horizons) < 200
    assert policy.num_keys < 1000 * 20
