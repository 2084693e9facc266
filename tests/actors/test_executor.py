"""Jobs beside a loop: in turn, bounded, dropped when nobody waits for them, and never in each other's way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from actorllm.actors.executor import MAX_REPLACED, SMALL, FairExecutor, JobDropped

LARGE = SMALL + 1


@dataclass(eq=False)
class Fake:
    name: str
    owner: int = 0
    tenant: str | None = None
    size: int = 1
    is_wanted: bool = True
    is_timed: bool = True
    run: Callable[[], Any] = lambda: "done"


class Gate:
    """Nothing begins before `open`."""

    def __init__(self, **limits: Any) -> None:
        self.is_open = False
        self.queue: FairExecutor[Fake] = FairExecutor("test", bool, has_room=lambda _: self.is_open, **limits)

    def put(self, *jobs: Fake) -> list[bool]:
        return [self.queue.put(job) for job in jobs]

    def open(self) -> None:
        self.is_open = True
        with self.queue._changed:
            self.queue._changed.notify_all()

    def take(self, count: int) -> list[tuple[str, Any]]:
        """The next outcomes, so many at least."""
        told: list[tuple[str, Any]] = []
        while len(told) < count:
            self.queue.wait(0.05)
            told += [(job.name, outcome) for job, outcome in self.queue.take_outcomes()]
        return told


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.queue.close()


def order_of(gate: Gate, *jobs: Fake) -> list[str]:
    """In which order large jobs run: there is one thread for these."""
    order: list[str] = []
    for job in jobs:
        job.run = lambda job=job: order.append(job.name)  # type: ignore[misc]
    assert all(gate.put(*jobs))
    gate.open()
    gate.take(len(jobs))
    return order


def test_owners_and_their_tenants_take_turns(gate: Gate) -> None:
    jobs = [Fake(f"a{i}", owner=0, tenant="busy", size=LARGE) for i in range(4)]
    jobs += [Fake("b0", owner=0, tenant="other", size=LARGE), Fake("c0", owner=1, size=LARGE)]
    order = order_of(gate, *jobs)
    assert order.index("c0") <= 1
    assert order.index("b0") <= 2
    assert [name for name in order if name.startswith("a")] == ["a0", "a1", "a2", "a3"]


def test_a_small_job_waits_for_no_large_one(gate: Gate) -> None:
    release = threading.Event()
    gate.open()
    gate.put(Fake("large", size=LARGE, run=release.wait), Fake("next", size=LARGE), Fake("small"))
    assert gate.take(1) == [("small", "done")]
    release.set()
    assert [name for name, _ in gate.take(2)] == ["large", "next"]


def test_a_smaller_one_goes_before_a_larger_one_that_came_just_before(gate: Gate) -> None:
    assert order_of(gate, Fake("huge", size=40 * LARGE), Fake("large", size=LARGE)) == ["large", "huge"]


def test_what_nobody_waits_for_is_dropped_and_told(gate: Gate) -> None:
    gone, here = Fake("gone", is_wanted=False), Fake("here")
    gate.put(gone, here)
    gate.open()
    told = dict(gate.take(2))
    assert isinstance(told["gone"], JobDropped)
    assert told["here"] == "done"
    assert gate.queue.statistics().num_dropped == 1
    assert not gate.queue.is_busy


def test_what_is_too_much_is_refused_and_owners_have_their_share() -> None:
    gate = Gate(max_jobs=4, max_size=1000)
    assert gate.put(*(Fake(f"{i}") for i in range(5))) == [True] * 4 + [False]
    assert gate.put(Fake("other", owner=1), Fake("other2", owner=1), Fake("other3", owner=1)) == [True, True, False]
    assert gate.put(Fake("large", owner=2, size=900), Fake("large", owner=2, size=900)) == [True, False]
    first = Fake("5", owner=3)
    assert gate.put(first, Fake("6", owner=3)) == [True, False]
    first.is_wanted = False
    assert gate.put(Fake("6", owner=3)) == [True], "the place of one that has gone is free"
    assert gate.queue.statistics().num_refused == 4
    gate.queue.close()


def test_whatever_a_job_raises_is_its_outcome(gate: Gate) -> None:
    class Panic(BaseException):
        """Of a native library."""

    def fail() -> None:
        raise Panic

    gate.open()
    gate.put(Fake("a", run=fail))
    assert [type(outcome) for _, outcome in gate.take(1)] == [Panic]
    gate.put(Fake("b"))
    assert gate.take(1) == [("b", "done")]


def test_threads_beyond_the_limit_are_replaced_a_few_at_a_time() -> None:
    gate = Gate(timeout_s=0.0)
    gate.open()
    release = threading.Event()
    slow = [Fake(f"slow{i}", size=LARGE, run=release.wait) for i in range(MAX_REPLACED + 2)]
    gate.put(*slow)
    told = gate.take(MAX_REPLACED + 1)
    assert all(isinstance(outcome, TimeoutError) for _, outcome in told)
    statistics = gate.queue.statistics()
    assert statistics.num_abandoned == MAX_REPLACED + 1
    assert statistics.num_waiting == 1, "it begins when one of them returns"
    gate.queue.timeout_s = 60.0
    release.set()
    assert gate.take(1) == [(f"slow{MAX_REPLACED + 1}", True)]
    assert gate.queue.statistics().num_abandoned == 0
    gate.queue.close()


def test_the_time_of_what_all_need_does_not_count() -> None:
    gate = Gate(timeout_s=30.0)
    gate.open()
    release = threading.Event()
    job = Fake("first", run=release.wait, is_timed=False)
    gate.put(job)
    while not gate.queue.statistics().num_running:
        pass
    (entry,) = [one.entry for one in gate.queue._threads if one.entry is not None]
    entry.began -= 1000.0
    assert gate.queue.take_outcomes() == []
    job.is_timed = True
    assert gate.queue.take_outcomes() == []
    release.set()
    assert gate.take(1) == [("first", True)]
    gate.queue.close()
