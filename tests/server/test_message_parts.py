"""Thoughts, text and calls over HTTP: a stream makes the message that the whole answer is, however a model writes it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorllm import AsyncLLM
from actorllm.server import create_app
from actorllm.server.message_parts import MAX_ARGUMENTS, MessageParts
from actorllm.server.tool_parsers import parser_named
from actorllm.server.tools import ToolUse
from actorllm.testing import ScriptedAsyncLLM
from actorllm.text.reasoning.parsers import reasoning_named
from tests.effort import examples
from tests.server.conftest import client_of, events_of

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>'
WEATHER = [("weather", '{"city": "x"}')]
ANSWERS = {
    "a thought": ("qwen3", "hermes", "<think>\nHm < 3.\n</think>\n\nYes.", "\nHm < 3.\n", "\n\nYes.", []),
    "no thought": ("qwen3", "hermes", "Yes.", None, "Yes.", []),
    "a thought without end": ("deepseek_r1", "hermes", "Hm.", "Hm.", None, []),
    "a call behind a thought": ("qwen3", "hermes", "<think>" + CALL + "</think>\n\n" + CALL, CALL, None, WEATHER),
    "text and a call": ("deepseek_r1", "hermes", "Hm.</think>\nI look.\n" + CALL, "Hm.", "\nI look.\n", WEATHER),
    "a call of a kimi": (
        "kimi_k2",
        "kimi_k2",
        "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "x"}<|tool_call_end|><|tool_calls_section_end|>',
        "Hm.",
        None,
        WEATHER,
    ),
    "harmony": (
        "openai_gptoss",
        "openai",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "x"}<|call|>',
        "Hm.",
        None,
        WEATHER,
    ),
    "harmony without its reasoning parser": (
        None,
        "openai",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "Hm.",
        "Yes.",
        [],
    ),
}


def parts_of(reasoning: str | None, tools: str | None, **options: Any) -> MessageParts:
    use = None
    if tools is not None:
        names = {"weather": {"type": "object"}}
        use = ToolUse(parser_named(tools, []), names, False, options.pop("is_parallel", True), False, None)
    return MessageParts(use, None if reasoning is None else reasoning_named(reasoning), **options)


def whole_of(parts: MessageParts, text: str, reason: str = "stop") -> dict[str, Any]:
    choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
    parts.put_into(choice, text, "")
    return choice


def streamed_of(parts: MessageParts, text: str, sizes: list[int], reason: str = "stop") -> dict[str, Any]:
    """What the deltas of a stream make together."""
    message: dict[str, Any] = {}
    cuts: list[str] = []
    while text:
        cuts.append(text[: sizes[len(cuts) % len(sizes)]])
        text = text[len(cuts[-1]) :]
    told = None
    for number, cut in enumerate(cuts or [""], 1):
        choice: dict[str, Any] = {"finish_reason": reason if number == max(1, len(cuts)) else None}
        parts.put_into_delta(0, choice, cut)
        add(message, choice["delta"])
        told = choice["finish_reason"]
    return {"message": message, "finish_reason": told}


def add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key in ("content", "reasoning", "reasoning_content"):
        if delta.get(key):
            message[key] = (message.get(key) or "") + delta[key]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({key: call[key] for key in ("id", "type")} | {"function": dict(call["function"])})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]


def told_of(choice: dict[str, Any]) -> tuple[Any, ...]:
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert message.get("reasoning") == message.get("reasoning_content")
    return message.get("reasoning"), message.get("content"), calls, choice["finish_reason"]


@pytest.mark.parametrize("name", ANSWERS)
def test_a_message_in_parts(name: str) -> None:
    reasoning, tools, text, thought, content, calls = ANSWERS[name]
    expected = (thought, content, calls, "tool_calls" if calls else "stop")
    assert told_of(whole_of(parts_of(reasoning, tools), text)) == expected
    for size in (len(text), 1, 3):
        assert told_of(streamed_of(parts_of(reasoning, tools), text, [size])) == expected


FRAGMENTS = (
    "<think>",
    "</think>",
    CALL,
    "<tool_call>",
    "</tool_call>",
    '{"name": "weather"',
    ', "arguments": {',
    "}",
    "\n",
    " ",
    "Hm",
)
HARMONY = (
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
    "final",
    "analysis",
    " to=functions.weather",
    "{}",
)


@given(
    st.sampled_from(
        [("qwen3", "hermes"), ("deepseek_r1", "pythonic"), ("qwen3", None), (None, "hermes"), (None, "openai")]
    ),
    st.booleans(),
    st.lists(st.sampled_from(FRAGMENTS) | st.sampled_from(HARMONY), max_size=10).map("".join),
    st.lists(st.integers(1, 9), min_size=1),
)
@settings(deadline=None, max_examples=examples(67, 200))
def test_any_cut_gives_the_same_message(
    parsers: tuple[str | None, str | None], is_parallel: bool, text: str, sizes: list[int]
) -> None:
    options = {} if parsers[1] is None else {"is_parallel": is_parallel}
    thought, content, *rest = told_of(whole_of(parts_of(*parsers, **options), text))
    assert told_of(streamed_of(parts_of(*parsers, **options), text, sizes)) == (thought, content or None, *rest)


def test_arguments_do_not_grow_without_limit() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"a": "' + "x" * (MAX_ARGUMENTS + 50)
    for made in (whole_of(parts_of(None, "hermes"), text), streamed_of(parts_of(None, "hermes"), text, [50_000])):
        thought, content, [(_, arguments)], _ = told_of(made)
        assert thought is None
        assert len(arguments) == MAX_ARGUMENTS
        assert content == text[text.index('{"a"') :][MAX_ARGUMENTS:]


def test_thoughts_are_left_out_on_demand() -> None:
    parts = parts_of("qwen3", None, shows_thoughts=False)
    choice = whole_of(parts, "<think>Hm.</think>Yes.")
    assert choice["message"] == {"role": "assistant", "content": "Yes."}
    assert told_of(streamed_of(parts, "<think>Hm.</think>Yes.", [4])) == (None, "Yes.", [], "stop")


@pytest.fixture(scope="module")
def scripted() -> Iterator[AsyncLLM]:
    """Answers with the last line of its prompt, or behind a thought that the prompt has begun."""

    def answer(prompt: str) -> str:
        return "Hm.</think>Yes." if "Well?" in prompt else prompt.strip().rpartition("\n")[2]

    engine = ScriptedAsyncLLM(answer, reasoning_parser="qwen3", max_model_len=512)
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


@pytest.fixture
async def client(scripted: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(create_app(scripted, trust_request_chat_template=True)) as made:
        yield made


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>Hm.</think>Yes.", ("Hm.", "Yes.", [], "stop")),
        ("Yes.", (None, "Yes.", [], "stop")),
        ("<think>Hm.</think>" + CALL.replace("\n", ""), ("Hm.", None, WEATHER, "tool_calls")),
    ],
)
async def test_thoughts_over_http(client: httpx.AsyncClient, text: str, expected: tuple[Any, ...]) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 200, "tools": TOOLS}
    whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert told_of(whole) == expected
    events = events_of(await client.post("/v1/chat/completions", json={**body, "stream": True, "n": 2}))
    for index in (0, 1):
        message: dict[str, Any] = {}
        choices = [
            event["choices"][0] for event in events if event["choices"] and event["choices"][0]["index"] == index
        ]
        for choice in choices:
            add(message, choice["delta"])
        assert told_of({"message": message, "finish_reason": choices[-1]["finish_reason"]}) == expected
    silent = (await client.post("/v1/chat/completions", json={**body, "include_reasoning": False})).json()
    assert told_of(silent["choices"][0]) == (None, *expected[1:])


@pytest.mark.anyio
async def test_the_prompt_says_whether_a_thought_has_begun(client: httpx.AsyncClient) -> None:
    template = "{{ messages[0]['content'] }}{% if thinks %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
    for thinks, expected in ((True, ("Hm.", "Yes.")), (False, (None, "Hm.</think>Yes."))):
        body = {
            "messages": [{"role": "user", "content": "Well?"}],
            "chat_template": template,
            "chat_template_kwargs": {"thinks": thinks},
        }
        whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        assert told_of(whole)[:2] == expected
        message: dict[str, Any] = {}
        for event in events_of(await client.post("/v1/chat/completions", json={**body, "stream": True})):
            add(message, event["choices"][0]["delta"])
        assert (message.get("reasoning"), message.get("content")) == expected


@pytest.mark.anyio
async def test_a_budget_is_checked(client: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    for budget in (-1, 1.5):
        response = await client.post("/v1/chat/completions", json={**body, "thinking_token_budget": budget})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "thinking_token_budget"


@pytest.fixture(scope="module")
def thinking() -> Iterator[AsyncLLM]:
    """The storyteller, as a model that always thinks."""
    options: dict[str, Any] = {"topology": "inline", "num_threads": 1, "seed": 1}
    engine = AsyncLLM("storyteller", dtype="float32", reasoning_parser="deepseek_r1", **options)
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


@pytest.mark.anyio
@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "deepseek_v31"])
async def test_a_call_that_is_demanded_comes_behind_the_thought(thinking: AsyncLLM, parser: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["x"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": "How is the weather?"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": schema}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "thinking_token_budget": 12,
        "max_tokens": 200,
        "seed": 4,
        "logit_bias": {"0": -100},
    }
    async with client_of(create_app(thinking, tool_call_parser=parser)) as client:
        whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        thought, content, [(name, arguments)], reason = told_of(whole)
        assert thought
        assert (content, name, json.loads(arguments), reason) == (None, "weather", {"city": "x"}, "tool_calls")
        message: dict[str, Any] = {}
        for event in events_of(await client.post("/v1/chat/completions", json={**body, "stream": True})):
            add(message, event["choices"][0]["delta"])
        assert told_of({"message": message, "finish_reason": reason}) == (thought, None, [(name, arguments)], reason)


@pytest.mark.anyio
async def test_a_form_is_that_of_the_answer_behind_the_thought(thinking: AsyncLLM) -> None:
    body = {
        "messages": [{"role": "user", "content": "How is the weather?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["sun", "rain"]}}},
        "thinking_token_budget": 12,
        "max_tokens": 200,
        "seed": 4,
        "logit_bias": {"0": -100},
    }
    async with client_of(create_app(thinking)) as client:
        whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    thought, content, calls, reason = told_of(whole)
    assert thought
    assert (json.loads(content) in ("sun", "rain"), calls, reason) == (True, [], "stop")
