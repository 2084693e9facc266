"""Stuck or only busy: the decision, from made-up signs of life."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from actorllm.actors.heartbeat import WITHOUT_NUMBER, Heartbeat, Sign, is_stopped
from actorllm.actors.step_budget import MIN_BUDGET_S, MULTIPLE, NEW_BUDGET_S, StepBudget
from actorllm.supervision.hang_detector import HangDetector

Story = Callable[[float], Sign]
"""What a process shows at a time."""


def idle(at: float) -> Sign:
    return Sign(beats=int(4 * at), num_steps=7, step=0, budget_s=0.0)


def silent(since: float, *, is_stopped: bool = False) -> Story:
    return lambda at: Sign(int(4 * min(at, since)), 7, 0, 0.0, is_stopped and at >= since)


def stepping(duration_s: float, budget_s: float = 30.0) -> Story:
    """One step after the other."""
    return lambda at: Sign(int(at / duration_s), int(at / duration_s), 1 + int(at / duration_s), budget_s)


def in_step(since: float, budget_s: float, *, step: int = 17, is_stopped: bool = False) -> Story:
    def story(at: float) -> Sign:
        return idle(at) if at < since else Sign(int(4 * since), 8, step, budget_s, is_stopped)

    return story


def watch(stories: dict[str, Story], times: Iterable[float], timeout_s: float = 10.0) -> list[tuple[float, str, str]]:
    vigil = HangDetector(timeout_s, 1.0)
    found: list[tuple[float, str, str]] = []
    dead: set[str] = set()
    for at in times:
        signs = {name: story(at) for name, story in stories.items() if name not in dead}
        for stuck in vigil.look(1000.0 + at, signs):
            found.append((at, stuck.actor, stuck.reason))
            dead.add(stuck.actor)
    return found


def every_second(until: int) -> list[float]:
    return [float(at) for at in range(until + 1)]


@pytest.mark.parametrize("story", [idle, stepping(0.005), stepping(0.9), stepping(25.0), in_step(5.0, 1000.0)])
def test_who_works_or_has_nothing_to_do_is_left_alone(story: Story) -> None:
    assert watch({"worker0": story, "scheduler": idle}, every_second(200)) == []


def test_a_step_beyond_its_budget_is_stuck_and_nobody_else() -> None:
    found = watch({"scheduler": idle, "worker0": in_step(5.0, 30.0)}, every_second(100))
    assert found == [(36.0, "worker0", "step 17 ran for 31.0 s, deadline 30 s")]


def test_time_counts_as_far_as_the_step_had_it() -> None:
    def starved(at: float) -> Sign:
        return replace(in_step(5.0, 30.0)(at), share=0.25)

    assert watch({"worker0": starved}, every_second(120)) == []
    ((at, _, _),) = watch({"worker0": starved}, every_second(200))
    assert at == 5 + 4 * 30 + 1


def test_a_control_has_a_deadline_as_well() -> None:
    ((_, _, reason),) = watch({"worker0": in_step(5.0, 3.0, step=WITHOUT_NUMBER)}, every_second(20))
    assert reason == "a control ran for 4.0 s, deadline 3 s"


def test_a_loop_that_stands_is_stuck() -> None:
    ((at, actor, reason),) = watch({"scheduler": silent(20.0), "worker0": idle}, every_second(100))
    assert (at, actor) == (31.0, "scheduler")
    assert reason == "its loop has not turned for 11.0 s, limit 10 s"


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        (silent(20.0, is_stopped=True), "the process was stopped for 11.0 s, limit 10 s"),
        (in_step(20.0, 300.0, is_stopped=True), "the process was stopped for 11.0 s during step 17, limit 10 s"),
    ],
)
def test_a_stopped_process_is_told_apart_from_a_long_step(story: Story, expected: str) -> None:
    ((at, _, reason),) = watch({"worker0": story}, every_second(100))
    assert (at, reason) == (31.0, expected)


def test_a_stop_that_ends_in_time_is_forgiven() -> None:
    def story(at: float) -> Sign:
        return Sign(int(4 * at), 7, 0, 0.0) if not 20 <= at < 28 else Sign(80, 7, 0, 0.0, True)

    assert watch({"worker0": story}, every_second(100)) == []


@pytest.mark.parametrize("gap_s", [5.0, 3600.0, 1e6])
def test_who_watches_and_was_stopped_himself_condemns_nobody(gap_s: float) -> None:
    """The whole group was stopped, or the machine asleep, in the middle of everything."""

    def frozen(story: Story) -> Story:
        return lambda at: story(at if at < 20 else max(20.0, at - gap_s))

    times = [float(at) for at in range(20)] + [20 + gap_s + at for at in range(100)]
    stories = {"scheduler": frozen(idle), "worker0": frozen(in_step(18.0, 1e9)), "worker1": frozen(stepping(3.0))}
    assert watch(stories, times) == []
    late = watch({"worker0": frozen(in_step(18.0, 30.0))}, times)
    assert len(late) == 1
    assert late[0][0] >= 20 + gap_s + 26, "what it could not use does not count"


def test_a_clock_that_goes_back_condemns_nobody() -> None:
    assert watch({"worker0": in_step(0.0, 30.0)}, [float(-at) for at in range(1000)]) == []


def test_a_starved_watch_still_finds_who_is_stuck() -> None:
    found = watch({"worker0": silent(0.0)}, [10.0 * at for at in range(20)])
    assert [actor for _, actor, _ in found] == ["worker0"]


def test_another_process_of_the_same_name_begins_anew() -> None:
    vigil = HangDetector(10.0, 1.0)
    stuck = Sign(5, 0, 0, 0.0)
    for at in range(10):
        assert vigil.look(float(at), {"worker0 1": stuck}) == []
    assert vigil.look(10.0, {}) == []
    for at in range(11, 21):
        assert vigil.look(float(at), {"worker0 2": stuck}) == []
    vigil.forget()
    for at in range(1000, 1010):
        assert vigil.look(float(at), {"worker0 2": stuck}) == []


# Budgets --------------------------------------------------------------------------------------------------------------


def test_the_budget_grows_with_the_step_and_with_what_was_measured() -> None:
    budget = StepBudget()
    assert budget.of(1) == budget.of(2048) == NEW_BUDGET_S, "nothing is known"
    budget.observe(16, 0.01, budget.of(16))
    assert budget.of(16) == MIN_BUDGET_S
    assert budget.of(2048) == NEW_BUDGET_S, "memory is touched and kernels are made for the first time"
    budget.observe(2048, 4.0, budget.of(2048))
    assert budget.of(2048) == 4.0 * MULTIPLE
    assert budget.of(16) == MIN_BUDGET_S
    assert budget.of(16384) == 8 * 4.0 * MULTIPLE
    assert budget.of(300) == NEW_BUDGET_S


def test_slow_steps_fade_and_a_stop_teaches_nothing() -> None:
    budget = StepBudget()
    budget.observe(8, 10.0, budget.of(8))
    assert budget.of(8) == 200.0
    budget.observe(8, 3600.0, budget.of(8))  # it was stopped, and all processes with it
    assert budget.of(8) == 200.0
    for _ in range(200):
        budget.observe(8, 0.01, budget.of(8))
    assert budget.of(8) == MIN_BUDGET_S


def test_a_given_budget_is_the_budget() -> None:
    budget = StepBudget(2.5)
    budget.observe(8, 2.0, budget.of(8))
    assert budget.of(8) == budget.of(4096) == 2.5


# Pulses ---------------------------------------------------------------------------------------------------------------


def test_both_ends_see_the_same_page() -> None:
    mine, fd = Heartbeat.create()
    theirs = Heartbeat(fd)
    os.close(fd)
    assert mine.read() == Sign(0, 0, 0, 0.0)
    theirs.beat()
    theirs.begin(12, 30.5)
    assert mine.read(is_stopped=True) == Sign(1, 1, 12, 30.5, True)
    theirs.end()
    assert mine.read() == Sign(2, 1, 0, 30.5)
    theirs.begin(WITHOUT_NUMBER, 1e9)
    assert mine.read().step == WITHOUT_NUMBER
    for heartbeat in (mine, theirs):
        heartbeat.close()


def test_the_kernel_knows_who_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        end = time.monotonic() + 5
        while not is_stopped(process.pid) and time.monotonic() < end:
            time.sleep(0.001)
        assert is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)
