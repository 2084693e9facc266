"""`answer_of`: from an HTTP request for text to the `Answer` that goes back, in whichever API's words it was asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from actorllm.errors import ActorLLMError
from actorllm.server.answer import Answer, StreamedAnswer, WholeAnswer
from actorllm.server.batch import submitted
from actorllm.server.completions import Asked
from actorllm.server.envelope import error_of
from actorllm.server.operations import read_admitted, state_of
from actorllm.server.protocol import Generation
from actorllm.server.sampling import name_request

G = TypeVar("G", bound=Generation)


async def answer_of(
    request: Request, model: type[G], ask: Callable[..., Asked], prompt_field: str, body: G | None = None
) -> tuple[Answer, Asked]:
    """model: of the body. ask: what the engine is asked, as `completions.ask`. body: where it was read already.

    Raises ApiError, also for what the engine refuses at once.
    """
    state = state_of(request)
    headers = request.headers
    body = await read_admitted(request, model) if body is None else body
    name = state.check_model(body.model)
    name_request(body, headers)
    fields = model.model_fields
    try:
        asked = ask(body, headers, state.defaults, name, state.decode)
        streams = await submitted(
            asked.prompts, lambda prompt: state.llm.generate(prompt, asked.params, **asked.extras.arguments)
        )
    except (ActorLLMError, RecursionError) as error:
        raise error_of(error, fields, prompt_field, body.renamed()) from error
    told = {"x-request-id": asked.shape.id, **asked.extras.headers()}
    answer = StreamedAnswer if asked.is_streamed else WholeAnswer
    made = answer(state, asked.shape, streams, fields, prompt_field, told)
    made.params, made.renamed = asked.params, body.renamed()
    return made, asked
