"""Structured outputs through the front doors: what is asked for comes out, alone, in a batch, with every other parameter."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from actorllm import AsyncLLM, LLMEngine, RequestOutputKind, SamplingParams, StructuredOutputsParams
from actorllm.errors import InvalidParameterError, UnknownParameterError
from tests.random_schemas import matches, random_schema
from tests.stories import Request, Story, difference, listen

pytestmark = pytest.mark.anyio

PROMPT = "Once upon a time"
EOS = 0
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4
"""Of the KV cache."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "likes": {"type": "array", "items": {"enum": ["tea", "cake", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    """Steps overlap: a mask is made while the forward of its step runs."""
    engine = AsyncLLM("storyteller", dtype="float32", topology="inline", num_threads=1, max_num_seqs=32, seed=1)
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


async def answer(llm: AsyncLLM, structured: Any, **parameters: Any) -> Any:
    params = SamplingParams(**{"max_tokens": 120, "seed": 5, "structured_outputs": structured, **parameters})
    return (await llm.complete(PROMPT, params)).outputs[0]


@pytest.mark.parametrize("options", [{}, {"disable_any_whitespace": True}, {"whitespace_pattern": " "}], ids=str)
async def test_json_of_a_schema(llm: AsyncLLM, options: dict[str, Any]) -> None:
    one = await answer(llm, StructuredOutputsParams(json=PERSON, **options))
    assert (one.finish_reason, one.stop_reason) == ("stop", None)
    assert matches(json.loads(one.text), PERSON)
    if "disable_any_whitespace" in options:
        assert one.text == json.dumps(json.loads(one.text), separators=(",", ":"))
    if "whitespace_pattern" in options:
        assert "\n" not in one.text


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"json": json.dumps(PERSON)}, r"\s*\{.*\}"),
        ({"regex": r"[a-z]{3,5} (19|20)\d\d"}, r"[a-z]{3,5} (19|20)\d\d"),
        ({"choice": ["yes", "no", "perhaps later"]}, "yes|no|perhaps later"),
        ({"grammar": 'root ::= "go " dir\ndir ::= "left" | "right"'}, "go (left|right)"),
        ({"grammar": 'start: "go " DIR\nDIR: "up" | "down"'}, "go (up|down)"),
        ({"grammar": '?start: go\n?go: "go " dir\n?dir: "up" | "down"\n'}, "go (up|down)"),
        ({"regex": ""}, ""),
    ],
    ids=str,
)
async def test_every_kind_ends_where_nothing_can_follow(llm: AsyncLLM, structured: Any, pattern: str) -> None:
    one = await answer(llm, structured)
    assert one.finish_reason == "stop"
    assert re.fullmatch(pattern, one.text, re.DOTALL), one.text


async def test_any_object(llm: AsyncLLM) -> None:
    one = await answer(llm, {"json_object": True}, logit_bias={93: 30.0})
    assert one.finish_reason == "stop"
    assert isinstance(json.loads(one.text), dict)


async def test_a_tag_with_free_text_before_it(llm: AsyncLLM) -> None:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<call>",
            "content": {"type": "json_schema", "json_schema": PERSON},
            "end": "</call>",
        },
    }
    text = (await answer(llm, {"structural_tag": json.dumps(tag)})).text
    assert text.startswith("<call>")
    assert text.endswith("</call>")
    assert matches(json.loads(text[6:-7]), PERSON)


@pytest.mark.parametrize(("pattern", "text"), [("a/b", "a/b"), (r"a\/b", "a/b"), (r"a\\/b", r"a\/b")])
async def test_slashes_in_a_pattern_of_a_tag(llm: AsyncLLM, pattern: str, text: str) -> None:
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}}
    assert (await answer(llm, {"structural_tag": json.dumps(tag)})).text == text


async def test_a_tag_that_may_end_anywhere(llm: AsyncLLM) -> None:
    format = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": ["", "</a>"]}
    one = await answer(llm, {"structural_tag": json.dumps({"format": format})}, max_tokens=20)
    assert one.text.startswith("<a>")
    assert len(one.text) > 3


async def test_an_end_of_text_is_a_token_like_any_other(llm: AsyncLLM) -> None:
    """As in vLLM: it is sampled where the grammar may end, also where it must; with ignore_eos the rest is free."""
    eos = {EOS: 100.0}
    one = await answer(llm, {"regex": "[ a-z]{0,9}"}, logit_bias=eos)
    assert (one.text, one.finish_reason, one.token_ids) == ("", "stop", [EOS])
    one = await answer(llm, {"regex": "[a-z]{4}"}, logprobs=1)
    assert (len(one.text), one.finish_reason, one.stop_reason) == (4, "stop", None)
    assert one.token_ids.count(EOS) == (one.token_ids[-1] == EOS) == 1
    assert len(one.logprobs) == len(one.token_ids)
    free = await answer(llm, {"regex": "[a-z]{4}"}, ignore_eos=True, max_tokens=20)
    assert free.token_ids[: len(one.token_ids)] == one.token_ids
    assert (len(free.token_ids), free.finish_reason) == (20, "length")
    siblings = await answer(llm, {"regex": "[a-z]{4}"}, ignore_eos=True, max_tokens=20, n=2)
    assert len(siblings.token_ids) == 20


async def test_an_end_that_other_rules_forbid_is_none_all_the_same(llm: AsyncLLM) -> None:
    one = await answer(llm, {"regex": "[ a-z]{0,99}"}, logit_bias={EOS: 100.0}, min_tokens=2)
    assert (len(one.token_ids), one.finish_reason) == (3, "stop")
    one = await answer(llm, {"regex": "[a-z]{4}"}, min_tokens=100)
    assert (len(one.text), one.finish_reason) == (4, "stop"), "its end goes before min_tokens"
    assert EOS not in one.token_ids
    letters = sorted(set((await answer(llm, {"regex": "[a-z]{40}"})).token_ids) - {EOS})
    one = await answer(llm, {"regex": "[a-z]{4}"}, allowed_token_ids=letters)
    assert (len(one.text), one.finish_reason) == (4, "stop")


async def test_a_full_length_and_an_end_at_once(llm: AsyncLLM) -> None:
    num = len((await answer(llm, {"choice": ["perhaps later"]})).token_ids)
    one = await answer(llm, {"choice": ["perhaps later"]}, max_tokens=num)
    assert (one.text, one.finish_reason) == ("perhaps later", "stop")
    one = await answer(llm, {"choice": ["perhaps later"]}, max_tokens=num - 1)
    assert one.finish_reason == "length"


async def test_other_parameters_act_within_the_grammar(llm: AsyncLLM) -> None:
    rules = {"presence_penalty": 1.5, "repetition_penalty": 1.2, "logit_bias": {34: -50.0}, "logprobs": 2, "top_k": 40}
    one = await answer(llm, {"json": PERSON}, **rules, bad_words=["the"], min_tokens=10)
    assert matches(json.loads(one.text), PERSON)
    assert len(one.logprobs) == len(one.token_ids)
    plain = await answer(llm, {"json": PERSON}, temperature=0.0, logprobs=1)
    ranks = [max(entry.rank for entry in row.values()) for row in plain.logprobs]
    assert max(ranks) > 1, "log-probabilities are the model's own, before the mask"
    stopped = await answer(llm, {"json": PERSON}, stop=['"age"'])
    assert stopped.stop_reason == '"age"'
    assert '"age"' not in stopped.text
    with pytest.raises(InvalidParameterError, match="structured_outputs and allowed_token_ids together leave no token"):
        await answer(llm, {"choice": ["yes", "no"]}, allowed_token_ids=[17])


async def test_siblings_have_a_grammar_each_and_share_their_prompt(llm: AsyncLLM) -> None:
    before = (await llm.stats())["scheduler"]["scheduler"]["num_forks"]
    params = SamplingParams(max_tokens=120, n=4, seed=2, structured_outputs={"json": PERSON})
    outputs = (await llm.complete(PROMPT, params)).outputs
    assert all(matches(json.loads(one.text), PERSON) for one in outputs)
    assert len({one.text for one in outputs}) > 1
    assert (await llm.stats())["scheduler"]["scheduler"]["num_forks"] == before + 3


async def test_a_stream_tells_the_same(llm: AsyncLLM) -> None:
    whole = await answer(llm, {"json": PERSON})
    kind = RequestOutputKind.DELTA
    params = SamplingParams(max_tokens=120, seed=5, structured_outputs={"json": PERSON}, output_kind=kind)
    pieces = [output.outputs[0] async for output in llm.generate(PROMPT, params)]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]
    assert len(pieces) > 3


async def test_neighbours_are_not_touched(llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=30, seed=9)
    alone = (await llm.complete(PROMPT, params)).outputs[0].token_ids
    together: list[Any] = [None] * 8

    async def ask(number: int) -> None:
        asked = {"json": PERSON} if number % 2 else None
        parameters = SamplingParams(max_tokens=30 if asked is None else 120, seed=9, structured_outputs=asked)
        together[number] = (await llm.complete(PROMPT, parameters)).outputs[0]

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(ask, number)
    assert all(one.token_ids == alone for one in together[::2])
    assert all(matches(json.loads(one.text), PERSON) for one in together[1::2])
    assert len({one.text for one in together[1::2]}) == 1


async def test_random_schemas_on_random_weights_always_parse(random_llm: AsyncLLM) -> None:
    schemas = [random_schema(number) for number in range(15)]

    async def ask(number: int, schema: dict[str, Any]) -> None:
        params = SamplingParams(max_tokens=None, seed=number, structured_outputs={"json": schema})
        one = (await random_llm.complete([5, 6, 7], params)).outputs[0]
        assert one.finish_reason == "stop", (schema, one.text)
        assert matches(json.loads(one.text), schema), (schema, one.text)

    async with anyio.create_task_group() as group:
        for number, schema in enumerate(schemas):
            group.start_soon(ask, number, schema)


MULTIPLES = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 10, "maxLength": 20},
        "none": {"type": "integer", "multipleOf": 3.7, "exclusiveMinimum": 0, "maximum": 10},
        "some": {"type": "number", "multipleOf": 2.5, "minimum": 2.25, "maximum": 2.55},
        "more": {"type": "number", "multipleOf": 0.05, "exclusiveMinimum": 95, "maximum": 95.5},
    },
    "required": ["name", "some"],
    "additionalProperties": False,
}
"""llguidance does not see that there is no value of "none", nor that there is one of "some", and 95 for "more"."""


async def test_multiples_end_in_no_middle(random_llm: AsyncLLM) -> None:
    async def ask(seed: int) -> None:
        params = SamplingParams(max_tokens=None, seed=seed, structured_outputs={"json": MULTIPLES})
        one = (await random_llm.complete([5, 6, 7], params)).outputs[0]
        value = json.loads(one.text)
        assert one.finish_reason == "stop"
        assert "none" not in value
        assert 10 <= len(value["name"]) <= 20
        assert value["some"] == 2.5
        assert 95 < value.get("more", 95.5) <= 95.5

    async with anyio.create_task_group() as group:
        for seed in range(24):
            group.start_soon(ask, seed)


@pytest.fixture(scope="module")
def random_llm() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("storyteller", load_format="dummy", topology="inline", num_threads=1, max_num_seqs=16, seed=1)
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


async def test_a_schema_that_cannot_be_used_fails_its_own_request(llm: AsyncLLM) -> None:
    errors: list[str] = []

    async def ask(structured: Any) -> None:
        with pytest.raises(InvalidParameterError) as caught:
            await answer(llm, structured)
        errors.append(str(caught.value))

    async with anyio.create_task_group() as group:
        group.start_soon(ask, {"json": {"type": "strin"}})
        group.start_soon(ask, {"json": {"$ref": "#/$defs/none"}})
        group.start_soon(ask, {"regex": "(a"})
        group.start_soon(ask, {"grammar": "start: nothing"})
        group.start_soon(ask, {"structural_tag": '{"type": "structural_tag", "format": {"type": "qwen_xml"}}'})
        good = await answer(llm, {"choice": ["fine"]})
    assert good.text == "fine"
    assert len(errors) == 5
    assert all(error.startswith("structured_outputs: ") for error in errors)
    assert any("strin" in error for error in errors)
    assert any("qwen_xml" in error for error in errors)


async def test_a_schema_that_explodes_is_bounded(llm: AsyncLLM) -> None:
    parts = [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(10)]} for i in range(8)]
    with pytest.raises(InvalidParameterError, match=r"structured_outputs: .*too"):
        await answer(llm, {"json": {"type": "object", "allOf": parts}})


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({}, "exactly one of .* nothing is given"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice are given"),
        ({"json": "{"}, "json is not valid JSON"),
        ({"json": "3"}, "must be a JSON object"),
        ({"json": 3}, "must be a JSON schema"),
        ({"json": {"a": {1, 2}}}, "cannot be written as JSON"),
        ({"json": {"a": float("nan")}}, "cannot be written as JSON"),
        ({"json": '{"a":' * 70 + "1" + "}" * 70}, "levels deep, and the limit is 64"),
        ({"regex": 3}, "regex=3 must be a string"),
        ({"regex": "a\x00"}, "NUL"),
        ({"regex": "\ud800"}, "not valid Unicode"),
        ({"regex": "a" * 300_000}, "300000 characters"),
        ({"choice": []}, "choice is empty"),
        ({"choice": "yes"}, "must be a list of strings"),
        ({"choice": [1]}, "must be a list of strings"),
        ({"grammar": "  "}, "grammar is empty"),
        ({"json_object": False}, "must be True or left out"),
        ({"json_object": True, "disable_any_whitespace": 1}, "must be True or False"),
        ({"structural_tag": {}}, "must be a string"),
    ],
    ids=str,
)
def test_bad_parameters_are_told_at_once(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidParameterError, match=match):
        SamplingParams(structured_outputs=wrong)


def test_a_schema_of_too_many_parts_is_refused_before_it_is_read() -> None:
    with pytest.raises(InvalidParameterError, match="60003 commas and opening brackets, and the limit is 50000"):
        SamplingParams(structured_outputs={"json": '{"a": [' + "1," * 60_001 + "1]}"})


def test_unknown_parameters() -> None:
    with pytest.raises(UnknownParameterError, match="no parameter 'jsn'; did you mean 'json'"):
        SamplingParams(structured_outputs={"jsn": {}})
    with pytest.raises(InvalidParameterError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    params.structured_outputs.regex = 3  # type: ignore[union-attr]
    with pytest.raises(InvalidParameterError, match="regex=3"):
        params.checked_copy()


KINDS: list[Any] = [
    {"json": PERSON, "disable_any_whitespace": True},
    {"regex": r"([a-z]{2,8} ){9}end"},
    None,
    {"json": {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 6, "maxItems": 7}},
]
LOAD = [
    Request(
        f"Once upon a time there was a {animal}",
        {
            "max_tokens": 90,
            "seed": number,
            "ignore_eos": KINDS[number % 4] is None,
            "temperature": 0.9,
            "logprobs": 1,
            "n": 1 + (number == 3),
            "presence_penalty": 0.5 * (number == 4),
            "structured_outputs": KINDS[number % 4],
        },
    )
    for number, animal in enumerate(["dog", "cat", "fox", "hen", "cow", "pig", "bee", "owl"])
]


async def tell(llm: AsyncLLM, on_output: Any = bool) -> list[Story]:
    stories: dict[int, Story] = {}

    async def one(number: int) -> None:
        stories[number] = await listen(llm, LOAD[number], on_output)

    async with anyio.create_task_group() as group:
        for number in range(len(LOAD)):
            group.start_soon(one, number)
    return [stories[number] for number in range(len(LOAD))]


def check(stories: list[Story], expected: list[Story]) -> None:
    for story, wanted in zip(stories, expected, strict=True):
        assert story.error is None
        for heard, other in zip(story.sequences, wanted.sequences, strict=True):
            assert difference(heard, other) is None
            if story.request.arguments["structured_outputs"] is not None:
                assert heard.reason == ("stop", None)


@pytest.mark.timeout(150)
async def test_preempted_and_killed_requests_go_on_in_their_grammars(llm: AsyncLLM) -> None:
    expected = await tell(llm)
    tight = AsyncLLM(
        "storyteller", dtype="float32", num_threads=1, max_model_len=128, kv_cache_memory_bytes=TOKEN_BYTES * 256
    )
    try:
        await tight.start()
        check(await tell(tight), expected)
        statistics = (await tight.stats())["scheduler"]["scheduler"]
        assert statistics["num_preemptions"] > 0
        num_outputs = 0
        plan = [(40, "scheduler"), (90, "worker0"), (140, "scheduler")]

        def kill(output: Any) -> None:
            nonlocal num_outputs
            num_outputs += 1
            if plan and num_outputs >= plan[0][0]:
                os.kill(tight._engine.pids[plan.pop(0)[1]], signal.SIGKILL)

        check(await tell(tight, kill), expected)
        assert plan == []
        statistics = (await tight.stats())["scheduler"]["scheduler"]
        assert statistics["kv"]["num_free"] == statistics["kv"]["num_blocks"]
    finally:
        tight.shutdown()


def test_an_engine_without_a_tokenizer_refuses() -> None:
    llm = AsyncLLM("storyteller", skip_tokenizer_init=True, topology="inline")
    with pytest.raises(InvalidParameterError, match="need a tokenizer"):
        llm.generate([1, 2], SamplingParams(structured_outputs={"regex": "a"}, detokenize=False))


def test_stepped_inline() -> None:
    engine = LLMEngine.from_engine_args(_args())
    try:
        engine.add_request("a", PROMPT, SamplingParams(max_tokens=99, seed=1, structured_outputs={"json": PERSON}))
        engine.add_request("b", PROMPT, SamplingParams(max_tokens=9, structured_outputs={"regex": "("}))
        outputs: dict[str, Any] = {}
        failed = None
        while engine.has_unfinished_requests():
            try:
                outputs |= {output.request_id: output for output in engine.step()}
            except InvalidParameterError as error:
                failed = error
    finally:
        engine.shutdown()
    assert matches(json.loads(outputs["a"].outputs[0].text), PERSON)
    told = failed or outputs["b"].outputs[0]
    assert "regex" in str(told) or told.finish_reason == "error"


def _args() -> Any:
    from actorllm import EngineArgs

    return EngineArgs(model="storyteller", topology="inline", num_threads=1)
