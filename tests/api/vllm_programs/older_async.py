"""The asynchronous engine under its older name, built where no loop runs."""

import asyncio
import sys

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams


async def run(engine: AsyncLLMEngine, prompt: str, request_id: str) -> None:
    final_output = None
    async for request_output in engine.generate(prompt, SamplingParams(max_tokens=8, n=2), request_id):
        final_output = request_output
    assert final_output is not None
    print("finished", final_output.request_id, final_output.finished)


async def main(engine: AsyncLLMEngine) -> None:
    await engine.check_health()
    await asyncio.gather(*(run(engine, "Once upon a time", str(i)) for i in range(3)))


if __name__ == "__main__":
    engine_args = AsyncEngineArgs(model=sys.argv[1], max_model_len=256, disable_log_stats=True, tensor_parallel_size=1)
    asyncio.run(main(AsyncLLMEngine.from_engine_args(engine_args)))
