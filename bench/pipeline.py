"""What do two stages on two cores give, beside one engine on one core?

    python bench/pipeline.py [--json FILE] [--rounds N] [--streams N] [--tokens N] [--shape NAME]

- Throughput: a pipeline of two stages with one thread each on two cores, against twice one engine on one core with all the
  streams, in turns. 1.0 would be two cores without any loss. Lanes have half the rows each. What a step costs whatever its
  rows (reading its weights) is paid twice.
- Bubbles: the share of the time in which a stage computes nothing, by what the workers count, and as the simulator predicts it from
  what one engine's steps have taken.
- Peer: one engine with two threads on the same two cores, for scale.

Weights are random: they cost the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time

from report import compared, finish, informative, versions
from sides import exit_on_sigterm


async def serve(model: str, num_streams: int, num_tokens: int, options: dict) -> dict:
    """Tokens per second of so many streams at once, and what each stage computed of that time."""
    from actorllm import AsyncLLM, SamplingParams

    prompts = [[1 + number, 5, 9, 3] for number in range(num_streams)]

    async def stream(llm, number: int, count: int) -> None:
        params = SamplingParams(max_tokens=count, temperature=0.8, seed=number, ignore_eos=True)
        await llm.complete(prompts[number], params)

    common = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": num_streams, "max_model_len": 512}
    if model == "storyteller":
        common = {"skip_tokenizer_init": True, "max_num_seqs": num_streams, "max_model_len": 512}
    async with AsyncLLM(model, **common, **options) as llm:
        await asyncio.gather(*[stream(llm, number, 8) for number in range(num_streams)])
        before = [one["busy_s"] for one in (await llm.stats())["workers"]]
        began = time.perf_counter()
        await asyncio.gather(*[stream(llm, number, num_tokens) for number in range(num_streams)])
        took = time.perf_counter() - began
        told = await llm.stats()
    busy = [one["busy_s"] - old for one, old in zip(told["workers"], before, strict=True)]
    return {
        "tokens_per_s": num_streams * num_tokens / took,
        "bubbles": [1 - one / took for one in busy],
        "num_steps": told["scheduler"]["scheduler"]["num_steps"],
    }


def predicted(num_streams: int, num_tokens: int, full: float, half: float) -> list[float]:
    """Bubbles of two equal stages. full, half: seconds of a step of all streams, and of half of them, on one core."""
    import numpy as np

    from actorllm.scheduling.cost_model import LinearModel, Regime
    from actorllm.slo.simulator import EngineShape, simulate
    from actorllm.slo.workload import make_workload

    per_row = max(0.0, (full - half) / (num_streams - num_streams // 2))
    model = LinearModel(
        (Regime(1e9, (max(0.0, full - num_streams * per_row), 0.0, per_row, 0.0, 0.0, 0.0)),), "measured"
    )
    lengths = np.full(num_streams, 4, np.int32), np.full(num_streams, num_tokens, np.int32)
    shape = EngineShape(num_blocks=60_000, max_num_seqs=num_streams, enable_prefix_caching=False, stages=(0.5, 0.5))
    run = simulate(make_workload(np.zeros(num_streams), lengths), shape, model)
    return list(run.bubbles[0])


SIDES = {
    "one": ({"num_threads": 1}, 1),
    "two-threads": ({"num_threads": 2}, 2),
    "pipeline": ({"num_threads": 1, "pipeline_parallel_size": 2}, 2),
}


def measured(side: str, model: str, num_streams: int, num_tokens: int, dtype: str) -> dict:
    """A run in a process of its own, on as many cores as its side has."""
    command = [sys.executable, __file__, "--side", side, "--streams", str(num_streams), "--tokens", str(num_tokens)]
    command += ["--shape", model, "--dtype", dtype]
    cores = sorted(os.sched_getaffinity(0))[: SIDES[side][1]]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, cores)
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--shape", default="Qwen3-0.6B", help="a folder of actorllm/bundled/shapes, or storyteller")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--side", choices=SIDES, help="of use to this program only")
    arguments = parser.parse_args()
    exit_on_sigterm()
    if arguments.side is not None:
        options = {**SIDES[arguments.side][0], "dtype": arguments.dtype}
        run = serve(arguments.shape, arguments.streams, arguments.tokens, options)
        print(json.dumps(asyncio.run(run)))
        return
    load_before = os.getloadavg()
    model = arguments.shape
    runs: dict[str, list[dict]] = {name: [] for name in (*SIDES, "half")}
    given = arguments.tokens, arguments.dtype
    for _ in range(arguments.rounds):
        for name in SIDES:
            runs[name].append(measured(name, model, arguments.streams, *given))
        runs["half"].append(measured("one", model, arguments.streams // 2, *given))
    speed = {name: [run["tokens_per_s"] for run in found] for name, found in runs.items()}
    expected = [
        predicted(arguments.streams, arguments.tokens, arguments.streams / one, arguments.streams // 2 / half)
        for one, half in zip(speed["one"], speed["half"], strict=True)
    ]
    rows = [
        compared(
            "tokens/s of two stages on two cores",
            speed["pipeline"],
            "twice one engine on one core",
            [2 * one for one in speed["one"]],
            at_least=0.85,
        ),
        informative(
            "tokens/s of two stages on two cores",
            speed["pipeline"],
            "one engine with two threads",
            speed["two-threads"],
        ),
        informative(
            "tokens/s of two stages on two cores",
            speed["pipeline"],
            "twice one engine on one core, half the streams",
            [2 * half for half in speed["half"]],
        ),
        *[
            informative(
                f"bubbles of stage {stage}, share of the time",
                [run["bubbles"][stage] for run in runs["pipeline"]],
                "as predicted by the simulator",
                [one[stage] for one in expected],
            )
            for stage in range(2)
        ],
    ]
    finish(
        "pipeline",
        "Two stages on two cores",
        rows,
        arguments.json,
        load_before,
        configuration={
            "rounds": arguments.rounds,
            "streams": arguments.streams,
            "tokens": arguments.tokens,
            "shape": arguments.shape,
            "dtype": arguments.dtype,
            "versions": versions(),
        },
        rounds=runs,
    )


if __name__ == "__main__":
    main()
