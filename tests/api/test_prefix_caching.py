"""Prefix caching as a user sees it: the same streams, sooner, and accounts of it. Text is the bundled model's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from actorllm import LLM, AsyncLLM, SamplingParams
from actorllm.errors import InvalidParameterError, InvalidPromptError

SYSTEM = "You tell stories to children who cannot sleep, and all of them end well. " * 4


def greedy(num_tokens: int = 20, **arguments: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **arguments)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("storyteller", dtype="float32", topology="inline", num_threads=1, block_size=16) as engine:
        yield engine


def complete(llm: LLM, prompt: Any, **arguments: Any) -> Any:
    (output,) = llm.generate([prompt], greedy(**arguments), use_tqdm=False)
    return output


def counts(llm: LLM) -> dict[str, int]:
    statistics: dict[str, int] = llm.stats()["scheduler"]["scheduler"]["prefix_cache"]
    return statistics


def test_streams_are_equal_with_and_without_caching(llm: LLM) -> None:
    prompts = [SYSTEM + end for end in ("A fox", "A king", "A fox", "A fox and a king", "")]
    with LLM(
        "storyteller", dtype="float32", topology="inline", num_threads=1, block_size=16, enable_prefix_caching=False
    ) as plain:
        expected = [complete(plain, prompt).outputs[0].token_ids for prompt in prompts]
        assert complete(plain, prompts[0]).num_cached_tokens == 0
        assert plain.stats()["scheduler"]["scheduler"]["prefix_cache"] is None
    outputs = [complete(llm, prompt) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert outputs[0].num_cached_tokens == 0
    assert all(output.num_cached_tokens >= 48 for output in outputs[1:])
    together = llm.generate(prompts, greedy(), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in together] == expected


def test_the_second_request_says_how_much_was_cached(llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = counts(llm)
    first, second = complete(llm, SYSTEM), complete(llm, SYSTEM)
    size = len(first.prompt_token_ids)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, (size - 1) // 16 * 16)
    assert second.metrics.num_cached_tokens == second.num_cached_tokens
    after = counts(llm)
    assert after["queries"] - before["queries"] == 2 * size
    assert after["hits"] - before["hits"] == second.num_cached_tokens
    assert after["requests"] - before["requests"] == 2


@pytest.mark.parametrize("interval", [1, 7])
async def test_every_output_of_a_stream_says_it(interval: int) -> None:
    async with AsyncLLM("storyteller", topology="inline", num_threads=1, block_size=16) as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True, stream_interval=interval)
        size = len((await llm.complete(SYSTEM, params)).prompt_token_ids)
        for n in (1, 2):
            params.n = n
            outputs = [output async for output in llm.generate(SYSTEM, params)]
            assert len(outputs) > 1
            assert {output.num_cached_tokens for output in outputs} == {(size - 1) // 16 * 16}
            assert {o.metrics.num_cached_tokens for o in outputs if o.metrics} == {(size - 1) // 16 * 16}
        outputs = [output async for output in llm.generate("Something else", params)]
        assert {output.num_cached_tokens for output in outputs} == {0}


def test_the_next_turn_of_a_conversation_finds_the_answer_of_the_last(llm: LLM) -> None:
    llm.reset_prefix_cache()
    first = complete(llm, SYSTEM, num_tokens=40)
    history = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    second = complete(llm, [*history, 5, 6, 7])
    assert second.num_cached_tokens == (len(history) - 1) // 16 * 16
    llm.reset_prefix_cache()
    assert complete(llm, [*history, 5, 6, 7]).outputs == second.outputs


def test_a_salt_keeps_prompts_apart(llm: LLM) -> None:
    llm.reset_prefix_cache()
    complete(llm, {"prompt": SYSTEM, "cache_salt": "a"})
    assert complete(llm, SYSTEM).num_cached_tokens == 0
    assert complete(llm, {"prompt": SYSTEM, "cache_salt": "b"}).num_cached_tokens == 0
    assert complete(llm, {"prompt": SYSTEM, "cache_salt": "a"}).num_cached_tokens > 0
    for salt in ("", 5, "\ud800"):
        with pytest.raises(InvalidPromptError, match="cache_salt="):
            complete(llm, {"prompt": SYSTEM, "cache_salt": salt})


def test_reading_can_be_skipped_and_everything_reset(llm: LLM) -> None:
    complete(llm, SYSTEM)
    assert complete(llm, SYSTEM, skip_reading_prefix_cache=True).num_cached_tokens == 0
    assert complete(llm, SYSTEM).num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    assert complete(llm, SYSTEM).num_cached_tokens == 0
    assert llm.reset_prefix_cache(False, False)
    assert complete(llm, SYSTEM).num_cached_tokens == 0
    assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
    assert llm.reset_prefix_cache(reset_connector=True)
    with pytest.raises(InvalidParameterError, match="reset_connector=2 is not supported; leave it at False or True"):
        llm.reset_prefix_cache(reset_connector=2)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="skip_reading_prefix_cache='yes'"):
        SamplingParams(skip_reading_prefix_cache="yes")  # type: ignore[arg-type]


def test_log_probabilities_of_a_cached_prompt_are_all_there(llm: LLM) -> None:
    cold = complete(llm, SYSTEM, prompt_logprobs=1)
    for asked in (None, True, False):
        warm = complete(llm, SYSTEM, prompt_logprobs=1, skip_reading_prefix_cache=asked)
        assert warm.num_cached_tokens == 0, "there are no logits of what is read from the cache"
    assert len(warm.prompt_logprobs) == len(warm.prompt_token_ids)
    assert warm.prompt_logprobs == cold.prompt_logprobs
