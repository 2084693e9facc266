"""What do two replicas give, what does the router cost, and what is seen of a replica that is killed?

    python bench/fleet.py [--json FILE] [--rounds N] [--streams N]

- Throughput: a fleet of two replicas with one thread each, against one engine whose whole program is pinned to one core and has
  half the streams, in turns. 2.0 would be two of them without any loss. The same against one engine with all the streams, whose
  batches are twice as large.
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
import itertools
import json
import os
import signal
import subprocess
import sys
import time

from report import absolute, compared, finish, informative, quantile, versions
from sides import exit_on_sigterm

TOKENS = 200
MODEL = "storyteller"
HERD = "herd"
VICTIMS = (("scheduler", "worker0"), ("scheduler",), ("worker0",))
"""What is killed of a replica, in turns."""


async def stream(llm, number: int, num_tokens: int) -> tuple[list[int], list[float]]:
    """The tokens of one stream, and when they came."""
    from actorllm import RequestOutputKind, SamplingParams

    params = SamplingParams(
        max_tokens=num_tokens, temperature=0.8, seed=number, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    tokens: list[int] = []
    times: list[float] = []
    async for output in llm.generate(f"Once upon a time, number {number},", params):
        tokens += output.outputs[0].token_ids
        times.append(time.perf_counter())
    return tokens, times


async def all_ready(llm) -> None:
    await llm.start()
    while not all(replica.state == "running" for replica in llm.health().replicas):  # noqa: ASYNC110 (of another thread)
        await asyncio.sleep(0.02)


async def serve(num_streams: int, num_tokens: int, options: dict) -> dict:
    """Tokens per second and gaps of so many streams at once."""
    from actorllm import AsyncLLM

    async with AsyncLLM(MODEL, **options) as llm:
        await all_ready(llm)
        await asyncio.gather(*[stream(llm, 1000 + number, 30) for number in range(num_streams)])
        began = time.perf_counter()
        found = await asyncio.gather(*[stream(llm, number, num_tokens) for number in range(num_streams)])
        seconds = time.perf_counter() - began
    gaps = [b - a for _, times in found for a, b in itertools.pairwise(times)]
    return {"tokens_per_s": num_streams * num_tokens / seconds, "gap_p99_s": quantile(gaps, 0.99)}


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

            async def strike(number: int = number) -> float:
                await asyncio.sleep(1.0)
                at = time.perf_counter()
                victims = VICTIMS[number % len(VICTIMS)]
                for name, pid in llm.health().replicas[number % 2].pids.items():
                    if name in victims:
                        os.kill(pid, signal.SIGKILL)
                return at

            found, at = await asyncio.gather(
                asyncio.gather(*[stream(llm, seed, num_tokens) for seed in seeds]), strike()
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
    began = time.perf_counter()
    for number in range(num_decisions):
        router.route(prompts[number % 50], views)
    return (time.perf_counter() - began) / num_decisions


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
    parser.add_argument("--side", choices=("one", "fleet", "kill", "herd", "burst"), help="of use to this program only")
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
            case _:
                run = serve(arguments.streams, arguments.tokens, options)
        print(json.dumps(asyncio.run(run)))
        return
    load_before = os.getloadavg()
    fleets, ones, halves, deaths, routes, herds = [], [], [], [], [], []
    for _ in range(arguments.rounds):
        fleets.append(measured("fleet", arguments.streams, arguments.tokens))
        ones.append(measured("one", arguments.streams, arguments.tokens))
        halves.append(measured("one", arguments.streams // 2, arguments.tokens))
        deaths.append(measured("kill", 32, arguments.tokens, arguments.kills))
        routes.append(route_seconds() * 1e6)
        herds.append(measured("herd", 400, arguments.tokens))
    speed = [run["tokens_per_s"] for run in fleets]
    rows = [
        compared(
            "tokens/s of two replicas",
            speed,
            "one engine on one core, half the streams",
            [run["tokens_per_s"] for run in halves],
            at_least=1.9,
        ),
        informative(
            "tokens/s of two replicas",
            speed,
            "one engine on one core, all the streams",
            [run["tokens_per_s"] for run in ones],
        ),
        compared(
            "p99 of gaps of two replicas, s",
            [run["gap_p99_s"] for run in fleets],
            "one engine on one core, half the streams",
            [run["gap_p99_s"] for run in halves],
            at_most=1.1,
        ),
        absolute("router, µs a request (8 replicas, 256 blocks)", routes, at_most=30.0),
        absolute(
            "killed replica: longest gap of moved streams, p99, s", [run["gap_p99_s"] for run in deaths], at_most=0.5
        ),
        absolute("killed replica: tokens that differ", [float(run["differing"]) for run in deaths], at_most=0.0),
        absolute(
            "herd: most to least loaded replica", [max(run.values()) / min(run.values()) for run in herds], at_most=1.1
        ),
        informative("killed replica: tokens compared, of all rounds", [float(sum(run["tokens"] for run in deaths))]),
        informative("killed replica: sequences that moved", [float(run["moved"]) for run in deaths]),
    ]
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
        rounds={"fleet": fleets, "one": ones, "half": halves, "kill": deaths, "router_us": routes, "herd": herds},
    )


if __name__ == "__main__":
    main()
