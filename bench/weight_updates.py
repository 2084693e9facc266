"""What does an update of the weights take, beside a copy of the same bytes?

An engine in processes of its own has random weights. The tensors of its model are handed over through shared memory, again and
again, and each time the same bytes are copied in this process, into memory that is mapped for it. Times are medians. What all
processes use of the cores meanwhile is told, too. The gap is the longest between two tokens of a stream that runs meanwhile and
keeps its KV; beside it, the longest without an update.
Run: python bench/weight_updates.py [--json FILE] [--model 135M] [--threads 2] [--times 7]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from model import SHAPES
from report import command, environment
from sides import cpu_seconds, process_tree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TARGET = 1.5
"""Times the copy."""


def tensors_of(shape: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a model of this shape, as a trainer has them."""
    import torch
    import transformers

    (architecture,) = shape["architectures"]
    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**shape)
    model = getattr(transformers, architecture)(config).to(torch.bfloat16)
    return dict(model.state_dict())


def processor_s() -> float:
    """What this process and its descendants have used of the cores."""
    return float(cpu_seconds(process_tree(os.getpid()))[1])


async def measure(model: str, num_threads: int, times: int) -> dict[str, float]:
    """Milliseconds and bytes of each figure."""
    import torch

    from actorllm import AsyncLLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model]))
        tensors = tensors_of(SHAPES[model])
        distinct = {tensor.data_ptr(): tensor for tensor in tensors.values()}  # a head may be the embedding
        options: dict[str, Any] = {"dtype": "bfloat16", "num_threads": num_threads, "max_model_len": 1024}
        async with AsyncLLM(folder, load_format="dummy", skip_tokenizer_init=True, **options) as llm:
            gaps: list[tuple[float, float]] = []
            news = asyncio.Event()

            async def listen(count: int) -> None:
                params = SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False)
                last = 0.0
                async for _ in llm.generate({"prompt_token_ids": [1, 2, 3]}, params):
                    at = time.perf_counter()
                    if last:
                        gaps.append((last, at))
                    last = at
                    news.set()

            async def until(count: int) -> None:
                while len(gaps) < count:
                    news.clear()
                    await news.wait()

            await llm.update_weights_from_tensors(tensors)
            await listen(100)
            idle_gap = max(end - start for start, end in gaps)
            copies, updates, busy_gaps = [], [], []
            copy_cpu, update_cpu = [], []
            for _ in range(times):
                gaps.clear()
                began, used = time.perf_counter(), processor_s()
                for tensor in distinct.values():
                    torch.empty_like(tensor).copy_(tensor)
                copies.append(time.perf_counter() - began)
                copy_cpu.append(processor_s() - used)
                began, used = time.perf_counter(), processor_s()
                await llm.update_weights_from_tensors(tensors)
                updates.append(time.perf_counter() - began)
                update_cpu.append(processor_s() - used)
                stream = asyncio.create_task(listen(900))
                await until(5)
                gaps.clear()
                await llm.update_weights_from_tensors(tensors, running="keep")
                await until(len(gaps) + 3)
                stream.cancel()
                await asyncio.gather(stream, return_exceptions=True)
                busy_gaps.append(max(end - start for start, end in gaps))
    return {
        "MiB": sum(one.nbytes for one in distinct.values()) / 2**20,
        "copy_ms": 1e3 * statistics.median(copies),
        "update_ms": 1e3 * statistics.median(updates),
        "copy_processor_ms": 1e3 * statistics.median(copy_cpu),
        "update_processor_ms": 1e3 * statistics.median(update_cpu),
        "longest_gap_ms": 1e3 * idle_gap,
        "longest_gap_in_update_ms": 1e3 * statistics.median(busy_gaps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="135M", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--times", type=int, default=7)
    arguments = parser.parse_args()
    before = list(os.getloadavg())
    found = asyncio.run(measure(arguments.model, arguments.threads, arguments.times))
    ratio = found["update_ms"] / found["copy_ms"]
    row = {"figure": arguments.model, **found, "times the copy": ratio}
    print(f"{'model':8}{'MiB':>8}{'copy ms':>10}{'update ms':>11}{'times':>7}   longest gap between tokens, ms")
    print(
        f"{arguments.model:8}{found['MiB']:8.0f}{found['copy_ms']:10.1f}{found['update_ms']:11.1f}{ratio:7.2f}   "
        f"{found['longest_gap_in_update_ms']:.1f}, without an update {found['longest_gap_ms']:.1f} (target of times {TARGET:g}); "
        f"processor time {found['update_processor_ms']:.0f} ms, of the copy {found['copy_processor_ms']:.0f}"
    )
    if arguments.json is not None:
        data = {
            "command": command(),
            "environment": environment(),
            "load_before": before,
            "configuration": {"model": arguments.model, "threads": arguments.threads},
            "rows": [row],
        }
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
