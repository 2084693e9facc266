"""LlamaIndex: its model for servers like this one, whole, streamed and asynchronous, with a tool that must be called."""

from typing import Literal

from checks import MODEL, TEXT, URL, check, run
from llama_index.core.llms import ChatMessage
from llama_index.core.program.function_program import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


def model(max_tokens: int = 8) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=f"{URL}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=max_tokens,
        max_retries=0,
        context_window=1024,
        temperature=0,
    )


ASKED = [ChatMessage(role="user", content=TEXT)]


@check
def chat() -> None:
    whole = model().chat(ASKED)
    pieces = [piece.delta for piece in model().stream_chat(ASKED)]
    assert "".join(pieces) == whole.message.content != ""


@check
def completion() -> None:
    plain = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=False, max_tokens=8)
    assert plain.complete(TEXT).text
    assert [piece.delta for piece in plain.stream_complete(TEXT)]


@check
async def asynchronous() -> None:
    assert (await model().achat(ASKED)).message.content


@check
def tools() -> None:
    def weather(city: Literal["Berlin", "Paris"]) -> str:
        """The weather of a city."""
        return "sunny"

    tool = FunctionTool.from_defaults(weather)
    answer = model(300).chat_with_tools([tool], user_msg=TEXT, tool_required=True)
    (call, *_) = model(300).get_tool_calls_from_response(answer)
    assert call.tool_kwargs["city"] in ("Berlin", "Paris")


class Answer(BaseModel):
    """Where, and how warm."""

    city: Literal["Berlin", "Paris"]
    is_warm: bool


@check
def typed() -> None:
    answer = model(300).as_structured_llm(Answer).chat(ASKED)
    assert isinstance(answer.raw, Answer)


run("llama-index-llms-openai-like", "llama-index-core", "openai")
