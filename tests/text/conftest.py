"""Tokenizers of three kinds: byte-level (the bundled model's), sentencepiece-like with byte fallback, and wordpiece."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from actorllm.config import BUNDLED_MODELS
from actorllm.text.tokenizer import Tokenizer

WORDS = ["hello", "world", "the", "fox", "runs"]


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2: a space becomes ▁, unknown characters become bytes, the decoder strips one leading space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁"]
    pieces += list("abcdefghijklmnopqrstuvwxyz.,!?")
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        left = "▁"
        for character in word:
            if left + character not in pieces:
                pieces.append(left + character)
                merges.append((left, character))
            left += character
    vocab = {piece: i for i, piece in enumerate(pieces)}
    built = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.add_special_tokens(["<unk>", "<s>", "</s>"])
    return built


def wordpiece() -> tokenizers.Tokenizer:
    """As BERT: pieces within a word begin with ##, words are joined by spaces."""
    pieces = ["[UNK]", "[SEP]", *WORDS, "un", "##able", "##s", "##ing", ",", "."]
    built = tokenizers.Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    built.add_special_tokens(["[UNK]", "[SEP]"])
    return built


@pytest.fixture(scope="session")
def storyteller() -> Tokenizer:
    return Tokenizer(BUNDLED_MODELS["storyteller"])


@pytest.fixture(scope="session")
def sentencepiece_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return saved(byte_fallback(), tmp_path_factory.mktemp("sp"), {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="session")
def wordpiece_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return saved(wordpiece(), tmp_path_factory.mktemp("wp"), {"sep_token": "[SEP]"})


@pytest.fixture(scope="session", params=["storyteller", "sentencepiece_like", "wordpiece_like"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer


def saved(built: tokenizers.Tokenizer, folder: Path, config: dict[str, object]) -> Tokenizer:
    built.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(config))
    return Tokenizer(folder)
