"""The largest set of prompts that can be on time, against a search through all sets."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from actorllm.scheduling.on_time import most_on_time
from tests.effort import examples

JOBS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 25), st.booleans()), min_size=1, max_size=8)


def can_be_on_time(work: list[int], due: list[int]) -> bool:
    """One after the other, the earliest deadline first."""
    now = 0
    for deadline, size in sorted(zip(due, work, strict=True)):
        now += size
        if now > deadline:
            return False
    return True


def largest(work: list[int], due: list[int], kept: list[int]) -> int:
    """How many others can be on time beside those that are kept; -1: not even those."""
    others = [i for i in range(len(work)) if i not in kept]
    for num in range(len(others), -1, -1):
        for chosen in itertools.combinations(others, num):
            rows = [*kept, *chosen]
            if can_be_on_time([work[i] for i in rows], [due[i] for i in rows]):
                return num
    return -1


@given(JOBS)
@settings(max_examples=examples(33, 100), deadline=None)
def test_no_larger_set_can_be_on_time(jobs: list[tuple[int, int, bool]]) -> None:
    work, due = [job[0] for job in jobs], [job[1] for job in jobs]
    chosen = most_on_time(np.array(work, float), np.array(due, float))
    rows = np.flatnonzero(chosen).tolist()
    assert can_be_on_time([work[i] for i in rows], [due[i] for i in rows])
    assert len(rows) == largest(work, due, [])


@given(JOBS)
@settings(max_examples=examples(33, 100), deadline=None)
def test_those_that_were_promised_stay_in(jobs: list[tuple[int, int, bool]]) -> None:
    work, due = [job[0] for job in jobs], [job[1] for job in jobs]
    kept = [i for i, job in enumerate(jobs) if job[2]]
    expected = largest(work, due, kept)
    if expected < 0:
        return  # they cannot all be on time any more, and what becomes of them is said nowhere
    chosen = most_on_time(np.array(work, float), np.array(due, float), np.array([job[2] for job in jobs]))
    rows = np.flatnonzero(chosen).tolist()
    assert set(kept) <= set(rows)
    assert can_be_on_time([work[i] for i in rows], [due[i] for i in rows])
    assert len(rows) - len(kept) == expected


def test_of_the_largest_sets_that_with_the_least_work() -> None:
    assert most_on_time(np.array([5.0, 2.0, 3.0]), np.array([5.0, 5.0, 5.0])).tolist() == [False, True, True]
    assert most_on_time(np.array([5.0, 4.0]), np.array([6.0, 6.0])).tolist() == [False, True]


def test_of_nothing_there_is_nothing_to_choose() -> None:
    assert most_on_time(np.zeros(0), np.zeros(0)).tolist() == []
