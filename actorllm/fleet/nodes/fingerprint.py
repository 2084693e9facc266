"""What replicas must have in common for their tokens to be the same: the files of the model, by a digest of parts of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

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
