"""What transformers reaches on the same GPU with the same shapes: `generate` with a static cache, compiled, and its own
continuous batching on the workload of our offline throughput. Random weights; only times are looked at.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from .clock import Bench
from .engine import Request, workload
from .models import Shape


def run(bench: Bench, shapes: list[Shape]) -> dict[str, Any]:
    rows, batches = [], bench.pick((1, 32), (1,))
    for shape in shapes[: bench.pick(None, 1)]:
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
    """Every request to its own length, and the second time counts: our engine is warm as well when it is measured."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    requests = workload(bench, shape)
    longest_in, longest_out = max(len(ids) for ids, _ in requests), max(n for _, n in requests)
    sizes = {
        "page_size": 32,
        "num_blocks": 64,
        "max_batch_tokens": 64,
        "max_requests_per_batch": 4,
        "use_cuda_graph": False,
    }
    with model.continuous_batching_context_manager(
        generation_config=GenerationConfig(
            max_new_tokens=longest_out, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(**sizes) if bench.is_check else None,
        workload_hints=WorkloadHints(longest_in, longest_out, len(requests)),
    ) as manager:
        served(manager, requests)
        began = time.perf_counter()
        num_tokens = served(manager, requests)
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "output tokens/s": num_tokens / seconds}


def served(manager: Any, requests: list[Request]) -> int:
    """How many tokens came. Raises RuntimeError where not all of them do."""
    for ids, num_out in requests:
        manager.add_request(ids, max_new_tokens=num_out)
    waiting, num_tokens = len(requests), 0
    while waiting:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the generation thread has ended")
        elif result.error is not None:
            raise RuntimeError(result.error)
        elif result.is_finished():
            waiting -= 1
            num_tokens += len(result.generated_tokens)
    if num_tokens != (wanted := sum(n for _, n in requests)):
        raise RuntimeError(f"{num_tokens} tokens came, {wanted} were asked for")
    return num_tokens
