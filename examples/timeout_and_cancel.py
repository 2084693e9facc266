"""Five ways to stop early; each frees the request's memory in the engine within one step."""

import asyncio

from actorllm import AsyncLLM, SamplingParams

LONG = SamplingParams(max_tokens=None, ignore_eos=True)  # as long as the model can get


async def main() -> None:
    async with AsyncLLM("storyteller") as llm:
        # 1. A time limit that keeps what there is by then.
        output = await llm.complete("Once upon a time", LONG, timeout=0.2)
        print("ended by its", output.outputs[0].stop_reason, "with", len(output.outputs[0].token_ids), "tokens")

        # 2. A time limit of asyncio's: an exception.
        try:
            async with asyncio.timeout(0.2):
                await llm.complete("Once upon a time", LONG)
        except TimeoutError:
            print("timed out")

        # 3. Leave the loop.
        async for output in llm.generate("There was a king", LONG):
            if len(output.outputs[0].token_ids) >= 10:
                break
        print("left with at least 10 tokens")

        # 4. Cancel the task.
        task = asyncio.create_task(llm.complete("There was a queen", LONG))
        await asyncio.sleep(0.05)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            print("cancelled")

        # 5. Abort by id, from anywhere: the stream still delivers what there is.
        async for output in llm.generate("There was a fox", LONG, request_id="fox"):
            await llm.abort("fox")
            reason = output.outputs[0].finish_reason
        print("finished with reason", reason)

        stats = await llm.stats()
        print("running", stats["scheduler"]["scheduler"]["num_running"])


if __name__ == "__main__":
    asyncio.run(main())
