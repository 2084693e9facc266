"""What a server decides for requests that do not: options of the command line, as arguments of `create_app`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request, Response

from actorllm import AsyncLLM
from actorllm.errors import ConfigError
from actorllm.server import create_app
from tests.server.conftest import client_of, events_of

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "dog"}]
BODY: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2, "ignore_eos": True, "seed": 1}
TEMPLATE = "{{ mood }} {% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}T{% endif %}"


async def ask(app: Any, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    async with client_of(app) as client:
        return await client.post(path, json={**BODY, **fields})


async def rendered(app: Any, **fields: Any) -> str:
    """The prompt of a chat."""
    async with client_of(app) as client:
        found = await client.post("/v1/chat/completions/render", json={**BODY, **fields})
        assert found.status_code == 200, found.text
        ids = found.json()["token_ids"]
        text: str = (await client.post("/detokenize", json={"tokens": ids})).json()["prompt"]
        return text


@pytest.mark.parametrize("is_file", [True, False])
async def test_a_template_in_place_of_the_models(llm: AsyncLLM, is_file: bool, tmp_path: Path) -> None:
    file = tmp_path / "one.jinja"
    file.write_text(TEMPLATE)
    options = {"chat_template": str(file) if is_file else TEMPLATE, "default_chat_template_kwargs": {"mood": "sad"}}
    app = create_app(llm, **options)
    assert await rendered(app) == "sad dog"
    assert await rendered(app, chat_template_kwargs={"mood": "gay"}) == "gay dog"
    tool = {"type": "function", "function": {"name": "f"}}
    assert (await rendered(app, tools=[tool], tool_choice="none")).endswith("dogT")
    app = create_app(llm, **options, exclude_tools_when_tool_choice_none=True)
    assert (await rendered(app, tools=[tool], tool_choice="none")).endswith("dog")
    assert "x-actorllm-warning" not in (await ask(app, tools=[tool])).headers  # it shows tools
    both = await ask(app, "/v1/responses", input="dog", max_tokens=None, messages=None, max_output_tokens=2)
    assert both.status_code == 200, both.text
    assert both.json()["usage"]["input_tokens"] == (await ask(app)).json()["usage"]["prompt_tokens"]


VARIABLES = (
    "{{ reasoning_effort }}/{{ enable_thinking }}/{% for d in documents or [] %}{{ d.text }}{% endfor %}/"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "//"),
        ({"reasoning_effort": "low"}, "low/True/"),
        ({"reasoning_effort": "none"}, "none/False/"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "high/False/"),
        ({"documents": [{"title": "a", "text": "fox"}, {"text": "hen"}]}, "//foxhen"),
    ],
)
async def test_templates_are_shown_documents_and_the_effort_that_is_wanted(
    llm: AsyncLLM, fields: dict[str, Any], shown: str
) -> None:
    """By the names that vLLM gives them. Nothing is warned of where the template reads them."""
    app = create_app(llm, chat_template=VARIABLES)
    assert await rendered(app, **fields) == f"{shown}/dog"
    assert "x-actorllm-warning" not in (await ask(app, **fields)).headers


async def test_the_other_protocols_tell_the_effort_to_the_template(llm: AsyncLLM) -> None:
    template = (
        "{% if enable_thinking is defined and not enable_thinking %}{{ 'aha ' * 9 }}{% endif %}{{ reasoning_effort }}"
    )
    app = create_app(llm, chat_template=template)
    chat = {"messages": MESSAGES, "max_tokens": 1}
    answer = {"input": "dog", "messages": None, "max_tokens": None, "max_output_tokens": 16}
    counts = {}
    for path, fields, key in (
        ("/v1/responses", {**answer, "reasoning": {"effort": "none"}}, "input_tokens"),
        ("/v1/responses", {**answer, "reasoning": {"effort": "low"}}, "input_tokens"),
        ("/v1/messages", {**chat, "thinking": {"type": "disabled"}}, "input_tokens"),
        ("/v1/messages", {**chat, "output_config": {"effort": "low"}}, "input_tokens"),
        ("/v1/chat/completions", {**chat, "reasoning_effort": "none"}, "prompt_tokens"),
        ("/v1/chat/completions", {**chat, "reasoning_effort": "low"}, "prompt_tokens"),
    ):
        response = await ask(app, path, **fields)
        assert response.status_code == 200, response.text
        counts[path, str(fields)] = response.json()["usage"][key]
        if path == "/v1/responses":
            assert response.json()["reasoning"]["effort"] == fields["reasoning"]["effort"]
    assert len(set(list(counts.values())[::2])) == len(set(list(counts.values())[1::2])) == 1
    assert len(set(counts.values())) == 2


async def test_the_form_of_content(llm: AsyncLLM) -> None:
    template = "{% for m in messages %}{% if m.content is string %}text{% else %}parts{% endif %}{% endfor %}"
    for form, shown in (("openai", "parts"), ("string", "text")):
        assert await rendered(create_app(llm, chat_template=template, chat_template_content_format=form)) == shown


async def test_roles_token_names_and_usage(llm: AsyncLLM) -> None:
    app = create_app(llm, response_role="bard", return_tokens_as_token_ids=True, enable_force_include_usage=True)
    (choice,) = (await ask(app, logprobs=True)).json()["choices"]
    assert choice["message"]["role"] == "bard"
    assert all(one["token"].startswith("token_id:") for one in choice["logprobs"]["content"])
    (choice,) = (await ask(app, logprobs=True, return_tokens_as_token_ids=False)).json()["choices"]
    assert not any(one["token"].startswith("token_id:") for one in choice["logprobs"]["content"])
    first, *_, last = events_of(await ask(app, stream=True))
    assert first["choices"][0]["delta"]["role"] == "bard"
    assert last["usage"]["completion_tokens"] == 2
    refused = await ask(create_app(llm), "/v1/completions", prompt="a", stream=True, stream_options=None)
    assert "usage" not in events_of(refused)[-1] or events_of(refused)[-1]["usage"] is None


class Counting:
    """A layer of ASGI."""

    seen = 0

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        type(self).seen += 1
        await self._app(scope, receive, send)


async def mark(request: Request, call_next: Any) -> Response:
    response: Response = await call_next(request)
    response.headers["x-mark"] = "yes"
    return response


async def test_layers_paths_and_pages(llm: AsyncLLM) -> None:
    here = __name__
    app = create_app(llm, middleware=[f"{here}.Counting", f"{here}:mark"], root_path="/llm", disable_fastapi_docs=True)
    answer = await ask(app)
    assert answer.status_code == 200
    assert answer.headers["x-mark"] == "yes"
    assert Counting.seen == 1
    async with client_of(app) as client:
        assert (await client.get("/llm/v1/models")).status_code == 200
        assert (await client.get("/docs")).status_code == 404
        assert (await client.get("/openapi.json")).status_code == 404


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"chat_template": "/no/such.jinja"}, "neither a file"),
        ({"chat_template": "/dev/null"}, "it is no regular file"),
        ({"chat_template": "a\0b"}, "neither a file"),
        ({"chat_template": Path("one.jinja")}, "must be a string"),
        ({"response_role": 3}, "response_role=3 must be a string"),
        ({"chat_template_content_format": "xml"}, "must be one of"),
        ({"default_chat_template_kwargs": 3}, "must be a mapping"),
        ({"response_role": ""}, "response_role is empty"),
        ({"middleware": ["nothing"]}, "must be an import path"),
        ({"middleware": ["no_such_module.x"]}, "cannot be loaded"),
        ({"middleware": ["os.path.join"]}, "must be a class, or an asynchronous function"),
    ],
)
def test_options_that_are_wrong(llm: AsyncLLM, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        create_app(llm, **options)


@pytest.mark.parametrize(
    "wrong", [{"return_tokens_as_token_ids": "no"}, {"enable_force_include_usage": 1}, {"middleware": [3]}]
)
async def test_switches_and_paths_of_another_type(llm: AsyncLLM, wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        create_app(llm, **wrong)


@pytest.mark.parametrize(("value", "is_told"), [(False, False), (None, False), (True, True)])
@pytest.mark.parametrize(
    ("path", "asked"),
    [("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}), ("completions", {"prompt": "Hi"})],
)
async def test_padding_of_events_is_not_there_and_not_refused(
    client: httpx.AsyncClient, path: str, asked: dict[str, Any], value: bool | None, is_told: bool
) -> None:
    options = {"include_usage": True, "include_obfuscation": value}
    response = await client.post(
        f"/v1/{path}", json={**asked, "max_tokens": 1, "stream": True, "stream_options": options}
    )
    assert events_of(response)[-1]["usage"]["completion_tokens"] == 1
    assert ("include_obfuscation" in response.headers.get("x-actorllm-warning", "")) is is_told
