"""A stream of growing texts."""

import asyncio
import sys

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM


async def main(model: str) -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, dtype="float32", max_model_len=256))
    try:
        is_growing, text = True, ""
        async for output in engine.generate("Once", SamplingParams(temperature=0, max_tokens=8), request_id="stream"):
            is_growing &= output.outputs[0].text.startswith(text)
            text = output.outputs[0].text
        print(is_growing, text, output.finished)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
