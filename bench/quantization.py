"""How much faster is a model with int8 or int4 weights than the same in bfloat16, and with a KV cache of int8?

All run in one process, step by step in turns, so that what else the machine does falls on both. Models have random weights. The
rows "KV" are of a model in bfloat16, whose cache is in bfloat16 or int8, with so many sequences of so many tokens.
Times are medians; of one thread its processor time, which a busy machine changes less.
Run: python bench/quantization.py [--json FILE] [--threads 2] [--models 135M,0.6B] [--state FILE]

With --state, a call measures one model and adds it to the file. Call it again until --json is written.
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
from report import command, environment

ROOT = Path(__file__).resolve().parent.parent

SIDES = {"bfloat16": None, "int8": "int8", "int4": "int4"}
TARGETS = {"decode 1": 1.5, "decode 16": 2.0, "prefill 512": 2.5}
"""Times as fast as bfloat16, of int8."""

CONTEXT, STEPS, PREFILL, PREFILLS = 128, 40, 512, 5
KV_SIZES = ((1, 1536), (16, 512))
"""Sequences, and tokens of each, of the steps that compare caches."""


def measure(model: str, num_threads: int) -> dict[str, dict[str, float]]:
    """Of every figure the value of each side, in this process."""
    import numpy as np

    from actorllm.config import EngineConfig
    from actorllm.messages import NewRow, StepPlan, pack_rows
    from actorllm.model.cpu.runner import CpuRunner

    clock = time.thread_time if num_threads == 1 else time.perf_counter
    figures: dict[str, dict[str, float]] = {}
    runners: dict[str, CpuRunner] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model]))

        def make(**options: Any) -> CpuRunner:
            config = EngineConfig.from_arguments(
                folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                max_num_seqs=16,
                max_num_batched_tokens=2048,
                num_threads=num_threads,
                **options,
            )
            return CpuRunner(config, show_progress=False)

        for side, method in SIDES.items():
            runners[side] = make(quantization=method)
            began = clock()
            runners[side].load()
            figures.setdefault("load s", {})[side] = clock() - began
            figures.setdefault("MB read in a step", {})[side] = runners[side].weight_bytes / 1e6
        rounded = make(kv_cache_dtype="int8")
        rounded.load()

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

    def medians(name: str, times: dict[str, list[float]]) -> None:
        figures[f"{name} ms"] = {side: statistics.median(values) for side, values in times.items()}

    for batch in (1, 16):
        rows = np.arange(batch, dtype=np.int32)
        for runner in runners.values():
            start(runner, batch, CONTEXT, CONTEXT + STEPS + 10)
            runner.step(StepPlan(step=1, prefill_slots=rows, prefill_counts=np.full(batch, CONTEXT, np.int32)))
            runner.step(StepPlan(step=2, decode_slots=rows))
            for _ in range(4):
                runner.step(StepPlan(step=2))
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(STEPS):
            for side, runner in runners.items():
                times[side].append(timed(runner, StepPlan(step=2)))
        medians(f"decode {batch}", times)
    caches = {"bfloat16": runners["bfloat16"], "int8": rounded}
    for batch, context in KV_SIZES:
        rows = np.arange(batch, dtype=np.int32)
        for runner in caches.values():
            start(runner, batch, context, context + STEPS + 10)
            for row in rows:
                runner.step(
                    StepPlan(step=1, prefill_slots=rows[row:][:1], prefill_counts=np.array([context], np.int32))
                )
            runner.step(StepPlan(step=2, decode_slots=rows))
        times = {side: [] for side in caches}
        for _ in range(STEPS):
            for side, runner in caches.items():
                times[side].append(timed(runner, StepPlan(step=2)))
        medians(f"KV, decode {batch} x {context}", times)
    times = {side: [] for side in SIDES}
    one, whole = np.zeros(1, np.int32), np.full(1, PREFILL, np.int32)
    for turn in range(PREFILLS + 1):
        for side, runner in runners.items():
            start(runner, 1, PREFILL, PREFILL)
            spent = timed(runner, StepPlan(step=1, prefill_slots=one, prefill_counts=whole))
            if turn:  # the first time makes oneDNN's kernels for this shape
                times[side].append(spent)
    medians(f"prefill {PREFILL}", times)
    return figures


def instructions() -> list[str]:
    """Those of the processor that matter here."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    flags = next((line.split(":")[1] for line in text.splitlines() if line.startswith("flags")), "").split()
    wanted = ("avx2", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
    return [flag for flag in wanted if flag in flags]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", default="135M,0.6B")
    parser.add_argument("--state", type=Path, help="what earlier calls have measured; default: this call measures all")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure, arguments.threads)))
        return
    from actorllm.config import EngineConfig
    from actorllm.model.threads import worker_environment

    before = list(os.getloadavg())
    config = EngineConfig.from_arguments("storyteller", num_threads=arguments.threads)
    rows: list[dict[str, Any]] = []
    models = arguments.models.split(",")
    found: dict[str, dict[str, dict[str, float]]] = {}
    if arguments.state is not None and arguments.state.is_file():
        found = json.loads(arguments.state.read_text())
    for model in [model for model in models if model not in found][: None if arguments.state is None else 1]:
        child = subprocess.run(
            [sys.executable, __file__, "--measure", model, "--threads", str(arguments.threads)],
            env={**os.environ, **worker_environment(config), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            check=True,
        )
        found[model] = json.loads(child.stdout)
        if arguments.state is not None:
            arguments.state.write_text(json.dumps(found))
    is_complete = found.keys() >= set(models)
    for model in models:
        for figure, values in found.get(model, {}).items():
            row: dict[str, Any] = {"figure": f"{model}, {figure}", **values}
            row["times"] = values["bfloat16"] / values["int8"]
            row["times_int4"] = values["bfloat16"] / values["int4"] if "int4" in values else None
            row["target"] = TARGETS.get(figure.removesuffix(" ms"))
            rows.append(row)
            goal = "" if row["target"] is None else f"   target {row['target']:g}"
            sides = "".join(f"{values[side]:12.2f}" if side in values else " " * 12 for side in SIDES)
            ratios = " and ".join(f"{one:.2f}" for one in (row["times"], row["times_int4"]) if one is not None)
            print(f"{row['figure']:32}{sides}   {ratios} times{goal}", flush=True)
    if not is_complete:
        print("call again: models are missing", file=sys.stderr)
    elif arguments.json is not None:
        data = {
            "command": command(),
            "environment": environment(),
            "instructions": instructions(),
            "load_before": before,
            "configuration": {"shapes": SHAPES, "threads": arguments.threads, "context": CONTEXT, "steps": STEPS},
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
