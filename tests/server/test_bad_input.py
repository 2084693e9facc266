"""Whatever a client sends, it hears what is wrong with it; the server lives on and keeps no block."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import httpx
import orjson
import pytest
from pydantic import ValidationError

from actorllm import AsyncLLM
from actorllm.server import create_app
from actorllm.server.app import BODIES
from actorllm.server.protocol import Body
from tests.server.conftest import client_of, is_idle, until

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Once"}]
LOOSE = {"type": "json_schema", "json_schema": {"strict": False, "schema": {"anyOf": [{"$ref": "#/anyOf/²"}]}}}
""""²" is a digit, and no number of a place."""
DEEP: Any = functools.reduce(lambda inner, _: [inner], range(200), 1)
CALL = {"type": "tool_use", "id": "a", "name": "look", "input": {"a": DEEP}}


def error_in(response: httpx.Response, status: int = 400, param: str | None = None) -> str:
    """The message, of an envelope as clients expect it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    tree = response.json()
    assert list(tree) == ["error"]
    assert set(tree["error"]) == {"message", "type", "param", "code"}
    assert tree["error"]["code"] == status
    assert tree["error"]["param"] == param
    assert tree["error"]["message"]
    message: str = tree["error"]["message"]
    return message


@pytest.fixture(autouse=True, scope="module")
def serves_on(llm: AsyncLLM) -> Iterator[None]:
    """After all of it."""
    yield

    async def check() -> None:
        async with client_of(create_app(llm)) as client:
            assert (await client.get("/load")).json() == {"server_load": 0}
            assert (await client.post(TEXT, json={"prompt": "Once", "max_tokens": 1})).status_code == 200
        await until(lambda: is_idle(llm))

    anyio.run(check)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "\xff\xfe"}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
        (b"[1]", "must be a JSON object, not list"),
        (b"null", "must be a JSON object"),
        (b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}", "not valid JSON"),
    ],
    ids=["empty", "open", "not UTF-8", "surrogate", "NaN", "list", "null", "deep"],
)
async def test_bodies_that_are_no_json_object(client: httpx.AsyncClient, body: bytes, told: str) -> None:
    assert told in error_in(await client.post(TEXT, content=body))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a", {}]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [99_999_999]}, "prompt"),
        ({"prompt": [5] * 2000}, "prompt"),
        ({"prompt": "a b " * 2000}, "prompt"),
        ({"prompt": "a" * 1_000_000}, "prompt"),
        ({"prompt": ["a"] * 20_000}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": []}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": -3}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": "x"}, "seed"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs": 1000}, "logprobs"),
        ({"stop": ["a"] * 50 + [str(i) for i in range(100)]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [10**8]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"allowed_token_ids": [17], "structured_outputs": {"choice": ["yes"]}}, "structured_outputs"),
        ({"allowed_token_ids": [17], "response_format": {"type": "json_object"}}, "response_format"),
        ({"allowed_token_ids": [0], "min_tokens": 2}, "allowed_token_ids"),
        ({"allowed_token_ids": [443], "stop_token_ids": [443], "min_tokens": 2, "n": 3}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"stream": "perhaps"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"suffix": "end"}, "suffix"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "strin"}}}, "structured_outputs"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
        ({"response_format": {"type": "json"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"response_format": LOOSE}, "response_format"),
        (
            {"structured_outputs": {"json": '{"uniqueItems": true, "multipleOf": %s}' % ("9" * 400)}},
            "structured_outputs",
        ),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"slo": -1}, "slo"),
        ({"slo": "fast"}, "slo"),
        ({"slo": {"tpott": 1}}, "slo"),
        ({"slo": []}, "slo"),
        ({"priority": 2**70}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a" * 1025}, "cache_salt"),
        ({"is_latency_sensitive": "sometimes"}, "is_latency_sensitive"),
        ({"repetition_detection": {"max_pattern_size": 5}}, "repetition_detection"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_fields_are_refused_by_name(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, stream: bool
) -> None:
    body = {"prompt": "Once", "max_tokens": 4, **({"stream": True} if stream else {}), **fields}
    if stream and param in ("stream_options", "stream") and "stream" not in fields:
        return
    error_in(await client.post(TEXT, json=body), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Once"}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a b " * 5000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 1_000_000}]}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -3}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        ({"max_tokens": None, "max_completion_tokens": -1}, "max_completion_tokens"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"return_prompt_text": True}, "return_prompt_text"),
        ({"mm_payload": {"a": 1}}, "mm_payload"),
        ({"stream_interval": 0}, "stream_interval"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_conversations_are_refused_by_name(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    error_in(await client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 4, **fields}), 400, param)


NAMED: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "a", "max_tokens": 1},
    CHAT: {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}


@pytest.mark.parametrize("path", NAMED)
async def test_the_name_of_a_request_is_short_and_ends_no_line(client: httpx.AsyncClient, path: str) -> None:
    """It is in every event, in a header of the answer, and at the head of lines of the log."""
    for name in ("a" * 257, "a\nb", "a\r\nset-cookie: b", "\x1b[2J", "a\u2028b", "\x7f"):
        told = error_in(await client.post(path, json={**NAMED[path], "request_id": name}), 400, "request_id")
        assert len(told) < 200
    if path in (TEXT, CHAT):
        response = await client.post(path, json={**NAMED[path], "request_id": "é" + 255 * "a"})
        assert response.json()["id"].endswith("-é" + 255 * "a")
        assert response.headers["x-request-id"].endswith("-?" + 255 * "a")


@pytest.mark.parametrize("path", [TEXT, CHAT, "/v1/responses"])
async def test_fields_without_number_that_nobody_knows(client: httpx.AsyncClient, path: str) -> None:
    """Clients and proxies read a header up to a few kilobytes, and looking for the name that was meant takes time."""
    unknown = {f"temperatur{number}": 0 for number in range(300)}
    response = await client.post(path, json={**NAMED[path], **unknown, "x" * 5000: 0})
    assert response.status_code == 200
    told = response.headers["x-actorllm-warning"]
    assert len(told) < 4096
    assert told.count("is not known and has no effect") == 10
    assert told.count("did you mean 'temperature'?") == 3
    assert told.endswith("so it is with 291 more fields")
    error_in(await client.post(path, json={**NAMED[path], **unknown, "prompt_embeds": "A"}), 400, "prompt_embeds")


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_the_first_error_of_a_field_is_enough(model: type[Body]) -> None:
    """There is room for millions in a body, and each of them would be an object."""
    counts = {}
    for name in model.model_fields:
        for wrong in ([[]] * 1000, {str(number): [] for number in range(1000)}):
            try:
                model.model_validate({name: wrong})
            except ValidationError as error:
                counts[name, type(wrong)] = error.error_count()
    assert counts
    assert max(counts.values()) < 20, counts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [0] * 100_000}, "messages"),
        ({"messages": MESSAGES * 20_000}, "messages"),
        ({"tools": [{}] * 20_000}, "tools"),
        ({"stop": [0] * 100_000}, "stop"),
        ({"allowed_token_ids": ["a"] * 100_000}, "allowed_token_ids"),
        ({"logit_bias": {str(number): "a" for number in range(100_000)}}, "logit_bias"),
        ({"stream": True, "stream_options": dict.fromkeys(map(str, range(100_000)))}, "stream_options"),
        ({"repetition_detection": dict.fromkeys(map(str, range(100_000)), "a")}, "repetition_detection"),
        ({"seed": {str(number): [[[]]] for number in range(100_000)}}, "seed"),
        ({"seed": "a" * 1_000_000}, "seed"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_wrong_items_without_number(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    told = error_in(await client.post(CHAT, json={"messages": MESSAGES, **fields}), 400, param)
    assert len(told) < 400


async def test_numbers_may_be_written_as_text(client: httpx.AsyncClient) -> None:
    body = {**NAMED[TEXT], "logit_bias": {"443": "100", "5": True}, "temperature": "0", "return_token_ids": True}
    (choice,) = (await client.post(TEXT, json=body)).json()["choices"]
    assert choice["token_ids"] == [443]


async def test_errors_name_what_the_client_sent(client: httpx.AsyncClient) -> None:
    fields = {"min_tokens": 5, "max_completion_tokens": 3}
    told = error_in(await client.post(CHAT, json={"messages": MESSAGES, **fields}), 400, "min_tokens")
    assert "max_completion_tokens=3" in told
    fields = {"echo": True, "logprobs": 1000, "logprob_token_ids": [5]}
    told = error_in(await client.post(TEXT, json={"prompt": "Once", **fields}), 400, "logprobs")
    assert told.startswith("logprobs=1000")


TOOLS = [{"type": "function", "function": {"name": "weather"}}]
RESPONSE = {"input": "Once", "text": {"format": {"type": "json_object"}}}


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/responses", {**RESPONSE, "structured_outputs": {"regex": "[0-9]+"}}, "structured_outputs"),
        ("/v1/responses", {**RESPONSE, "response_format": {"type": "json_object"}}, "response_format"),
        *(
            (CHAT, {"tools": TOOLS, "structured_outputs": {"json": {}, option: value}}, option)
            for option, value in (
                ("disable_any_whitespace", True),
                ("disable_additional_properties", True),
                ("whitespace_pattern", " "),
            )
        ),
        (CHAT, {"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens=3"),
        (CHAT, {"store": True}, "store"),
        (CHAT, {"service_tier": "priority"}, "service_tier"),
        ("/tokenize", {"prompt": "a", "add_special_token": False}, "'add_special_token'"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ("/detokenize", {"tokens": [5], "skip_special_token": True}, "'skip_special_token'"),
        ("/abort_requests", {"request_ids": [], "abort": True}, "'abort'"),
        ("/generate", {"prompt": "a", "slo": {"ttft": 5, "e2e": 1}}, "slo"),
    ],
    ids=str,
)
async def test_what_is_not_done_is_told(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], name: str
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, **fields} if path == CHAT else fields
    response = await client.post(path, json=body)
    assert response.status_code in (200, 400)
    if response.status_code == 200:
        assert name in response.headers["x-actorllm-warning"]
    else:
        assert name in response.json()["error"]["message"]
        assert response.json()["error"]["param"] in fields


async def test_what_asks_for_nothing_is_not_told_of(client: httpx.AsyncClient) -> None:
    idle = {"store": False, "service_tier": "auto", "user": "me", "max_completion_tokens": 1, "n": 1}
    response = await client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1, **idle})
    assert response.status_code == 200
    assert "x-actorllm-warning" not in response.headers


async def test_nested_without_end(client: httpx.AsyncClient) -> None:
    nested: Any = "a"
    for _ in range(900):
        nested = [nested]
    messages = [{"role": "user", "content": "Once", "more": nested}]
    response = await client.post(CHAT, json={"messages": messages, "max_tokens": 1})
    assert response.status_code in (200, 400), response.text
    error_in(await client.post(TEXT, json={"prompt": nested, "max_tokens": 1}), 400, "prompt")


async def test_what_is_not_there(client: httpx.AsyncClient) -> None:
    error_in(await client.post(TEXT, json={"prompt": "a", "model": "gpt-4"}), 404, "model")
    error_in(await client.get("/v1/models/gpt-4"), 404, "model")
    error_in(await client.get("/v1/completion"), 404)
    error_in(await client.get(TEXT), 405)
    assert "more than" not in error_in(await client.post("/v1/nothing", json={"input": "a"}), 404)


async def test_bodies_that_are_too_large(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
    error_in(await client.post(TEXT, content=b" " * ((8 << 20) + 1)), 413)
    assert "not valid JSON" in error_in(await client.post(TEXT, content=b" " * (8 << 20)))
    async with client_of(create_app(llm, max_body_bytes=1000)) as strict:
        told = error_in(await strict.post(TEXT, content=b"x" * 1001), 413)
        assert "1000 bytes" in told

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b" " * 500

        response = await strict.post(TEXT, content=chunks())
        error_in(response, 413)
        assert response.headers["connection"] == "close"


async def test_bodies_that_never_come(llm: AsyncLLM) -> None:
    async def forever() -> AsyncIterator[bytes]:
        yield b"{"
        await anyio.sleep(60)

    async with client_of(create_app(llm, body_timeout_s=0.05)) as client:
        assert "did not arrive within 0.05" in error_in(await client.post(TEXT, content=forever()), 408)


async def test_keys(llm: AsyncLLM) -> None:
    async with client_of(create_app(llm, api_key=["first", "second"])) as client:
        assert (await client.get("/health")).status_code == 200
        for headers in (
            {},
            {"authorization": "Bearer third"},
            {"authorization": "Basic first"},
            {"authorization": "Bearer"},
        ):
            response = await client.get("/v1/models", headers=headers)
            error_in(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
            error_in(await client.post("/generate", json={"prompt": "a"}, headers=headers), 401)
        for key in ("first", "second"):
            response = await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert response.status_code == 200


async def test_too_much_at_once(llm: AsyncLLM) -> None:
    app = create_app(llm, max_concurrent_requests=1)
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True}
    async with client_of(app) as client, anyio.create_task_group() as group:
        group.start_soon(lambda: client.post(TEXT, json=body))

        async def is_under_way() -> bool:
            return (await client.get("/load")).json() == {"server_load": 1}

        await until(is_under_way)
        response = await client.post(TEXT, json=body)
        error_in(response, 429)
        assert response.headers["retry-after"] == "1"
        await client.post("/abort_requests", json={"abort_all": True})


async def test_a_body_takes_a_place_before_it_is_read(llm: AsyncLLM) -> None:
    """Else as many as like may send large ones slowly, and all of them are kept."""
    body = orjson.dumps({"prompt": "Once", "max_tokens": 1})
    may_come, is_read = anyio.Event(), False
    answers: list[httpx.Response] = []

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:5]
        await may_come.wait()
        yield body[5:]

    async def another() -> AsyncIterator[bytes]:
        nonlocal is_read
        is_read = True
        yield body

    async with client_of(create_app(llm, max_concurrent_requests=1)) as client, anyio.create_task_group() as group:

        async def ask() -> None:
            answers.append(await client.post(TEXT, content=slowly()))

        group.start_soon(ask)

        async def is_under_way() -> bool:
            return (await client.get("/load")).json() == {"server_load": 1}

        await until(is_under_way)
        for path in (*NAMED, "/generate"):
            error_in(await client.post(path, content=another()), 429)
        assert not is_read
        may_come.set()
        await until(lambda: _has(answers))
        assert (await client.post(TEXT, content=body)).status_code == 200
    assert answers[0].status_code == 200


async def _has(answers: list[httpx.Response]) -> bool:
    return bool(answers)


async def test_an_unforeseen_failure_is_told_in_the_envelope_and_logged(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise LookupError("secret")

    async with client_of(create_app(llm)) as client:
        with monkeypatch.context() as patch:
            patch.setattr(llm, "generate", fails)
            message = error_in(await client.post(TEXT, json={"prompt": "Once"}), 500)
        with monkeypatch.context() as patch:
            patch.setattr("actorllm.server.shape.OpenAIShape.events", fails)
            message += error_in(await client.post(TEXT, json={"prompt": "Once", "stream": True}), 500)
        with monkeypatch.context() as patch:
            patch.setattr("actorllm.text.tokenizer.Tokenizer.encode", fails)
            message += error_in(await client.post("/tokenize", json={"prompt": "Once"}), 500)
    assert "secret" not in message
    assert caplog.text.count("LookupError: secret") == 3


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, {"prompt": "Once", "metadata": {"a": DEEP}}),
        (
            CHAT,
            {
                "messages": MESSAGES,
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"a": DEEP}}}],
            },
        ),
        ("/v1/responses", {"input": "Once", "store": False, "metadata": {"a": DEEP}}),
        ("/v1/responses", {"input": "Once", "store": True, "text": {"a": DEEP}}),
        ("/v1/messages", {"messages": [*MESSAGES, {"role": "assistant", "content": [CALL]}]}),
        (
            "/api/chat",
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": {"a": DEEP}}}]}
                ]
            },
        ),
    ],
    ids=["text", "chat", "response", "stored", "message", "ollama"],
)
async def test_what_is_nested_deeper_than_an_answer_can_be_is_refused(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    """In a body that is small enough to be parsed on the loop."""
    response = await client.post(path, json={"model": "storyteller", "max_tokens": 1, **fields})
    assert response.status_code == 400, response.text
    assert "the limit is 200 levels" in response.text


async def test_as_many_levels_as_are_taken(client: httpx.AsyncClient) -> None:
    body = {"model": "storyteller", "input": "Once", "store": False, "max_output_tokens": 1, "metadata": {"a": DEEP[0]}}
    response = await client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["metadata"] == body["metadata"]
