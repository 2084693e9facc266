"""Text to token ids and back, by the Rust `tokenizers` library.

Owns how a tokenizer is found and read. `tokenizer.json` is read directly: importing transformers would cost a process
half a second that the scheduler's has no use for. A folder without it (older models: sentencepiece, or vocabulary and
merges) goes through transformers' AutoTokenizer, which converts. Ids equal AutoTokenizer's `encode` in both cases.

Called by the frontend (encode) and by actorllm.text.detokenizer (which uses `backend`). Immutable after construction, and
safe to use from several threads.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import tokenizers
from numpy.typing import NDArray

from actorllm.errors import CorruptModelError, InvalidPromptError, ModelNotFoundError, UnsupportedModelError
from actorllm.text.token_length import max_token_characters
from actorllm.types.model_files import read_object

I32: TypeAlias = NDArray[np.int32]
Side: TypeAlias = Literal["left", "right"]
"""Which end of a text is left out where it is too long."""

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA_SPECIAL_NAMES = ("additional_special_tokens", "extra_special_tokens")

OTHER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "tekken.json")
"""What transformers can make a tokenizer from when there is no tokenizer.json."""


@dataclass(frozen=True, slots=True)
class PairLayout:
    """Special tokens of a pair of texts."""

    before: list[int]
    between: list[int]
    after: list[int]
    has_types: bool
    """The tokens from the second text on are of another type."""

    def joined(self, first: I32, second: I32, most: int | None, side: Side) -> tuple[I32, int]:
        """One prompt of two texts with `most` tokens at most, and where the second one begins; 0: it is not told apart.

        Of texts that are too long, the longer one is shortened first, at this side, as transformers does.
        """
        num_special = len(self.before) + len(self.between) + len(self.after)
        if most is not None and first.size + second.size + num_special > most:
            room = max(0, most - num_special)
            short, long = sorted((first.size, second.size))
            long = short if short > room else max(short, room - short)
            if short + long > room:
                short = room // 2
                long = room - short
            sizes = (short, long) if first.size <= second.size else (long, short)
            first, second = (
                ids[ids.size - size :] if side == "left" else ids[:size]
                for ids, size in zip((first, second), sizes, strict=True)
            )
        parts = [self.before, first, self.between, second, self.after]
        start = len(self.before) + first.size + len(self.between)
        return np.concatenate([np.asarray(part, np.int32) for part in parts]), start if self.has_types else 0


class Tokenizer:
    """The tokenizer of a model folder.

    Raises ModelNotFoundError when the folder or every tokenizer file is missing, CorruptModelError when a file is there
    and cannot be used, UnsupportedModelError when the tokenizer exists in Python only.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder)
        if not self.path.is_dir():
            raise ModelNotFoundError(f"tokenizer folder {str(self.path)!r} does not exist")
        self.config: dict[str, Any] = read_object(self.path / "tokenizer_config.json", is_optional=True)
        """tokenizer_config.json as it is; empty if there is none."""
        file = self.path / "tokenizer.json"
        self.backend: Any = _from_file(file) if file.is_file() else _from_transformers(self.path)
        """The `tokenizers.Tokenizer`. It neither truncates nor pads."""
        self.backend.no_truncation()
        self.backend.no_padding()
        # Older folders name the special tokens in a file of their own, which wins.
        names = self.names = self.config | read_object(self.path / "special_tokens_map.json", is_optional=True)
        try:
            self._add_missing_tokens(names)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CorruptModelError(f"{self.path}: the special tokens of tokenizer_config.json are unusable") from error
        ids = {name: self._id_of(names.get(name)) for name in SPECIAL_NAMES}
        self.bos_token_id = ids["bos_token"]
        self.eos_token_id = ids["eos_token"]
        self.unk_token_id = ids["unk_token"]
        self.pad_token_id = ids["pad_token"]
        added = self.backend.get_added_tokens_decoder()
        self.added_tokens: dict[int, str] = {id: token.content for id, token in added.items()}
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        """What `skip_special_tokens` leaves out."""
        self.vocab_size: int = self.backend.get_vocab_size(with_added_tokens=True)
        """Number of tokens, the added ones included. The model's may be larger (padding) and is what ids are checked by."""

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> I32:
        """Token ids, int32 [num_tokens], with the special tokens that the model puts around a text, or without them.

        max_tokens: of a longer text only its end, within the special tokens around it. Special tokens that are spelled out
        in the text become their ids. Raises InvalidPromptError for what is no text (lone surrogates, bytes), and where the
        tokenizer fails on the text.
        """
        if not isinstance(text, str):
            raise InvalidPromptError(f"a prompt must be a string, not {type(text).__name__}")
        try:
            # A batch gives up the interpreter lock, which a single text does not. Also a short text may take seconds, where
            # the pattern of the pre-tokenizer tries everything.
            encoding = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except TypeError as error:
            raise InvalidPromptError("the prompt holds characters that are not valid Unicode") from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            raise InvalidPromptError(
                f"the tokenizer failed on this prompt of {len(text)} characters ({type(error).__name__}: {error!s:.200}); "
                f"change the text, or give token ids"
            ) from error
        ids = np.array(encoding.ids, np.int32)
        if max_tokens is None or ids.size <= max_tokens:
            return ids
        is_around = np.array(encoding.special_tokens_mask, np.bool_)
        room = max_tokens - np.count_nonzero(is_around)
        if room < 1:
            return ids[-max_tokens:]
        is_around[np.flatnonzero(~is_around)[-room:]] = True
        return ids[is_around]

    @functools.cached_property
    def max_token_characters(self) -> int | None:
        """More characters than this no token stands for; None: one token can stand for any number of them.

        None also where it is not known: a normalizer that removes characters, or tokens that swallow blanks around them.
        """
        return max_token_characters(self.backend)

    @property
    def truncation_side(self) -> Side:
        """Where the author of the tokenizer leaves something out."""
        return "left" if self.config.get("truncation_side") == "left" else "right"

    def encode_within(self, text: str, add_special_tokens: bool, most: int | None, side: Side | None) -> I32:
        """As `encode`, with at most so many tokens (None: all): special tokens around a text stay, and of the text what is
        nearest to its other end. side: which end that is not; None: `truncation_side`."""
        ids = self.encode(text, add_special_tokens)
        if most is None or ids.size <= most:
            return ids
        num_special = self.backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoding = self.backend.encode(text, add_special_tokens=False)
        encoding.truncate(max(0, most - num_special), direction=side or self.truncation_side)
        if num_special:
            encoding = self.backend.post_process(encoding, None, True)
        return np.array(encoding.ids[:most], np.int32)

    @functools.cached_property
    def pair_layout(self) -> PairLayout:
        """The special tokens around and between two texts that are one prompt, as the model's author has set them."""
        encoding = self.backend.encode("a", "b")
        places = {number: [i for i, s in enumerate(encoding.sequence_ids) if s == number] for number in (0, 1)}
        first, second = places[0], places[1]
        ids = encoding.ids
        if not first or not second or first[-1] > second[0]:  # the post-processor of another kind of model
            return PairLayout([], [], [], has_types=False)
        return PairLayout(
            ids[: first[0]],
            ids[first[-1] + 1 : second[0]],
            ids[second[-1] + 1 :],
            has_types=encoding.type_ids[second[0]] == 1,
        )

    def decode(self, ids: Sequence[int] | I32, skip_special_tokens: bool = False) -> str:
        """The text of token ids. Bytes that are no UTF-8 become U+FFFD; ids outside the vocabulary are left out."""
        text: str = self.backend.decode(_as_list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def tokens_of(self, ids: Sequence[int]) -> list[str]:
        """Token ids as the vocabulary spells them; an id without a token as the empty string."""
        return [self.backend.id_to_token(i) or "" for i in ids]

    def _add_missing_tokens(self, names: dict[str, Any]) -> None:
        """Add what only the configuration knows, as transformers does: first by id, then by name."""
        known = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        by_id = names.get("added_tokens_decoder") or {}
        for _, value in sorted(by_id.items(), key=lambda item: int(item[0])):
            token = _added_token(value)
            if token.content not in known:
                self.backend.add_tokens([token])
                known.add(token.content)
        listed = [names.get(name) for name in SPECIAL_NAMES]
        for name in EXTRA_SPECIAL_NAMES:
            extra = names.get(name) or []
            listed += list(extra.values()) if isinstance(extra, dict) else list(extra)
        for value in listed:
            if value and _added_token(value).content not in known:
                token = _added_token(value)
                token.special = True
                self.backend.add_special_tokens([token])
                known.add(token.content)

    def _id_of(self, value: Any) -> int | None:
        if not value:
            return None
        id: int | None = self.backend.token_to_id(_added_token(value).content)
        return id


def _as_list(ids: Sequence[int] | I32) -> list[int]:
    listed: list[int] = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    return listed


def _added_token(value: Any) -> Any:
    """A token as tokenizer_config.json writes it: a string, or an object with its flags."""
    if isinstance(value, str):
        return tokenizers.AddedToken(value, normalized=False, special=True)
    flags = {key: flag for key, flag in value.items() if key not in ("content", "__type", "id")}
    return tokenizers.AddedToken(value["content"], **flags)


def _from_file(file: Path) -> Any:
    try:
        return tokenizers.Tokenizer.from_buffer(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CorruptModelError(f"{file} cannot be read: {error}") from error


def transformers_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The tokenizer of a folder as transformers has it. Raises CorruptModelError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a third party's parsers of a dozen formats raise
        raise CorruptModelError(
            f"transformers cannot read the tokenizer in {str(path)!r}: {error}; save it as tokenizer.json, or use "
            f"skip_tokenizer_init=True to work with token ids"
        ) from error


def _from_transformers(path: Path) -> Any:
    if not any((path / name).is_file() for name in OTHER_FILES) and not any(path.glob("*.tiktoken")):
        raise ModelNotFoundError(
            f"{str(path)!r} holds no tokenizer (no tokenizer.json, nor {', '.join(OTHER_FILES)}); "
            "give another tokenizer folder, or skip_tokenizer_init=True to work with token ids"
        )
    converted = transformers_tokenizer(path)
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(
            f"the tokenizer in {str(path)!r} ({type(converted).__name__}) has no tokenizers backend; save it as "
            "tokenizer.json, or use skip_tokenizer_init=True"
        )
    return backend
