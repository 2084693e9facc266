"""`POST /v1/chat/completions/batch`: several conversations in one body, and a choice for each in the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from actorllm.errors import InvalidParameterError
from actorllm.server import chat
from actorllm.server.asking import answer_of
from actorllm.server.batch import Portions
from actorllm.server.completions import Asked
from actorllm.server.envelope import ApiError
from actorllm.server.operations import takes
from actorllm.server.protocol import ChatCompletionRequest, Generation, Messages, checked
from actorllm.server.sampling import Defaults
from actorllm.text.reasoning.parsers import ReasoningParser
from actorllm.types.outputs import CompletionOutput, RequestOutput
from actorllm.types.params import MAX_N

router = APIRouter()

NOT_HERE = ("stream", "stream_options", "tools", "use_beam_search", "prompt_logprobs", "echo", "resume_for")
"""Fields of one conversation; empty ones ask for nothing."""


class BatchChatRequest(Generation):
    """`POST /v1/chat/completions/batch`. Every field beside the messages is that of a chat."""

    messages: Annotated[list[Messages], Field(fail_fast=True, min_length=1, max_length=MAX_N)]


@router.post("/v1/chat/completions/batch", openapi_extra=takes(BatchChatRequest))
async def converse(request: Request) -> Response:
    """Answer each of several conversations."""
    answer, _ = await answer_of(request, BatchChatRequest, ask, "messages")
    return answer


async def ask(
    body: BatchChatRequest,
    headers: Mapping[str, str],
    defaults: Defaults,
    model: str,
    decode: Callable[[list[int]], str],
) -> Asked:
    """Raises ApiError, InvalidParameterError and InvalidPromptError."""
    given = {**(body.model_extra or {}), **body.given()}
    for name in NOT_HERE:
        if given.get(name):
            raise ApiError(400, f"{name} is not supported for several conversations; leave it out", name)
    if given.get("n", 1) != 1:
        raise InvalidParameterError(f"n={body.n} must be 1: there is a choice for each conversation")
    # All fields beside the messages are checked once, with the first conversation.
    one = checked(ChatCompletionRequest, {**given, "messages": body.messages[0]})
    first = chat.ask(one, headers, defaults, model, decode)
    prompts = first.prompts
    portions = Portions()
    for messages in body.messages[1:]:
        one.messages = messages
        prompts.append(chat.prompt_of(one, defaults)[1])
        await portions.count()
    assert isinstance(first.shape, chat.ChatShape)
    shape = BatchShape(first.shape.view, len(prompts), 1, first.extras.slo, decode, body.request_id)
    shape.read_as(first.shape)

    def reasoning_of(number: int) -> Callable[[str], ReasoningParser] | None:
        one.messages = body.messages[number]
        return defaults.reasoning_of(one)

    shape.reasoning_of = reasoning_of
    return Asked(prompts, first.params, first.extras, shape, False)


class BatchShape(chat.ChatShape):
    """The end of each prompt says how its own answer begins."""

    reasoning_of: Callable[[int], Callable[[str], ReasoningParser] | None]
    """What makes a parser of thoughts for the conversation of this number."""

    def _whole_choice(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        if self._parts is not None and self.reasoning is not None:
            self.reasoning = self.reasoning_of(index)
            self._parts.read_by(self.reasoning)
        return super()._whole_choice(index, output, one)

    def _add_to_whole(self, tree: dict[str, Any], outputs: Any) -> None:
        """Ids of prompts stand nowhere: there are several."""
        tree |= {"prompt_logprobs": None, "prompt_token_ids": None}
