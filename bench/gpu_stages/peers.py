"""What transformers reaches on the same GPU with the same shapes: `generate` with a static cache, compiled, and its own
continuous batching on the workload of our offline throughput. Random weights; only times are looked at.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

import torch

from .clock import Bench
from .engine import workload
from .models import Shape


def run(bench: Bench, shapes: list[Shape]) -> dict[str, Any]:
    rows, batches = [], bench.pick((1, 32), (1,))
    for shape in shapes[:1] if bench.is_check else [shapes[0], shapes[-1]]:
        model = build(bench, shape)
        cases = [
            (f"generate, static cache, compiled, batch {batch}", partial(static, batch=batch)) for batch in batches
        ]
        for what, measure in [*cases, ("continuous batching, our workload", continuous)]:
            found = attempt(measure, bench, shape, model)
            rows.append({"model": shape.name, "what": what, **found})
        del model
        bench.empty_cache()
    return {"peers": rows}


def attempt(measure: Any, *arguments: Any) -> dict[str, Any]:
    """Why something does not run is a result as well."""
    try:
        return {**measure(*arguments), "problem": ""}
    except Exception as problem:
        return {"problem": f"{type(problem).__name__}: {str(problem)[:120]}"}


def build(bench: Bench, shape: Shape) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**shape.config())
    with torch.device(bench.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def static(bench: Bench, shape: Shape, model: Any, batch: int) -> dict[str, Any]:
    """Decode steps alone: the difference of two lengths."""
    num_in, short, long = bench.pick((1024, 8, 136), (8, 2, 4))
    ids = torch.randint(0, shape.vocab, (batch, num_in), device=bench.device)
    more = {} if bench.is_check else {"cache_implementation": "static"}

    def seconds(num_out: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=num_out, min_new_tokens=num_out, do_sample=False, pad_token_id=0, **more)
        if not bench.is_check:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for num_out in (long, short, long):  # compiles
        seconds(num_out)
    step = (seconds(long) - seconds(short)) / (long - short)
    return {"step, ms": step * 1e3, "output tokens/s": batch / step}


def continuous(bench: Bench, shape: Shape, model: Any) -> dict[str, Any]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    lengths = workload(bench)
    draw = random.Random(1)
    inputs = [[draw.randrange(min(10000, shape.vocab)) for _ in range(n)] for n, _ in lengths]
    longest = max(n for _, n in lengths)  # one length for all: it knows no other way
    generation = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = {
        "page_size": 32,
        "num_blocks": 64,
        "max_batch_tokens": 64,
        "max_requests_per_batch": 4,
        "use_cuda_graph": False,
    }
    config = ContinuousBatchingConfig(**sizes) if bench.is_check else None
    began = time.perf_counter()
    outputs = model.generate_batch(
        inputs=inputs, generation_config=generation, continuous_batching_config=config, progress_bar=False
    )
    seconds = time.perf_counter() - began
    total = sum(len(output.generated_tokens) for output in outputs.values())
    return {"seconds": seconds, "output tokens/s": total / seconds}
