"""A stream of pieces."""

import asyncio
import sys

from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def main(model: str) -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, dtype="float32", max_model_len=256))
    try:
        params = SamplingParams(temperature=0, max_tokens=8, output_kind=RequestOutputKind.DELTA)
        pieces = [output.outputs[0].text async for output in engine.generate("Once", params, request_id="deltas")]
        print("".join(pieces), len(pieces) > 1)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
