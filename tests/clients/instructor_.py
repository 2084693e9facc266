"""instructor: models by a named tool, and by a JSON schema."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from checks import MESSAGES, MODEL, URL, check, needs_tools, run
from pydantic import BaseModel


class Answer(BaseModel, extra="forbid"):  # else any number of other fields may follow, and a storyteller has many
    city: Literal["Berlin", "Paris"]
    is_warm: bool


def ask(mode: instructor.Mode) -> Answer:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)
    return client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_model=Answer, max_tokens=300, max_retries=0
    )


@check
def plain_text() -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none"))
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, response_model=None, max_tokens=8)
    assert answer.choices[0].message.content


@check
def by_tool() -> None:
    needs_tools()
    assert isinstance(ask(instructor.Mode.TOOLS), Answer)


@check
def by_schema() -> None:
    needs_tools()
    assert isinstance(ask(instructor.Mode.JSON_SCHEMA), Answer)


run("instructor", "openai")
