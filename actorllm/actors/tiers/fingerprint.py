"""`fingerprint_of`: what the bits of a KV block depend on besides its hash, as one digest: files of the model and arithmetic."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import actorllm
from actorllm.config import EngineConfig

STRIDE, SAMPLE_BYTES = 1 << 20, 4096
"""Of a large file so many bytes are read at each multiple of the stride: every tensor of that size is among them."""
WHOLE_BYTES = 32 << 20
"""Files of up to so many bytes are read whole. Of larger ones the time of the last change counts, too."""


def fingerprint_of(config: EngineConfig, arithmetic: str) -> bytes:
    """32 bytes. arithmetic: of the worker (`model.arithmetic.arithmetic_of`). Raises OSError for files that cannot be read."""
    model = config.model
    parts = {
        "version": actorllm.__version__,
        "arithmetic": arithmetic,
        "files": _digest_of(Path(model.path)),
        "dummy": model.seed if model.load_format == "dummy" else None,
        "overrides": repr(model.overrides),
        "quantization": [model.quantization, model.quantization_twin],
        "architecture": [model.architecture, model.impl],
        "cache": [config.cache.block_size, config.cache.dtype],
        "batch_invariant": config.batch_invariant,
        "experts": config.enable_expert_parallel,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def _digest_of(path: Path) -> str:
    """Of the files of a model: all that is in small ones, and samples of large ones."""
    digest = hashlib.sha256()
    for file in sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size <= WHOLE_BYTES:
                digest.update(f"{file.name} {size}\n".encode())
                digest.update(opened.read())
                continue
            digest.update(f"{file.name} {size} {os.fstat(opened.fileno()).st_mtime_ns}\n".encode())
            for start in [*range(0, size, STRIDE), max(0, size - SAMPLE_BYTES)]:
                digest.update(os.pread(opened.fileno(), SAMPLE_BYTES, start))
    return digest.hexdigest()
