"""A service of vectors: many callers of one engine."""

import asyncio
import sys

from vllm import AsyncEngineArgs, PoolingParams
from vllm.v1.engine.async_llm import AsyncLLM


async def vector(engine: AsyncLLM, text: str, name: str) -> list[float]:
    async for output in engine.encode(text, PoolingParams(task="embed"), request_id=name):
        if output.finished:
            return output.outputs.data.tolist()
    raise RuntimeError(name)


async def main(model: str) -> None:
    args = AsyncEngineArgs(model=model, dtype="float32", max_model_len=256, runner="pooling")
    engine = AsyncLLM.from_engine_args(args)
    try:
        texts = ["Once upon a time", "Once there was a time", "Stone"]
        first, second, third = await asyncio.gather(*(vector(engine, t, f"v{i}") for i, t in enumerate(texts)))
        print(
            len(first), *(round(sum(a * b for a, b in zip(first, other, strict=True)), 3) for other in (second, third))
        )
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
