"""Streaming with AsyncLLM in DELTA mode."""

import asyncio
import sys

from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    sampling_params = SamplingParams(
        max_tokens=40, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
    )
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
        for completion in output.outputs:
            if completion.text:
                print(completion.text, end="", flush=True)
        if output.finished:
            print("\nfinished", request_id)
            break


async def main() -> None:
    engine_args = AsyncEngineArgs(model=sys.argv[1], enforce_eager=True)
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        for i, prompt in enumerate(["The future of", "In a galaxy far", "The key to happiness is"], 1):
            await stream_response(engine, prompt, f"stream-example-{i}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
