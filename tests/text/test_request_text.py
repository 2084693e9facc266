"""RequestText: detokenization and stop strings of a request, also of one that is submitted again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorllm.text.request_text import RequestText
from actorllm.text.tokenizer import Tokenizer
from tests.effort import examples

STORY = "Once upon a time, a 🦊 lived in a wood. It was happy.\n\nThe end. And more"


def output_ids(tokenizer: Tokenizer, text: str = STORY) -> list[int]:
    ids: list[int] = tokenizer.encode(text).tolist()
    return ids[1:]  # without <|endoftext|> in front


def run(text: RequestText, ids: list[int]) -> tuple[str, str | None, int]:
    """Token by token to the end: the text, what stopped it, and how many tokens it took."""
    given_out = ""
    for i, token in enumerate(ids):
        emitted, stop, num_used = text.push([token])
        given_out += emitted
        assert num_used == 1
        if stop is not None:
            return given_out + text.finish(), stop, i + 1
    return given_out + text.finish(), None, len(ids)


def test_without_stop_strings(storyteller: Tokenizer) -> None:
    ids = output_ids(storyteller)
    assert run(RequestText(storyteller, [0]), ids) == (STORY, None, len(ids))
    text = RequestText(storyteller, np.array([0], np.int32))
    assert text.push(np.array(ids, np.int32)) == (STORY, None, len(ids))
    assert text.push([]) == ("", None, 0)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["The end.", " wood", "🦊", "happy.\n\nT", "e", "Once upon"])
def test_a_stop_string(storyteller: Tokenizer, stop: str, include: bool) -> None:
    ids = output_ids(storyteller)
    place = STORY.index(stop)
    expected = STORY[: place + len(stop)] if include else STORY[:place]
    text, found, num_used = run(RequestText(storyteller, [0], stop=[stop, "absent"], include_stop=include), ids)
    assert (text, found) == (expected, stop)
    assert storyteller.decode(ids[:num_used]).rstrip("\ufffd").find(stop) == place
    assert stop not in storyteller.decode(ids[: num_used - 1])
    # and all tokens at once
    whole = RequestText(storyteller, [0], stop=[stop, "absent"], include_stop=include)
    assert whole.push(ids) == (expected, stop, num_used)
    assert whole.stop_string == stop
    assert whole.push(ids) == ("", stop, 0)
    assert whole.finish() == ""


def test_no_stop_before_min_tokens(storyteller: Tokenizer) -> None:
    ids = output_ids(storyteller, "no no no no no no")
    first = run(RequestText(storyteller, [0], stop=["no"]), ids)
    assert first == ("", "no", 1)
    for min_tokens in range(1, len(ids)):
        text, stop, num_used = run(RequestText(storyteller, [0], stop=["no"], min_tokens=min_tokens), ids)
        assert stop == "no"
        assert num_used == min_tokens + 1
        assert text == storyteller.decode(ids[:num_used])[: -len("no")]
    text, stop, _ = run(RequestText(storyteller, [0], stop=["no"], min_tokens=len(ids)), ids)
    assert (text, stop) == ("no no no no no no", None)


def test_a_stop_string_may_begin_before_min_tokens(storyteller: Tokenizer) -> None:
    ids = output_ids(storyteller, "a b c d")
    assert storyteller.decode(ids[:2]) == "a b"
    text, stop, num_used = run(RequestText(storyteller, [0], stop=["b c"], min_tokens=2), ids)
    assert (text, stop, num_used) == ("a ", "b c", 3)


def test_held_back_text_comes_at_the_end(storyteller: Tokenizer) -> None:
    ids = output_ids(storyteller, "a fox and The en")
    text = RequestText(storyteller, [0], stop=["The end"])
    emitted, stop, _ = text.push(ids)
    assert (emitted, stop) == ("a fox and ", None)
    assert text.finish() == "The en"
    broken = output_ids(storyteller, "The en🦊")[:-1]
    text = RequestText(storyteller, [0], stop=["The end"])
    so_far = text.push(broken)[0]
    assert so_far + text.finish() == storyteller.decode(broken)


@settings(max_examples=examples(50, 150), deadline=None)
@given(
    cut=st.integers(0, 60),
    stop=st.lists(st.sampled_from(["The end.", "happy.\n\nThe", "🦊 lived by", "wood. It was sad", "xyz"]), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 40),
)
def test_submitted_again_it_goes_on_at_the_same_character(
    storyteller: Tokenizer, cut: int, stop: list[str], include: bool, min_tokens: int
) -> None:
    ids = output_ids(storyteller)
    options = {"stop": stop, "include_stop": include, "min_tokens": min_tokens}
    whole, found, num_used = run(RequestText(storyteller, [0], **options), ids)  # type: ignore[arg-type]
    cut = min(cut, num_used - 1)
    before = RequestText(storyteller, [0], **options)  # type: ignore[arg-type]
    given_out = "".join(before.push([i])[0] for i in ids[:cut])
    again = RequestText(storyteller, [0], np.array(ids[:cut], np.int32), **options)  # type: ignore[arg-type]
    rest, found_again, num_more = run(again, ids[cut:])
    assert given_out + rest == whole
    assert found_again == found
    assert cut + num_more == num_used


def test_random_tokens_with_stop_strings(any_tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        ids = rng.integers(0, any_tokenizer.vocab_size, 80).tolist()
        plain = run(RequestText(any_tokenizer, ids[:3]), ids)[0]
        assert run(RequestText(any_tokenizer, ids[:3], stop=["never this"]), ids) == (plain, None, 80)
        stop = plain[10:13]
        text, found, _ = run(RequestText(any_tokenizer, ids[:3], stop=[stop]), ids)
        assert found == stop
        assert text == plain[: plain.index(stop)]


def test_special_tokens_in_the_output(storyteller: Tokenizer) -> None:
    ids = [*output_ids(storyteller, "a fox"), 0]
    assert run(RequestText(storyteller, [0]), ids)[0] == "a fox"
    assert run(RequestText(storyteller, [0], skip_special_tokens=False), ids)[0] == "a fox<|endoftext|>"
    stopped = RequestText(storyteller, [0], skip_special_tokens=False, stop=["<|endoftext|>"])
    assert run(stopped, ids) == ("a fox", "<|endoftext|>", len(ids))
