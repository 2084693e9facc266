"""Two engines in one program, each with processes and memory of its own: the one writes, the other goes on."""

import asyncio

from actorllm import AsyncLLM, SamplingParams


async def main() -> None:
    writer = AsyncLLM("storyteller", name="writer")
    editor = AsyncLLM("storyteller", name="editor", dtype="float32", topology="inline")  # no processes: all in here
    async with writer, editor:
        draft = await writer.complete("Once upon a time", SamplingParams(max_tokens=30, seed=3))
        begun = "Once upon a time" + draft.outputs[0].text
        print("writer:", begun)
        final = await editor.complete(begun, SamplingParams(max_tokens=30, temperature=0))
        print("editor:", final.outputs[0].text)


if __name__ == "__main__":
    asyncio.run(main())
