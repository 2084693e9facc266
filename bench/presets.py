"""Make the presets of step times that are added up from published kernels, and hold them against published runs.

    python bench/presets.py --data DIR [--output actorllm/scheduling/presets]

DIR is the folder aiconfigurator_core of the unpacked wheel aiconfigurator-core (0.12.0, Apache-2.0): systems/data has kernels
that were measured on each GPU, model_configs the config.json of models, systems/silicon_sample.csv what servers measured. The
kernels are those of vLLM, the ones between the products come from the bandwidth of the data sheet (`kernel_shapes`).

A run is simulated with its own lengths and concurrency: a client sends as soon as it has an answer, steps have up to 8,192 tokens.
Nothing is fitted to it. The figure is its mean TPOT. The TTFT of such a run hangs on how the clients began, which is not
published, so it is not compared. Runs whose requests cannot be in memory together are left out, since they queue.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actorllm.scheduling.kernel_model import KernelModel
from actorllm.slo.data_sheets import read_config
from actorllm.slo.kernel_profiles import KernelFit, fit_kernels
from actorllm.slo.kernel_shapes import ModelShape, read_shapes
from actorllm.slo.simulator import EngineShape, simulate
from actorllm.slo.workload import make_workload

ADDRESS = "PyPI aiconfigurator-core 0.12.0 (github.com/ai-dynamo/aiconfigurator), systems/data, kernels of vLLM"
DIGITS = 4
GPUS = {
    "a100": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "l40s": "l40s",
    "rtxpro6000": "rtx_pro_6000_server",
}
"""Our names, and the folders."""
CONFIGS = {
    "llama-3.1-8b": "meta-llama--Meta-Llama-3.1-8B",
    "qwen3-32b": "Qwen--Qwen3-32B",
    "qwen3-30b-a3b": "Qwen--Qwen3-30B-A3B",
    "llama-3.1-70b": "meta-llama--Meta-Llama-3.1-70B",
}
MEMORY = {"h100": 80e9, "h200": 141e9, "b200": 180e9}
"""Bytes of a GPU whose runs are compared."""
RUNS = {
    "h100-llama-3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", "trtllm", ""),
    "h100-tp2-qwen3-32b": ("Qwen/Qwen3-32B", "vllm", ""),
    "h100-tp2-llama-3.1-70b-fp8": ("meta-llama/Llama-3.1-70B", "vllm", "fp8"),
    "h200-tp2-llama-3.1-70b-fp8": ("meta-llama/Llama-3.1-70B", "vllm", "fp8"),
    "b200-tp2-llama-3.1-70b-fp8": ("meta-llama/Llama-3.1-70B", "vllm", "fp8"),
}
"""By preset: model, server and precision of the runs that are held against it."""
STEP_TOKENS = 8192
ROUNDS = 3
"""Requests of each client."""


@dataclass(frozen=True)
class Case:
    gpu: str
    model: str
    tp: int
    dtype: str

    @property
    def name(self) -> str:
        shared = f"-tp{self.tp}" if self.tp > 1 else ""
        return f"{self.gpu}{shared}-{self.model}{'-fp8' if self.dtype == 'fp8' else ''}"


def cases() -> Iterator[Case]:
    for gpu in GPUS:
        yield Case(gpu, "llama-3.1-8b", 1, "bfloat16")
        yield Case(gpu, "qwen3-32b", 2, "bfloat16")
        yield Case(gpu, "qwen3-30b-a3b", 2 if gpu == "l40s" else 1, "bfloat16")
        # An A100 has no products of fp8.
        yield Case(gpu, "llama-3.1-70b", *((4, "bfloat16") if gpu == "a100" else (2, "fp8")))


def tokens_of_memory(case: Case, shape: ModelShape) -> int:
    """That the KV of so many GPUs holds at 90 % of their memory."""
    layer = sum(outputs * inputs for outputs, inputs in shape.products().values())
    size = 1 if case.dtype == "fp8" else 2
    weights = shape.layers * layer * size + 2 * 2 * shape.vocabulary * shape.hidden / shape.tp
    return int((0.9 * MEMORY[case.gpu] - weights) / (2 * 2 * shape.layers * shape.kv_heads * shape.head))


def errors_on_runs(case: Case, model: KernelModel, shape: ModelShape, data: Path) -> list[float]:
    """Of the mean TPOT of each published run."""
    wanted = RUNS.get(case.name)
    if wanted is None:
        return []
    limit = tokens_of_memory(case, shape)
    found = []
    with open(data / "systems" / "silicon_sample.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mode"] == "agg" and row["system"] == GPUS[case.gpu]]
    for row in rows:
        if (row["model_path"], row["backend"], row["precision"], int(row["tp_size"])) != (*wanted, case.tp):
            continue
        size, count, clients = (int(row[name]) for name in ("isl", "osl", "batch_size"))
        if clients * (size + count) > limit:
            continue
        num = ROUNDS * clients
        lengths = np.full(num, size, np.int32), np.full(num, count, np.int32)
        engine = EngineShape(
            num_blocks=limit // 16,
            max_num_seqs=clients,
            max_num_batched_tokens=STEP_TOKENS,
            max_model_len=size + count + 16,
        )
        run = simulate(make_workload(np.zeros(num), lengths), engine, model, policy="sarathi", max_concurrency=clients)
        found.append(1e3 * float(run.timeline.tpot.mean()) / float(row["silicon_tpot_ms"]) - 1)
        print(f"  {size} + {count} tokens, {clients} clients: {found[-1]:+.1%}", flush=True)
    return found


def told_error(fit: KernelFit, errors: list[float], wanted: tuple[str, str, str] | None) -> str:
    kernels = [error for _, _, error in fit.errors]
    told = f"interpolated kernels {100 * min(kernels):.0f} to {100 * max(kernels):.0f} %"
    if not errors or wanted is None:
        return f"of steps unknown; {told}"
    server = {"vllm": "vLLM", "trtllm": "TensorRT-LLM"}[wanted[1]]
    return f"TPOT of {len(errors)} runs of {server} that it was not fitted to: {100 * np.mean(np.abs(errors)):.0f} %; {told}"


def rounded(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    data, models, errors = arguments.data, {}, {}
    for case in cases():
        config = read_config(data / "model_configs" / f"{CONFIGS[case.model]}_config.json")
        folder = data / "systems" / "data" / GPUS[case.gpu]
        read = read_shapes(folder, config, tp=case.tp, dtype=case.dtype, gpu=case.gpu)
        fit = fit_kernels(read.profile, read.layers, f"{case.name}-kernels")
        on_runs = errors_on_runs(case, fit.model, ModelShape.of(config, case.tp), data)
        errors[fit.model.name] = told_error(fit, on_runs, RUNS.get(case.name))
        models[fit.model.name] = {name: rounded(value) for name, value in asdict(fit.model).items() if value}
        print(f"{fit.model.name}: {errors[fit.model.name]}", flush=True)
    if arguments.output:
        told = {"address": ADDRESS, "errors": errors}
        (arguments.output / "kernels.json").write_text(json.dumps(told, indent=1) + "\n")
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(model)}" for name, model in models.items())
        (arguments.output / "kernel_models.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
