"""What applications ask of a request and of an engine, with scripted engines: limits, log-probabilities, grammars, ends."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from actorllm import SamplingParams
from actorllm.errors import ConfigError, EngineOverloaded, InvalidParameterError, RequestFailedError
from actorllm.testing import ScriptedAnswer, ScriptedAsyncLLM, ScriptedLLM
from actorllm.types.structured_outputs import StructuredOutputsParams


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def ask(llm: ScriptedAsyncLLM, prompt: str, options: dict[str, Any] | None = None, **params: Any) -> Any:
    """The last output of every sample."""
    samples: dict[int, Any] = {}
    stream = llm.generate(prompt, SamplingParams(**{"max_tokens": 100} | params), **options or {})
    async for output in stream:
        samples |= {one.index: one for one in output.outputs}
    output.outputs = [samples[index] for index in sorted(samples)]
    return output


async def test_a_full_engine_refuses() -> None:
    forever = ScriptedAnswer("never", first_token_s=3600.0)
    refused: list[EngineOverloaded] = []
    async with (
        ScriptedAsyncLLM(lambda prompt: forever, max_num_seqs=1, max_waiting_requests=1) as llm,
        anyio.create_task_group() as tasks,
    ):

        async def send() -> None:
            try:
                await ask(llm, "x")
            except EngineOverloaded as error:
                refused.append(error)

        for _ in range(5):
            tasks.start_soon(send)
        while len(refused) < 3:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert len(refused) == 3
    assert {error.max_waiting_requests for error in refused} == {1}


async def test_a_timeout_of_the_request_ends_it() -> None:
    async with ScriptedAsyncLLM(lambda prompt: ScriptedAnswer("never", first_token_s=3600.0)) as llm:
        output = await ask(llm, "x", options={"timeout": 0.05})
        assert (output.outputs[0].finish_reason, output.outputs[0].text) == ("abort", "")
        assert output.outputs[0].stop_reason == "deadline"


async def test_a_policy_shares_between_tenants() -> None:
    order: list[str] = []

    def answers(prompt: str) -> ScriptedAnswer:
        order.append(prompt)
        return ScriptedAnswer("one two three", token_s=0.02)

    async with (
        ScriptedAsyncLLM(answers, max_num_seqs=1, scheduling_policy="vtc") as llm,
        anyio.create_task_group() as tasks,
    ):
        for number in range(4):
            tasks.start_soon(ask, llm, f"greedy {number}", {"tenant": "greedy"})
        while not order:
            await anyio.sleep(0.001)
        tasks.start_soon(ask, llm, "modest", {"tenant": "modest"})
    assert sorted(order) == ["greedy 0", "greedy 1", "greedy 2", "greedy 3", "modest"]
    assert order.index("modest") == 1


async def test_log_probabilities_are_those_of_the_script() -> None:
    answer = ScriptedAnswer("one two", logprobs=[-0.5, -0.25])
    async with ScriptedAsyncLLM(lambda prompt: answer, max_num_batched_tokens=64, max_num_seqs=8) as llm:
        output = await ask(llm, "x", logprobs=3, n=2)
        for sample in output.outputs:
            assert [entry[token].logprob for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)] == [
                -0.5,
                -0.25,
                0.0,
            ]
            assert sample.cumulative_logprob == -0.75
            assert all(len(entry) == 3 for entry in sample.logprobs)
            assert sample.logprobs[0][sample.token_ids[0]].decoded_token == "one"
            assert sorted(entry.rank for entry in sample.logprobs[0].values()) == [1, 2, 3]
        output = await ask(llm, "x", logprobs=0)
        assert [len(entry) for entry in output.outputs[0].logprobs] == [1, 1, 1]
        output = await ask(llm, "word " * 100, prompt_logprobs=2)  # in more than one step
        told, ids = output.prompt_logprobs, output.prompt_token_ids
        assert len(told) == len(ids) > 64
        assert told[0] is None
        assert all(entry[token].rank == 1 for entry, token in zip(told[1:], ids[1:], strict=True))
        assert [one.text for one in (await ask(llm, "y")).outputs] == ["one two"]


async def test_log_probabilities_go_on_after_the_death_of_the_worker() -> None:
    answer = ScriptedAnswer("one two three", worker_dies_after=1, logprobs=[-1.0, -2.0, -3.0])
    async with ScriptedAsyncLLM([answer]) as llm:
        output = await ask(llm, "x y z", logprobs=1, prompt_logprobs=0)
        assert [max(e.logprob for e in entry.values()) for entry in output.outputs[0].logprobs] == [-1, -2, -3, 0]
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        assert llm.health().num_recoveries == 1


def test_a_log_probability_is_at_most_0() -> None:
    with pytest.raises(ConfigError, match=r"0\.5"):
        ScriptedAnswer("x", logprobs=[0.5])


async def test_a_text_in_the_grammar_passes_and_another_fails() -> None:
    answers = {"json": '{"a": 1}', "other": "It is no JSON."}
    grammar = StructuredOutputsParams(json={"type": "object"})
    async with ScriptedAsyncLLM(answers) as llm:
        assert (await ask(llm, "json", structured_outputs=grammar)).outputs[0].text == '{"a": 1}'
        with pytest.raises(RequestFailedError, match="not in the grammar"):
            await ask(llm, "other", structured_outputs=grammar)
        assert (await ask(llm, "other")).outputs[0].text == "It is no JSON."


async def test_a_stop_string_cuts_the_text() -> None:
    async with ScriptedAsyncLLM(["one two three"]) as llm:
        sample = (await ask(llm, "x", stop=["two"])).outputs[0]
        assert (sample.text, sample.finish_reason, sample.stop_reason) == ("one ", "stop", "two")


async def test_samples_and_equal_requests_take_answers_in_order() -> None:
    async with ScriptedAsyncLLM(["one", "two", "three", "four", "five"]) as llm:
        assert [one.text for one in (await ask(llm, "x", n=3)).outputs] == ["one", "two", "three"]
        texts: list[str] = []

        async def send() -> None:
            texts.append((await ask(llm, "x", seed=1)).outputs[0].text)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            tasks.start_soon(send)
        assert sorted(texts) == ["five", "four"]


async def test_equal_requests_keep_their_answers_when_the_worker_dies() -> None:
    answers = [ScriptedAnswer("one two", worker_dies_after=2), ScriptedAnswer("three four", worker_dies_after=1)]
    async with ScriptedAsyncLLM(answers) as llm:
        texts: list[str] = []

        async def send() -> None:
            texts.append((await ask(llm, "x", seed=1)).outputs[0].text)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            tasks.start_soon(send)
        assert sorted(texts) == ["one two", "three four"]


async def test_a_preempted_request_goes_on_with_its_answer() -> None:
    async with ScriptedAsyncLLM(lambda prompt: prompt) as llm:
        texts: list[str] = []

        async def send(prompt: str) -> None:
            async for output in llm.generate(prompt, SamplingParams(max_tokens=100)):
                if len(texts) == 0 and output.outputs[0].token_ids:
                    await llm.reset_prefix_cache(reset_running_requests=True)
            texts.append(output.outputs[0].text)

        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(send, f"number {number} of several, with some words")
        assert sorted(texts) == [f"number {number} of several, with some words" for number in range(3)]


async def test_after_unload_the_script_goes_on() -> None:
    async with ScriptedAsyncLLM(["one", "two"]) as llm:
        assert (await ask(llm, "x")).outputs[0].text == "one"
        await llm.unload()
        assert llm.health().state == "new"
        assert (await ask(llm, "x")).outputs[0].text == "two"


async def test_vectors_are_refused() -> None:
    with pytest.raises(ConfigError, match="generates text and makes no vectors"):
        ScriptedAsyncLLM(["x"], runner="pooling")
    async with ScriptedAsyncLLM(["x"]) as llm:
        with pytest.raises(InvalidParameterError, match="makes no vectors"):
            async for _ in llm.encode("x"):
                pass


def test_rules_about_tokens_do_not_change_what_the_script_has_chosen() -> None:
    llm = ScriptedLLM(["one two"])
    params = SamplingParams(max_tokens=20, repetition_penalty=1.5, logit_bias={5: 1.0}, min_p=0.1, bad_words=["two"])
    assert llm.generate("x", params, use_tqdm=False)[0].outputs[0].text == "one two"
    llm.shutdown()


async def test_a_request_that_was_left_delays_no_other_in_real_time() -> None:
    asked: list[str] = []

    def answer(prompt: str) -> ScriptedAnswer:
        asked.append(prompt)
        return ScriptedAnswer("never", first_token_s=3600.0) if prompt == "x" else ScriptedAnswer("second")

    async with ScriptedAsyncLLM(answer) as llm:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, llm, "x")
            while not asked:  # else it may be left before the script hears of it
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(20.0):
            assert (await ask(llm, "y")).outputs[0].text == "second"


async def test_a_request_that_was_left_delays_no_other_after_one_like_it_has_failed() -> None:
    """The next step is planned when the one fails, and the request is in it as well."""
    asked: list[str] = []

    def answer(prompt: str) -> ScriptedAnswer:
        asked.append(prompt)
        if prompt == "y":
            return ScriptedAnswer("second")
        is_first = asked.count("x") == 1
        return ScriptedAnswer("one two", fails_after=2) if is_first else ScriptedAnswer("never", first_token_s=3600.0)

    async with ScriptedAsyncLLM(answer) as llm:
        with pytest.raises(RequestFailedError):
            await ask(llm, "x", seed=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(ask, llm, "x", seed=1))
            while asked != ["x", "x"]:
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(20.0):
            assert (await ask(llm, "y")).outputs[0].text == "second"


async def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    def answer(prompt: str) -> ScriptedAnswer:
        return ScriptedAnswer("one two", worker_dies_after=1 if prompt.endswith("7") else None)

    async with ScriptedAsyncLLM(answer, max_num_seqs=2) as llm:
        for number in range(20):
            assert (await ask(llm, f"prompt {number}")).outputs[0].text == "one two"
        # The slot of the last one is free when the next step is planned.
        assert len(llm._scripted._script._parts) <= 2
