"""The bound of characters per token: certain where there is one, and none where a token may stand for anything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from actorllm.config import BUNDLED_MODELS
from actorllm.text.token_length import max_token_characters
from actorllm.text.tokenizer import Tokenizer
from tests.effort import examples

BYTES = pre_tokenizers.ByteLevel.alphabet()


def byte_level(*more: str, normalizer: Any = None, pre_tokenizer: Any = None) -> Backend:
    """A tokenizer of bytes, and of words that are merged from two."""
    vocabulary = {token: i for i, token in enumerate([*sorted(BYTES), *more])}
    merges = [(word[: len(word) // 2], word[len(word) // 2 :]) for word in more]
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend


WITH_A_BOUND = {
    "bytes": byte_level(),
    "words": byte_level("aa", "aaaa", "aaaaaaaa"),
    "composed": byte_level("aa", normalizer=normalizers.NFC()),
    "lower": byte_level("aa", normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "pieces": byte_level(
        "aa",
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(use_regex=False)]),
    ),
    "storyteller": Tokenizer(BUNDLED_MODELS["storyteller"]).backend,
}


@pytest.mark.parametrize("name", WITH_A_BOUND)
@settings(max_examples=examples(13, 40), deadline=None)
@given(text=st.text() | st.text("a \u0301\u0323\u1100\u1161\u11a8\u2126", max_size=60))
def test_no_token_stands_for_more_characters(name: str, text: str) -> None:
    backend = WITH_A_BOUND[name]
    longest = max_token_characters(backend)
    assert longest is not None
    assert len(text) <= longest * len(backend.encode(text, add_special_tokens=False).ids)


def test_it_is_the_longest_token_added_ones_included() -> None:
    backend = byte_level("aa", "aaaa")
    assert max_token_characters(backend) == 4
    backend.add_tokens([AddedToken("a long token", normalized=False)])
    assert max_token_characters(backend) == len("a long token")


def unigram(**arguments: Any) -> Backend:
    return Backend(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, **arguments))


def with_token(**flags: bool) -> Backend:
    backend = byte_level()
    backend.add_tokens([AddedToken("<x>", **flags)])
    return backend


@pytest.mark.parametrize(
    "backend",
    [
        byte_level(normalizer=normalizers.Strip()),
        byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
        byte_level(normalizer=normalizers.Replace("  ", " ")),
        byte_level(normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
        byte_level(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        byte_level(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
            )
        ),
        with_token(lstrip=True),
        with_token(rstrip=True),
        Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
        Backend(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
        Backend(models.BPE({"a": 0}, [])),
        unigram(),
        unigram(byte_fallback=True),
    ],
    ids=range(13),
)
def test_where_one_token_may_stand_for_any_text_there_is_no_bound(backend: Backend) -> None:
    assert max_token_characters(backend) is None


def test_bytes_in_the_vocabulary_are_a_bound() -> None:
    vocabulary = {token: i for i, token in enumerate(["a", *(f"<0x{byte:02X}>" for byte in range(256))])}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True))
    assert max_token_characters(backend) == len("<0x00>")
    assert len(backend.encode("ééé\u1100").ids) == 9
