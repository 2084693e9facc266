"""Three samples of one prompt in one stream, put together by index."""

import asyncio
import sys

from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def main(model: str) -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, dtype="float32", max_model_len=256))
    try:
        params = SamplingParams(
            n=3, temperature=1.0, top_k=1, max_tokens=7, seed=1, logprobs=1, output_kind=RequestOutputKind.DELTA
        )
        texts, counts, reasons = [""] * 3, [0] * 3, [None] * 3
        async for output in engine.generate("The little bird", params, request_id="three"):
            for one in output.outputs:
                texts[one.index] += one.text
                counts[one.index] += len(one.logprobs)
                reasons[one.index] = one.finish_reason or reasons[one.index]
        print(texts, counts, reasons)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
