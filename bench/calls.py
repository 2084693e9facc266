"""How many Python functions of the engine does one decode step call? One stream, inline topology.

What a step costs beside the model is mostly calls. Their number does not depend on the machine, but for a few wake-ups.

    python bench/calls.py [--json FILE]

Prints calls per step by thread, and the functions that are called most.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from report import environment, print_table, versions, write_json

import actorllm
from actorllm import AsyncLLM, RequestOutputKind, SamplingParams

PACKAGE = str(Path(actorllm.__file__).parent)
NUM_BEFORE, NUM_STEPS = 50, 200
TARGET = 280

counts: Counter[tuple[str, str, str]] = Counter()
is_counting = False


def count(frame: Any, event: str, _: Any) -> None:
    file = frame.f_code.co_filename
    if is_counting and event == "call" and (file.startswith(PACKAGE) or file == "<string>"):  # made by dataclasses
        counts[threading.current_thread().name, file.removeprefix(PACKAGE)[1:], frame.f_code.co_qualname] += 1


async def decode() -> None:
    global is_counting
    llm = AsyncLLM("storyteller", topology="inline", num_threads=1)
    params = SamplingParams(max_tokens=300, ignore_eos=True, seed=1, output_kind=RequestOutputKind.DELTA)
    num_tokens = 0
    async for output in llm.generate("Once upon a time", params):
        num_tokens += len(output.outputs[0].token_ids)
        is_counting = NUM_BEFORE <= num_tokens < NUM_BEFORE + NUM_STEPS
    llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    threading.setprofile(count)
    sys.setprofile(count)
    asyncio.run(decode())
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    by_thread: Counter[str] = Counter()
    for (thread, _, _), number in counts.items():
        by_thread[thread] += number
    total = by_thread.total() / NUM_STEPS
    rows = [{"thread": name, "calls per step": round(number / NUM_STEPS)} for name, number in by_thread.most_common()]
    rows.append({"thread": "all", "calls per step": round(total), "target": f"≤ {TARGET}", "met": total <= TARGET})
    print_table("Python calls per decode step of one stream", rows)
    most = [
        {"function": f"{file}: {name}", "calls per step": round(number / NUM_STEPS, 1)}
        for (_, file, name), number in counts.most_common(15)
    ]
    print_table("called most", most)
    if arguments.json:
        write_json(
            arguments.json,
            {"bench": "calls", "environment": environment(), "configuration": {"versions": versions()}, "rows": rows},
        )


if __name__ == "__main__":
    main()
