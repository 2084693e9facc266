"""Many streams at once."""

import asyncio
import sys

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM


async def main(model: str) -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, dtype="float32", max_model_len=256))

    async def text(number: int) -> str:
        params = SamplingParams(temperature=0, max_tokens=3 + number)
        async for output in engine.generate("The dog", params, request_id=f"many-{number}"):
            last = output
        return last.outputs[0].text

    try:
        for found in await asyncio.gather(*(text(number) for number in range(4))):
            print(found)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
