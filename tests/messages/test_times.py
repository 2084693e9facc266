"""Points in time of messages: each is marked, and a transport between two clocks can move them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorllm import messages
from actorllm.messages import Outputs, StepPlan, StepResult, Submit
from actorllm.messages.schema import SCHEMA
from actorllm.messages.times import TIMES, translate, translated
from actorllm.types.request_end import TIMES as TIMES_OF_AN_END
from actorllm.types.request_end import RequestEnd
from tests.scheduling.conftest import make_scheduler

NUMBERS = {"Submit": {"temperature", "top_p", "min_p", "slo"}}
"""Numbers that are no points in time: parameters, and durations."""
DURATIONS_OF_AN_END = {"recovery_s", "planning_s", "forward_s", "execution_s"}

OFFSET_S = 5_000.0


def submit_at(now: float, timeout_s: float) -> Submit:
    return Submit(rid=1, arrival=now, prompt=np.arange(9, dtype=np.int32), max_tokens=5, deadline=now + timeout_s)


def test_every_number_of_a_message_is_a_point_in_time_or_known_to_be_none() -> None:
    for name, entry in SCHEMA.items():
        numbers = {field for field, told in entry.fields.items() if told.kind in ("float", "floats")}
        marked = {field for field, told in entry.fields.items() if told.is_time}
        assert marked == numbers - NUMBERS.get(name, set()), name
    for field in dataclasses.fields(RequestEnd):
        is_number = "float" in str(field.type)
        position = [one.name for one in dataclasses.fields(RequestEnd)].index(field.name)
        assert (position in TIMES_OF_AN_END) == (is_number and field.name not in DURATIONS_OF_AN_END), field.name


def test_the_messages_with_points_in_time() -> None:
    assert {name: set(found) for name, found in TIMES.items()} == {
        "Submit": {"arrival", "first_token", "deadline"},
        "StepResult": {"started", "ended"},
        "Outputs": {"ends", "emitted"},
    }


TIME = st.floats(1.0, 1e9)
ENDS = st.lists(st.tuples(TIME, st.none() | TIME, st.none() | TIME, st.none() | TIME), max_size=3)


@given(arrival=TIME, first=st.none() | TIME, deadline=st.none() | TIME, ends=ENDS, offset=st.floats(-1e6, 1e6))
def test_they_move_and_nothing_else_does(
    arrival: float, first: float | None, deadline: float | None, ends: list[tuple[Any, ...]], offset: float
) -> None:
    submit = Submit(
        rid=3,
        arrival=arrival,
        prompt=np.arange(3, dtype=np.int32),
        max_tokens=4,
        first_token=first,
        deadline=deadline,
        slo=[0.5, None],
    )
    rows = [[i, "stop", None, None, *times, 1, 2, 3, 0, 0, 0.25, None] for i, times in enumerate(ends)]
    none = np.zeros(len(rows), np.int32)
    outputs = Outputs(rids=none, index=none, tokens=none, ends=rows, emitted=arrival)
    moved = translated(submit, offset)
    assert (moved.arrival, moved.slo) == (arrival + offset, [0.5, None])
    assert moved.first_token == (None if first is None else first + offset)
    assert moved.deadline == (None if deadline is None else deadline + offset)
    kept = [field.name for field in dataclasses.fields(Submit) if field.name not in TIMES["Submit"]]
    assert all(getattr(moved, name) is getattr(submit, name) for name in kept)
    expected = [[*row[:4], *(time if time is None else time + offset for time in row[4:8]), *row[8:]] for row in rows]
    told = translated(outputs, offset)
    assert (list(told.ends), told.emitted) == (expected, arrival + offset)
    assert [row[4:8] for row in rows] == [list(times) for times in ends], "the sender's is not changed"
    for message, other in ((submit, moved), (outputs, told)):
        translate(message, offset)
        assert all(getattr(message, name) == getattr(other, name) for name in TIMES[type(message).__name__])


def test_what_has_no_time_is_passed_on_as_it_is() -> None:
    for message in (StepPlan(step=3), messages.Abort(rids=np.zeros(1, np.int32)), StepResult(step=1)):
        assert translated(message, OFFSET_S) is message


@pytest.mark.parametrize("is_translated", [True, False])
def test_a_deadline_of_a_clock_that_is_behind_holds_for_its_seconds(is_translated: bool) -> None:
    """The sender's clock is 5,000 s behind: untranslated, its deadline is over before the request begins."""
    scheduler = make_scheduler()
    now = 10_000.0
    submit = submit_at(now - OFFSET_S, 60.0)
    refused = scheduler.submit(0, translated(submit, OFFSET_S) if is_translated else submit, now)
    assert (refused is None) is is_translated
    assert scheduler.expire(now + 59.0) == []
    assert len(scheduler.expire(now + 60.5)) == (1 if is_translated else 0)
