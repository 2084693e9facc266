"""The smallest program: print a story while it is made.

python examples/hello.py [PROMPT]
"""

import asyncio
import sys

from actorllm import AsyncLLM, SamplingParams


async def main(prompt: str) -> None:
    async with AsyncLLM("storyteller") as llm:
        print(prompt, end="", flush=True)
        async for piece in llm.stream(prompt, SamplingParams(temperature=0.8, max_tokens=80, seed=7)):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    asyncio.run(main(" ".join(sys.argv[1:]) or "Once upon a time, in a forest,"))
