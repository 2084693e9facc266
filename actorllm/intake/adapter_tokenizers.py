"""Tokenizers that adapters bring: `AdapterTokenizers`, from the folder of an adapter to what reads its prompts and ends its texts.

A folder with tokenizer.json has a tokenizer of its own, with its own chat template and end of text. Texts of the model are made
by the engine's tokenizer, while steps are computed. So an id may not have one text there and another one here: such an adapter is
refused. It may add ids that the engine's tokenizer has no text for.

Most adapters of one base bring the same files. So a tokenizer is kept by the content of its files, and is loaded once for all
folders that have it. Called by threads that read prompts.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from actorllm.config import ModelConfig
from actorllm.errors import InvalidParameterError, InvalidPromptError, ModelError, shown
from actorllm.intake.tokenization import Prompt, PromptReader, TokenizedPrompt
from actorllm.text.tokenizer import Tokenizer
from actorllm.types.adapter_folder import folder_of
from actorllm.types.model_files import read_object

K = TypeVar("K")
V = TypeVar("V")

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""What is read of a folder. The first one is what makes a tokenizer; the last one names ends of text as well."""
MAX_FILE_BYTES = 64 << 20
MAX_TOKENIZERS = 8
"""That are kept, each with files of its own content."""
MAX_FOLDERS = 1024
"""Whose content is remembered."""

Folder: TypeAlias = tuple[str, tuple[tuple[int, ...], ...]]
"""A folder and the state of its files, by FILES."""


class AdapterPromptReader(PromptReader):
    """Reads prompts by a tokenizer that may know ids which the model does not have."""

    def tokenize(self, prompt: Prompt, **how: Any) -> TokenizedPrompt:
        tokenized = super().tokenize(prompt, **how)
        if tokenized.ids.size and (highest := int(tokenized.ids.max())) >= self._model.vocab_size:
            raise InvalidPromptError(
                f"the tokenizer of the adapter makes token {highest} of this prompt, and the model has {self._model.vocab_size}"
            )
        return tokenized


@dataclass(frozen=True, slots=True)
class AdapterTexts:
    """How texts of one adapter differ from those of the model."""

    prompts: PromptReader | None
    """Reads its prompts; None: that of the engine does."""
    end_ids: tuple[int, ...]
    """What ends its texts, beside what ends those of the model."""


NOTHING = AdapterTexts(None, ())


class AdapterTokenizers:
    """See the module docstring."""

    def __init__(self, model: ModelConfig, engine_tokenizer: Callable[[], Tokenizer]) -> None:
        """engine_tokenizer: that of the engine."""
        self._model = model
        self._engine_tokenizer = engine_tokenizer
        self._contents: OrderedDict[Folder, bytes] = OrderedDict()
        """The digests of the files of folders, those used last at the end."""
        self._known: OrderedDict[bytes, tuple[Folder, AdapterTexts]] = OrderedDict()
        """By that digest what was read, and where: large texts are read from there. Those used last at the end."""
        self._lock = threading.Lock()

    def texts_of(self, path: str) -> AdapterTexts:
        """Of the adapter in this folder. Raises InvalidParameterError for a tokenizer that cannot be used with the model."""
        if self._model.tokenizer is None:
            return NOTHING  # there are only ids
        folder = _state_of(folder_of(path))
        if not folder[1][0] and not folder[1][-1]:
            return NOTHING
        with self._lock:
            content = self._contents.get(folder)
        try:
            if content is None:
                content = _content_of(Path(folder[0]))
            with self._lock:
                known = self._known.get(content)
            if known is None or (known[0] != folder and _state_of(Path(known[0][0])) != known[0]):
                known = folder, self._read(Path(folder[0]))
        except (ModelError, OSError) as error:
            raise InvalidParameterError(
                f"the tokenizer of the adapter {path} cannot be used: {error!s:.500}"
            ) from error
        with self._lock:
            _keep(self._contents, folder, content, MAX_FOLDERS)
            _keep(self._known, content, known, MAX_TOKENIZERS)
        return known[1]

    def forget(self) -> None:
        """Give back what was loaded; it is loaded again when it is needed."""
        with self._lock:
            self._known.clear()
            self._contents.clear()

    def _read(self, folder: Path) -> AdapterTexts:
        ends = _listed(read_object(folder / FILES[-1], is_optional=True).get("eos_token_id"))
        reader: PromptReader | None = None
        if (folder / FILES[0]).is_file():
            reader = AdapterPromptReader(replace(self._model, tokenizer=str(folder)))
            self._check(folder, reader.tokenizer)
            ends |= _listed(reader.tokenizer.eos_token_id)
        return AdapterTexts(reader, tuple(sorted(id for id in ends if 0 <= id < self._model.vocab_size)))

    def _check(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Raises InvalidParameterError where an id stands for another text than in the engine."""
        theirs = self._engine_tokenizer().backend.get_vocab(with_added_tokens=True)
        text_of = {id: text for text, id in theirs.items()}
        for text, id in tokenizer.backend.get_vocab(with_added_tokens=True).items():
            if text_of.get(id, text) != text:
                raise InvalidParameterError(
                    f"the tokenizer of the adapter {folder} has {shown(text)} as token {id}, which is {shown(text_of[id])} in that "
                    f"of the engine; build the engine with tokenizer={str(folder)!r:.300}, or take the tokenizer's files out"
                )


def _state_of(folder: Path) -> Folder:
    return str(folder), tuple(_stamp(folder / name) for name in FILES)


def _content_of(folder: Path) -> bytes:
    """The digest of the files. Raises InvalidParameterError for one that is too large."""
    made = sha256()
    if (folder / "additional_chat_templates").is_dir():
        made.update(str(folder).encode())  # those are not looked at here, so that nothing is shared
    for name in FILES:
        file = folder / name
        if not file.is_file():
            continue
        if (size := file.stat().st_size) > MAX_FILE_BYTES:
            raise InvalidParameterError(f"{file} has {size} bytes; at most {MAX_FILE_BYTES} are read")
        with open(file, "rb") as opened:
            made.update(f"{name}\0".encode() + sha256(opened.read(MAX_FILE_BYTES)).digest())
    return made.digest()


def _keep(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)


def _listed(ids: Any) -> set[int]:
    """eos_token_id, as it may be written."""
    ids = ids if isinstance(ids, list) else [ids]
    return {id for id in ids[:64] if type(id) is int}


def _stamp(file: Path) -> tuple[int, ...]:
    """What changes with a file; empty: there is none."""
    try:
        stat = os.stat(file)
    except OSError:
        return ()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
