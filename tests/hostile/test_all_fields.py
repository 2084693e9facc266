"""Requests over all fields at their edges, sizes in orders of magnitude: each is answered or refused, and disturbs nothing.

Every example is one request beside a short stream of fixed tokens, on one engine in this process. Whatever is drawn, the
request ends with outputs or with an error of the library that is its own, and the other stream is as it always is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from actorllm import SLO, AsyncLLM, RequestOutputKind, SamplingParams
from actorllm.errors import ActorLLMError, EngineDeadError
from actorllm.text.chat_template import Conversation
from tests.effort import examples
from tests.hostile.bystander import NAME, PROMPT, longest_pause

VOCABULARY = 4096
BESIDE = SamplingParams(max_tokens=8, ignore_eos=True, seed=7, output_kind=RequestOutputKind.DELTA)
NUMBERS = itertools.count()
MOST_OUTPUTS = 12
"""Of a drawn request; then it is dropped."""

sizes = st.sampled_from([0, 1, 2, 10, 100, 1_000, 10_000, 100_000, 1_000_000])
small_sizes = st.sampled_from([0, 1, 2, 16, 17, 100, 1_000, 10_000])
characters = st.sampled_from(["a", " ", "\n", "é", "💥", "\x00", "\ud800", "</s>", "word ", "9", "{", "\u0301"])
texts = st.builds(lambda text, size: text * size, characters, sizes)
integers = st.sampled_from([0, 1, -1, 2, VOCABULARY - 1, VOCABULARY, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63), 10**30])
numbers = st.one_of(
    integers,
    st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0, 1e-45, 1e-300, 3.4e38, 1e308, math.inf, -math.inf, math.nan]),
)
odd = st.sampled_from([None, True, "", "1", b"1", [], {}, object(), 1.5, np.float32(1), np.int64(3), np.zeros(3)])
ids = st.builds(lambda value, size: [value] * size, integers, small_sizes)
words = st.lists(st.builds(lambda text, size: text * size, characters, small_sizes), max_size=3)
many_words = st.builds(lambda size: [f"w{i}" for i in range(size)], small_sizes)
grammars = st.one_of(
    st.builds(lambda size: {"regex": f"a{{0,{size}}}b"}, small_sizes),
    st.builds(lambda size: {"choice": [f"c{i}" for i in range(size)]}, small_sizes),
    st.builds(lambda size: {"json": {"type": "string", "minLength": size}}, sizes),
    st.builds(lambda size: {"json": '{"items":' * size + "{}" + "}" * size}, small_sizes),
    st.sampled_from(
        [{"regex": "(a*)*(b|"}, {"grammar": "start: start"}, {"json": {"$ref": "#"}}, {"json_object": True}]
    ),
)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "logit_bias": st.builds(
        lambda key, size, bias: {key + i: bias for i in range(size)}, integers, small_sizes, numbers
    ),
    "allowed_token_ids": ids,
    "bad_words": words | many_words,
    "logprob_token_ids": ids,
    "repetition_detection": st.builds(lambda value: {"max_pattern_size": value, "min_count": value}, integers),
    "structured_outputs": grammars,
    "stop": words | many_words | texts,
    "stop_token_ids": ids,
    "output_kind": st.sampled_from(RequestOutputKind),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), numbers
    ),
}
"""What is drawn for a parameter; integers for those that are not here."""


def some_of(values: dict[str, st.SearchStrategy[Any]], most: int) -> st.SearchStrategy[dict[str, Any]]:
    """At most so many of these, so that a request is not refused for the first of many."""
    names = st.lists(st.sampled_from(sorted(values)), max_size=most, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: values[name] for name in chosen}))


parameters = some_of(
    {field.name: FIELDS.get(field.name, integers) | odd for field in fields(SamplingParams) if field.init}, 2
)

prompts = st.one_of(
    texts,
    ids,
    odd,
    st.builds(lambda ids: np.array(ids, object), ids),
    st.builds(lambda text, salt: {"prompt": text, "cache_salt": salt}, texts, texts | odd),
    st.builds(lambda text: {"prompt_token_ids": [1, 2], "prompt": text}, texts),
    st.builds(lambda size: Conversation([{"role": "user", "content": "a"}] * size), small_sizes),
    st.builds(lambda text: Conversation([{"role": text[:3], "content": text}]), texts),
)
extras = some_of(
    {
        "request_id": texts | odd,
        "priority": integers | odd,
        "tenant": texts | odd,
        "type_info": texts | odd,
        "is_latency_sensitive": odd,
        "timeout": numbers | odd,
        "deadline": numbers | odd,
        "slo": st.builds(lambda value: {"ttft": value}, numbers) | numbers | odd,
        "tokenization_kwargs": st.builds(lambda value: {"truncate_prompt_tokens": value}, integers) | odd,
    },
    1,
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AsyncLLM, list[int]]]:
    record = tmp_path_factory.mktemp("hostile") / "run"
    engine = AsyncLLM("storyteller", topology="inline", num_threads=1, record=record)
    yield engine, anyio.run(undisturbed, engine)
    engine.shutdown()
    assert not Path(f"{record}.2").exists(), "the scheduler was started again"
    assert longest_pause(record) <= 3


async def undisturbed(engine: AsyncLLM) -> list[int]:
    return (await engine.complete(PROMPT, BESIDE)).outputs[0].token_ids


async def drawn(engine: AsyncLLM, prompt: Any, parameters: dict[str, Any], extras: dict[str, Any]) -> str:
    """What became of a request, in a word."""
    if isinstance(slo := extras.get("slo"), dict):
        try:
            extras = extras | {"slo": SLO(**slo)}
        except ActorLLMError:
            return "refused: SLO"
    try:
        params = SamplingParams(**parameters)
        count = 0
        async for _ in engine.generate(prompt, params, **{"request_id": None} | extras):
            count += 1
            if count == MOST_OUTPUTS:
                return "answered in part"
    except EngineDeadError:
        raise
    except ActorLLMError as error:
        refused = error
    else:
        return "answered"
    assert str(refused)
    assert len(str(refused)) < 4096, "a message does not repeat what was sent"
    return f"refused: {type(refused).__name__}"


async def beside(engine: AsyncLLM, expected: list[int], *arguments: Any) -> str:
    fate = ""
    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:

            async def attack() -> None:
                nonlocal fate
                fate = await drawn(engine, *arguments)

            tasks.start_soon(attack)
            stream = engine.generate(PROMPT, BESIDE, f"{NAME}-{next(NUMBERS)}")
            tokens = [token async for output in stream for token in output.outputs[0].token_ids]
    assert tokens == expected
    return fate


@settings(max_examples=examples(20, 60), deadline=None, suppress_health_check=list(HealthCheck))
@given(prompt=st.just("One day") | prompts | prompts, parameters=parameters, extras=extras)
def test_whatever_is_asked(
    llm: tuple[AsyncLLM, list[int]], prompt: Any, parameters: dict[str, Any], extras: dict[str, Any]
) -> None:
    engine, expected = llm
    parameters.setdefault("max_tokens", 4)
    event(anyio.run(beside, engine, expected, prompt, parameters, extras))
