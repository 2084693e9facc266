"""A stream whose reader leaves before the end, and the next request."""

import asyncio
import sys

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM


async def main(model: str) -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, dtype="float32", max_model_len=256))
    try:
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        async for output in engine.generate("The dog", params, request_id="left"):
            if len(output.outputs[0].token_ids) >= 3:
                break
        await engine.abort("left")
        params = SamplingParams(temperature=0, max_tokens=4)
        async for output in engine.generate("The cat", params, request_id="next"):
            last = output
        print(last.outputs[0].text)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
