"""llm (Simon Willison's): a model of its OpenAI plug-in with another base, whole and streamed, with a schema."""

from __future__ import annotations

import json

from checks import MODEL, TEXT, URL, WEATHER, check, run
from llm.default_plugins.openai_models import AsyncChat, Chat

SCHEMA = WEATHER["function"]["parameters"]
FIELDS = {"model_id": MODEL, "api_base": f"{URL}/v1", "supports_schema": True, "supports_tools": True}
chat = Chat(**FIELDS)
chat.key = "none"


@check
def prompt() -> None:
    whole = chat.prompt(TEXT, stream=False, max_tokens=8, seed=1)
    assert whole.text() == "".join(chat.prompt(TEXT, stream=True, max_tokens=8, seed=1)) != ""
    assert whole.usage().output == 8


@check
def conversation() -> None:
    told = chat.conversation()
    assert told.prompt(TEXT, stream=False, max_tokens=8).text()
    assert told.prompt("And then?", stream=False, max_tokens=8).text()


@check
def schema() -> None:
    answer = chat.prompt(TEXT, stream=False, schema=SCHEMA, max_tokens=300)
    assert set(json.loads(answer.text())) == {"city", "days"}


@check
async def asynchronous() -> None:
    own = AsyncChat(**FIELDS)
    own.key = "none"
    assert await own.prompt(TEXT, stream=False, max_tokens=8).text()


run("llm", "openai")
