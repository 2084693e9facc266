"""An application's tests of its own streaming, with everything real but the model."""

from __future__ import annotations

import subprocess
import sys

import anyio
import anyio.lowlevel
import pytest

from actorllm import SamplingParams
from actorllm.errors import EngineDeadError, InvalidParameterError, RequestFailedError
from actorllm.testing import ScriptedAnswer, ScriptedAsyncLLM, ScriptedLLM, VirtualTime

PARAMS = SamplingParams(max_tokens=200, temperature=0.0)
STORY = "A wörld of 🙂 and\n  two spaces."


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def text_of(llm: ScriptedAsyncLLM, prompt: str) -> str:
    text = ""
    async for output in llm.generate(prompt, PARAMS):
        text = output.outputs[0].text
    return text


async def test_texts_are_those_of_the_script() -> None:
    for answers in ({"hello": STORY}, [STORY], lambda prompt: STORY if prompt == "hello" else "?"):
        async with ScriptedAsyncLLM(answers) as llm:
            assert await text_of(llm, "hello") == STORY


async def test_many_streams_at_once() -> None:
    async with ScriptedAsyncLLM(lambda prompt: f"{prompt} {prompt} again") as llm:
        texts: dict[int, str] = {}

        async def read(number: int) -> None:
            texts[number] = await text_of(llm, f"number {number}")

        async with anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(read, number)
        assert texts == {n: f"number {n} number {n} again" for n in range(40)}


async def test_a_long_prompt_and_several_samples() -> None:
    async with ScriptedAsyncLLM(lambda prompt: "fine", max_num_batched_tokens=64, max_num_seqs=8) as llm:
        assert await text_of(llm, "word " * 300) == "fine"
        async for output in llm.generate("x", SamplingParams(n=3, max_tokens=20)):
            last = output
        assert [one.text for one in last.outputs] == ["fine"] * 3


async def test_max_tokens_and_checks_are_real() -> None:
    async with ScriptedAsyncLLM(["one two three four five six seven eight"]) as llm:
        with pytest.raises(InvalidParameterError):
            llm.generate("x", SamplingParams(temperature=-1))
        async for output in llm.generate("x", SamplingParams(max_tokens=3)):
            last = output
        assert len(last.outputs[0].token_ids) == 3
        assert last.outputs[0].finish_reason == "length"


async def test_a_request_fails_and_others_go_on() -> None:
    answers = {"bad": ScriptedAnswer(STORY, fails_after=3), "good": STORY}
    async with ScriptedAsyncLLM(answers) as llm:
        with pytest.raises(RequestFailedError):
            await text_of(llm, "bad")
        assert await text_of(llm, "good") == STORY
        with pytest.raises(RequestFailedError, match="no answer for the prompt"):
            await text_of(llm, "unknown")


async def test_of_equal_requests_one_fails_and_the_other_takes_its_time() -> None:
    time = VirtualTime()
    failing = ScriptedAnswer("one two", first_token_s=30.0, fails_after=1)
    async with ScriptedAsyncLLM([failing, ScriptedAnswer([5, 6, 7], token_s=60.0)], time=time) as llm:
        counts: dict[int, list[int]] = {0: [], 1: []}
        failed: list[int] = []

        async def read(number: int) -> None:
            try:
                async for output in llm.generate("x", SamplingParams(max_tokens=20, seed=1)):
                    counts[number].append(len(output.outputs[0].token_ids))
            except RequestFailedError:
                failed.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(2):
                tasks.start_soon(read, number)
            await anyio.lowlevel.checkpoint()
            await time.advance(30.0)
            while not failed or not counts[1 - failed[0]]:
                await anyio.sleep(0.001)
            other = counts[1 - failed[0]]
            await time.advance(59.0)
            assert other == [1]
            await time.advance(500.0)
        assert other[-1] >= 3
        assert len(failed) == 1


async def test_a_stream_goes_on_after_the_death_of_the_worker() -> None:
    async with ScriptedAsyncLLM([ScriptedAnswer(STORY, worker_dies_after=4)]) as llm:
        assert await text_of(llm, "x") == STORY
        assert llm.health().num_recoveries == 1


async def test_the_engine_dies() -> None:
    async with ScriptedAsyncLLM([ScriptedAnswer(STORY, engine_dies_after=4)]) as llm:
        with pytest.raises(EngineDeadError):
            await text_of(llm, "x")
        with pytest.raises(EngineDeadError):
            await text_of(llm, "y")


async def test_virtual_time() -> None:
    time = VirtualTime()
    answer = ScriptedAnswer([1, 2, 3, 4, 5], first_token_s=3600.0, token_s=60.0)
    async with ScriptedAsyncLLM([answer], time=time) as llm:
        counts: list[int] = []

        async def read() -> None:
            async for output in llm.generate("x", PARAMS):
                counts.append(len(output.outputs[0].token_ids))  # noqa: PERF401 - it is looked at meanwhile

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.lowlevel.checkpoint()
            await time.advance(3599.0)
            assert counts == []
            await time.advance(1.0)
            while not counts:
                await anyio.sleep(0.001)
            assert counts == [1]
            await time.advance(121.0)
            while counts[-1] < 3:
                await anyio.sleep(0.001)
            assert counts[-1] == 3
            await time.advance(180.0)
        assert counts[-1] == 6


async def test_latencies_pass_in_real_time() -> None:
    async with ScriptedAsyncLLM([ScriptedAnswer(STORY, first_token_s=60.0)]) as llm:
        with pytest.raises(TimeoutError), anyio.fail_after(0.05):
            await text_of(llm, "x")


def test_blocking() -> None:
    llm = ScriptedLLM({"a": "first", "b": "second"})
    outputs = llm.generate(["a", "b"], PARAMS, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["first", "second"]
    llm.shutdown()


def test_no_torch_is_imported() -> None:
    program = (
        "import sys; from actorllm.testing import ScriptedLLM\n"
        "llm = ScriptedLLM(['fine']); print(llm.generate('x', use_tqdm=False)[0].outputs[0].text); llm.shutdown()\n"
        "print({'torch', 'transformers', 'triton'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert result.stdout == "fine\nset()\n"
