"""Programs with endpoints of their own answer them by vLLM's serving classes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from actorllm.compat.engine.arg_utils import AsyncEngineArgs
from actorllm.compat.engine.async_llm_engine import AsyncLLMEngine
from actorllm.compat.entrypoints.logger import RequestLogger
from actorllm.compat.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    ErrorResponse,
)
from actorllm.compat.entrypoints.openai.serving_chat import OpenAIServingChat
from actorllm.compat.entrypoints.openai.serving_completion import OpenAIServingCompletion
from actorllm.compat.entrypoints.openai.serving_models import BaseModelPath, LoRAModulePath, OpenAIServingModels
from actorllm.compat.entrypoints.openai.serving_tokenization import OpenAIServingTokenization
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from actorllm.errors import ConfigError, UnknownArgumentError
from actorllm.text.plugin_classes.deltas import AskedFields
from tests.model.adapters.lora_folders import write_adapter
from tests.server.conftest import client_of, is_idle, until

pytestmark = pytest.mark.anyio

TALK = [{"role": "user", "content": "Once upon a time"}]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
GREEDY: dict[str, Any] = {"messages": TALK, "max_tokens": 6, "temperature": 0}
ENGINE: dict[str, Any] = {"dtype": "float32", "topology": "inline", "num_threads": 1, "enable_lora": True}


@pytest.fixture
async def engine() -> AsyncIterator[AsyncLLMEngine]:
    made = AsyncLLMEngine.from_engine_args(AsyncEngineArgs("storyteller", **ENGINE))
    await made.start()
    yield made
    made.shutdown()


def application(chat: OpenAIServingChat) -> FastAPI:
    """As programs for Ray Serve write it."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def create(request: ChatCompletionRequest, raw_request: Request) -> Response:
        generator = await chat.create_chat_completion(request, raw_request)
        if isinstance(generator, ErrorResponse):
            return JSONResponse(content=generator.model_dump(), status_code=generator.code)
        if request.stream:
            return StreamingResponse(content=generator, media_type="text/event-stream")
        assert isinstance(generator, ChatCompletionResponse)
        return JSONResponse(content=generator.model_dump())

    return app


async def test_a_program_answers_chats_at_an_endpoint_of_its_own(engine: AsyncLLMEngine) -> None:
    models = OpenAIServingModels(engine, [BaseModelPath(name="mine", model_path="storyteller")])
    app = application(OpenAIServingChat(engine, models, "bard", request_logger=None, chat_template=None))
    async with client_of(app) as client:
        answer = await client.post("/v1/chat/completions", json={**GREEDY, "model": "mine", "tools": [LOOK]})
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        assert (whole["model"], whole["choices"][0]["message"]["role"]) == ("mine", "bard")
        streamed = await client.post("/v1/chat/completions", json={**GREEDY, "stream": True})
        *lines, last = [line.removeprefix("data: ") for line in streamed.text.split("\n\n")[:-1]]
        text = "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)
        assert (text, last) == (whole["choices"][0]["message"]["content"], "[DONE]")
        for body, status in (({"model": "other"}, 404), ({"max_tokens": -1}, 400), ({"messages": 3}, 422)):
            assert (await client.post("/v1/chat/completions", json={**GREEDY, **body})).status_code == status


@pytest.mark.parametrize(
    "arguments",
    [
        lambda engine, models: (
            (engine, engine.model_config, models, "assistant"),
            {"chat_template_content_format": "auto"},
        ),
        lambda engine, models: (
            (engine,),
            {
                "models": models,
                "model_config": engine.model_config,
                "response_role": "assistant",
                "request_logger": RequestLogger(max_log_len=9),
                "enable_auto_tools": False,
                "tool_parser": None,
                "reasoning_parser": "",
            },
        ),
        lambda engine, models: ((engine, ["mine"], "assistant", None, None), {}),
        lambda engine, models: ((engine, engine.model_config, ["mine"], "assistant"), {"lora_modules": None}),
    ],
    ids=["configuration first", "by name", "names of old", "both of old"],
)
async def test_the_orders_of_several_releases(engine: AsyncLLMEngine, arguments: Any) -> None:
    models = OpenAIServingModels(engine, engine.model_config, [BaseModelPath("mine", "storyteller")], lora_modules=None)
    positional, named = arguments(engine, models)
    chat = OpenAIServingChat(*positional, **named)
    answer = await chat.create_chat_completion(ChatCompletionRequest(model="mine", **GREEDY))
    assert answer.choices[0].message.content
    assert answer.model == "mine"


async def test_completions_tokens_and_names(engine: AsyncLLMEngine) -> None:
    models = OpenAIServingModels(engine_client=engine, base_model_paths=[BaseModelPath("mine")])
    completion = OpenAIServingCompletion(engine, models, request_logger=None)
    body = CompletionRequest(model="mine", prompt=["a", "b"], max_tokens=2, logprobs=1)
    answer = await completion.create_completion(body)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len(answer.choices[0].logprobs.token_logprobs) == answer.usage.completion_tokens // 2 == 2
    tokens = OpenAIServingTokenization(engine, models)
    told = await tokens.create_tokenize({"prompt": "Once upon"})
    assert (await tokens.create_detokenize({"tokens": told.tokens})).prompt.endswith("Once upon")
    assert [card.id for card in (await models.show_available_models()).data] == ["mine"]
    assert models.is_base_model("mine")
    refused = await completion.create_completion({"prompt": 3})
    assert isinstance(refused, ErrorResponse)
    assert (refused.code, refused.error.code, refused.param, refused.error.param) == (400, 400, "prompt", "prompt")


async def test_adapters_are_shared_and_come_and_go(engine: AsyncLLMEngine, tmp_path: Path) -> None:
    layers = {"model.layers.0.self_attn.o_proj": (256, 256)}
    for name in "ab":
        write_adapter(tmp_path / name, layers)
    models = OpenAIServingModels(
        engine, [BaseModelPath("mine")], lora_modules=[LoRAModulePath("a", str(tmp_path / "a"))]
    )
    chat = OpenAIServingChat(engine, models, "assistant")
    await models.init_static_loras()
    assert (await chat.create_chat_completion({**GREEDY, "model": "a"})).model == "a"
    assert (await chat.create_chat_completion({**GREEDY, "model": "b"})).code == 404
    told = await models.load_lora_adapter({"lora_name": "b", "lora_path": str(tmp_path / "b")})
    assert "added successfully" in told
    assert sorted(models.lora_requests) == ["a", "b"]
    assert (await chat.create_chat_completion({**GREEDY, "model": "b"})).model == "b"
    assert "removed successfully" in await models.unload_lora_adapter({"lora_name": "b"})
    assert (await chat.create_chat_completion({**GREEDY, "model": "b"})).code == 404


@pytest.mark.parametrize("ends", ["closed", "dropped", "never begun"])
async def test_a_stream_that_is_left_ends_its_request(engine: AsyncLLMEngine, ends: str) -> None:
    chat = OpenAIServingChat(engine, OpenAIServingModels(engine, [BaseModelPath("mine")]), "assistant")
    lines = await chat.create_chat_completion({**GREEDY, "max_tokens": 900, "ignore_eos": True, "stream": True})
    if ends != "never begun":
        assert (await anext(lines)).startswith("data: {")
    if ends == "closed":
        await lines.aclose()
        assert [line async for line in lines] == []
    del lines
    await until(lambda: is_idle(engine))


async def test_what_is_wrong_is_told(engine: AsyncLLMEngine) -> None:
    models = OpenAIServingModels(engine, [BaseModelPath("mine")])
    with pytest.raises(
        UnknownArgumentError, match="OpenAIServingChat has no argument 'chat_templat'; did you mean 'chat_template'"
    ):
        OpenAIServingChat(engine, models, "assistant", chat_templat="x")
    with pytest.raises(ConfigError, match="reasoning_parser='qwen3': the engine has None; build it with"):
        OpenAIServingChat(engine, models, "assistant", reasoning_parser="qwen3")
    with pytest.raises(ConfigError, match="give the argument 3 by its name"):
        OpenAIServingChat(engine, models, 3)


def test_a_request_is_what_parsers_are_given_too() -> None:
    request = ChatCompletionRequest(model="m", messages=TALK, tools=[LOOK])
    assert request.tools[0].function.name == "look"
    assert request.model_dump(exclude_none=True)["tools"] == [LOOK]
    assert json.loads(request.model_dump_json(exclude_unset=True)) == {"model": "m", "messages": TALK, "tools": [LOOK]}
    assert isinstance(AskedFields(model="m"), ChatCompletionRequest)
