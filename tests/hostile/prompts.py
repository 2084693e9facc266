"""Prompts that are hard to read, and a model whose tokenizer is careless."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from actorllm.config import BUNDLED_MODELS

STORYTELLER = BUNDLED_MODELS["storyteller"]

LONG = "The quick brown fox jumps over the lazy dog. " * 80_000
"""3.6 million characters: seconds of a tokenizer. Legal where it is truncated."""

TO_THE_ROOM = {"truncate_prompt_tokens": 500}

PANIC = "a" * 40
"""On which the careless pattern gives up, which the library in Rust answers with a panic."""

ENDLESS_TEMPLATE = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)


def careless_model(folder: Path) -> Path:
    """The storyteller with a pre-tokenizer pattern that tries everything: `(a+)+b`."""
    made = folder / "careless"
    made.mkdir()
    for file in STORYTELLER.iterdir():
        if file.is_file():
            shutil.copy(file, made)
    tree = json.loads((made / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tree["pre_tokenizer"]]}
    (made / "tokenizer.json").write_text(json.dumps(tree))
    return made


def slow_text(count: int) -> str:
    """A text on which the careless pattern works long, and does not give up: some 0.1 s for each."""
    return ("a" * 22 + "c") * count
