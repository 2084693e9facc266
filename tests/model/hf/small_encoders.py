"""Encoders with random weights, and a tokenizer of words for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "initializer_range": 0.3,
}
LABELS = {"id2label": {0: "sad", 1: "so so", 2: "glad"}, "label2id": {"sad": 0, "so so": 1, "glad": 2}}


def save_words(folder: Path) -> None:
    """A tokenizer of BERT's kind whose vocabulary is w0 to w91."""
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(92))]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(str(folder))


def save_encoder(folder: Path, make: Any, **changes: Any) -> Any:
    """With that tokenizer. Returns the model."""
    torch.manual_seed(0)
    model = make(make.config_class(**(SHAPE | changes))).eval()
    model.save_pretrained(folder)
    save_words(folder)
    return model
