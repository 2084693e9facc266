"""A program that joins an engine: `guest.py NAME`. Obeys JSON lines on stdin, answers with JSON lines on stdout.

{"do": "stream", "prompt", "max_tokens", "seed"}: "first" at the first output, then the tokens or the error.
{"do": "die"}: SIGKILL, while a fork of this process holds everything it had open and says "forked".
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

from actorllm import AsyncLLM, RequestOutputKind, SamplingParams


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


async def stream(llm: AsyncLLM, prompt: list[int], max_tokens: int, seed: int) -> None:
    params = SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    tokens: list[int] = []
    try:
        async for output in llm.generate(prompt, params):
            if not tokens:
                say(first=True)
            tokens += output.outputs[0].token_ids
    except Exception as error:
        say(error=type(error).__name__, message=str(error), num_tokens=len(tokens))
    else:
        say(tokens=tokens)


async def main(name: str) -> None:
    llm = AsyncLLM.attach(name)
    await llm.start()
    say(attached=True)
    tasks = set()
    async for line in lines():
        command = json.loads(line)
        match command.pop("do"):
            case "stream":
                tasks.add(asyncio.create_task(stream(llm, **command)))
            case "die":
                if os.fork() == 0:
                    say(forked=True)
                    os.read(0, 1)  # until the other end of stdin is closed
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
    llm.shutdown()


async def lines() -> Any:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        yield line


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
