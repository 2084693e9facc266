"""What does `batch_invariant=True` cost: fixed arithmetic beside free arithmetic, in the same process, step by step in turns?

    python bench/invariance.py [--models 135M] [--threads 2] [--json FILE]

Models have random weights in bfloat16. Decode steps of 1, 16 and 128 rows, and prompts. Medians; with one thread its processor
time, which a busy machine changes less. vLLM's price on a GPU, by its documentation: 31 % throughput, 59 % latency.
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

from model import SHAPES
from report import compared, finish

ROOT = Path(__file__).resolve().parent.parent

MOST = 1.05
"""Times of the free arithmetic that a decode step may take."""

BATCHES, CONTEXT, STEPS, PREFILLS = (1, 16, 128), 128, 40, 9
PROMPTS = (32, 512)


def measure(model: str, num_threads: int) -> dict[str, dict[str, list[float]]]:
    """Of every figure the milliseconds of each side, in this process."""
    import numpy as np

    from actorllm.config import EngineConfig
    from actorllm.messages import NewRow, StepPlan, pack_rows
    from actorllm.model.cpu.runner import CpuRunner

    clock = time.thread_time if num_threads == 1 else time.perf_counter
    runners: dict[str, CpuRunner] = {}
    with tempfile.TemporaryDirectory() as folder:
        if model in SHAPES:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model]))
        for side in ("free", "fixed"):
            config = EngineConfig.from_arguments(
                folder if model in SHAPES else model,
                load_format="dummy",
                dtype="bfloat16",
                skip_tokenizer_init=True,
                max_num_seqs=max(BATCHES),
                max_num_batched_tokens=2048,
                num_threads=num_threads,
                batch_invariant=side == "fixed",
            )
            runners[side] = CpuRunner(config, show_progress=False)
            runners[side].load()

    def start(runner: CpuRunner, batch: int, prompt: int, room: int) -> None:
        per_row = -(-room // runner.config.cache.block_size)
        runner.allocate(batch * per_row)
        random = np.random.default_rng(0)
        runner.execute(
            StepPlan(
                step=0,
                new_rows=pack_rows(NewRow(row, prompt, seed=row, temperature=0.8) for row in range(batch)),
                new_tokens=random.integers(0, runner.model_config.vocab_size, batch * prompt).astype(np.int32),
                new_num_blocks=np.full(batch, per_row, np.int32),
                new_blocks=random.permutation(batch * per_row).astype(np.int32),
            )
        )

    def timed(runner: CpuRunner, plan: StepPlan) -> float:
        began = clock()
        runner.step(plan)
        return 1e3 * (clock() - began)

    figures: dict[str, dict[str, list[float]]] = {}
    for batch in BATCHES:
        rows = np.arange(batch, dtype=np.int32)
        for runner in runners.values():
            start(runner, batch, CONTEXT, CONTEXT + STEPS + 10)
            for first in range(0, batch, 16):
                part = rows[first : first + 16]
                runner.step(StepPlan(step=1, prefill_slots=part, prefill_counts=np.full(len(part), CONTEXT, np.int32)))
            runner.step(StepPlan(step=2, decode_slots=rows))
            for _ in range(4):
                runner.step(StepPlan(step=2))
        times = figures[f"decode step, batch {batch}, ms"] = {side: [] for side in runners}
        for turn in range(STEPS):
            for side, runner in list(runners.items())[:: 1 if turn % 2 else -1]:
                times[side].append(timed(runner, StepPlan(step=2)))
    for prompt in PROMPTS:
        times = figures[f"prompt of {prompt} tokens, ms"] = {side: [] for side in runners}
        one, whole = np.zeros(1, np.int32), np.full(1, prompt, np.int32)
        for turn in range(PREFILLS + 1):
            for side, runner in list(runners.items())[:: 1 if turn % 2 else -1]:
                start(runner, 1, prompt, prompt)
                spent = timed(runner, StepPlan(step=1, prefill_slots=one, prefill_counts=whole))
                if turn:  # the first time makes oneDNN's kernels for this shape
                    times[side].append(spent)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", default="storyteller,135M")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure, arguments.threads)))
        return
    from actorllm.config import EngineConfig
    from actorllm.model.threads import worker_environment

    load_before = os.getloadavg()
    config = EngineConfig.from_arguments("storyteller", num_threads=arguments.threads)
    rows: list[dict[str, Any]] = []
    rounds: dict[str, Any] = {}
    for model in arguments.models.split(","):
        child = subprocess.run(
            [sys.executable, __file__, "--measure", model, "--threads", str(arguments.threads)],
            env={**os.environ, **worker_environment(config), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            check=True,
        )
        rounds[model] = json.loads(child.stdout)
        for figure, times in rounds[model].items():
            target = MOST if figure.startswith("decode") else None
            rows.append(compared(f"{model}: {figure}", times["fixed"], "without it", times["free"], at_most=target))
            print(
                f"{rows[-1]['measure']:44} {statistics.median(times['fixed']):9.2f}  {rows[-1]['ratio']:.3f}x",
                flush=True,
            )
    finish(
        "invariance",
        "batch_invariant=True beside free arithmetic, bfloat16",
        rows,
        arguments.json,
        load_before,
        configuration={"shapes": SHAPES, "threads": arguments.threads, "context": CONTEXT, "steps": STEPS},
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
