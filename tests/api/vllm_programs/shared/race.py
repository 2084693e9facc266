"""Several attempts at once; the others are aborted when the first one is done."""

import asyncio
import sys

from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def main(model: str) -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, dtype="float32", max_model_len=256))

    async def attempt(name: str, max_tokens: int) -> tuple[str, str, str | None]:
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        async for output in engine.generate("In the forest", params, name):
            return name, output.outputs[0].text, output.outputs[0].finish_reason
        return name, "", None

    try:
        names = {"long": 200, "short": 5, "longer": 220}
        tasks = [asyncio.create_task(attempt(name, number)) for name, number in names.items()]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        print([task.result() for task in done])
        await engine.abort(["long", "longer"])
        rest = await asyncio.gather(*tasks)
        print(sorted((name, reason) for name, _, reason in rest))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
