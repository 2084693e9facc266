"""The paths of `/v1/responses`: make one, get it, read its stream again, cancel it, forget it.

A response in the background is an ordinary streamed answer whose client is a record of it (`EventRecorder`). It goes on
without readers. A reader gets what is recorded, from any number on, and waits for more.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import orjson
from fastapi import APIRouter, Request, Response
from starlette.types import Message, Receive, Scope, Send

from actorllm.actors.engine_thread import HostLoop
from actorllm.server.answer import Answer
from actorllm.server.asking import answer_of
from actorllm.server.envelope import ApiError
from actorllm.server.operations import JSONResponse, state_of, takes
from actorllm.server.output_items import messages_of
from actorllm.server.responses.kept import KeptResponse, KeptResponses
from actorllm.server.responses.request import AskedResponse, ResponsesRequest, ask
from actorllm.server.responses.shape import ResponsesShape
from actorllm.server.state import ServerState

router = APIRouter()

MAX_LISTED = 100
"""Items of an input that are listed at a time."""


def _kept(state: ServerState) -> KeptResponses | None:
    """None: another API process may answer the next request."""
    return None if state.has_peers else state.responses


def _found(request: Request, name: str) -> KeptResponse:
    return state_of(request).responses.find(name)


@router.post("/v1/responses", openapi_extra=takes(ResponsesRequest))
async def respond(request: Request) -> Response:
    """Answer an input, as text or as items."""
    state = state_of(request)
    answer, asked = await answer_of(request, ResponsesRequest, partial(ask, responses=_kept(state)), "input")
    shape = asked.shape
    assert isinstance(asked, AskedResponse)
    assert isinstance(shape, ResponsesShape)
    kept = asked.kept
    if kept is None:
        return answer
    shape.on_end = partial(_keep, state.responses, kept)
    if not kept.is_background:
        return answer
    try:
        state.responses.begin(kept)
    except ApiError:
        answer.abort()
        raise
    kept.abort = answer.abort
    write = partial(_write, answer, shape, request.scope, state.responses, kept)
    HostLoop.current().spawn(write, state.detached)
    headers = {"x-request-id": kept.id, **asked.extras.headers()}
    if asked.wants_stream:
        return Reader(kept, -1, headers)
    return JSONResponse(kept.response, headers=headers)


@router.get("/v1/responses/{name}")
async def get_response(request: Request, name: str) -> Response:
    """A kept response, or with stream=true the events of one in the background, after `starting_after` or `Last-Event-ID`."""
    kept = _found(request, name)
    query = request.query_params
    if query.get("stream", "false").lower() not in ("true", "1"):
        return JSONResponse(kept.response)
    if not kept.is_background:
        raise ApiError(400, "stream: only responses with background=true are streamed again", "stream")
    after = query.get("starting_after", request.headers.get("last-event-id", "-1"))
    try:
        number = int(after[:20])
    except ValueError:
        raise ApiError(400, f"starting_after={after!r:.80} must be the number of an event", "starting_after") from None
    kept.after(number)
    return Reader(kept, max(number, -1), {})


@router.get("/v1/responses/{name}/input_items")
async def list_input_items(request: Request, name: str) -> Response:
    """What a kept response was given as input, without what `previous_response_id` put before it. Query: limit, order, after."""
    kept = _found(request, name)
    query = request.query_params
    text, order = query.get("limit", "20"), query.get("order", "desc")
    if not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= MAX_LISTED):
        raise ApiError(400, f"limit={text!r:.40} must be between 1 and {MAX_LISTED}", "limit")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order={order!r:.40} must be 'asc' or 'desc'", "order")
    if not kept.input_items:
        raise ApiError(404, f"response_id: the input of {kept.id!r:.80} was too long to be kept", "response_id")
    items = orjson.loads(kept.input_items)
    if order == "desc":
        items.reverse()
    after = query.get("after")
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise ApiError(400, f"after={after!r:.80} is no item of this input", "after")
        items = items[places[0] + 1 :]
    shown = items[: int(text)]
    tree = {"object": "list", "data": shown, "has_more": len(items) > len(shown)}
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return JSONResponse({**tree, **ends})


@router.post("/v1/responses/{name}/cancel")
async def cancel(request: Request, name: str) -> Response:
    """End a response in the background; it has what there is."""
    kept = _found(request, name)
    if not kept.is_background:
        raise ApiError(400, "only responses with background=true can be cancelled", "response_id")
    if kept.ended_at is None:
        kept.is_cancelled = True
        kept.abort()
        await kept.wait_for_end()
    return JSONResponse(kept.response)


@router.delete("/v1/responses/{name}")
async def delete(request: Request, name: str) -> Response:
    """Forget a response."""
    kept = _found(request, name)
    state = state_of(request)
    if kept.ended_at is None:
        kept.abort()
    state.responses.forget(kept)
    return JSONResponse({"id": kept.id, "object": "response", "deleted": True})


def _keep(responses: KeptResponses, kept: KeptResponse, tree: dict[str, Any]) -> None:
    """A response has ended: it is kept with its conversation."""
    if kept.is_cancelled and tree["status"] == "incomplete" and tree["incomplete_details"] is None:
        tree["status"] = "cancelled"
    kept.answer(messages_of(tree["output"]))
    kept.response = orjson.dumps(tree)
    if not kept.is_background:
        responses.add(kept)


async def _write(
    answer: Answer, shape: ResponsesShape, scope: Scope, responses: KeptResponses, kept: KeptResponse
) -> None:
    """What a client would read, into the record. Nothing is raised."""
    recorder = EventRecorder(shape, kept)
    try:
        own = {key: scope[key] for key in ("type", "path", "headers", "method", "app")}
        await answer(own, recorder.receive, recorder.send)
    finally:
        if not recorder.is_whole:
            recorder.fail(orjson.dumps({"error": {"message": "the server is about to end", "code": 503}}))
        responses.add(kept)


class EventRecorder:
    """The client of an answer that goes on without one."""

    def __init__(self, shape: ResponsesShape, kept: KeptResponse) -> None:
        self._shape = shape
        self._kept = kept
        self._is_error = False
        self.is_whole = False

    async def receive(self) -> Message:
        await anyio.sleep_forever()
        raise AssertionError("it never leaves")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_error = message["status"] != 200
            return
        if self._is_error:
            self.fail(message["body"])
        else:
            if not message["more_body"]:
                self.is_whole = True
            self._kept.add(message["body"])

    def fail(self, body: bytes) -> None:
        """The answer is an error and no response: it becomes a failed one."""
        self.is_whole = True
        self._kept.add(self._shape.failure(body))


class Reader(Response):
    """The events of a response in the background, from one on, until its end."""

    def __init__(self, kept: KeptResponse, after: int, headers: dict[str, str]) -> None:
        self._kept = kept
        self._after = after
        self.background = None
        self.status_code = 200
        more = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        self.raw_headers = [(name.encode(), value.encode()) for name, value in {**more, **headers}.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch, receive, group.cancel_scope)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._read(send)
            group.cancel_scope.cancel()

    async def _read(self, send: Send) -> None:
        kept = self._kept
        while True:
            is_over = kept.ended_at is not None
            try:
                chunk, self._after = kept.after(self._after)
            except ApiError as error:  # this client reads more slowly than events come
                told = {"type": "error", "code": "server_error", "message": error.message, "param": None}
                event = orjson.dumps({**told, "sequence_number": self._after + 1})
                chunk, is_over = b"event: error\ndata: %b\n\n" % event, True
            if chunk or is_over:
                await send({"type": "http.response.body", "body": chunk, "more_body": not is_over})
            if is_over:
                return
            await kept.wait_behind(self._after)

    async def _watch(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()
