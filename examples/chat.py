"""A chat in a terminal: the model's chat template makes the prompt, and each answer becomes part of the next question.

Ctrl-C stops an answer, and Ctrl-D ends the chat.

python examples/chat.py [QUESTION ...]
"""

import asyncio
import sys
from collections.abc import Iterator

from actorllm import AsyncLLM, RequestOutputKind, SamplingParams

PARAMS = SamplingParams(temperature=0.8, max_tokens=40, seed=5, output_kind=RequestOutputKind.DELTA)


def typed() -> Iterator[str]:
    """The lines of the terminal. The engine has a thread of its own, and does not mind that the loop stands still."""
    try:
        while True:
            yield input("user: ")
    except (EOFError, KeyboardInterrupt):
        print()


def told(questions: list[str]) -> Iterator[str]:
    for question in questions:
        print("user:", question)
        yield question


async def answer(llm: AsyncLLM, messages: list[dict[str, str]]) -> None:
    """Print the answer as it is made. What there is of one that is stopped stays in the conversation, too."""
    messages.append({"role": "assistant", "content": ""})
    print("assistant: ", end="", flush=True)
    async for output in llm.chat(messages[:-1], PARAMS):
        messages[-1]["content"] += output.outputs[0].text
        print(output.outputs[0].text, end="", flush=True)
    print()


def main(questions: list[str]) -> None:
    messages: list[dict[str, str]] = []
    llm = AsyncLLM("storyteller")
    with asyncio.Runner() as runner:
        for question in told(questions) if questions else typed():
            messages.append({"role": "user", "content": question})
            try:
                runner.run(answer(llm, messages))
            except KeyboardInterrupt:
                print(" [stopped]")
    llm.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
