"""Whole steps of the worker's own runner, without an engine around it: how near a decode step is to what the memory allows, where
its time goes, what each of its tricks is worth, and how much of the matmul ceiling a prefill reaches.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actorllm.config import EngineConfig
from actorllm.messages import NewRow, StepPlan, pack_rows
from actorllm.model.cuda import ops
from actorllm.model.cuda.device import CudaDevice, HostDevice
from actorllm.model.cuda.rehearsal import compiling
from actorllm.model.cuda.runner import MEASURED_STEPS, CudaRunner
from actorllm_kernels.configs import trying

from .clock import Bench, interval
from .models import Shape

CONTEXT = 1024
STEPS = 10
"""That are timed together. Each makes its sequences longer by a token."""


@contextlib.contextmanager
def runner_of(bench: Bench, shape: Shape, uses_pdl: bool = True, **more: Any) -> Iterator[CudaRunner]:
    """With random weights and a cache for the largest batch. more: arguments of the engine.

    Raises RuntimeError when there is no room for a cache.
    """
    with prepared(bench, shape, uses_pdl, **more) as runner:
        runner.load()
        num_blocks = runner.profile_num_blocks()
        if num_blocks == 0:
            raise RuntimeError(f"{shape.name}: the GPU has no memory left for a cache; who else is on it?")
        runner.allocate(num_blocks)
        yield runner


@contextlib.contextmanager
def prepared(bench: Bench, shape: Shape, uses_pdl: bool = True, **more: Any) -> Iterator[CudaRunner]:
    """A runner that has loaded nothing yet.

    Its memory is given back when the block ends, even if it is still held: the next runner asks for nearly all there is.
    """
    sizes = bench.pick(
        {"max_model_len": 16384, "max_num_seqs": 256, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.85},
        {
            "max_model_len": 2048,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "kv_cache_memory_bytes": 4_000_000,
            "num_threads": 1,
        },
    )
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig.from_arguments(
            shape.write(Path(folder)) if bench.is_check else shape.name,
            **{"load_format": "dummy", "skip_tokenizer_init": True, "block_size": 64, "device": "cpu", **sizes, **more}
            | ({} if bench.is_check else {"device": "cuda"}),
        )
        device = HostDevice() if bench.is_check else CudaDevice(uses_pdl=uses_pdl)
        runner = CudaRunner(config, show_progress=False, device=device)
    try:
        yield runner
    finally:
        runner.close()
        bench.empty_cache()


def step_samples(bench: Bench, runner: CudaRunner, batch: int, context: int) -> list[float]:
    """Of a decode step over so many tokens, from events around several of them with that mean length."""
    with torch.inference_mode(), runner.device.active():
        call, before, count = step_calls(bench, runner, batch, context)
        return [seconds / count for seconds in bench.samples(call, before=before)]


def step_calls(
    bench: Bench, runner: CudaRunner, batch: int, context: int, *, is_recorded: bool = True
) -> tuple[Callable[[], Any], Callable[[], Any], int]:
    """Several steps, what must be done before them, and how many they are. On the runner's device."""
    count = bench.pick(STEPS, 1)
    step = runner.steady_step(batch, context, is_recorded=is_recorded)
    fill(runner, batch)

    def again() -> None:
        runner.state.num_computed[:batch] = context - 1 - count // 2  # a step attends to one more than are computed

    return lambda: [step() for _ in range(count)], again, count


def verdict_of(runner: CudaRunner) -> str:
    """Whether what is timed computes what it should: kernels and a recorded step were checked when the runner was made."""
    if replaced := ops.replaced():
        return f"computed by torch: {', '.join(replaced)}"
    return "right" if runner.graphs.is_on or not runner._records else "its graph is wrong"


def fill(runner: CudaRunner, batch: int) -> None:
    """Noise, always the same, in the blocks of the rows of `steady_step`: a cache of zeros would be no work for the memory."""
    torch.manual_seed(0)
    used = int(runner.state.block_table[:batch].max()) + 1
    for layer in runner._pool.pool.unbind(0):
        if layer.dtype == torch.uint8:  # codes of floats of 8 bits, from 0 to 2
            layer[:used].random_(0, 64)
        else:
            layer[:used].normal_()


def decode(bench: Bench, shapes: list[Shape], bandwidth: float, flops: float) -> dict[str, Any]:
    """The share of the limit, by batch size."""
    rows, split = [], []
    for shape in shapes:
        with runner_of(bench, shape) as runner:
            for batch in bench.pick((1, 8, 32, 64, 128, 256), (3,)):
                context = bench.pick(CONTEXT, 5)
                try:
                    samples = step_samples(bench, runner, batch, context)
                except ValueError as error:  # the cache has no room for that
                    print(f"  {shape.name} {batch}: {error}", flush=True)
                    continue
                seconds, (low, high) = statistics.median(samples), interval(samples)
                limit = shape.decode_limit_s(batch, context, bandwidth, flops)
                rows.append(
                    {
                        "model": shape.name,
                        "batch": batch,
                        "context": context,
                        "step, ms": seconds * 1e3,
                        "from, ms": low * 1e3,
                        "to, ms": high * 1e3,
                        "verdict": verdict_of(runner),
                        "limit, ms": limit * 1e3,
                        "share": limit / seconds,
                        "tokens/s": batch / seconds,
                    }
                )
            for batch in (1, 32, 256):  # behind the times: a profiler that has run may leave something behind
                if any(row["model"] == shape.name and row["batch"] == batch for row in rows):
                    found = by_kernel(bench, runner, batch, bench.pick(CONTEXT, 5))
                    split += [{"model": shape.name, "batch": batch, **row} for row in found]
    return {"steps": rows, "by kernel": split}


def by_kernel(bench: Bench, runner: CudaRunner, batch: int, context: int) -> list[dict[str, Any]]:
    """Where the time of a step goes; nothing without a GPU."""
    if bench.is_check:
        return []
    times = 5
    with torch.inference_mode(), runner.device.active():
        step = runner.steady_step(batch, context)
        step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(times):
                step()
            torch.cuda.synchronize()
    found = [(event.key, event.self_device_time_total / times, event.count / times) for event in profile.key_averages()]
    total = sum(us for _, us, _ in found) or 1.0
    return [
        {"kernel": name[:60], "launches": count, "us": us, "share": us / total}
        for name, us, count in sorted(found, key=lambda row: -row[1])[:12]
    ]


def prefill(bench: Bench, shapes: list[Shape], flops: float) -> dict[str, Any]:
    """One prompt through the whole model, sampled and taken to the host."""
    rows = []
    for shape in shapes:
        for length in bench.pick((1024, 8192), (70,)):
            more = {} if bench.is_check else {"max_model_len": length + 1, "max_num_batched_tokens": length}
            with runner_of(bench, shape, **more) as runner:
                seconds = statistics.median(_prefill_seconds(bench, runner) for _ in range(bench.pick(5, 1)))
            num_tokens = bench.pick(length, 16)
            rate = shape.prefill_flops(num_tokens) / seconds
            rows.append(
                {
                    "model": shape.name,
                    "tokens": num_tokens,
                    "ms": seconds * 1e3,
                    "tokens/s": num_tokens / seconds,
                    "TFLOP/s": rate / 1e12,
                    "share of the matmul ceiling": rate / flops,
                }
            )
    return {"whole prompts": rows}


def _prefill_seconds(bench: Bench, runner: CudaRunner) -> float:
    """The largest prefill step that the configuration allows."""
    _, plans = runner._largest_steps()
    runner.forget_requests()
    began = time.perf_counter()
    runner.step(plans[0])
    return time.perf_counter() - began


def ablations(bench: Bench, shapes: list[Shape]) -> dict[str, Any]:
    """The same step with one trick left out at a time, in pairs: both ways take turns on the same machine."""
    rows = []
    ways: dict[str, tuple[bool, Callable[[], Any]]] = {
        "no dependent launches": (False, contextlib.nullcontext),
        "no prefetch of weights": (True, lambda: _both("PREFETCH", 0)),
        "no fused products": (True, lambda: trying("skinny_gemm", MAX_ROWS=0)),
        "no graph": (True, contextlib.nullcontext),
    }
    context, batches = bench.pick(CONTEXT, 5), bench.pick((1, 32), (1,))
    for shape in shapes[: bench.pick(None, 1)]:
        room = -(-(CONTEXT + MEASURED_STEPS) // 64 + 1) * 64 * max(batches) * shape.kv_bytes_per_token
        more = {} if bench.is_check else {"kv_cache_memory_bytes": room, "max_num_seqs": max(batches)}
        with runner_of(bench, shape, **more) as base:
            for name, (uses_pdl, changed) in ways.items():
                with changed(), runner_of(bench, shape, uses_pdl, **more) as other:
                    for batch in batches:
                        is_recorded = name != "no graph"
                        with torch.inference_mode(), base.device.active():  # one stream, which the clock is on
                            first, second = (
                                step_calls(bench, runner, batch, context, is_recorded=recorded)
                                for runner, recorded in ((base, True), (other, is_recorded))
                            )
                            ratios = bench.paired((first[0], second[0]), (first[1], second[1]))
                        low, high = interval(ratios)
                        row = {"model": shape.name, "batch": batch, "way": name, "ratio": statistics.median(ratios)}
                        verdict = verdict_of(base if verdict_of(base) != "right" else other)
                        rows.append({**row, "from": low, "to": high, "verdict": verdict})
    return {"ablations": rows}


@contextlib.contextmanager
def _both(name: str, value: int) -> Iterator[None]:
    with trying("skinny_gemm", **{name: value}), trying("lm_head_sample", **{name: value}):
        yield


def start_split(bench: Bench, shape: Shape) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Seconds of the parts of a worker's start, one after the other, and what every size of a decode step takes to record.

    In a worker, kernels are compiled while the weights are read; here they come first, so that each has its own time.
    """
    seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        bench.synchronize()
        seconds[f"{part}, s"] = time.perf_counter() - began

    with prepared(bench, shape) as runner:
        if not bench.is_check:  # nothing is compiled for an interpreter
            with timed("compilation"), runner.device.active(), compiling(runner.rehearse):
                pass
        with timed("weights"):
            runner.load()
        with timed("profiling run"):
            num_blocks = runner.profile_num_blocks()
        with timed("cache, first graphs"):
            runner.allocate(num_blocks)
        graphs = []
        while runner.wants_to_record:
            part, size = runner.graphs.next_wanted()  # type: ignore[misc]
            before, began = bench.held_bytes(), time.perf_counter()
            runner.record_next()
            bench.synchronize()
            row = {"rows": size, "ms": (time.perf_counter() - began) * 1e3}
            graphs.append({"part": part.value, **row, "MB": (bench.held_bytes() - before) / 1e6})
    return seconds, graphs


def order(bench: Bench, shapes: list[Shape]) -> dict[str, Any]:
    """Dependent launches against plain ones: many steps of the same requests must give the same tokens, bit for bit.

    In the smallest model, where a launch that does not wait is most likely to be too early; at few rows, which have the fused
    products, and at many, which have not; and with prompts.
    """
    rows = []
    for shape in shapes[:1]:
        plain, dependent = (dict(tokens_of(bench, shape, uses_pdl)) for uses_pdl in (False, True))
        for what, tokens in plain.items():
            other = (tokens != dependent[what]).any(1).nonzero().flatten().tolist()
            row = {"model": shape.name, "what": what, "steps": len(tokens), "same tokens": not other}
            rows.append({**row, "first difference": other[0] if other else None})
    different = [f"{row['model']}, {row['what']}" for row in rows if not row["same tokens"]]
    return {
        "order": rows,
        "wrong": f"dependent launches give other tokens: {'; '.join(different)}" if different else "",
    }


def tokens_of(bench: Bench, shape: Shape, uses_pdl: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """By what is done, the tokens of many steps, [num_steps, num_rows]."""
    with runner_of(bench, shape, uses_pdl) as runner, torch.inference_mode(), runner.device.active():
        yield "prompts", torch.stack([prompts_of(bench, runner) for _ in range(bench.pick(100, 1))])
        for batch in bench.pick((1, 8, 32, 256), (2,)):
            try:
                step = runner.steady_step(batch, bench.pick(200, 5))
            except ValueError as error:  # the cache has no room for that
                print(f"  {shape.name} {batch}: {error}", flush=True)
                continue
            fill(runner, batch)
            seen = []
            for _ in range(bench.pick(1000, 2)):
                step()
                seen.append(runner.state.last_token[:batch].clone())
            yield f"batch {batch}", torch.stack(seen).cpu()


def prompts_of(bench: Bench, runner: CudaRunner) -> torch.Tensor:
    """Two prompts, two more beside them, and a step of all four: the tokens, and a sum of the bits of what the cache has then."""
    lengths, per_row = bench.pick((700, 33, 1, 200), (5, 3, 1, 4)), bench.pick(12, 1)
    runner.forget_requests()
    draw = np.random.default_rng(0)
    new = [NewRow(slot, n, seed=slot, temperature=0.7) for slot, n in enumerate(lengths)]

    def plan(step: int, first: int, count: int, decoded: int) -> StepPlan:
        slots = np.arange(first, first + count, dtype=np.int32)
        counts = np.array(lengths[first : first + count], np.int32)
        return StepPlan(
            step=step,
            new_rows=pack_rows(new[first : first + count]),
            new_tokens=draw.integers(0, runner.model_config.vocab_size, int(counts.sum())).astype(np.int32),
            new_num_blocks=np.full(count, per_row, np.int32),
            new_blocks=np.arange(first * per_row, (first + count) * per_row, dtype=np.int32),
            prefill_slots=slots,
            prefill_counts=counts,
            decode_slots=np.arange(decoded, dtype=np.int32),
        )

    tokens = [runner.step(one).tokens for one in (plan(0, 0, 2, 0), plan(1, 2, 2, 2), plan(2, 4, 0, 4))]
    written = runner._pool.pool[:, : len(lengths) * per_row].view(torch.int16).sum(dtype=torch.int64).cpu()
    return torch.cat([torch.from_numpy(np.concatenate(tokens)).long(), written.view(1)])
