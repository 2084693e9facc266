"""The life of a stream that outlives its readers: it begins, goes on without them for a while, and is kept for a while.

A request asks for it with `resume_for`, in seconds, or the server does for all streams (`resume_streams_for`). Without readers for
so long, the request is aborted as that of a client that left. Its events are kept for so long after its end. By default there is
none of this: a client that leaves ends its request at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio
from fastapi import Request
from starlette.responses import Response
from starlette.types import Scope

from actorllm.actors.engine_thread import HostLoop
from actorllm.server.answer import Answer
from actorllm.server.asking import answer_of
from actorllm.server.completions import Asked
from actorllm.server.envelope import ApiError
from actorllm.server.operations import read_admitted, state_of
from actorllm.server.outliving.elsewhere import KeptElsewhere
from actorllm.server.outliving.reader import EventRecorder, Reader
from actorllm.server.outliving.resume import resume_for
from actorllm.server.protocol import ResumableBody
from actorllm.server.responses.kept import KeptResponse
from actorllm.server.shape import Shape
from actorllm.server.state import ServerState

B = TypeVar("B", bound=ResumableBody)

RESUME_HEADER = "x-actorllm-resume-for"
"""Of a response: how many seconds its stream goes on without a reader."""


async def answered(request: Request, model: type[B], ask: Callable[..., Asked], prompt_field: str) -> Response:
    """What `answer_of` gives; a stream that is to outlive its readers does. Raises ApiError."""
    body, state = await read_admitted(request, model), state_of(request)
    seconds = resume_for(body, state.defaults, state.responses)
    answer, asked = await answer_of(request, model, ask, prompt_field, body=body)
    if not seconds:
        return answer
    kept = KeptResponse(asked.shape.id, None, b"", is_background=False, resume_for=seconds, is_stored=False)
    return await outlive(request, answer, asked, kept, is_asked=body.resume_for is not None)


async def outlive(request: Request, answer: Answer, asked: Asked, kept: KeptResponse, *, is_asked: bool) -> Response:
    """Begin the stream; the first reader is the client that asked for it.

    is_asked: by that client, and not by the server for all streams, of which those are answered as others that find no place.
    Raises ApiError: there are too many, or one of this name.
    """
    state = state_of(request)
    if not is_asked and not state.responses.may_begin(kept):  # others have begun since it was looked up
        kept.resume_for = None
        return answer
    recorder = begin(state, answer, asked.shape, request.scope, kept)
    headers = {"x-request-id": kept.id, RESUME_HEADER: f"{kept.resume_for:g}", **asked.extras.headers()}
    # The status is decided by the first output, as in other answers. A client that leaves before that does not read.
    left = partial(_until_left, request)
    with kept.being_read():
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                await left()
                group.cancel_scope.cancel()

            group.start_soon(wait)
            await recorder.has_begun.wait()
            group.cancel_scope.cancel()
        return recorder.refused or Reader(kept, -1, headers)


async def _until_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def begin(state: ServerState, answer: Answer, shape: Shape, scope: Scope, kept: KeptResponse) -> EventRecorder:
    """Have an answer written into a record. Raises ApiError: there are too many, or one of this name."""
    try:
        state.responses.begin(kept)
    except ApiError:
        answer.abort()
        raise
    kept.abort = answer.abort
    recorder = EventRecorder(shape, kept, tells_refusals=not kept.is_background)
    HostLoop.current().spawn(partial(_write, state, answer, recorder, scope, kept), state.detached)
    return recorder


async def _write(state: ServerState, answer: Answer, recorder: EventRecorder, scope: Scope, kept: KeptResponse) -> None:
    """What a client would read, into the record. Nothing is raised."""

    async def give_up() -> None:
        assert kept.resume_for is not None
        await kept.wait_unread(kept.resume_for)
        answer.abort()

    try:
        own = {key: scope[key] for key in ("type", "path", "headers", "method", "app")}
        async with anyio.create_task_group() as group:
            if kept.resume_for is not None:
                group.start_soon(give_up)
            await answer(own, recorder.receive, recorder.send)
            group.cancel_scope.cancel()
    finally:
        recorder.end()
        if recorder.refused is None:
            state.responses.add(kept)
        else:
            state.responses.drop(kept)


async def found(request: Request, name: str, *, is_read: bool = False) -> KeptResponse | KeptElsewhere:
    """What is kept by this name, here or in another API process. is_read: as a stream. Raises ApiError."""
    state = state_of(request)
    kept = state.responses.get(name, is_read=is_read)
    if kept is not None:
        return kept
    elsewhere = await KeptElsewhere.find(state.peers, name, is_read=is_read) if state.has_peers else None
    return elsewhere or state.responses.find(name, is_read=is_read)


async def read_on(request: Request, name: str) -> Response:
    """The events of a stream behind `starting_after` or `Last-Event-ID`. Raises ApiError."""
    kept = await found(request, name, is_read=True)
    if not kept.outlives:
        told = "stream: only responses with background=true, and streams with resume_for, are streamed again"
        raise ApiError(400, told, "stream")
    after = request.query_params.get("starting_after", request.headers.get("last-event-id", "-1"))
    try:
        number = max(int(after[:20]), -1)
    except ValueError:
        raise ApiError(400, f"starting_after={after!r:.80} must be the number of an event", "starting_after") from None
    await kept.check_after(number)
    return Reader(kept, number, {})
