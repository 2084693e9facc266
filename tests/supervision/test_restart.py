"""Counting deaths: what is started again, how soon, and what is not."""

from __future__ import annotations

from actorllm.supervision.restart import RestartCounter, RestartLimits

LIMITS = RestartLimits(max_deaths=5, max_early_deaths=3, first_delay_s=0.1, max_delay_s=0.3)


def test_five_deaths_in_a_row_are_the_end_and_the_waits_grow_up_to_a_limit() -> None:
    counter = RestartCounter(LIMITS)
    assert [counter.died("workers", was_ready=True) for _ in range(5)] == [0.0, 0.1, 0.2, 0.3, None]
    assert counter.explain("workers") == "these were 5 deaths in a row without one token in between"


def test_a_token_in_between_makes_it_another_row() -> None:
    counter = RestartCounter(LIMITS)
    for _ in range(50):
        assert counter.died("workers", was_ready=True) == 0.0
        assert counter.died("scheduler", was_ready=True) == 0.0
        assert counter.died("workers", was_ready=True) == 0.1
        counter.progressed()


def test_groups_are_counted_apart() -> None:
    counter = RestartCounter(LIMITS)
    assert [counter.died("workers", was_ready=True) for _ in range(4)][-1] == 0.3
    assert [counter.died("scheduler", was_ready=True) for _ in range(5)][-1] is None


def test_three_deaths_before_it_was_ready_are_the_end() -> None:
    counter = RestartCounter(LIMITS)
    assert counter.died("scheduler", was_ready=True) == 0.0
    assert [counter.died("scheduler", was_ready=False) for _ in range(3)] == [0.1, 0.2, None]
    assert counter.explain("scheduler") == "it did not become ready in 3 attempts"


def test_who_became_ready_may_fail_to_again() -> None:
    counter = RestartCounter(LIMITS)
    for _ in range(10):
        assert counter.died("scheduler", was_ready=True) == 0.0
        assert [counter.died("scheduler", was_ready=False) for _ in range(2)] == [0.1, 0.2]
        counter.progressed()
