"""How many characters of a text one token stands for at most, read from the parts of a tokenizer.

Only what is certain counts: where any part could make many characters into one token, or into none, there is no such
number. A text with more characters than this number times the tokens that a prompt may have is refused without work.
Called by actorllm.text.tokenizer.
"""

from __future__ import annotations

from typing import Any

import orjson

MAX_COMPOSED = 4
"""Unicode composes at most so many characters into one."""

SHRINKS: dict[str, int] = {
    "NFC": MAX_COMPOSED,
    "NFKC": MAX_COMPOSED,
    "NFD": 1,
    "NFKD": 1,
    "Lowercase": 1,
    "Prepend": 1,
    "ByteLevel": 1,
}
"""Normalizers that remove nothing: how many characters become one at most."""

KEEPING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")
"""Pre-tokenizers that remove nothing. Split and Punctuation are among them unless their behavior is "Removed"."""

SPLITTING = ("Split", "Punctuation")


def max_token_characters(backend: Any) -> int | None:
    """Of a `tokenizers.Tokenizer`; None: there is no such number, or it is not certain."""
    shrink = _shrink(_tree(backend.normalizer))
    if shrink is None or not _keeps_all(_tree(backend.pre_tokenizer)):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # such a token swallows all the blanks beside it
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not _covers_all(backend, vocabulary):
        return None
    return shrink * max(map(len, vocabulary), default=1)


def _tree(part: Any) -> dict[str, Any] | None:
    """A part of a tokenizer as it stands in tokenizer.json; an unreadable one as of an unknown type."""
    if part is None:
        return None
    try:
        tree: dict[str, Any] = orjson.loads(part.__getstate__())
    except (TypeError, ValueError):  # made in Python
        return {"type": "?"}
    return tree


def _shrink(tree: dict[str, Any] | None) -> int | None:
    """How many characters a normalizer makes into one at most; None: any number."""
    if tree is None:
        return 1
    if tree["type"] == "Sequence":
        shrink = 1
        for part in tree["normalizers"]:
            one = _shrink(part)
            if one is None:
                return None
            shrink *= one
        return shrink
    if tree["type"] == "Replace":
        pattern = tree["pattern"].get("String")
        return 1 if pattern is not None and len(tree["content"]) >= len(pattern) else None
    return SHRINKS.get(tree["type"])


def _keeps_all(tree: dict[str, Any] | None) -> bool:
    """Whether a pre-tokenizer hands on every character."""
    if tree is None:
        return True
    if tree["type"] == "Sequence":
        return all(map(_keeps_all, tree["pretokenizers"]))
    if tree["type"] in SPLITTING:
        return bool(tree["behavior"] != "Removed")
    return tree["type"] in KEEPING


def _covers_all(backend: Any, vocabulary: dict[str, int]) -> bool:
    """Whether every character has tokens of its own: no unknown ones that are fused into one token, or left out."""
    model = backend.model
    if type(model).__name__ != "BPE":
        return False  # others make one token of any unknown word, or do not say whether they do
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    parts = [_tree(backend.pre_tokenizer), _tree(backend.normalizer)]
    return any(map(_is_byte_level, parts)) and all(letter in vocabulary for letter in _byte_letters())


def _is_byte_level(tree: dict[str, Any] | None) -> bool:
    if tree is None:
        return False
    parts = tree.get("pretokenizers") or tree.get("normalizers") or ()
    return tree["type"] == "ByteLevel" or any(map(_is_byte_level, parts))


def _byte_letters() -> list[str]:
    """How vocabularies of bytes spell each byte: as itself where it can be printed, else from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = range(0x100, 0x100 + 256 - len(printed))
    return [*map(chr, printed), *map(chr, others)]
