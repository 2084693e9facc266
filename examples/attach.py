"""One engine, two programs: this one owns it and gives it a name, and the program that it starts joins it by that name.

While it runs, `actorllm ps` in a third terminal lists it. Run `python attach.py join` yourself to join once more.
"""

import asyncio
import sys

from actorllm import AsyncLLM, SamplingParams
from actorllm.errors import EngineNotFoundError

NAME = "tale"
PARAMS = SamplingParams(max_tokens=40, seed=5)


async def tell(llm: AsyncLLM, who: str, prompt: str) -> None:
    output = await llm.complete(prompt, PARAMS)
    print(f"{who}: {prompt}{output.outputs[0].text!r}", flush=True)


async def own() -> None:
    async with AsyncLLM("storyteller", name=NAME) as llm:
        other = await asyncio.create_subprocess_exec(sys.executable, __file__, "join")
        await tell(llm, "owner", "Once upon a time")
        await other.wait()
        print("the guest has left, and the engine goes on", flush=True)
        await tell(llm, "owner", "There was a fox")


async def join() -> None:
    try:
        llm = AsyncLLM.attach(NAME)
    except EngineNotFoundError as error:
        sys.exit(str(error))
    await tell(llm, "guest", "Once upon a time")
    await tell(llm, "guest", "There was a fox")
    llm.shutdown()  # ends what this program still has running; the engine is not its own


if __name__ == "__main__":
    asyncio.run(join() if sys.argv[1:] == ["join"] else own())
