"""langchain-openai: chat and completion models, streamed, in batches, with tools."""

from __future__ import annotations

from checks import MODEL, TEXT, URL, WEATHER, check, needs_tools, run
from langchain_openai import ChatOpenAI, OpenAI

chat = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=8, seed=1, max_retries=0)


@check
def invoke() -> None:
    answer = chat.invoke(TEXT)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] == 8


@check
def stream() -> None:
    assert "".join(chunk.content for chunk in chat.stream(TEXT)) == chat.invoke(TEXT).content


@check
def batch() -> None:
    assert len(chat.batch([TEXT, "The king", "A fox"])) == 3


@check
def completion() -> None:
    model = OpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=8, max_retries=0)
    assert model.invoke(TEXT)
    assert "".join(model.stream(TEXT))


@check
async def asynchronous() -> None:
    assert (await chat.ainvoke(TEXT)).content


@check
def tools() -> None:
    needs_tools()
    model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=300, max_retries=0)
    answer = model.bind_tools([WEATHER], tool_choice="required").invoke(TEXT)
    assert answer.tool_calls[0]["name"] == "weather"


run("langchain-openai", "openai")
