"""Tokenizers that adapters bring: one for all folders with the same files, and another where they differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from actorllm.config import BUNDLED_MODELS, EngineConfig
from actorllm.intake import tokenization
from actorllm.intake.adapter_tokenizers import MAX_TOKENIZERS, AdapterTokenizers
from actorllm.text.chat_template import Conversation
from actorllm.text.tokenizer import Tokenizer

BASE = Path(BUNDLED_MODELS["storyteller"])


@pytest.fixture(scope="module")
def engine_tokenizer() -> Tokenizer:
    return Tokenizer(BASE)


@pytest.fixture
def tokenizers(engine_tokenizer: Tokenizer) -> AdapterTokenizers:
    return AdapterTokenizers(EngineConfig.from_arguments("storyteller").model, lambda: engine_tokenizer)


def folder_of(path: Path, **names: Any) -> str:
    """With the tokenizer of the storyteller, in which these fields differ."""
    path.mkdir()
    shutil.copy(BASE / "tokenizer.json", path)
    tree = json.loads((BASE / "tokenizer_config.json").read_text()) | names
    (path / "tokenizer_config.json").write_text(json.dumps(tree))
    return str(path)


def test_hundreds_of_folders_with_the_same_files_load_one_tokenizer(
    tokenizers: AdapterTokenizers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []

    def load(folder: Any) -> Tokenizer:
        loaded.append(folder)
        return Tokenizer(folder)

    monkeypatch.setattr(tokenization, "Tokenizer", load)
    folders = [folder_of(tmp_path / str(number)) for number in range(MAX_TOKENIZERS + 3)]
    for _ in range(2):
        for folder in folders:
            reader = tokenizers.texts_of(folder).prompts
            assert reader is not None
            assert reader.tokenize("Once upon a time").ids.size
    assert loaded == folders[:1]


@pytest.mark.parametrize(
    "file", ["tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/default.jinja"]
)
def test_a_folder_with_another_template_has_a_tokenizer_of_its_own(
    tokenizers: AdapterTokenizers, tmp_path: Path, file: str
) -> None:
    conversation = Conversation.of([{"role": "user", "content": "Once"}])
    for number, brackets in enumerate(("[]", "()")):
        template = f"{{% for message in messages %}}{brackets[0]}{{{{ message.content }}}}{brackets[1]}{{% endfor %}}"
        is_config = file == "tokenizer_config.json"
        folder = folder_of(tmp_path / str(number), **({"chat_template": template} if is_config else {}))
        if not is_config:
            (Path(folder) / file).parent.mkdir(exist_ok=True)
            (Path(folder) / file).write_text(template)
        reader = tokenizers.texts_of(folder).prompts
        assert reader is not None
        assert reader.chat_template.render(conversation) == f"{brackets[0]}Once{brackets[1]}"


def test_what_is_shared_outlives_the_folder_that_it_was_read_from(
    tokenizers: AdapterTokenizers, tmp_path: Path
) -> None:
    """Large texts are read from the folder, by another process."""
    first, second = (folder_of(tmp_path / folder) for folder in ("first", "second"))
    tokenizers.texts_of(first)
    shared = tokenizers.texts_of(second).prompts
    assert shared is not None
    assert str(shared.tokenizer.path) == first
    shutil.rmtree(first)
    left = tokenizers.texts_of(second).prompts
    assert left is not None
    assert str(left.tokenizer.path) == second
