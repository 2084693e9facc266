"""Haystack: its generator of chats, whole, streamed and with a tool, in a pipeline."""

from __future__ import annotations

import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from checks import MODEL, TEXT, URL, WEATHER, check, run
from haystack import Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret


def generator(max_tokens: int = 8, **more: object) -> OpenAIChatGenerator:
    settings = {"max_tokens": max_tokens, "seed": 1, **more.pop("generation_kwargs", {})}
    return OpenAIChatGenerator(
        api_key=Secret.from_token("none"),
        model=MODEL,
        api_base_url=f"{URL}/v1",
        generation_kwargs=settings,
        max_retries=0,
        **more,
    )


@check
def pipeline() -> None:
    made = Pipeline()
    made.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user("{{ text }}")]))
    made.add_component("model", generator())
    made.connect("prompt.prompt", "model.messages")
    (reply,) = made.run({"prompt": {"text": TEXT}})["model"]["replies"]
    assert reply.text
    assert reply.meta["usage"]["completion_tokens"] == 8


@check
def streamed() -> None:
    pieces = []
    (reply,) = generator(streaming_callback=lambda piece: pieces.append(piece.content)).run(
        [ChatMessage.from_user(TEXT)]
    )["replies"]
    assert "".join(pieces) == reply.text != ""


@check
def tools() -> None:
    function = WEATHER["function"]
    tool = Tool(function["name"], function["description"], function["parameters"], function=lambda city, days: "sunny")
    made = generator(300, tools=[tool], generation_kwargs={"tool_choice": "required"})
    (reply,) = made.run([ChatMessage.from_user(TEXT)])["replies"]
    assert set(reply.tool_calls[0].arguments) == {"city", "days"}


run("haystack-ai", "openai")
