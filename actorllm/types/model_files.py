"""The JSON files of a model's folder. Standard library and orjson only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from actorllm.errors import CorruptModelError


def read_json(file: Path) -> Any:
    """What it holds. Raises CorruptModelError."""
    try:
        return orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise CorruptModelError(f"{file} cannot be read: {error}") from error


def read_object(file: Path, *, is_optional: bool = False) -> dict[str, Any]:
    """A JSON object. is_optional: without such a file, an empty one. Raises CorruptModelError."""
    if is_optional and not file.is_file():
        return {}
    tree = read_json(file)
    if not isinstance(tree, dict):
        raise CorruptModelError(f"{file} must hold a JSON object, not {type(tree).__name__}")
    return tree
