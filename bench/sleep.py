"""How much memory does `sleep` give back, and what does waking take, beside a start?

An engine in processes of its own computes long prompts, sleeps, and wakes. Its files are random weights that were saved before.
Bytes are those that the system counts for the worker; what is given back is set against weights and computed KV. A start and a
waking end with the first token of a short prompt. Times are medians of rounds, and each round has one start.
Run: python bench/sleep.py [--json FILE] [--model 135M] [--threads 2] [--rounds 3] [--level 1]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from model import SHAPES
from report import command, environment
from weight_updates import tensors_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHARE, WAKING = 0.9, 0.1
"""Targets: of the memory, and of a start."""
PROMPTS, LENGTH = 8, 500


def first_token(llm: Any) -> float:
    """When a short prompt has its first token."""
    from actorllm import SamplingParams

    llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    return time.perf_counter()


def measure(folder: str, shape: dict[str, Any], num_threads: int, level: Any, rounds: int) -> dict[str, float]:
    from actorllm import LLM, SamplingParams

    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    kv_bytes = PROMPTS * LENGTH * shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * head_dim * 2
    weight_bytes = (Path(folder) / "model.safetensors").stat().st_size
    starts, wakings, shares = [], [], []
    for _ in range(rounds):
        began = time.perf_counter()
        options: dict[str, Any] = {"dtype": "bfloat16", "num_threads": num_threads, "max_model_len": 1024}
        with LLM(folder, skip_tokenizer_init=True, enable_sleep_mode=True, **options) as llm:
            starts.append(first_token(llm) - began)
            prompts: Any = [{"prompt_token_ids": [i + 1] * LENGTH} for i in range(PROMPTS)]
            llm.generate(prompts, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
            shares.append(llm.sleep(level) / (weight_bytes + kv_bytes))
            began = time.perf_counter()
            llm.wake_up()
            wakings.append(first_token(llm) - began)
    start, waking = statistics.median(starts), statistics.median(wakings)
    return {
        "weights_and_kv_MiB": (weight_bytes + kv_bytes) / 2**20,
        "given_back": statistics.median(shares),
        "start_s": start,
        "waking_s": waking,
        "times a start": waking / start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="135M", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--level", type=int, default=1, choices=(1, 2))
    arguments = parser.parse_args()
    before = list(os.getloadavg())
    shape = SHAPES[arguments.model]
    with tempfile.TemporaryDirectory() as folder:
        from safetensors.torch import save_file

        (Path(folder) / "config.json").write_text(json.dumps(shape))
        tensors = tensors_of(shape)
        if shape.get("tie_word_embeddings"):
            tensors.pop("lm_head.weight", None)
        save_file({name: one.contiguous() for name, one in tensors.items()}, Path(folder) / "model.safetensors")
        del tensors
        found = measure(folder, shape, arguments.threads, arguments.level, arguments.rounds)
    print(
        f"{arguments.model}: {found['given_back']:.0%} of {found['weights_and_kv_MiB']:.0f} MiB given back (target {SHARE:.0%}); "
        f"waking {found['waking_s']:.2f} s, a start {found['start_s']:.2f} s: {found['times a start']:.2f} (target {WAKING:g})"
    )
    if arguments.json is not None:
        data = {
            "command": command(),
            "environment": environment(),
            "load_before": before,
            "configuration": {"model": arguments.model, "threads": arguments.threads, "level": arguments.level},
            "rows": [{"figure": arguments.model, **found}],
        }
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
