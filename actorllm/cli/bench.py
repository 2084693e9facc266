"""`actorllm bench`: throughput, latency and start-up of one engine, measured from outside as an application sees them.

The keys of the JSON that `--output-json` writes are those of `vllm bench`, so that the same scripts read both. So are the
options, but not all of vLLM's are there. There are no data sets (prompts are random token ids), other backends or LoRA, and no
`--async-engine`, `--prequeue-requests` or `--profile`. All requests go on to their full length, and prefix caching is off
unless it is asked for. Called by the command line.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from cyclopts import App

from actorllm.cli.options import EngineFlags, SeededEngineFlags, check_writable
from actorllm.errors import ConfigError, EngineStartError

if TYPE_CHECKING:
    from actorllm.api.llm import LLM
    from actorllm.types.params import SamplingParams

PERCENTAGES = (10, 25, 50, 75, 90, 99)

bench = App(name="bench", help="Measure throughput, latency or start-up of an engine.")


@bench.command
def throughput(
    *,
    engine_options: SeededEngineFlags = SeededEngineFlags(),  # noqa: B008 - frozen
    input_len: int = 128,
    output_len: int = 128,
    n: int = 1,
    num_prompts: int = 1000,
    num_warmups: int = 1,
    disable_detokenize: bool = False,
    output_json: Path | None = None,
) -> None:
    """Requests and tokens per second when everything is asked for at once.

    Parameters
    ----------
    input_len
        Tokens of each prompt.
    output_len
        Tokens generated for each.
    n
        Sequences generated for each.
    num_warmups
        Requests before the clock starts.
    disable_detokenize
        Make no text.
    output_json
        Write the results to this file.
    """
    _check(output_json, input_len=input_len, output_len=output_len, n=n, num_prompts=num_prompts)
    seed = engine_options.seed or 0
    with _llm(engine_options, input_len + output_len) as llm:
        params = _params(output_len, disable_detokenize, n)
        if num_warmups > 0:
            llm.generate(_prompts(llm, num_warmups, input_len, seed + 1), params, use_tqdm=False)
        prompts = _prompts(llm, num_prompts, input_len, seed)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params)
        elapsed = time.perf_counter() - began
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    total = num_input + num_output
    print(
        f"Throughput: {num_prompts / elapsed:.2f} requests/s, {total / elapsed:.2f} total tokens/s, "
        f"{num_output / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_input}")
    print(f"Total num output tokens:  {num_output}")
    _write(
        output_json,
        {
            "model_id": engine_options.model,
            "elapsed_time": elapsed,
            "num_requests": num_prompts,
            "total_num_tokens": total,
            "requests_per_second": num_prompts / elapsed,
            "tokens_per_second": total / elapsed,
        },
    )


@bench.command
def latency(
    *,
    engine_options: SeededEngineFlags = SeededEngineFlags(),  # noqa: B008 - frozen
    input_len: int = 32,
    output_len: int = 128,
    batch_size: int = 8,
    n: int = 1,
    use_beam_search: bool = False,
    num_iters_warmup: int = 10,
    num_iters: int = 30,
    disable_detokenize: bool = False,
    output_json: Path | None = None,
) -> None:
    """Seconds that one batch of requests takes from the first to the last token.

    Parameters
    ----------
    input_len
        Tokens of each prompt.
    output_len
        Tokens generated for each.
    batch_size
        Requests at once.
    n
        Sequences generated for each; with beam search, its width.
    use_beam_search
        Search instead of sampling.
    num_iters_warmup
        Batches before the clock starts.
    num_iters
        Batches that are measured.
    disable_detokenize
        Make no text.
    output_json
        Write the results to this file.
    """
    from actorllm import BeamSearchParams, TokensPrompt

    _check(output_json, input_len=input_len, output_len=output_len, batch_size=batch_size, n=n, num_iters=num_iters)
    with _llm(engine_options, input_len + output_len) as llm:
        params = _params(output_len, disable_detokenize, n)
        beams = BeamSearchParams(beam_width=n, max_tokens=output_len, ignore_eos=True)
        prompts = _prompts(llm, batch_size, input_len, 0)

        def run() -> float:
            began = time.perf_counter()
            if use_beam_search:
                llm.beam_search([TokensPrompt(prompt_token_ids=ids) for ids in prompts], beams)
            else:
                llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - began

        _repeat(run, num_iters_warmup, "Warmup iterations")
        latencies = _repeat(run, num_iters, "Bench iterations")
    average, percentiles = _summary(latencies)
    print(f"Avg latency: {average} seconds")
    for percentage, value in percentiles.items():
        print(f"{percentage}% percentile latency: {value} seconds")
    results = {
        "model_id": engine_options.model,
        "avg_latency": average,
        "latencies": latencies,
        "percentiles": percentiles,
    }
    _write(output_json, results)


@bench.command
def startup(
    *,
    engine_options: SeededEngineFlags = SeededEngineFlags(),  # noqa: B008 - frozen
    num_iters_cold: int = 3,
    num_iters_warmup: int = 1,
    num_iters_warm: int = 3,
    output_json: Path | None = None,
) -> None:
    """Seconds until an engine in a fresh process is ready.

    Cold: the model's files are not in the page cache. Nothing is ever compiled here, so the compilation times, which are
    there for readers of vLLM's results, are 0.

    Parameters
    ----------
    num_iters_cold
        Cold starts that are measured.
    num_iters_warmup
        Warm starts before the clock starts.
    num_iters_warm
        Warm starts that are measured.
    output_json
        Write the results to this file.
    """
    from actorllm.config import EngineConfig

    _check(output_json, num_iters_cold=num_iters_cold, num_iters_warm=num_iters_warm)
    folder = Path(EngineConfig.from_arguments(engine_options.model, **engine_options.arguments()).model.path)

    def run_warm() -> float:
        return _start_once(engine_options)

    def run_cold() -> float:
        _evict(folder)
        return _start_once(engine_options)

    cold = _repeat(run_cold, num_iters_cold, "Cold startup iterations")
    _repeat(run_warm, num_iters_warmup, "Warmup iterations")
    warm = _repeat(run_warm, num_iters_warm, "Warm startup iterations")
    results: dict[str, Any] = {}
    for phase, times in (("cold", cold), ("warm", warm)):
        for what, values in (("startup", times), ("compilation", [0.0] * len(times))):
            average, percentiles = _summary(values)
            results[f"avg_{phase}_{what}_time"] = average
            results[f"{phase}_{what}_times"] = values
            results[f"{phase}_{what}_percentiles"] = percentiles
        print(f"Avg {phase} startup time: {results[f'avg_{phase}_startup_time']:.2f} seconds")
    _write(output_json, results)


START = """
import json, sys, time
from actorllm import LLM
model, arguments = json.loads(sys.argv[1])
began = time.perf_counter()
llm = LLM(model, **arguments)
print(time.perf_counter() - began)
llm.shutdown()
"""
"""What a fresh process runs to measure one start. Importing the package is not part of it, as in vLLM."""


def _start_once(options: EngineFlags) -> float:
    argument = orjson.dumps([options.model, options.arguments()]).decode()
    result = subprocess.run([sys.executable, "-c", START, argument], capture_output=True, text=True, check=False)
    if result.returncode:
        last = result.stderr.strip().rpartition("\n")[2]
        raise EngineStartError(f"the engine did not start in its process: {last}")
    return float(result.stdout)


def _evict(folder: Path) -> None:
    """Ask the kernel to drop the files of a model from the page cache. What another process has mapped stays."""
    import os

    for file in folder.iterdir():
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _llm(options: EngineFlags, num_tokens: int) -> LLM:
    from actorllm.api.llm import LLM
    from actorllm.config import EngineConfig

    arguments = {"enable_prefix_caching": False} | options.arguments()
    longest = EngineConfig.from_arguments(options.model, **arguments).model.max_model_len
    if num_tokens > longest:
        raise ConfigError(f"input_len and output_len are {num_tokens} together, and max_model_len is {longest}")
    return LLM(options.model, **arguments)


def _params(output_len: int, disable_detokenize: bool, n: int) -> SamplingParams:
    from actorllm.types.params import SamplingParams

    return SamplingParams(n=n, max_tokens=output_len, ignore_eos=True, detokenize=not disable_detokenize)


def _prompts(llm: LLM, count: int, length: int, seed: int) -> list[list[int]]:
    import numpy as np

    rng = np.random.default_rng(seed)
    ids: list[list[int]] = rng.integers(0, min(10_000, llm.config.model.vocab_size), (count, length)).tolist()
    return ids


def _repeat(run: Callable[[], float], count: int, label: str) -> list[float]:
    from tqdm import tqdm

    return [run() for _ in tqdm(range(count), desc=label, dynamic_ncols=True)]


def _summary(values: list[float]) -> tuple[float, dict[str, float]]:
    """The average, and the percentiles by their number."""
    import numpy as np

    percentiles = np.percentile(values, PERCENTAGES).tolist()
    return float(np.mean(values)), {str(p): value for p, value in zip(PERCENTAGES, percentiles, strict=True)}


def _check(output_json: Path | None, **at_least_one: int) -> None:
    for name, value in at_least_one.items():
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    check_writable(output_json=output_json)


def _write(path: Path | None, results: dict[str, Any]) -> None:
    if path is not None:
        path.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2))
