"""Detokenizer: the pieces are the text, whatever the tokens; and the four dead ends of a decode stream."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from actorllm.text.detokenizer import MAX_WITHHELD, Detokenizer
from actorllm.text.tokenizer import Tokenizer
from tests.effort import examples

TEXTS = [
    "Once upon a time, in a forest, there lived a fox.",
    " leading and  double   spaces \n\n lines ",
    "日本語のテキスト, Ünïcödé, 👩‍👩‍👧 🦊🦊 ﬁn",
    "hello world, the fox runs!",
    "\ufffd a replacement character that was meant \ufffd",
]


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_are_the_text(any_tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = any_tokenizer.encode(text).tolist()
    assert "".join(pieces(Detokenizer(any_tokenizer, (), skip), ids)) == any_tokenizer.decode(ids, skip)


@pytest.mark.parametrize("prompt", ["hello", "the fox runs,", "日本語"])
def test_pieces_follow_the_prompt(any_tokenizer: Tokenizer, prompt: str) -> None:
    """A leading space of the first word of the output is part of it."""
    prompt_ids = any_tokenizer.encode(prompt).tolist()
    ids = any_tokenizer.encode(prompt + " world the fox 🦊").tolist()
    assert ids[: len(prompt_ids)] == prompt_ids, "choose a prompt that ends where a token does"
    output = ids[len(prompt_ids) :]
    expected = any_tokenizer.decode(ids, True)[len(any_tokenizer.decode(prompt_ids, True)) :]
    for context in (prompt_ids, np.array(prompt_ids, np.int32)):
        assert "".join(pieces(Detokenizer(any_tokenizer, context), output)) == expected
    assert expected.startswith(" ") == bool(any_tokenizer.decode(prompt_ids, True))


def test_many_at_once(storyteller: Tokenizer) -> None:
    ids = storyteller.encode("A 🦊 ran into the 日本語 wood.")
    detokenizer = Detokenizer(storyteller)
    assert detokenizer.push_many(ids[:7]) + detokenizer.push_many(ids[7:].tolist()) == "A 🦊 ran into the 日本語 wood."
    assert detokenizer.push_many([]) == ""


def test_text_comes_as_soon_as_it_is_certain(storyteller: Tokenizer) -> None:
    ids = storyteller.encode("a fox and 🦊").tolist()[1:]
    given_out = pieces(Detokenizer(storyteller), ids)
    whole = [storyteller.decode(ids[: i + 1]) for i in range(len(ids))]
    so_far = ""
    for piece, full in zip(given_out, whole, strict=False):
        so_far += piece
        assert so_far == full.rstrip("\ufffd")


@settings(max_examples=examples(67, 200), deadline=None)
@given(st.data())
def test_random_tokens_never_raise(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    top = any_tokenizer.vocab_size + 50
    ids = data.draw(st.lists(st.integers(0, top), max_size=60))
    prompt = data.draw(st.lists(st.integers(0, top), max_size=10))
    text = "".join(pieces(Detokenizer(any_tokenizer, prompt), ids))
    whole = any_tokenizer.decode(ids, True)
    if not prompt and "\ufffd" not in whole:
        assert text == whole


@settings(max_examples=examples(67, 200), deadline=None)
@given(text=st.text(max_size=40), cut=st.integers(0, 40))
def test_any_text(storyteller: Tokenizer, text: str, cut: int) -> None:
    ids = storyteller.encode(text).tolist()
    prompt, output = ids[:cut], ids[cut:]
    got = "".join(pieces(Detokenizer(storyteller, prompt), output))
    assert got == storyteller.decode(output, True)


# The four dead ends ---------------------------------------------------------------------------------------------------


def test_a_character_that_is_never_completed_comes_at_the_end(storyteller: Tokenizer) -> None:
    ids = storyteller.encode("a fox 🦊").tolist()[1:-1]
    detokenizer = Detokenizer(storyteller)
    so_far = detokenizer.push_many(ids)
    assert not so_far.endswith("\ufffd")
    end = detokenizer.finish()
    assert set(end) == {"\ufffd"}
    assert so_far + end == storyteller.decode(ids)
    assert detokenizer.finish() == ""


def test_endless_invalid_bytes_come_out_and_do_not_pile_up(storyteller: Tokenizer) -> None:
    bad = storyteller.encode("🦊").tolist()[1]  # the first byte of four
    detokenizer = Detokenizer(storyteller)
    given_out = [detokenizer.push(bad) for _ in range(3000)]
    assert sum(bool(piece) for piece in given_out) == 3000 // MAX_WITHHELD
    assert set("".join(given_out)) == {"\ufffd"}
    assert len("".join(given_out)) >= 3000 // MAX_WITHHELD * MAX_WITHHELD
    # and good text goes on behind them
    assert "".join(pieces(detokenizer, storyteller.encode("the fox").tolist())).endswith("the fox")


def test_a_prompt_that_ends_within_a_character_is_not_repeated(storyteller: Tokenizer) -> None:
    ids = storyteller.encode("my secret prompt 🦊").tolist()
    prompt, output = ids[:-1], [ids[-1], *storyteller.encode(" and then").tolist()[1:]]
    detokenizer = Detokenizer(storyteller, prompt)
    text = "".join(pieces(detokenizer, output))
    assert "secret" not in text
    assert text.endswith("and then")
    # the danger is real
    plain = DecodeStream(ids=prompt, skip_special_tokens=True)
    assert "secret" in "".join(plain.step(storyteller.backend, i) or "" for i in output)


class RewritingStream:
    """A DecodeStream whose third token takes back text, as some decoders do."""

    def __init__(self, ids: list[int], skip_special_tokens: bool) -> None:
        self.inner = DecodeStream(ids=ids, skip_special_tokens=skip_special_tokens)
        self.num_steps = 0

    def step(self, backend: object, token_id: int) -> str | None:
        self.num_steps += 1
        if self.num_steps == 3:
            raise Exception("Invalid prefix encountered while decoding stream.")
        text: str | None = self.inner.step(backend, token_id)
        return text


def test_an_invalid_prefix_loses_nothing(storyteller: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorllm.text.detokenizer.DecodeStream", RewritingStream)
    for text in ("the fox runs into the wood and sleeps", "🦊 in 日本"):
        ids = storyteller.encode(text).tolist()
        got = "".join(pieces(Detokenizer(storyteller), ids))
        assert got.replace("\ufffd", "") in text or got == text
        if text.isascii():
            assert got == text


def test_any_other_error_of_the_library_is_not_swallowed(storyteller: Tokenizer) -> None:
    with pytest.raises(TypeError):
        Detokenizer(storyteller).push("x")  # type: ignore[arg-type]


@pytest.mark.parametrize("num_special", [1, MAX_WITHHELD - 1, MAX_WITHHELD, 200])
def test_skipped_special_tokens_do_not_change_the_spaces(sentencepiece_like: Tokenizer, num_special: int) -> None:
    """The word behind them keeps its space, however many there are."""
    words = sentencepiece_like.encode("hello world the fox").tolist()
    eos = sentencepiece_like.eos_token_id
    assert eos is not None
    ids = [*words[:2], *[eos] * num_special, *words[2:]]
    assert "".join(pieces(Detokenizer(sentencepiece_like), ids)) == "hello world the fox"


def test_special_tokens_are_kept_on_request(storyteller: Tokenizer) -> None:
    ids = storyteller.encode("fox<|endoftext|>").tolist()
    assert "".join(pieces(Detokenizer(storyteller, (), skip_special_tokens=False), ids)) == (
        "<|endoftext|>fox<|endoftext|>"
    )


def test_spaces_between_special_tokens(any_tokenizer: Tokenizer) -> None:
    """Without them each token of a run of special ones is its own name; nothing else changes."""
    special = sorted(any_tokenizer.special_ids)
    words = any_tokenizer.encode("the fox").tolist()
    ids = [*words, *special, *special, *words, special[0]]
    plain = "".join(pieces(Detokenizer(any_tokenizer, (), False), ids))
    closed = "".join(pieces(Detokenizer(any_tokenizer, (), False, False), ids))
    run = "".join(any_tokenizer.added_tokens[i] for i in special * 2)
    assert run in closed
    assert plain.replace(" ", "") == closed.replace(" ", "")
    if " ".join(any_tokenizer.added_tokens[i] for i in special * 2) in plain:  # as wordpiece has it
        assert closed != plain
    else:
        assert closed == plain
    skipped = [Detokenizer(any_tokenizer, (), True, spaces) for spaces in (True, False)]
    assert pieces(skipped[0], ids) == pieces(skipped[1], ids)
