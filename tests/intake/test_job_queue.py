"""Which job comes next: held against a model that looks at everything, for any sequence of events."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from actorllm.intake.job import Job
from actorllm.intake.job_queue import LIGHT_IN_A_ROW, ORDER_GRACE_S, JobQueue
from actorllm.intake.tokenizer_pool import TokenizerWorker
from tests.effort import examples

NUM_WORKERS = 3


class Plain(Job):
    def __init__(self, submitter: str | None = None, is_heavy: bool = False, number: int = 0) -> None:
        self.submitter = submitter
        self.is_heavy = is_heavy
        self.number = number
        self.kind = "request"

    def run(self, worker: TokenizerWorker | None) -> None:
        raise AssertionError("nobody runs it here")

    def end(self, error: BaseException | None) -> None:
        raise AssertionError("nobody ends it here")


def order(queue: JobQueue, now: float = 0.0) -> list[int]:
    """The numbers of all jobs, where each is done before the next one is taken."""
    numbers = []
    while (job := queue.take(now)) is not None:
        assert isinstance(job, Plain)
        numbers.append(job.number)
        queue.done(job)
    return numbers


def test_submitters_take_turns() -> None:
    queue = JobQueue(2)
    for number in range(4):
        queue.put(Plain("a", number=number))
    queue.put(Plain("b", number=10))
    queue.put(Plain("c", number=20))
    assert order(queue) == [0, 10, 20, 1, 2, 3]


def test_light_before_heavy_and_neither_starves() -> None:
    queue = JobQueue(2)
    for number in range(2 * LIGHT_IN_A_ROW + 2):
        queue.put(Plain("light", number=number))
    for number in (100, 101):
        queue.put(Plain("heavy", True, number))
    numbers = order(queue)
    assert numbers.index(100) == LIGHT_IN_A_ROW
    assert numbers.index(101) == 2 * LIGHT_IN_A_ROW + 1
    assert [number for number in numbers if number < 100] == sorted(range(2 * LIGHT_IN_A_ROW + 2))


def test_one_worker_is_never_given_a_heavy_job() -> None:
    queue = JobQueue(2)
    for number in range(3):
        queue.put(Plain(str(number), True, number))
    first, second = queue.take(0.0), queue.take(0.0)
    assert first is not None
    assert second is not None
    assert not queue.has_next(0.0)
    assert queue.take(0.0) is None
    queue.put(Plain("light"))
    light = queue.take(0.0)
    assert light is not None
    assert not light.is_heavy


def test_one_that_takes_long_is_overtaken() -> None:
    queue = JobQueue(2)
    first, second = Plain("a", number=1), Plain("a", number=2)
    queue.put(first)
    queue.put(second)
    assert queue.take(0.0) is first
    first.since = 1.0
    assert queue.take(1.0 + ORDER_GRACE_S / 2) is None
    assert queue.take(1.0 + ORDER_GRACE_S) is second


def test_a_barrier_waits_for_those_of_before_only() -> None:
    queue = JobQueue(2)
    before, after, barrier, control = Plain("a"), Plain("b"), Plain(), Plain()
    queue.put(before)
    queue.put_barrier(barrier)
    queue.put(after)
    assert queue.take(0.0) is before
    assert queue.take(0.0) is after
    assert queue.take(0.0) is None
    queue.put_control(control)
    assert queue.take(0.0) is None
    queue.done(after)
    before.since = 0.0
    assert queue.take(ORDER_GRACE_S / 2) is None
    assert queue.take(ORDER_GRACE_S) is control, "it does not wait for one that takes long"
    queue.done(before)
    assert queue.take(0.0) is barrier


def test_a_control_waits_for_no_heavy_job() -> None:
    queue = JobQueue(2)
    heavy, control = Plain("a", True), Plain()
    queue.put(heavy)
    queue.put_control(control)
    assert queue.take(0.0) is control
    assert queue.take(0.0) is heavy


class Machine(RuleBasedStateMachine):
    """Jobs come, are taken, end, are given up and dropped in any order."""

    make: Callable[[int], JobQueue] = JobQueue

    def __init__(self) -> None:
        super().__init__()
        self.queue = type(self).make(NUM_WORKERS - 1)
        self.now = 0.0
        self.number = 0
        self.waiting: list[Plain] = []
        self.open: list[Plain] = []
        """Waiting or running, in the order in which they came."""
        self.running: list[Plain] = []

    @rule(submitter=st.sampled_from([None, "a", "b", "c"]), is_heavy=st.booleans())
    def put(self, submitter: str | None, is_heavy: bool) -> None:
        self.number += 1
        job = Plain(submitter, is_heavy, self.number)
        self.waiting.append(job)
        self.open.append(job)
        self.queue.put(job)

    @rule()
    def put_barrier(self) -> None:
        self.number += 1
        job = Plain(number=self.number)
        job.kind = "barrier"
        self.waiting.append(job)
        self.queue.put_barrier(job)

    @rule()
    def put_control(self) -> None:
        self.number += 1
        job = Plain(number=self.number)
        job.kind = "control"
        self.waiting.append(job)
        self.queue.put_control(job)

    @precondition(lambda self: len(self.running) < NUM_WORKERS)
    @rule(is_serial=st.booleans())
    def take(self, is_serial: bool) -> None:
        could = [job for job in self.waiting if self.may_run(job)] if not (is_serial and self.running) else []
        assert self.queue.has_next(self.now, is_serial) == bool(could)
        job = self.queue.take(self.now, is_serial)
        if job is None:
            assert not could, f"{could[0].number} could have run"
            return
        assert isinstance(job, Plain)
        assert job in could
        self.waiting.remove(job)
        self.running.append(job)

    def may_run(self, job: Plain) -> bool:
        if job.kind != "request":
            is_first = not any(one.kind == job.kind and one.number < job.number for one in self.waiting)
            before = [one for one in self.open if one.number < job.number]
            if job.kind == "control":
                before = [one for one in before if not one.is_heavy and not self.is_late(one)]
            return is_first and not before
        same = [one for one in self.open if one.submitter == job.submitter and one.is_heavy == job.is_heavy]
        for one in same:
            if one.number >= job.number:
                continue
            if one not in self.running or not self.is_late(one):
                return False
        # a later one that overtook is running, too
        if any(one in self.running and not self.is_late(one) for one in same):
            return False
        return not job.is_heavy or sum(one.is_heavy for one in self.running) < NUM_WORKERS - 1

    def is_late(self, job: Plain) -> bool:
        return job.since is not None and self.now - job.since >= ORDER_GRACE_S

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.running)).since = self.now

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.running))
        self.running.remove(job)
        if job in self.open:
            self.open.remove(job)
        self.queue.done(job)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        requests = [job for job in self.waiting if job.kind == "request"]
        gone = set(data.draw(st.lists(st.sampled_from(requests)))) if requests else set()
        assert set(self.queue.drop(lambda job: job in gone)) == gone
        self.waiting = [job for job in self.waiting if job not in gone]
        self.open = [job for job in self.open if job not in gone]

    @rule(seconds=st.sampled_from([0.1, ORDER_GRACE_S]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def counts(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert self.queue.num_running == len(self.running)
        assert self.queue.num_submitters <= len(self.waiting)


QUICK = settings(max_examples=examples(20, 60), stateful_step_count=40, deadline=None)


def test_any_sequence_of_events() -> None:
    run_state_machine_as_test(Machine, settings=QUICK)


class Unordered(JobQueue):
    """Planted: two jobs of one submitter at a time."""

    def _is_in_order(self, job: Job, now: float) -> bool:
        return True


def test_a_planted_mistake_is_found() -> None:
    planted = type("Planted", (Machine,), {"make": Unordered})
    found = settings(
        QUICK, max_examples=3000, database=None, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(planted, settings=found)
