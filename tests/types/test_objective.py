"""Objectives: what they accept, and the two readings of a promise per token."""

from __future__ import annotations

import math
from typing import Any

import pytest

from actorllm.errors import InvalidParameterError
from actorllm.types.objective import SLO, RequestClass


def test_a_bare_number_is_a_promise_per_token() -> None:
    assert SLO.from_value(0.05) == SLO(tpot=0.05)
    assert SLO.from_value(SLO(ttft=1)) == SLO(ttft=1)
    assert SLO.from_value(None) is None


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"ttft": 0}, "ttft=0"),
        ({"tpot": -1.0}, "tpot=-1.0"),
        ({"e2e": math.inf}, "e2e=inf"),
        ({"ttft": True}, "ttft=True"),
        ({"ttft": 1, "ttft_per_prompt_token": -1}, "ttft_per_prompt_token=-1"),
        ({"ttft": 1, "ttft_per_prompt_token": math.nan}, "ttft_per_prompt_token=nan"),
    ],
)
def test_impossible_values_are_named(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameterError, match=name.replace("(", r"\(")):
        SLO(**arguments)


def test_an_unknown_key_names_the_nearest_one() -> None:
    with pytest.raises(InvalidParameterError, match=r"SLO tpots=0\.05 is not known; did you mean 'tpot'"):
        SLO.from_mapping({"tpots": 0.05})


def test_it_travels_in_a_submit() -> None:
    slo = SLO(0.5, 0.05, None, 1 / 4000)
    assert SLO.from_fields(slo.to_fields()) == slo
    assert SLO.from_fields(None) is None


def test_the_first_token_has_longer_for_a_longer_prompt() -> None:
    assert SLO(ttft=0.5, ttft_per_prompt_token=1 / 4000).ttft_limit(8000) == 2.5
    assert SLO(tpot=0.1).ttft_limit(8000) == math.inf


def test_what_comes_early_may_be_late_later_in_the_deadline_reading_only() -> None:
    """First token after 0.1 of 1 second, then 10 gaps of 0.12: over 0.05 each, and still in time for a reader."""
    slo = SLO(ttft=1.0, tpot=0.05)
    times: dict[str, Any] = {
        "arrival": 10.0,
        "first_token": 10.1,
        "last_token": 11.3,
        "num_prompt": 5,
        "num_output": 11,
    }
    assert not slo.is_met(**times, reading="tpot")
    assert slo.is_met(**times, reading="deadline")
    assert not slo.is_met(**(times | {"last_token": 11.51}), reading="deadline")


def test_deadlines_begin_at_the_promise_or_else_at_the_first_token() -> None:
    assert SLO(ttft=1.0, tpot=0.5).token_deadline(3, 10.0, 7) == 12.5
    assert SLO(tpot=0.5).token_deadline(3, 10.0, 7, first_token=20.0) == 21.5
    assert SLO(tpot=0.5).token_deadline(3, 10.0, 7) == math.inf
    assert SLO(ttft=1.0).token_deadline(0, 10.0, 7) == 11.0
    assert SLO(ttft=1.0).token_deadline(1, 10.0, 7) == math.inf


def test_what_nobody_can_keep_is_told() -> None:
    assert "e2e=0.5" in (SLO(ttft=1.0, e2e=0.5).contradiction() or "")
    assert "no effect" in (SLO(tpot=1.0, ttft_per_prompt_token=0.1).contradiction() or "")
    assert SLO(ttft=1.0, tpot=0.1, e2e=5.0).contradiction() is None


def test_patience_is_checked() -> None:
    with pytest.raises(InvalidParameterError, match="patience=0"):
        RequestClass("x", patience=0)
