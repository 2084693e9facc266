"""The whole engine on a GPU: offline throughput, latencies by batch size, the gap between steps, the start, and sleep.

Weights are random (`load_format="dummy"`), requests go on to their full length, prefix caching is off. The workload of offline
throughput is that of nano-vllm's bench.py: 256 requests, 100 to 1,024 tokens in and out, drawn in its order from seed 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from report import quantile

from actorllm import LLM, AsyncLLM, SamplingParams, TokensPrompt

from . import steps
from .clock import Bench
from .models import Shape

Request = tuple[list[int], int]
"""The tokens of a prompt, and how many come out."""


def arguments(bench: Bench, shape: Shape, folder: str, **more: Any) -> dict[str, Any]:
    """Of `LLM`. folder: where the config.json of a shape goes that the package does not know."""
    sizes = bench.pick(
        {"max_model_len": 4096, "max_num_seqs": 256, "device": "cuda"},
        {"max_model_len": 256, "max_num_seqs": 4, "topology": "inline"},
    )
    return {
        "model": shape.name if not bench.is_check else str(shape.write(Path(folder))),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        **sizes,
        **more,
    }


def workload(bench: Bench, shape: Shape) -> list[Request]:
    """As nano-vllm draws it: all prompts with their tokens, then all lengths of outputs."""
    draw = random.Random(0)
    count, low, high = bench.pick((256, 100, 1024), (3, 3, 8))
    ids = [[draw.randint(0, 10000) for _ in range(draw.randint(low, high))] for _ in range(count)]
    lengths = [draw.randint(low, high) for _ in range(count)]
    return [([id % shape.vocab for id in prompt], n) for prompt, n in zip(ids, lengths, strict=True)]


def alike(shape: Shape, count: int, num_in: int, num_out: int) -> list[Request]:
    """Requests of one size."""
    draw = random.Random(1)
    return [([draw.randrange(min(10000, shape.vocab)) for _ in range(num_in)], num_out) for _ in range(count)]


def prompts(requests: list[Request]) -> list[TokensPrompt]:
    return [TokensPrompt(prompt_token_ids=ids) for ids, _ in requests]


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.6, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def offline(bench: Bench, shapes: list[Shape]) -> dict[str, Any]:
    """Output tokens per second; with and without graphs, and without a second step in flight."""
    rows = []
    ways: dict[str, dict[str, Any]] = {"": {}, "eager": {"enforce_eager": True}, "depth 1": {"async_scheduling": False}}
    cases = [(shapes[0], way) for way in ways] + [(shape, "") for shape in shapes[1:]]
    for shape, way in cases[: bench.pick(None, 2)]:
        with tempfile.TemporaryDirectory() as folder, LLM(**arguments(bench, shape, folder, **ways[way])) as llm:
            requests = workload(bench, shape)
            llm.generate(prompts(requests[:2]), params(8), use_tqdm=False)
            while not is_settled(llm.stats()):
                time.sleep(0.05)
            began = time.perf_counter()
            llm.generate(prompts(requests), [params(n) for _, n in requests], use_tqdm=False)
            seconds = time.perf_counter() - began
        rate = sum(n for _, n in requests) / seconds
        rows.append({"model": shape.name, "way": way or "as it is", "seconds": seconds, "output tokens/s": rate})
    return {"offline": rows}


def is_settled(stats: dict[str, Any]) -> bool:
    """Whether workers have recorded all steps that they want as graphs: they do that when they have nothing else to do.

    Raises RuntimeError where one could not be recorded: what is measured then is not what is meant to run.
    """
    if any(worker.get("num_graphs_refused", 0) for worker in stats["workers"]):
        raise RuntimeError("a decode step cannot be recorded as a graph: the worker's log says why")
    return not any(worker.get("num_graphs_wanted", 0) for worker in stats["workers"])


def latency(bench: Bench, shapes: list[Shape]) -> dict[str, Any]:
    """TTFT and ITL of requests that come together, 1,024 tokens in and 128 out, seen by the application."""
    rows = []
    for shape in shapes:
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(_latencies(bench, shape, folder))
        rows += [{"model": shape.name, **row} for row in found]
    return {"latency": rows}


async def _latencies(bench: Bench, shape: Shape, folder: str) -> list[dict[str, Any]]:
    """By batch size, of one engine."""
    async with AsyncLLM(**arguments(bench, shape, folder)) as llm:
        return [await _latency(bench, shape, llm, batch) for batch in bench.pick((1, 32, 256), (2,))]


async def _latency(bench: Bench, shape: Shape, llm: AsyncLLM, batch: int) -> dict[str, Any]:
    num_in, num_out = bench.pick((1024, 128), (20, 5))
    asked = prompts(alike(shape, batch, num_in, num_out))

    async def one(prompt: TokensPrompt) -> list[float]:
        began = time.perf_counter()
        return [began, *[time.perf_counter() async for _ in llm.generate(prompt, params(num_out))]]

    for _ in range(2):  # the first round warms up
        found = await asyncio.gather(*(one(prompt) for prompt in asked))
        while not is_settled(await llm.stats()):  # noqa: ASYNC110  # it is a process that is asked
            await asyncio.sleep(0.05)
    first = [times[1] - times[0] for times in found]
    gaps = [later - earlier for times in found for earlier, later in itertools.pairwise(times[1:])]
    return {
        "batch": batch,
        "TTFT p50, ms": statistics.median(first) * 1e3,
        "TTFT p99, ms": quantile(first, 0.99) * 1e3,
        "ITL p50, ms": statistics.median(gaps) * 1e3,
        "ITL p99, ms": quantile(gaps, 0.99) * 1e3,
        "output tokens/s": batch
        * (num_out - 1)
        / (max(times[-1] for times in found) - min(times[1] for times in found)),
    }


def idle(bench: Bench, shapes: list[Shape]) -> dict[str, Any]:
    """How long the GPU has nothing to do between two decode steps, from a profile of the worker."""
    rows = []
    for shape, batch in bench.pick([(shapes[0], 1), (shapes[-1], 256)], [(shapes[0], 1)]):
        with tempfile.TemporaryDirectory() as folder:
            trace = asyncio.run(_profiled(bench, shape, folder, batch))
            rows.append({"model": shape.name, "batch": batch, **between_steps(trace)})
    return {"idle": rows}


async def _profiled(bench: Bench, shape: Shape, folder: str, batch: int) -> list[dict[str, Any]]:
    """The events of the worker's profile of some steady steps."""
    traces = Path(folder) / "traces"
    more = {"profiler_config": {"profiler": "torch", "torch_profiler_dir": str(traces)}}
    num_in, num_out = bench.pick((1024, 400), (8, 40))
    async with AsyncLLM(**arguments(bench, shape, folder, **more)) as llm:
        streams = [llm.generate(prompt, params(num_out)) for prompt in prompts(alike(shape, batch, num_in, num_out))]

        async def drain(stream: Any, started: asyncio.Event) -> None:
            seen = 0
            async for _ in stream:
                seen += 1
                if seen == num_out // 4:
                    started.set()

        begun = [asyncio.Event() for _ in streams]
        tasks = [asyncio.create_task(drain(*pair)) for pair in zip(streams, begun, strict=True)]
        await asyncio.gather(*(event.wait() for event in begun))
        await llm.start_profile()
        await asyncio.sleep(bench.pick(0.3, 0.01))
        await llm.stop_profile()
        await asyncio.gather(*tasks)
    events: list[dict[str, Any]] = []
    for file in traces.glob("**/*"):
        if file.is_file():
            events += json.loads(_text(file))["traceEvents"]
    return events


def _text(file: Path) -> bytes:
    if file.suffix == ".gz":
        import gzip

        return gzip.decompress(file.read_bytes())
    return file.read_bytes()


def between_steps(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Of pairs of decode steps that follow each other. None where the profile has no kernels, as on a CPU.

    A step begins with step_prep and ends with kv_clear, the last node of its graph. What lies between that and the next
    step_prep belongs to the host: small copies and uploads, which are work, and the rest, in which the GPU is idle. Steps with
    prompts are passed over.
    """
    work = sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in events if is_work(event))
    begins = [i for i, (_, _, name) in enumerate(work) if "step_prep" in name]
    parts = [work[begin:end] for begin, end in itertools.pairwise([*begins, len(work)])]
    gaps, lengths = [], []
    for part, after in itertools.pairwise(parts):
        ends = [i for i, (_, _, name) in enumerate(part) if "kv_clear" in name]
        if not ends or any("attn_prefill" in name for _, _, name in (*part, *after)):
            continue
        gaps.append(uncovered(part[ends[-1]][1], after[0][0], part[ends[-1] + 1 :]))
        lengths.append(after[0][0] - part[0][0])
    if not gaps:
        return {"steps": 0, "step, us": None, "idle between steps, us": None, "share": None}
    return {
        "steps": len(gaps),
        "step, us": statistics.median(lengths),
        "idle between steps, us": statistics.median(gaps),
        "share": sum(gaps) / sum(lengths),
    }


def is_work(event: dict[str, Any]) -> bool:
    """Whether the GPU does something in this event of a profile."""
    return event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")


def uncovered(start: float, end: float, work: list[tuple[float, float, str]]) -> float:
    """How much of the time from start to end none of the work takes. work: ordered by when it begins."""
    idle = 0.0
    for begin, stop, _ in work:
        idle += max(0.0, min(begin, end) - start)
        start = max(start, stop)
    return idle + max(0.0, end - start)


def start(bench: Bench, shapes: list[Shape]) -> dict[str, Any]:
    """Until the first token, with an empty cache of compiled kernels and with a full one; and where the time goes."""
    rows, parts, graphs = [], [], []
    for shape in shapes[: bench.pick(None, 1)]:
        with tempfile.TemporaryDirectory() as folder, environment_variable("TRITON_CACHE_DIR", f"{folder}/engine"):
            cold, warm = (_first_token(bench, shape, folder) for _ in range(2))
        rows.append({"model": shape.name, "cold, s": cold, "warm, s": warm})
        with tempfile.TemporaryDirectory() as folder, environment_variable("TRITON_CACHE_DIR", folder):
            seconds, recorded = steps.start_split(bench, shape)
        parts.append({"model": shape.name, **seconds})
        graphs += [{"model": shape.name, **row} for row in recorded]
    return {"start": rows, "a worker's start, cold, by part": parts, "graphs": graphs}


@contextlib.contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set for this process and those that it starts meanwhile."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def sleep(bench: Bench, shapes: list[Shape]) -> dict[str, Any]:
    """Engines that sleep and wake, with the kernels compiled before. Waking and a start end with a first token.

    Raises RuntimeError where streams are others afterwards. Bytes are those that are free on the GPU, as its driver counts them.
    Only weights of files are read again at level 2.
    """
    rows = []
    stored = {"model": "storyteller", "load_format": "auto", "max_model_len": 256}
    cases: list[tuple[str, Shape, dict[str, Any], tuple[int, ...]]] = [("storyteller", shapes[0], stored, (1, 2))]
    cases += [(shape.name, shape, {}, (1,)) for shape in shapes[: bench.pick(None, 1)]]
    for name, shape, more, levels in cases:
        with tempfile.TemporaryDirectory() as folder, environment_variable("TRITON_CACHE_DIR", f"{folder}/engine"):
            asked = arguments(bench, shape, folder, enable_sleep_mode=True, **more)
            with LLM(**asked) as llm:  # compiles
                _short_stream(llm, 1)
            began = time.perf_counter()
            with LLM(**asked) as llm:
                _short_stream(llm, 1)
                start = time.perf_counter() - began
                expected = _short_stream(llm, bench.pick(64, 4))
                while not is_settled(llm.stats()):
                    time.sleep(0.05)
                for level in levels:
                    rows.append({"model": name, "level": level, "start, s": start, **_nap(llm, bench, level)})
                    if _short_stream(llm, bench.pick(64, 4)) != expected:
                        raise RuntimeError(f"{name} has another stream after sleep(level={level})")
    return {"sleep": rows}


def _nap(llm: LLM, bench: Bench, level: Any) -> dict[str, Any]:
    """What it gives back, and how long it takes."""
    used, began = _used_bytes(bench), time.perf_counter()
    freed = llm.sleep(level)
    asleep, slept = _used_bytes(bench), time.perf_counter()
    llm.wake_up()
    woken = time.perf_counter()
    _short_stream(llm, 1)
    return {
        "falling asleep, s": slept - began,
        "waking, s": woken - slept,
        "waking to the first token, s": time.perf_counter() - slept,
        "told as given back, GiB": freed / 2**30,
        "given back, GiB": (used - asleep) / 2**30,
        "share of what was used": None if bench.is_check else (used - asleep) / used,
    }


def _used_bytes(bench: Bench) -> int:
    """Of the GPU's memory, by all processes."""
    if bench.is_check:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _short_stream(llm: LLM, num_tokens: int) -> list[int]:
    """The most likely tokens behind a prompt."""
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    (output,) = llm.generate(TokensPrompt(prompt_token_ids=list(range(1, 17))), greedy, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def _first_token(bench: Bench, shape: Shape, folder: str) -> float:
    began = time.perf_counter()
    with LLM(**arguments(bench, shape, folder)) as llm:
        llm.generate(prompts(alike(shape, 1, 16, 1)), params(1), use_tqdm=False)
        return time.perf_counter() - began
