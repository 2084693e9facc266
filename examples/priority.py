"""An urgent request on an engine that is full: it displaces one that can wait, which loses nothing but time."""

import asyncio

from actorllm import AsyncLLM, SamplingParams


async def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    async with AsyncLLM("storyteller", scheduling_policy="priority", max_num_seqs=2) as llm:
        patient = [llm.generate(f"There was {who}", params, priority=5) for who in ("a king", "a fox")]
        for stream in patient:
            await anext(stream)  # both run, and there is room for two

        urgent = await llm.complete("Help, said the", SamplingParams(temperature=0, max_tokens=10), priority=-1)
        print("urgent:", urgent.outputs[0].text.strip())
        print("patient ones done before it:", sum(stream.has_ended for stream in patient))

        outputs = [[output async for output in stream][-1] for stream in patient]
        print("tokens of the patient ones:", [len(output.outputs[0].token_ids) for output in outputs])
        print("displaced:", sum(output.metrics.num_preemptions for output in outputs))


if __name__ == "__main__":
    asyncio.run(main())
