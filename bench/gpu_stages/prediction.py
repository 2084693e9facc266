"""What the model of bytes and latency says of whole steps, launch by launch, before a GPU has run any of them.

The launches are those of the worker's own runner, on tensors without memory: their grids, configurations and shapes. How long
each takes is `actorllm_kernels.cost`'s.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actorllm.config import EngineConfig
from actorllm.model.cuda import ops
from actorllm.model.cuda.decoder import StepTokens
from actorllm.model.cuda.rehearsal import MetaDevice
from actorllm.model.cuda.runner import CudaRunner
from actorllm_kernels import cost
from actorllm_kernels.attn_decode import division
from actorllm_kernels.configs import target
from actorllm_kernels.cost import MACHINES, Machine, Work
from actorllm_kernels.launches import recording

from .models import MODELS, Shape

CONTEXT = 1024
PROMPT = 8192
BATCHES = (1, 8, 32, 64, 128, 256)
SPREAD = 1.5
"""Latencies and starts may be so many times longer or shorter than assumed: the interval of a prediction."""

PRODUCTS = ("linear", "wide_linear")


@dataclass(frozen=True)
class Predicted:
    """One launch of a step."""

    name: str
    work: Work

    def seconds(self, machine: Machine) -> float:
        return cost.seconds(self.work, machine)


@contextlib.contextmanager
def runner_of(shape: Shape, **more: Any) -> Iterator[CudaRunner]:
    """On tensors without memory, as if on a GPU that launches dependents."""
    with tempfile.TemporaryDirectory() as folder, target(cost.TABLE), torch.inference_mode():
        config = EngineConfig.from_arguments(
            shape.write(Path(folder)),
            load_format="dummy",
            skip_tokenizer_init=True,
            block_size=64,
            device="cpu",
            dtype="bfloat16",
            max_model_len=PROMPT + 1,
            max_num_seqs=256,
            **more,
        )
        runner = CudaRunner(config, show_progress=False, device=MetaDevice(uses_pdl=True))
        runner.model = runner._without_weights()
        runner._allocate(700)
        attention = runner._attention
        attention.division = division(runner.device.torch_device, attention.shape.head_dim, attention.shape.group)
        yield runner


def decode_step(runner: CudaRunner, batch: int, context: int, machine: Machine) -> list[Predicted]:
    """The launches of a decode step of so many sequences, each with so many tokens."""
    size = runner.graphs.size_for(batch)
    with ops.record() as calls:
        runner._launch_part(runner._way_part(size), size)
    return _predicted(calls, machine, kv_tokens=batch * context)


def prompt_step(runner: CudaRunner, num_tokens: int, machine: Machine) -> list[Predicted]:
    """Those of the forward of one prompt, in a chunk."""
    counts, zeros = np.array([num_tokens], np.int32), np.zeros(num_tokens, np.int64)
    ids, positions, kv_slots = runner.device.upload_parts(zeros, zeros, zeros - 1)
    chunks = runner._attention.chunks(np.zeros(1, np.int32), counts, counts)
    with ops.record() as calls:
        runner.model.forward(StepTokens(ids, positions, kv_slots, None, chunks), runner._pool, runner.state, pdl=True)
    return _predicted(calls, machine, kv_tokens=num_tokens, prompt_pairs=num_tokens * (num_tokens + 1) / 2)


def filtering(rows: int, vocab: int, machine: Machine) -> list[Predicted]:
    """Those of the filters of a step: top_k of 20 and top_p of 0.95."""
    from actorllm_kernels.sample_pick import Offers, SamplingState
    from actorllm_kernels.sample_topk_topp import FilterScratch, FilterState, sample_topk_topp

    meta = torch.device("meta")

    def column(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, dtype=dtype, device=meta)

    kinds = (torch.float32, torch.int64, torch.int32, torch.int32, torch.int32)
    filters = FilterState(column(torch.int32), column(torch.float32), column(torch.float32))
    with target(cost.TABLE), recording() as launches:
        sample_topk_topp(
            torch.empty(rows, vocab, device=meta),
            column(torch.int32),
            SamplingState(*map(column, kinds)),
            filters,
            FilterScratch.empty(rows, vocab, meta),
            Offers.empty(rows, vocab, meta),
        )
    found = []
    for launch in launches:
        name = launch.kernel.__name__.removesuffix("_kernel")
        work = cost.of_launch(launch, machine)
        if name == "tile_maxima":
            work = replace(work, num_bytes=4.0 * rows * vocab)  # from memory at worst
        if name == "cutoff":
            work = replace(work, serial=4, tail_s=cost.cutoff_s(launch, machine))
        found.append(Predicted(name, work))
    return found


def _predicted(calls: list[Any], machine: Machine, *, kv_tokens: int, prompt_pairs: float = 0.0) -> list[Predicted]:
    found: list[Predicted] = []
    for call in calls:
        assert isinstance(call, functools.partial)
        name = getattr(call.func, "__name__", "")
        if name in PRODUCTS:
            x, weight = call.args[:2]
            work = cost.of_product(len(x), weight.shape[0], weight.shape[1], machine)
            found.append(Predicted("cuBLAS", replace(work, programs=machine.multiprocessors)))
            continue
        with recording() as launches:
            call()
        moved = float(sum(_bytes(argument) for argument in (*call.args, *call.keywords.values())))
        if not launches:
            found.append(Predicted(name, cost.of_moves(moved, False)))
        for launch in launches:
            name = launch.kernel.__name__.removesuffix("_kernel")
            work = cost.of_launch(launch, machine, kv_tokens=kv_tokens, prompt_pairs=prompt_pairs)
            if name in SMALL:
                work = cost.of_moves(moved, work.is_dependent)
            found.append(Predicted(name, work))
    return found


SMALL = ("rmsnorm", "qknorm_rope_kv", "activation_mul")
"""Of these, what they move is their arguments, but for the cache and tables that they index."""


def _bytes(value: Any) -> int:
    """Of activations: what has a row per token."""
    is_large = isinstance(value, torch.Tensor) and value.dim() in (2, 3) and value.dtype == torch.bfloat16
    return value.numel() * value.element_size() if is_large else 0


def between(steps: list[Predicted], machine: Machine) -> tuple[float, float, float]:
    """Seconds of the launches one after the other: as assumed, and with shorter and longer latencies."""
    return (
        sum(one.seconds(machine) for one in steps),
        *(sum(one.seconds(_latencies(machine, by)) for one in steps) for by in (1 / SPREAD, SPREAD)),
    )


def _latencies(machine: Machine, by: float) -> Machine:
    names = ("latency_s", "cached_s", "launch_s", "dependent_s")
    return replace(machine, **{name: getattr(machine, name) * by for name in names})


def by_kernel(steps: list[Predicted], machine: Machine) -> dict[str, tuple[int, float]]:
    """Launches and seconds of every kernel."""
    counts, times = Counter(one.name for one in steps), Counter[str]()
    for one in steps:
        times[one.name] += one.seconds(machine)
    return {name: (counts[name], seconds) for name, seconds in times.most_common()}


def table(machine: Machine, models: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Steps, prompts and filters, as rows for a table."""
    found: dict[str, list[dict[str, Any]]] = {
        "wanted": wanted(machine, models),
        "steps": [],
        "prompts": [],
        "filters": [],
    }
    for name in models:
        shape = MODELS[name]
        with runner_of(shape) as runner:
            for batch in BATCHES:
                steps = decode_step(runner, batch, CONTEXT, machine)
                limit = shape.decode_limit_s(batch, CONTEXT, machine.bandwidth, machine.flops)
                found["steps"].append({"model": name, "batch": batch, **_row(steps, machine, limit)})
            steps = prompt_step(runner, PROMPT, machine)
            limit = shape.prefill_flops(PROMPT) / machine.flops
            found["prompts"].append({"model": name, "tokens": PROMPT, **_row(steps, machine, limit)})
    for rows in (1, 32):
        steps = filtering(rows, 151_936, machine)
        found["filters"].append({"rows": rows, **_row(steps, machine, 0.0)})
    return found


@dataclass(frozen=True)
class Wanted:
    """A figure that the model is held against before a device measures it."""

    machine: str
    what: str
    """steps, prompts or filters: the table that has it."""
    model: str
    size: int
    """Sequences, tokens of a prompt or rows."""
    at_least: float | None = None
    """Share of the limit."""
    at_most_ms: float | None = None


WANTED = (
    *(Wanted("H200", "steps", "Qwen3-0.6B", batch, share) for batch, share in ((1, 0.5), (32, 0.75), (256, 0.85))),
    *(Wanted("H200", "steps", "Llama-3.1-8B", batch, share) for batch, share in ((1, 0.85), (32, 0.82), (256, 0.85))),
    *(Wanted("H200", "prompts", model, PROMPT, 0.6) for model in ("Qwen3-0.6B", "Llama-3.1-8B")),
    *(Wanted("H200", "filters", "", rows, at_most_ms=0.025) for rows in (1, 32)),
    Wanted("H100", "steps", "Llama-3.2-1B", 1, at_most_ms=0.98),
)


def _named(one: Wanted) -> str:
    names = {
        "steps": f"decode step of {one.model}, batch {one.size}",
        "prompts": f"prompt of {one.size} tokens, {one.model}",
        "filters": f"top_k and top_p, {one.size} {'rows' if one.size > 1 else 'row'}",
    }
    return f"{names[one.what]}, {'ms' if one.at_least is None else 'share of the limit'}"


def wanted(machine: Machine, models: list[str]) -> list[dict[str, Any]]:
    """What is wanted of this GPU beside what the model says, as rows for a table."""
    rows = []
    for one in WANTED:
        if one.machine != machine.name or (one.model and one.model not in models):
            continue
        steps, limit = _of(one, machine)
        value, short, long = between(steps, machine)
        if one.at_least is None:
            values, is_reached = [1e3 * time for time in (value, short, long)], 1e3 * value <= (one.at_most_ms or 0.0)
        else:
            values, is_reached = [limit / time for time in (value, long, short)], limit / value >= one.at_least
        predicted, low, high = (f"{number:.{2 if one.what != 'filters' else 3}f}" for number in values)
        rows.append(
            {
                "figure": f"{machine.name}: {_named(one)}",
                "wanted": f"{one.at_most_ms if one.at_least is None else one.at_least:g}",
                "predicted": predicted,
                "interval": f"{low} to {high}",
                "reached in the model": "yes" if is_reached else "no",
            }
        )
    return rows


def _of(one: Wanted, machine: Machine) -> tuple[list[Predicted], float]:
    """The launches, and the least time that they can take."""
    if one.what == "filters":
        return filtering(one.size, 151_936, machine), 0.0
    shape = MODELS[one.model]
    with runner_of(shape) as runner:
        if one.what == "prompts":
            return prompt_step(runner, one.size, machine), shape.prefill_flops(one.size) / machine.flops
        limit = shape.decode_limit_s(one.size, CONTEXT, machine.bandwidth, machine.flops)
        return decode_step(runner, one.size, CONTEXT, machine), limit


def _row(steps: list[Predicted], machine: Machine, limit: float) -> dict[str, Any]:
    seconds, short, long = between(steps, machine)
    slowest = list(by_kernel(steps, machine).items())[:3]
    row: dict[str, Any] = {"launches": len(steps), "predicted, ms": seconds * 1e3}
    if limit:
        row |= {"limit, ms": limit * 1e3, "share": limit / seconds}
    row["from, ms"], row["to, ms"] = short * 1e3, long * 1e3
    row["most of it"] = ", ".join(f"{name} {one / seconds:.0%}" for name, (_, one) in slowest)
    return row


def measured_machine(results: dict[str, dict[str, Any]], chip: str) -> Machine:
    """What is known of this GPU: ceilings as they were measured, latencies as assumed."""
    known = next((machine for name, machine in MACHINES.items() if name in chip), MACHINES["H200"])
    ceilings = results.get("ceilings", {})
    if not ceilings.get("read_bytes_per_s"):
        return known
    (nodes,) = ceilings["nodes"]
    return replace(
        known,
        name=chip,
        bandwidth=ceilings["read_bytes_per_s"],
        flops=ceilings["flops"],
        launch_s=nodes["us per node"] * 1e-6,
        dependent_s=nodes["us per dependent node"] * 1e-6,
    )


def beside(results: dict[str, dict[str, Any]], chip: str) -> list[dict[str, Any]]:
    """Every measured decode step beside the predicted one, and where the two part most."""
    machine, found = measured_machine(results, chip), []
    split: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in results.get("steps", {}).get("by kernel", []):
        split.setdefault((row["model"], row["batch"]), []).append(row)
    rows = [row for row in results.get("steps", {}).get("steps", []) if row["model"] in MODELS]
    for name in dict.fromkeys(row["model"] for row in rows):
        with runner_of(MODELS[name]) as runner:
            for row in (row for row in rows if row["model"] == name):
                steps = decode_step(runner, row["batch"], row["context"], machine)
                seconds, short, long = between(steps, machine)
                measured = {one["kernel"]: one["us"] * 1e-6 for one in split.get((name, row["batch"]), [])}
                found.append(
                    {
                        "model": name,
                        "batch": row["batch"],
                        "measured, ms": row["step, ms"],
                        "from, ms": row["from, ms"],
                        "to, ms": row["to, ms"],
                        "verdict": row["verdict"],
                        "predicted, ms": seconds * 1e3,
                        "predicted from, ms": short * 1e3,
                        "predicted to, ms": long * 1e3,
                        "measured / predicted": row["step, ms"] * 1e-3 / seconds,
                        "slower than predicted": _worst(measured, by_kernel(steps, machine)),
                    }
                )
    return found


def _worst(measured: dict[str, float], predicted: dict[str, tuple[int, float]]) -> str:
    """The kernel that takes most above its prediction; nothing where no profile was taken."""
    over = {name: measured.get(f"{name}_kernel", 0.0) - seconds for name, (_, seconds) in predicted.items()}
    name = max(over, key=lambda one: over[one], default="")
    return f"{name}, {over[name] * 1e6:+.0f} us" if over and over[name] > 0 else ""
