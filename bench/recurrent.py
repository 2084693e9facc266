"""How fast are steps of models with recurrent layers, against the modules of transformers?

Models of the shapes of Mamba 2, Granite 4 and Qwen3-Next, narrowed, with random weights. The other side is the stock module of
`transformers` with its own cache and a whole batch at a time, because these models have no other way through actorllm. Sides take
turns, each in a process of its own. Times are medians of decode steps, after prompts of 64 tokens.
Run: python bench/recurrent.py [--json FILE] [--threads 1,2] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from experts import ROOT, STEPS, step_times
from report import command, environment

COMMON: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
ATTENTION = {"num_attention_heads": 16, "num_key_value_heads": 4}
TYPES = (["linear_attention"] * 3 + ["full_attention"]) * 2
SHAPES: dict[str, dict[str, Any]] = {
    "mamba2": {
        **COMMON,
        "architectures": ["Mamba2ForCausalLM"],
        "num_heads": 32,
        "head_dim": 64,
        "n_groups": 1,
        "state_size": 128,
    },
    "granitemoehybrid": {
        **COMMON,
        **ATTENTION,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": TYPES,
        "num_local_experts": 0,
        "intermediate_size": 2816,
        "shared_intermediate_size": 2816,
        "mamba_n_heads": 32,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "attention_multiplier": 0.0156,
    },
    "qwen3_next": {
        **COMMON,
        **ATTENTION,
        "architectures": ["Qwen3NextForCausalLM"],
        "layer_types": TYPES,
        "head_dim": 64,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "intermediate_size": 2816,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
}
SIDES = ("fused", "transformers")
BATCHES = (1, 16)
PROMPT = 64


def module_times(name: str, num_threads: int, dtype: str) -> dict[str, float]:
    """As `experts.step_times`, of the module of transformers."""
    import torch
    import transformers

    torch.set_num_threads(num_threads)
    shape = {key: value for key, value in SHAPES[name].items() if key != "architectures"}
    config = transformers.CONFIG_MAPPING[name](**shape)
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()
    found = {}
    with torch.inference_mode():
        for batch in BATCHES:
            began = time.perf_counter()
            out = model(torch.randint(0, shape["vocab_size"], (batch, PROMPT)), use_cache=True, logits_to_keep=1)
            found[f"prompts of {batch}"] = (time.perf_counter() - began) * 1e3
            steps = []
            for _ in range(STEPS):
                tokens = out.logits[:, -1].argmax(1, keepdim=True)
                began = time.perf_counter()
                out = model(tokens, cache=out.cache, use_cache=True)
                steps.append(time.perf_counter() - began)
            found[f"decode {batch}"] = statistics.median(steps[5:]) * 1e3
    return found


def measure(side: str, name: str, num_threads: int, dtype: str) -> dict[str, float]:
    if side == "transformers":
        return module_times(name, num_threads, dtype)
    return step_times({**SHAPES[name], "model_type": name}, {}, num_threads, dtype, BATCHES, PROMPT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(*arguments.measure, int(arguments.threads), arguments.dtype)))
        return
    found: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for num_threads in arguments.threads.split(","):
        for name in SHAPES:
            sides = found.setdefault(num_threads, {})[name] = {}
            for side in SIDES:
                own = [__file__, "--measure", side, name, "--threads", num_threads, "--dtype", arguments.dtype]
                paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels"), str(ROOT / "bench")))
                run = subprocess.run(
                    [sys.executable, *own],
                    capture_output=True,
                    text=True,
                    check=True,
                    env={**os.environ, "PYTHONPATH": paths},
                )
                sides[side] = json.loads(run.stdout.splitlines()[-1])
            print(f"{name}, {num_threads} threads, {arguments.dtype}: milliseconds, and how many times as fast")
            for what, ms in sides["fused"].items():
                other = sides["transformers"][what]
                print(f"  {what:22} {ms:8.2f}  transformers {other:8.2f}  {other / ms:5.2f}x")
    if arguments.json is not None:
        tree = {"command": command(), "environment": environment(), "dtype": arguments.dtype, "found": found}
        arguments.json.write_text(json.dumps(tree, indent=1) + "\n")


if __name__ == "__main__":
    main()
