"""Shapes of five well-known models, without their weights: for benchmarks with load_format="dummy" and no download.

Each folder holds a config.json with the sizes that were published. There is no tokenizer: requests give token ids, and
outputs have no text. Called by `config.read_model_folder`.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
SHAPES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def shape_folder(name: str) -> Path | None:
    """The folder of a shape by the model's name, with or without its owner's ("Qwen/Qwen3-0.6B"), in any case."""
    wanted = name.rpartition("/")[2].lower()
    return next((FOLDER / shape for shape in SHAPES if shape.lower() == wanted), None)
