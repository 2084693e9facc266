"""A small model that several ranks can share, and its streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from actorllm import LLM, SamplingParams

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 331,
    "hidden_size": 48,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


def model_folder(path: Path, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps(SHAPE | changes))
    return path


def arguments(**changes: Any) -> dict[str, Any]:
    return {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 8, "num_threads": 1} | changes


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 331, n).tolist() for n in (3, 40, 17, 64, 1, 25, 33, 9, 50, 12)]
    params = [
        SamplingParams(temperature=0.8 * (i % 3 > 0), seed=i, max_tokens=24, min_tokens=5, ignore_eos=i % 2 == 0)
        for i in range(len(prompts))
    ]
    return prompts, params


def streams(folder: Path, **changes: Any) -> list[tuple[int, ...]]:
    prompts, params = requests()
    with LLM(folder, **arguments(max_num_batched_tokens=48, **changes)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]
