"""What is the time to the first token of a long prompt whose KV is in the cache, next to that of a short prompt?

One engine per model, in its processes, with one request at a time, timed from `generate` to its first output as an
application sees it: block hashes in the frontend, messages and detokenizing are part of it, and tokenizing is not, since
prompts are token ids. Rounds take turns: a prompt of 16 tokens, which is shorter than a block and never cached; one of 1,000
whose full blocks are in the cache, from one of several such prompts; and one of 1,000 that was not sent before, for
comparison. The ratio is that of the medians of all rounds.

    python bench/prefix.py [--json FILE] [--rounds N] [--models storyteller,135M]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from model import SHAPES
from report import command, environment, print_table, spread, write_json

LONG, SHORT = 1000, 16
AT_MOST = 1.5
"""Times the time to first token of the short prompt."""
NUM_CACHED = 4
"""Long prompts that take turns."""
SIDES = ("short", "cached", "not cached")


async def seconds_to_first(llm: Any, prompt: list[int], num_cached: int) -> float:
    """Of one request alone. num_cached: tokens that it must find in the cache."""
    from actorllm import SamplingParams

    began = time.perf_counter()
    async for output in llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)):
        seconds = time.perf_counter() - began
        assert output.num_cached_tokens == num_cached, (output.num_cached_tokens, num_cached)
        return seconds
    raise SystemExit("there was no output")


async def measure(model: str, arguments: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds by side, one for each round."""
    from actorllm import AsyncLLM

    random = np.random.default_rng(0)
    found: dict[str, list[float]] = defaultdict(list)
    async with AsyncLLM(model, max_num_seqs=16, max_model_len=1024, **arguments) as llm:
        block, vocab = llm.config.cache.block_size, llm.config.model.vocab_size

        def prompt(length: int) -> list[int]:
            ids: list[int] = random.integers(3, vocab, length).tolist()
            return ids

        full = (LONG - 1) // block * block  # the last token is always computed
        cached = [prompt(LONG) for _ in range(NUM_CACHED)]
        for one in cached:
            await seconds_to_first(llm, one, 0)
        for number in range(-NUM_CACHED, rounds):  # those before 0 warm up
            turn = {
                "short": await seconds_to_first(llm, prompt(SHORT), 0),
                "cached": await seconds_to_first(llm, cached[number % NUM_CACHED], full),
                "not cached": await seconds_to_first(llm, prompt(LONG), 0),
            }
            for side, seconds in turn.items() if number >= 0 else ():
                found[side].append(seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--models", default="storyteller,135M")
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    rows, targets, rounds = [], [], {}
    for model in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {}
            if model in SHAPES:
                (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model]))
                options = {"load_format": "dummy", "skip_tokenizer_init": True}
            found = asyncio.run(measure(folder if model in SHAPES else model, options, arguments.rounds))
        rounds[model] = found
        median = {side: statistics.median(found[side]) for side in SIDES}
        rows += [
            {
                "model": model,
                "prompt": f"{SHORT if side == 'short' else LONG} tokens" + ("" if side == "short" else f", {side}"),
                "TTFT ms": 1e3 * median[side],
                "spread ms": 1e3 * spread(found[side]),
                "ratio to short": median[side] / median["short"],
            }
            for side in SIDES
        ]
        ratio = median["cached"] / median["short"]
        targets.append(
            {
                "measure": f"{model}: TTFT of {LONG} cached tokens / of {SHORT} tokens",
                "ratio": ratio,
                "target": f"<= {AT_MOST}",
                "met": ratio <= AT_MOST,
            }
        )
    print_table("Time to first token", rows)
    print_table("Targets", targets)
    if arguments.json is not None:
        write_json(
            arguments.json,
            {
                "bench": "prefix",
                "command": command(),
                "environment": environment(),
                "load_before": [round(x, 2) for x in load_before],
                "configuration": {"long": LONG, "short": SHORT, "rounds": arguments.rounds, "topology": "process"},
                "targets": targets,
                "rows": rows,
                "rounds": rounds,
            },
        )


if __name__ == "__main__":
    main()
