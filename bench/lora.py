"""What do adapters cost a decode step, beside the same step of their base?

Four runners in one process, step by step in turns: without adapters, with adapters that no row has, with one adapter for all
rows, and with eight adapters over the rows. The model and its adapters have random weights. A round is one step of each.
Run: python bench/lora.py [--json FILE] [--threads 2] [--model 135M] [--rank 16] [--rounds 60] [--cpu]
With --cpu, times are of the processor, of all threads: beside other programs they tell more than those of the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from model import SHAPES
from report import compared, finish

ROOT = Path(__file__).resolve().parent.parent

SIDES = {"base": 0, "no row": 0, "1 adapter": 1, "8 adapters": 8}
"""How many adapters the rows have."""
TARGETS = {(16, "1 adapter"): 0.9, (16, "8 adapters"): 0.8}
"""Times the tokens/s of the base."""
MAX_LORAS, CONTEXT = 8, 128
BATCHES = (1, 16)


def measure(
    model: str, rank: int, num_threads: int, num_rounds: int, is_cpu: bool
) -> dict[str, dict[str, list[float]]]:
    """Of every figure the milliseconds of each side in every round, in this process."""
    import numpy as np
    import torch

    from actorllm.config import EngineConfig
    from actorllm.messages import NewRow, StepPlan, pack_rows
    from actorllm.model.cpu.runner import CpuRunner

    runners: dict[str, CpuRunner] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model]))
        for side in SIDES:
            num_slots = MAX_LORAS if SIDES[side] > 1 else 1
            adapters: dict[str, Any] = {"enable_lora": True, "max_loras": num_slots, "max_lora_rank": rank}
            config = EngineConfig.from_arguments(
                folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                max_num_seqs=16,
                num_threads=num_threads,
                **({} if side == "base" else adapters),
            )
            runners[side] = runner = CpuRunner(config, show_progress=False)
            runner.load()
            if runner.adapters is None:
                continue
            slots = runner.adapters.slots
            for slot in range(1, num_slots + 1):
                tensors = {}
                for name, target in slots.targets.items():
                    down = torch.randn(rank, target.in_features) / target.in_features**0.5
                    up = torch.randn(rank, len(target.rows)) / (10 * rank**0.5)
                    tensors[name] = (down.to(slots.dtype), up.to(slots.dtype))
                runner.adapters.put(slot, str(slot), tensors)
    now = time.process_time if is_cpu else time.perf_counter
    figures: dict[str, dict[str, list[float]]] = {}
    for batch in BATCHES:
        rows = np.arange(batch, dtype=np.int32)
        for side, runner in runners.items():
            per_row = -(-(CONTEXT + num_rounds + 10) // runner.config.cache.block_size)
            runner.allocate(batch * per_row)
            random, count = np.random.default_rng(0), SIDES[side]
            ids = [1 + row % count if count else 0 for row in range(batch)]
            runner.execute(
                StepPlan(
                    step=0,
                    new_rows=pack_rows(
                        NewRow(row, CONTEXT, seed=row, temperature=0.8, adapter_id=ids[row]) for row in range(batch)
                    ),
                    new_tokens=random.integers(0, runner.model_config.vocab_size, batch * CONTEXT).astype(np.int32),
                    new_num_blocks=np.full(batch, per_row, np.int32),
                    new_blocks=random.permutation(batch * per_row).astype(np.int32),
                )
            )
            runner.step(StepPlan(step=1, prefill_slots=rows, prefill_counts=np.full(batch, CONTEXT, np.int32)))
            runner.step(StepPlan(step=2, decode_slots=rows))
            for _ in range(4):
                runner.step(StepPlan(step=2))
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        for round_ in range(num_rounds):
            turns = list(SIDES)[round_ % len(SIDES) :] + list(SIDES)[: round_ % len(SIDES)]
            for side in turns:  # none has always the caches that the same other one leaves
                began = now()
                runners[side].step(StepPlan(step=2))
                times[side].append(1e3 * (now() - began))
        figures[f"decode {batch}"] = times
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="135M", choices=sorted(SHAPES))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--cpu", action="store_true", help="measure the processor's time")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        given = (arguments.model, arguments.rank, arguments.threads, arguments.rounds, arguments.cpu)
        print(json.dumps(measure(*given)))
        return
    from actorllm.config import EngineConfig
    from actorllm.model.threads import worker_environment

    before = os.getloadavg()
    config = EngineConfig.from_arguments("storyteller", num_threads=arguments.threads)
    child = subprocess.run(
        [
            *(sys.executable, __file__, "--measure", "--model", arguments.model),
            *("--rank", str(arguments.rank), "--threads", str(arguments.threads)),
            *("--rounds", str(arguments.rounds), *(["--cpu"] if arguments.cpu else [])),
        ],
        env={**os.environ, **worker_environment(config), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        check=True,
    )
    rows: list[dict[str, Any]] = []
    found = json.loads(child.stdout)
    for batch in BATCHES:
        rates = {side: [1e3 * batch / ms for ms in times] for side, times in found[f"decode {batch}"].items()}
        for side in list(SIDES)[1:]:
            target = TARGETS.get((batch, side))
            given = {} if target is None else {"at_least": target}
            what = f"tokens/s of {batch} row{'s' * (batch > 1)}, {side}"
            rows.append(compared(what, rates[side], "the base", rates["base"], **given))
    clock = "processor" if arguments.cpu else "clock"
    finish(
        "lora",
        f"Decode steps of {arguments.model} with adapters of rank {arguments.rank}, {arguments.threads} threads",
        rows,
        arguments.json,
        before,
        configuration={
            "model": arguments.model,
            "rank": arguments.rank,
            "threads": arguments.threads,
            "clock": clock,
            "context": CONTEXT,
        },
        milliseconds=found,
    )


if __name__ == "__main__":
    main()
