"""Whether a draft model reads the same tokens as its target, as far as the files of both tell. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actorllm.errors import ConfigError
from actorllm.types.model_files import read_object

TOKENIZER_FILE = "tokenizer.json"


def check_same_tokenizer(
    target: Path, target_tree: Mapping[str, Any], draft: Path, draft_tree: Mapping[str, Any]
) -> None:
    """Raises ConfigError where the vocabularies differ. A folder without a tokenizer is held to the number of tokens only.

    Arguments:
        target, draft: the folders.
        target_tree, draft_tree: their config.json.
    """
    sizes = [tree.get("vocab_size") for tree in (target_tree, draft_tree)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"speculative_config: model={str(draft)!r} has vocab_size={sizes[1]!r:.40}, and the target {str(target)!r} has "
            f"{sizes[0]!r:.40}; use a draft model with the same tokenizer"
        )
    files = [folder / TOKENIZER_FILE for folder in (target, draft)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    ids = [_ids(read_object(file)) for file in files]
    if ids[0] != ids[1]:
        raise ConfigError(
            f"speculative_config: the tokenizer of model={str(draft)!r} has other tokens than that of {str(target)!r}; use a "
            f"draft model with the same tokenizer"
        )


def _ids(tree: Mapping[str, Any]) -> Any:
    """The tokens by their ids, in whatever form this kind of tokenizer lists them; added ones, too."""
    model, added = tree.get("model"), tree.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    entries = added if isinstance(added, list) else []
    return vocabulary, sorted(
        str((entry.get("id"), entry.get("content"))) for entry in entries if isinstance(entry, dict)
    )
