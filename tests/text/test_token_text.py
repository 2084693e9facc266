"""The text of single tokens: spaces, parts of characters, special tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers

from actorllm.config import BUNDLED_MODELS
from actorllm.messages.logprobs import LogprobSpan
from actorllm.text.token_text import LogprobText, TokenText
from actorllm.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(BUNDLED_MODELS["storyteller"])


def span_of(*ids: list[int], position: int = 0) -> LogprobSpan:
    table = np.array(ids, np.int32)
    return LogprobSpan(0, position, table, np.zeros(table.shape, np.float32), np.ones(len(ids), np.int32))


def test_the_texts_of_chosen_tokens_make_the_text(tokenizer: Tokenizer) -> None:
    text = " there lived a naïve king 王 🙂, who said: »Hö!«"
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    assert any(tokenizer.decode([i]).endswith("\ufffd") for i in ids)
    texts = LogprobText(TokenText(tokenizer))
    for _ in range(2):  # by decoding, and from what is known by then
        assert "".join(texts.texts(span_of(*[[i] for i in ids]))) == text
    assert "".join(piece for i in ids for piece in LogprobText.texts(texts, span_of([i]))) == text, "span by span"


def test_alternatives_see_the_same_tokens_before_them(tokenizer: Tokenizer) -> None:
    parts = tokenizer.encode("é", add_special_tokens=False).tolist()
    other = tokenizer.encode("è", add_special_tokens=False).tolist()
    assert len(parts) == len(other) == 2
    assert parts[0] == other[0]
    texts = LogprobText(TokenText(tokenizer))
    assert texts.texts(span_of([parts[0], 443])) == ["", " there"]
    assert texts.texts(span_of([parts[1], other[1], 443])) == ["é", "è", " there"]
    assert texts.texts(span_of([parts[1], 443])) == ["", " there"], "after a whole character it completes nothing"


def test_prompt_and_output_do_not_complete_each_other(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode("é", add_special_tokens=False).tolist()
    texts = LogprobText(TokenText(tokenizer))
    texts.texts(span_of([first], position=4))
    assert texts.texts(span_of([second])) == [""]
    assert LogprobText(TokenText(tokenizer), [443, first]).texts(span_of([second])) == ["é"], "a resumed output does"


def test_special_and_unknown_ids(tokenizer: Tokenizer) -> None:
    special = min(tokenizer.special_ids)
    texts = LogprobText(TokenText(tokenizer)).texts(span_of([special, 10**6]))
    assert texts == [tokenizer.decode([special]), ""]
    assert texts[0]


def test_a_space_at_the_start_is_kept() -> None:
    """Sentencepiece decoders take it away from the first token of a text."""
    backend: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁king": 0, "dom": 1, "▁▁": 2}, unk_token="dom"))
    backend.decoder = tokenizers.decoders.Metaspace()
    texts = TokenText(SimpleNamespace(backend=backend))  # type: ignore[arg-type]
    assert [texts.of(i, ()) for i in range(3)] == [" king", "dom", "  "]
