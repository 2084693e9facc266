"""`answer_of`: from an HTTP request for text to the `Answer` that goes back, in whichever API's words it was asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

from fastapi import Request

from actorllm.errors import ActorLLMError
from actorllm.server.answer import Answer, StreamedAnswer, WholeAnswer
from actorllm.server.batch import submitted
from actorllm.server.completions import Asked
from actorllm.server.copies import check_parameters
from actorllm.server.envelope import error_of
from actorllm.server.operations import read_admitted, state_of
from actorllm.server.protocol import Body
from actorllm.server.sampling import name_request
from actorllm.types.params import settled

B = TypeVar("B", bound=Body)
Ask: TypeAlias = Callable[..., Asked | Awaitable[Asked]]


async def read_named(request: Request, model: type[B], tag: str = "", body: Any = None) -> tuple[B, str]:
    """The body, with what it leaves to the server, and the name of its model. The arguments are those of `answer_of`.

    The server knows the templates of its model from then on. Raises ApiError.
    """
    state = state_of(request)
    if body is None:
        body = await read_admitted(request, model)
    name = state.check_model(body.model, tag)
    name_request(body, request.headers)
    state.defaults.fill(body)
    await state.know_templates()
    return body, name


async def answer_of(
    request: Request, model: type[B], ask: Ask, prompt_field: str, tag: str = "", body: Any = None
) -> tuple[Answer, Asked]:
    """model: of the body, which has `model` and `request_id`. ask: what the engine is asked, as `completions.ask`; it may wait.
    tag: what may stand behind a model's name. body: where it was read already.

    Raises ApiError, also for what the engine refuses at once.
    """
    state = state_of(request)
    headers = request.headers
    body, name = await read_named(request, model, tag, body)
    fields = model.model_fields
    try:
        told = ask(body, headers, state.defaults, name, state.decode)
        asked = await told if isinstance(told, Awaitable) else told
        asked.extras.arguments |= state.models.arguments_of(name, tag)
        check_parameters(len(asked.prompts), asked.params, state.engine.config.model.vocab_size, prompt_field)
        params = settled(asked.params)
        streams = await submitted(
            asked.prompts, lambda prompt: state.llm.generate(prompt, params, **asked.extras.arguments)
        )
    except (ActorLLMError, RecursionError) as error:
        raise error_of(error, fields, prompt_field, body.renamed()) from error
    more = {"x-request-id": asked.shape.id, **asked.extras.headers()}
    answer = StreamedAnswer if asked.is_streamed else WholeAnswer
    made = answer(state, asked.shape, streams, fields, prompt_field, more)
    made.params, made.renamed = asked.params, body.renamed()
    return made, asked
