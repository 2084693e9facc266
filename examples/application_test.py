"""A pytest suite of an application that streams, with a scripted engine: `pytest examples/application_test.py`."""

import asyncio
from collections.abc import Callable

import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.errors import EngineDeadError, RequestFailedError
from actorllm.testing import ScriptedAnswer, ScriptedAsyncLLM, VirtualTime
from actorllm.testing.fixtures import scripted_llm

__all__ = ["scripted_llm"]


async def answer(llm: AsyncLLM, prompt: str, seconds: float = 30.0) -> str:
    """What is tested: it asks twice, and gives up after a time."""
    for _ in range(2):
        text = ""
        try:
            async with asyncio.timeout(seconds):
                async for output in llm.generate(prompt, SamplingParams(max_tokens=64)):
                    text = output.outputs[0].text
            return text
        except RequestFailedError:
            continue
        except TimeoutError:
            return text + " [cut]"
    return "[failed]"


Build = Callable[..., ScriptedAsyncLLM]


@pytest.mark.asyncio
async def test_it_asks_again(scripted_llm: Build) -> None:
    llm = scripted_llm([ScriptedAnswer("never", fails_after=0), "Second time."])
    assert await answer(llm, "hello") == "Second time."


def test_it_gives_up(scripted_llm: Build) -> None:
    time = VirtualTime()  # thirty seconds of it take none
    llm = scripted_llm([ScriptedAnswer("never", first_token_s=3600.0)], time=time)
    assert time.run(answer(llm, "hello")) == " [cut]"
    assert time.now() == 30.0


@pytest.mark.asyncio
async def test_a_crash_is_not_noticed(scripted_llm: Build) -> None:
    llm = scripted_llm([ScriptedAnswer("It goes on.", worker_dies_after=2)])
    assert await answer(llm, "hello") == "It goes on."


@pytest.mark.asyncio
async def test_the_end_of_the_engine_is_told(scripted_llm: Build) -> None:
    with pytest.raises(EngineDeadError):
        await answer(scripted_llm([ScriptedAnswer("never", engine_dies_after=1)]), "hello")
