"""anthropic: messages whole and streamed, tools, and tokens counted."""

from __future__ import annotations

import anthropic
from checks import MESSAGES, MODEL, URL, WEATHER, check, run

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
TOOL = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}


@check
def message() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=8, messages=MESSAGES)
    assert answer.content[0].text
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 8)


@check
def streamed() -> None:
    with client.messages.stream(model=MODEL, max_tokens=8, messages=MESSAGES) as stream:
        pieces = list(stream.text_stream)
        whole = stream.get_final_message()
    assert "".join(pieces) == whole.content[0].text
    assert whole.usage.output_tokens == 8


@check
def tools() -> None:
    answer = client.messages.create(
        model=MODEL, max_tokens=300, messages=MESSAGES, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}
    )
    call = next(block for block in answer.content if block.type == "tool_use")
    assert set(call.input) == {"city", "days"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(model=MODEL, max_tokens=8, messages=turns, tools=[TOOL]).usage.input_tokens > 0


@check
def streamed_tools() -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=300, messages=MESSAGES, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}
    ) as stream:
        whole = stream.get_final_message()
    assert whole.stop_reason == "tool_use"
    assert set(next(block for block in whole.content if block.type == "tool_use").input) == {"city", "days"}


@check
async def asynchronous() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0) as own:
        assert (await own.messages.create(model=MODEL, max_tokens=8, messages=MESSAGES)).content


@check
def counted() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 0


@check
def errors() -> None:
    try:
        client.messages.create(model=MODEL, max_tokens=0, messages=MESSAGES)
    except anthropic.BadRequestError as error:
        assert "max_tokens" in str(error)
    else:
        raise AssertionError("no error")


run("anthropic")
