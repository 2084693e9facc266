"""smolagents: its model for servers like this one, whole and streamed, with a tool that must be called, and by a schema."""

from __future__ import annotations

from checks import MODEL, TEXT, URL, check, run
from smolagents import ChatMessage, OpenAIModel, tool

ASKED = [ChatMessage(role="user", content=[{"type": "text", "text": TEXT}])]


def model(max_tokens: int) -> OpenAIModel:
    return OpenAIModel(MODEL, api_base=f"{URL}/v1", api_key="none", max_tokens=max_tokens)


@tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name.
    """
    return "sunny"


@check
def text() -> None:
    answer = model(8).generate(ASKED)
    assert answer.content
    assert answer.token_usage.output_tokens == 8


@check
def streamed() -> None:
    pieces = [delta.content or "" for delta in model(8).generate_stream(ASKED)]
    assert "".join(pieces)


@check
def tools() -> None:
    answer = model(300).generate(ASKED, tools_to_call_from=[weather])
    assert answer.tool_calls[0].function.name == "weather"


@check
def schema() -> None:
    form = {"name": "a", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}}
    form["schema"]["additionalProperties"] = False
    answer = model(100).generate(ASKED, response_format={"type": "json_schema", "json_schema": form})
    assert answer.content.strip().startswith("{")


run("smolagents", "openai")
