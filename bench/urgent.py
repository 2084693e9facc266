"""How soon does an urgent request get its first token when the batch is full?

One engine with the priority policy, in its processes, and so many long requests of the least urgency that every slot is
taken. At moments that have nothing to do with its steps a request of more urgency comes. Of each the timeline tells how many
steps ended until its first token: those in flight when the scheduler hears of it, two at most, and that of its prompt, which
fits into one step. Counted from the call it is sometimes one more, which ends while the request is on its way. The time to
first token, as the application sees it, stands beside that of the same request on an idle engine.

    python bench/urgent.py [--json FILE] [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import command, environment, print_table, spread, write_json

from actorllm import AsyncLLM, SamplingParams
from actorllm.clock import from_epoch, now

BATCH = 16
STEP_TOKENS = 512
"""Of a step: each of the prompts fits into one beside the batch."""
PROMPTS = {"16 tokens": 16, "400 tokens": 400}
AT_MOST = 2
"""Steps beside those of the prompt."""
OUTPUT = 900
ROUNDING_S = 1e-5
"""Of times that went through epoch seconds."""


@dataclass(frozen=True, slots=True)
class Times:
    """Of one request, in monotonic seconds."""

    called: float
    queued: float
    """When the scheduler heard of it."""
    first_token: float
    """When the scheduler had its first token."""
    came: float
    """When its caller had it."""


async def first_token(llm: AsyncLLM, ids: list[int]) -> Times:
    """Of a request for one token."""
    called = now()
    output = await llm.complete(ids, SamplingParams(max_tokens=1, ignore_eos=True, temperature=0))
    assert output.metrics is not None
    return Times(called, from_epoch(output.metrics.queued_ts), from_epoch(output.metrics.first_token_ts), now())


@contextlib.asynccontextmanager
async def full_batch(llm: AsyncLLM) -> AsyncIterator[None]:
    """Every slot is taken by a request that goes on for longer than what is measured."""

    async def endless(number: int) -> None:
        while True:
            params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, seed=number)
            async for _ in llm.generate([3 + number], params, priority=10):
                pass

    tasks = [asyncio.create_task(endless(number)) for number in range(BATCH)]
    try:
        while (await llm.stats())["scheduler"]["scheduler"]["num_running"] < BATCH:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(rounds: int) -> tuple[dict[tuple[str, str], list[float]], dict[tuple[str, str], list[int]]]:
    """Seconds to first token by (prompt, side), and steps to it of the urgent ones by (prompt, counted from when)."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    steps: dict[tuple[str, str], list[int]] = defaultdict(list)
    draw = random.Random(0)

    def prompt(size: int) -> list[int]:
        return [draw.randrange(3, 4096) for _ in range(size)]

    options: dict[str, Any] = {"max_num_seqs": BATCH, "max_num_batched_tokens": STEP_TOKENS}
    async with AsyncLLM("storyteller", scheduling_policy="priority", **options) as llm:
        for name, size in PROMPTS.items():
            for number in range(-2, rounds):  # those before 0 warm up
                times = await first_token(llm, prompt(size))
                if number >= 0:
                    seconds[name, "idle engine"].append(times.came - times.called)
        ask = llm._engine.ask_scheduler
        async with full_batch(llm):
            for _ in range(rounds):
                for name, size in PROMPTS.items():
                    await asyncio.sleep(draw.uniform(0.02, 0.05))
                    await asyncio.wrap_future(ask("start_timeline"))
                    times = await first_token(llm, prompt(size))
                    events = await asyncio.wrap_future(ask("take_timeline"))
                    seconds[name, "urgent, batch full"].append(times.came - times.called)
                    steps[name, "the scheduler's knowledge"].append(
                        steps_between(events, times.queued, times.first_token)
                    )
                    steps[name, "the call"].append(steps_between(events, times.called, times.first_token))
        return seconds, steps


def steps_between(events: list[dict[str, Any]], began: float, ended: float) -> int:
    """Steps whose results were applied in the time, the one included that brought the token at its end."""
    updates = [event["ts"] / 1e6 for event in events if event["name"].startswith("update ")]
    return sum(began < at < ended + ROUNDING_S for at in updates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    seconds, steps = asyncio.run(measure(arguments.rounds))
    targets = [
        {
            "measure": f"{name}: steps from {start} to the first token, without that of the prompt",
            "most": max(found) - 1,
            "median": statistics.median(found) - 1,
            "target": f"<= {AT_MOST}" if start != "the call" else "—",
            "met": max(found) - 1 <= AT_MOST if start != "the call" else "—",
        }
        for (name, start), found in steps.items()
    ]
    rows = [
        {
            "prompt": name,
            "request": side,
            "TTFT ms": 1e3 * statistics.median(found),
            "largest ms": 1e3 * max(found),
            "spread ms": 1e3 * spread(found),
        }
        for (name, side), found in seconds.items()
    ]
    print_table("Time to first token", rows)
    print_table("Targets", targets)
    if arguments.json is not None:
        write_json(
            arguments.json,
            {
                "bench": "urgent",
                "command": command(),
                "environment": environment(),
                "load_before": [round(x, 2) for x in load_before],
                "configuration": {"batch": BATCH, "step_tokens": STEP_TOKENS, "rounds": arguments.rounds},
                "targets": targets,
                "rows": rows,
                "rounds": {
                    f"{name}, {what}": found for each in (steps, seconds) for (name, what), found in each.items()
                },
            },
        )


if __name__ == "__main__":
    main()
