"""A stream goes on over the death of the processes that make it: the worker is killed, then the scheduler, then both.

The text is the one that comes without any of this. Nothing has to be asked for: it is what an engine does. With
`on_failure="raise"` every request would end with EngineDeadError instead, as in vLLM.
"""

import asyncio
import os
import signal
import sys
import time

from actorllm import AsyncLLM, RequestOutputKind, SamplingParams

PARAMS = SamplingParams(max_tokens=240, seed=3, temperature=0.7, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
KILLS = {60: ["worker0"], 120: ["scheduler"], 180: ["worker0", "scheduler"]}


async def tell(llm: AsyncLLM, kills: dict[int, list[str]]) -> str:
    text, num_tokens, killed_at = "", 0, 0.0
    async for output in llm.generate("Once upon a time", PARAMS):
        text += output.outputs[0].text
        num_tokens += len(output.outputs[0].token_ids)
        print(output.outputs[0].text, end="", flush=True)
        if killed_at:
            print(f"\n[the next token came {time.monotonic() - killed_at:.2f} s later]", flush=True)
            killed_at = 0.0
        if kills and num_tokens >= min(kills):
            actors, health = kills.pop(min(kills)), llm.health()
            for actor in actors:
                os.kill(health.actors[actor].pid or sys.exit("it is dead"), signal.SIGKILL)
            print(f"\n[killed {' and '.join(actors)}]", flush=True)
            killed_at = time.monotonic()
    print()
    if output.metrics.num_recoveries:
        print(f"recoveries of this request: {output.metrics.num_recoveries}")
    return text


async def main() -> None:
    async with AsyncLLM("storyteller", dtype="float32") as llm:
        undisturbed = await tell(llm, {})
        disturbed = await tell(llm, dict(KILLS))
        print(f"the same text: {disturbed == undisturbed}")
        print(f"the engine: {llm.health().state}, after {llm.health().num_recoveries} recoveries")


asyncio.run(main())
