"""A conversation: the model's chat template makes the prompt, and each answer becomes part of the next question.

python examples/chat.py [QUESTION ...]
"""

import asyncio
import sys

from actorllm import AsyncLLM, RequestOutputKind, SamplingParams

QUESTIONS = ["Once upon a time, in a forest, there lived a fox.", "And one day a king came by, and said:"]


async def main(questions: list[str]) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=40, seed=5, output_kind=RequestOutputKind.DELTA)
    messages = []
    async with AsyncLLM("storyteller") as llm:
        for question in questions:
            print("user:", question)
            print("assistant: ", end="", flush=True)
            messages.append({"role": "user", "content": question})
            answer = ""
            async for output in llm.chat(messages, params):
                answer += output.outputs[0].text
                print(output.outputs[0].text, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or QUESTIONS))
