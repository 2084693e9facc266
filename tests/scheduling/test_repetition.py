"""Repetition detection: when it strikes, against vLLM's definition stated plainly, and what the scheduler makes of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorllm.messages.logit_rules import SamplingRules
from actorllm.scheduling.repetition import RepetitionWatch
from tests.scheduling.chained_tokens import reference_stream
from tests.scheduling.conftest import Engine


def is_repeating(output: list[int], largest: int, smallest: int, count: int) -> bool:
    """The last p tokens stand there `count` times in a row, for some p."""
    return any(
        output[-p * count :] == output[-p:] * count for p in range(smallest, largest + 1) if p * count <= len(output)
    )


@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(2, 4),
    st.integers(0, 60),
)
def test_it_is_the_definition(output: list[int], largest: int, smallest: int, count: int, resumed_at: int) -> None:
    smallest = min(smallest, largest)
    resumed_at = min(resumed_at, len(output))
    watch = RepetitionWatch(largest, smallest, count, 1000, np.array(output[:resumed_at], np.int32))
    for length in range(resumed_at + 1, len(output) + 1):
        watch.push(output[length - 1])
        assert watch.is_repeating == is_repeating(output[:length], largest, smallest, count)


def test_patterns_that_have_no_room_cost_nothing() -> None:
    watch = RepetitionWatch(1 << 16, 1, 2**31 - 1, 500, np.zeros(0, np.int32))
    for _ in range(10):
        watch.push(3)
    assert not watch.is_repeating
    watch = RepetitionWatch(1 << 16, 1, 5, 10, np.zeros(0, np.int32))
    for _ in range(5):
        watch.push(3)
    assert watch.is_repeating


PROMPT = [3, 1, 4]


@pytest.fixture
def looping(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the scripted worker samples: 40 tokens without a pattern up to the tenth, then a loop of three."""
    stream = [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, *[30, 31, 32] * 10]
    monkeypatch.setattr("tests.scheduling.chained_tokens.draw", lambda prefix, seed, index, vocab=97: stream[index])
    return stream


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [40, 11])
@pytest.mark.parametrize(
    ("repetition", "min_tokens", "expected"),
    [((3, 1, 3), 0, 19), ((5, 2, 2), 0, 16), ((3, 1, 3), 25, 25), ((2, 1, 2), 0, 36), ((6, 4, 2), 0, 22)],
)
def test_a_loop_ends_the_request(
    looping: list[int], depth: int, num_blocks: int, repetition: tuple[int, int, int], min_tokens: int, expected: int
) -> None:
    engine = Engine(depth=depth, num_blocks=num_blocks)
    rules = SamplingRules(repetition=repetition).to_fields()
    arguments = {"max_tokens": 36, "min_tokens": min_tokens, "ignore_eos": True}
    engine.submit(3, PROMPT, **arguments)
    engine.submit(2, PROMPT, **arguments)
    engine.submit(1, PROMPT, rules=rules, **arguments)  # the last to come is the first that must go
    engine.run()
    end = engine.ends[1]
    assert engine.streams[1] == looping[:expected]
    if expected == 36:
        assert (end.reason, end.stop_reason) == ("length", None)
    else:
        assert (end.reason, end.stop_reason) == ("repetition", "repetition_detected")
    assert engine.streams[2] == looping[:36]
    assert (end.sequence.num_preemptions > 0) == (num_blocks == 11)


def test_it_is_not_forgotten_over_a_resumed_output(looping: list[int]) -> None:
    engine = Engine()
    rules = SamplingRules(repetition=(3, 1, 3)).to_fields()
    engine.submit(1, PROMPT, rules=rules, max_tokens=36, ignore_eos=True, output=np.array(looping[:17], np.int32))
    engine.run()
    assert engine.streams[1] == looping[:19]


def test_length_and_stop_ids_come_first(looping: list[int]) -> None:
    engine = Engine()
    rules = SamplingRules(repetition=(3, 1, 3)).to_fields()
    engine.submit(1, PROMPT, rules=rules, max_tokens=19, ignore_eos=True)
    engine.submit(2, PROMPT, rules=rules, max_tokens=30, ignore_eos=True, stop_token_ids=[30], min_tokens=16)
    engine.run()
    assert engine.ends[1].reason == "length"
    assert (engine.ends[2].reason, engine.ends[2].stop_reason) == ("stop", 30)


def test_rules_that_cannot_be_used_end_their_request_only(engine: Engine) -> None:
    engine.submit(1, PROMPT, rules={"allowed_ids": [10**6]})
    engine.submit(2, PROMPT, ignore_eos=True)
    engine.run()
    assert engine.ends[1].reason == "error"
    assert "sampling rules" in engine.ends[1].error
    assert engine.streams[2] == reference_stream(PROMPT, 2, 8)
