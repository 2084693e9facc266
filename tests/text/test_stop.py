"""Stop strings: the first one to be complete, wherever the text is cut, and no more held back than can matter."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorllm.text.stop import StopMatcher
from tests.effort import examples


def first_stop(text: str, stops: list[str], behind: int = 0) -> tuple[int, str] | None:
    """Where the first stop string ends that ends behind a place, and which: of several the longest."""
    for end in range(behind + 1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            return end, max(found, key=len)
    return None


def held_back(text: str, stops: list[str]) -> int:
    """The longest end of the text that is a beginning, but not all, of a stop string."""
    return max(n for n in range(len(text) + 1) if n == 0 or any(len(s) > n and s.startswith(text[-n:]) for s in stops))


text_of_few = st.text("ab.", max_size=30)
stop_strings = st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=examples(167, 500), deadline=None)
@given(parts=st.lists(text_of_few, max_size=8), stops=stop_strings, include=st.booleans(), min_parts=st.integers(0, 4))
def test_equal_to_brute_force(parts: list[str], stops: list[str], include: bool, min_parts: int) -> None:
    text = "".join(parts)
    expected = first_stop(text, stops, len("".join(parts[:min_parts])))
    matcher = StopMatcher(stops, include)
    given_out, seen = "", ""
    for i, part in enumerate(parts):
        seen += part
        emitted, stop = matcher.push(part, can_stop=i >= min_parts)
        given_out += emitted
        if expected is not None and expected[0] <= len(seen):
            end, which = expected
            assert stop == which
            assert given_out == text[: end if include else end - len(which)]
            assert matcher.held == ""
            return
        assert stop is None
        num_held = 0 if include else held_back(seen, stops)
        assert given_out == seen[: len(seen) - num_held]
        assert matcher.held == seen[len(seen) - num_held :]
    assert expected is None
    assert given_out + matcher.flush() == text
    assert matcher.flush() == ""


@settings(max_examples=examples(67, 200), deadline=None)
@given(text=text_of_few, stops=stop_strings)
def test_character_by_character_is_the_same_as_at_once(text: str, stops: list[str]) -> None:
    whole, stop = StopMatcher(stops).push(text)
    matcher = StopMatcher(stops)
    given_out = ""
    for character in text:
        emitted, found = matcher.push(character)
        given_out += emitted
        if found:
            assert found == stop
            break
    assert given_out == whole


@pytest.mark.parametrize(
    ("text", "stops", "kept", "stop"),
    [
        ("a fox. END more", ["END"], "a fox. ", "END"),
        ("abcdef", ["def", "bcd"], "a", "bcd"),  # the one that is complete first, not the one that is listed first
        ("xabcd", ["cd", "abcd"], "x", "abcd"),  # complete at the same character: the one that begins first
        ("aab", ["ab"], "a", "ab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("nothing", ["stop"], "nothing", None),
        ("日本語。終", ["。"], "日本語", "。"),
    ],
)
def test_which_stop_string_wins(text: str, stops: list[str], kept: str, stop: str | None) -> None:
    assert StopMatcher(stops).push(text) == (kept, stop)
    included = StopMatcher(stops, include_stop=True).push(text)
    assert included == (kept + (stop or ""), stop)


def test_only_what_can_still_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["\n\nUser:", "###"])
    assert matcher.push("Hello") == ("Hello", None)
    assert matcher.push("\n") == ("", None)
    assert matcher.held == "\n"
    assert matcher.push("\nUs") == ("", None)
    assert matcher.push("ed #") == ("\n\nUsed ", None)
    assert matcher.push("#") == ("", None)
    assert matcher.push("x") == ("##x", None)
    assert matcher.push("##") == ("", None)
    assert matcher.flush() == "##"


def test_nothing_is_held_back_where_the_stop_string_is_included() -> None:
    matcher = StopMatcher(["END"], include_stop=True)
    assert matcher.push("x EN") == ("x EN", None)
    assert matcher.push("D rest") == ("D", "END")


def test_a_stop_string_may_begin_before_it_may_end() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.push("abc ab", can_stop=False) == ("abc ", None)
    assert matcher.push("c") == ("", "abc")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        StopMatcher(["a", ""])


def test_a_repetitive_text_takes_linear_time() -> None:
    """Every step back in the automaton is paid for by a step forward."""
    matcher = StopMatcher(["a" * 5000 + "b"])
    text, stop = matcher.push("a" * 200_000 + "b")
    assert stop == "a" * 5000 + "b"
    assert len(text) == 195_000
