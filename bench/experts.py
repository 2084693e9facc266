"""Does a mixture of experts decode at the speed of its active weights?

Three models with random weights, each in a process of its own: a mixture of experts by its fused forward, the same one through
transformers, and a dense model with as many weights as a token of the mixture reads. Times are medians of decode steps.
Run: python bench/experts.py [--json FILE] [--threads 1,2] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import command, environment

ROOT = Path(__file__).resolve().parent.parent

COMMON: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
NUM_EXPERTS, NUM_ACTIVE, EXPERT_SIZE = 64, 8, 384

MIXTURE: dict[str, Any] = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "intermediate_size": NUM_ACTIVE * EXPERT_SIZE,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": NUM_ACTIVE,
    "moe_intermediate_size": EXPERT_SIZE,
    "norm_topk_prob": True,
}
DENSE: dict[str, Any] = {
    **COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "intermediate_size": NUM_ACTIVE * EXPERT_SIZE,
}

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "experts": (MIXTURE, {}),
    "experts, int8": (MIXTURE, {"quantization": "int8"}),
    "experts, hf": (MIXTURE, {"model_impl": "transformers"}),
    "dense": (DENSE, {}),
    "dense, int8": (DENSE, {"quantization": "int8"}),
}
BATCHES = (1, 4, 16)
PROMPT, STEPS = 64, 40


def measure(name: str, num_threads: int, dtype: str) -> dict[str, float]:
    """Milliseconds of a step, by what it does; in this process."""
    shape, arguments = MODELS[name]
    return step_times(shape, arguments, num_threads, dtype, BATCHES, PROMPT)


def step_times(
    shape: dict[str, Any],
    arguments: dict[str, Any],
    num_threads: int,
    dtype: str,
    batches: tuple[int, ...],
    prompt: int,
) -> dict[str, float]:
    """As `measure`, of a model with this config.json, after prompts of so many tokens."""
    import numpy as np

    from actorllm.config import EngineConfig
    from actorllm.messages import NewRow, StepPlan, pack_rows
    from actorllm.model.cpu.runner import CpuRunner

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        config = EngineConfig.from_arguments(
            folder,
            load_format="dummy",
            dtype=dtype,
            skip_tokenizer_init=True,
            max_num_seqs=32,
            max_num_batched_tokens=max(2048, max(batches) * prompt),
            num_threads=num_threads,
            **arguments,
        )
        runner = CpuRunner(config, show_progress=False)
        runner.load()
    vocab, size = shape["vocab_size"], config.cache.block_size
    random = np.random.default_rng(0)
    times: dict[str, float] = {}
    for batch in batches:
        per_row = -(-(prompt + STEPS + 1) // size)
        runner.allocate(batch * per_row)
        rows = np.arange(batch, dtype=np.int32)
        plan = StepPlan(
            step=0,
            new_rows=pack_rows(NewRow(row, prompt, seed=row, temperature=0.8) for row in range(batch)),
            new_tokens=random.integers(0, vocab, batch * prompt).astype(np.int32),
            new_num_blocks=np.full(batch, per_row, np.int32),
            new_blocks=random.permutation(batch * per_row).astype(np.int32),
        )
        runner.execute(plan)
        began = time.perf_counter()
        runner.step(StepPlan(step=1, prefill_slots=rows, prefill_counts=np.full(batch, prompt, np.int32)))
        times[f"prompts of {batch}"] = (time.perf_counter() - began) * 1e3
        decode = StepPlan(step=2, decode_slots=rows)
        steps = []
        for _ in range(STEPS):
            began = time.perf_counter()
            runner.sample(runner.execute(decode))
            steps.append(time.perf_counter() - began)
            decode = StepPlan(step=3)
        times[f"decode {batch}"] = statistics.median(steps[5:]) * 1e3
        runner.execute(StepPlan(step=4, decode_slots=rows[:0], freed=rows))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--models", default=";".join(MODELS))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure, int(arguments.threads), arguments.dtype)))
        return
    found: dict[str, dict[str, dict[str, float]]] = {}
    for num_threads in arguments.threads.split(","):
        by_model = found[num_threads] = {}
        for name in arguments.models.split(";"):
            own = [__file__, "--measure", name, "--threads", num_threads, "--dtype", arguments.dtype]
            path = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
            run = subprocess.run(
                [sys.executable, *own],
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "PYTHONPATH": path},
            )
            by_model[name] = json.loads(run.stdout.splitlines()[-1])
        print(f"{num_threads} threads, {arguments.dtype}: milliseconds, and times those of the dense model")
        for name, times in by_model.items():
            base = by_model.get("dense, int8" if name.endswith("int8") else "dense", times)
            shown = "  ".join(f"{what} {ms:7.2f} ({ms / base[what]:4.2f}x)" for what, ms in times.items())
            print(f"  {name:14} {shown}")
    if arguments.json is not None:
        tree = {"command": command(), "environment": environment(), "dtype": arguments.dtype, "found": found}
        arguments.json.write_text(json.dumps(tree, indent=1) + "\n")


if __name__ == "__main__":
    main()
