"""The table of architectures that were tried (`architectures.json`), from which docs/models.md is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def table(kind: str) -> list[Any]:
    """kind: "fused", "transformers", "media", "encoder-decoder", "encoders" or "refused"."""
    found: list[Any] = json.loads(Path(__file__).with_suffix(".json").read_text())[kind]
    return found
