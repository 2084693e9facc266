"""What replicas must have in common for their tokens to be the same: the files of the model, and how their ranks compute."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SAMPLE_BYTES = 64 << 10
"""Read at the beginning, in the middle and at the end of each file of weights: all of it would take as long as loading it."""


def model_digest(folder: str | Path) -> str:
    """Of config.json, and of names, sizes and samples of the weights. Raises OSError."""
    digest = hashlib.sha256()
    path = Path(folder)
    digest.update((path / "config.json").read_bytes())
    for file in sorted([*path.glob("*.safetensors"), *path.glob("*.gguf")]):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for start in (0, max(0, size // 2), max(0, size - SAMPLE_BYTES)):
                opened.seek(start)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def facts_of_ranks(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the first rank says of itself, with the arithmetic of each where they differ; empty: none tells its arithmetic.

    facts: what actors say of themselves, by name, in any order.
    """
    by_rank = sorted((name for name in facts if "arithmetic" in facts[name]), key=lambda name: (len(name), name))
    if not by_rank:
        return {}
    lines = [str(facts[name]["arithmetic"]) for name in by_rank]
    if len(set(lines)) > 1:
        lines[0] = "; ".join(f"{line} in {name}" for name, line in zip(by_rank, lines, strict=True))
    return {**facts[by_rank[0]], "arithmetic": lines[0]}
