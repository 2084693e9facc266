"""How long does a step of the model runner take, and what share of the machine's limits is that?

Drives `CpuRunner` with hand-made plans, in a fresh process per model and number of threads (the OpenMP wait policy is
read once per process). Times are medians. Run: python bench/model.py [--json FILE] [--threads 1,2] [--models 135M,...]
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

SHAPES: dict[str, dict[str, Any]] = {
    "135M": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
}

TARGETS = {
    ("storyteller", "decode 1 ms"): 0.45,
    ("storyteller", "decode 128 ms"): 5.0,
    ("135M", "decode 1 ms"): 10.1,
    ("135M", "batch 16 tokens/s"): 418.0,
    ("0.6B", "decode 1 ms"): 30.9,
    ("0.6B", "batch 16 tokens/s"): 93.0,
}

PROMPT, OUTPUT, CONTEXT = 128, 64, 150


def measure(model: str, num_threads: int) -> dict[str, float]:
    """All figures of one model, in this process."""
    import numpy as np
    import torch

    from actorllm.config import EngineConfig
    from actorllm.messages import NewRow, StepPlan, pack_rows
    from actorllm.model.cpu.runner import CpuRunner

    with tempfile.TemporaryDirectory() as folder:
        if model in SHAPES:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model]))
        config = EngineConfig.from_arguments(
            folder if model in SHAPES else model,
            load_format="dummy" if model in SHAPES else "auto",
            skip_tokenizer_init=True,
            max_num_seqs=128,
            max_num_batched_tokens=2048,
            num_threads=num_threads,
        )
        runner = CpuRunner(config, show_progress=False)
        runner.load()
    figures: dict[str, float] = {}
    size = config.cache.block_size
    vocab = runner.model_config.vocab_size
    random = np.random.default_rng(0)

    def start(batch: int, prompt: int, room: int) -> StepPlan:
        """`batch` requests of `prompt` tokens in a fresh cache, with shuffled blocks for `room` tokens each."""
        per_row = -(-room // size)
        runner.allocate(batch * per_row)
        return StepPlan(
            step=0,
            new_rows=pack_rows(NewRow(row, prompt, seed=row, temperature=0.8) for row in range(batch)),
            new_tokens=random.integers(0, vocab, batch * prompt).astype(np.int32),
            new_num_blocks=np.full(batch, per_row, np.int32),
            new_blocks=random.permutation(batch * per_row).astype(np.int32),
        )

    def prefill(batch: int, prompt: int, room: int, at_a_time: int) -> None:
        """Prompts of all rows, at most `at_a_time` tokens in a step."""
        runner.execute(start(batch, prompt, room))
        for first in range(0, batch, max(1, at_a_time // prompt)):
            rows = np.arange(first, min(batch, first + max(1, at_a_time // prompt)), dtype=np.int32)
            runner.step(StepPlan(step=1, prefill_slots=rows, prefill_counts=np.full(len(rows), prompt, np.int32)))

    def decode(batch: int, steps: int) -> tuple[float, float]:
        """Median milliseconds of a decode step, and of the sampling in it."""
        plan = StepPlan(step=2, decode_slots=np.arange(batch, dtype=np.int32))
        times, sampling = [], []
        for _ in range(steps):
            began = time.perf_counter()
            handle = runner.execute(plan)
            middle = time.perf_counter()
            runner.sample(handle)
            ended = time.perf_counter()
            times.append(ended - began)
            sampling.append(ended - middle)
            plan = StepPlan(step=2)
        return 1e3 * statistics.median(times), 1e3 * statistics.median(sampling)

    batches = (1, 16, 128) if model == "storyteller" else (1, 16)
    for batch in batches:
        steps = 200 if model == "storyteller" else 40
        prefill(batch, CONTEXT - steps // 2 if steps < 150 else 64, 64 + 300, 2048)
        decode(batch, 5)
        figures[f"decode {batch} ms"], figures[f"sampling {batch} ms"] = decode(batch, steps)

    prefill(1, 64, 65, 2048)
    for length in (128, 1024):
        seconds = []
        for _ in range(3):
            plan = start(1, length, length)
            runner.execute(plan)
            began = time.perf_counter()
            runner.step(
                StepPlan(step=1, prefill_slots=np.zeros(1, np.int32), prefill_counts=np.full(1, length, dtype=np.int32))
            )
            seconds.append(time.perf_counter() - began)
        figures[f"prefill {length} tokens/s"] = length / min(seconds)
    a, b = torch.randn(2048, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - began)
    figures["matmul GFLOP/s"] = 2e-9 * 2048**3 / min(seconds)
    body = runner.decoder.num_bytes / 2 - runner.decoder.lm_head.num_bytes / 2  # parameters outside the LM head
    flops = 2e-9 * body * figures["prefill 1024 tokens/s"]
    figures["prefill share of matmul"] = flops / figures["matmul GFLOP/s"]

    for _ in range(2):  # the first time makes oneDNN's kernels for these shapes
        began = time.perf_counter()
        prefill(16, PROMPT, PROMPT + OUTPUT, 1024)
        decode(16, OUTPUT - 1)
        figures["batch 16 tokens/s"] = 16 * OUTPUT / (time.perf_counter() - began)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--models", default="storyteller,135M,0.6B")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure, int(arguments.threads))))
        return
    from actorllm.config import EngineConfig
    from actorllm.model.threads import worker_environment

    before = list(os.getloadavg())
    rows: dict[str, dict[str, Any]] = {}
    for model in arguments.models.split(","):
        for threads in map(int, arguments.threads.split(",")):
            config = EngineConfig.from_arguments("storyteller", num_threads=threads)
            load_before = os.getloadavg()[0]
            child = subprocess.run(
                [sys.executable, __file__, "--measure", model, "--threads", str(threads)],
                env={**os.environ, **worker_environment(config), "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                check=True,
            )
            figures = json.loads(child.stdout)
            for figure, value in figures.items():
                rows.setdefault(figure, {"figure": figure})[f"{model}, {threads} threads"] = value
            print(f"\n{model}, {threads} threads, load average {load_before:.1f} before")
            for name, value in figures.items():
                target = TARGETS.get((model, name))
                goal = "" if target is None else f"   target {target:g}"
                print(f"  {name:28} {value:10.3f}{goal}", flush=True)
    if arguments.json is not None:
        data = {
            "command": command(),
            "environment": environment(),
            "load_before": before,
            "configuration": {
                "shapes": SHAPES,
                "context": CONTEXT,
                "prompt": PROMPT,
                "output": OUTPUT,
                "block_size": config.cache.block_size,
                "worker_environment": worker_environment(config),
            },
            "rows": list(rows.values()),
        }
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
