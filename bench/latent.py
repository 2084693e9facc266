"""What do latents in the cache save, of memory and of a decode step?

One model of the shape of DeepSeek-V2-Lite, narrowed, with random weights. Its fused forward has a latent for a token in the cache.
Through transformers it has keys and values of every head. Each is measured in a process of its own. Times are medians of decode
steps, after prompts of 64 and of 1,024 tokens.
Run: python bench/latent.py [--json FILE] [--threads 1,2] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from experts import ROOT, step_times
from report import command, environment

SHAPE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 32,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 352,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "max_position_embeddings": 2048,
    "eos_token_id": None,
    "bos_token_id": None,
}
SIDES: dict[str, dict[str, Any]] = {"fused": {}, "hf": {"model_impl": "transformers"}}
BATCHES = (1, 16)
PROMPTS = (64, 1024)


def measure(name: str, num_threads: int, dtype: str) -> dict[str, float]:
    found = {}
    for prompt in PROMPTS:
        times = step_times(SHAPE, SIDES[name], num_threads, dtype, BATCHES, prompt)
        found |= {f"{what} at {prompt}": ms for what, ms in times.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure, int(arguments.threads), arguments.dtype)))
        return
    numbers = {"fused": SHAPE["kv_lora_rank"] + SHAPE["qk_rope_head_dim"], "hf": 2 * 16 * (128 + 64)}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for num_threads in arguments.threads.split(","):
        sides = found[num_threads] = {}
        for name in SIDES:
            own = [__file__, "--measure", name, "--threads", num_threads, "--dtype", arguments.dtype]
            paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels"), str(ROOT / "bench")))
            run = subprocess.run(
                [sys.executable, *own],
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "PYTHONPATH": paths},
            )
            sides[name] = json.loads(run.stdout.splitlines()[-1])
        print(
            f"{num_threads} threads, {arguments.dtype}: milliseconds, and how many times as fast as through transformers"
        )
        for what, ms in sides["fused"].items():
            other = sides["hf"][what]
            print(f"  {what:22} {ms:8.2f}  hf {other:8.2f}  {other / ms:5.2f}x")
    print(f"numbers of a token in the cache of a layer: {numbers['fused']} and {numbers['hf']}")
    if arguments.json is not None:
        tree = {
            "command": command(),
            "environment": environment(),
            "dtype": arguments.dtype,
            "numbers": numbers,
            "found": found,
        }
        arguments.json.write_text(json.dumps(tree, indent=1) + "\n")


if __name__ == "__main__":
    main()
