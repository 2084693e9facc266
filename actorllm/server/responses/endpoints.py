"""The paths of `/v1/responses`: make one, get it, read its stream again, cancel it, forget it.

A response in the background outlives its readers (`outliving`), and so does a stream that is asked for with `resume_for`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from actorllm.server.asking import answer_of
from actorllm.server.envelope import ApiError
from actorllm.server.operations import JSONResponse, read_admitted, state_of, takes
from actorllm.server.outliving.elsewhere import KeptElsewhere
from actorllm.server.outliving.reader import Reader
from actorllm.server.outliving.streams import begin, found, outlive, read_on
from actorllm.server.output_items import messages_of
from actorllm.server.responses.kept import KeptResponse, KeptResponses
from actorllm.server.responses.request import AskedResponse, ResponsesRequest, ask
from actorllm.server.responses.shape import ResponsesShape

router = APIRouter()

MAX_LISTED = 100
"""Items of an input that are listed at a time."""


@router.post("/v1/responses", openapi_extra=takes(ResponsesRequest))
async def respond(request: Request) -> Response:
    """Answer an input, as text or as items."""
    state = state_of(request)
    body = await read_admitted(request, ResponsesRequest)
    earlier = await _earlier(request, body)
    told = partial(ask, responses=state.responses, earlier=earlier)
    answer, asked = await answer_of(request, ResponsesRequest, told, "input", body=body)
    shape = asked.shape
    assert isinstance(asked, AskedResponse)
    assert isinstance(shape, ResponsesShape)
    kept = asked.kept
    if kept is None:
        return answer
    shape.on_end = partial(_keep, state.responses, kept)
    if not kept.outlives:
        return answer
    if not kept.is_background:
        return await outlive(request, answer, asked, kept, is_asked=body.resume_for is not None)
    begin(state, answer, shape, request.scope, kept)
    headers = {"x-request-id": kept.id, **asked.extras.headers()}
    if asked.wants_stream:
        return Reader(kept, -1, headers)
    return JSONResponse(kept.response, headers=headers)


async def _earlier(request: Request, body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation that the request goes on from. Raises ApiError."""
    name, field = body.previous_response_id, "previous_response_id"
    if name is None:
        return []
    try:
        kept = await found(request, name)
    except ApiError as error:
        raise ApiError(error.status, error.message.replace("response_id", field, 1), field) from error
    if not kept.has_ended:
        raise ApiError(400, f"{field}: {name!r:.80} has not ended yet", field)
    conversation = await kept.part("conversation")
    if not conversation:
        told = f"{field}: the conversation of {name!r:.80} is too long to be kept; send it as input"
        raise ApiError(400, told, field)
    messages: list[dict[str, Any]] = orjson.loads(conversation)
    return messages


@router.get("/v1/responses/{name}")
async def get_response(request: Request, name: str) -> Response:
    """A kept response; with stream=true the events of one that outlives its readers, after `starting_after` or `Last-Event-ID`."""
    if request.query_params.get("stream", "false").lower() in ("true", "1"):
        return await read_on(request, name)
    return JSONResponse(await (await found(request, name)).part("response"))


@router.get("/v1/responses/{name}/input_items")
async def list_input_items(request: Request, name: str) -> Response:
    """What a kept response was given as input, without what `previous_response_id` put before it. Query: limit, order, after."""
    kept = await found(request, name)
    query = request.query_params
    text, order = query.get("limit", "20"), query.get("order", "desc")
    if not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= MAX_LISTED):
        raise ApiError(400, f"limit={text!r:.40} must be between 1 and {MAX_LISTED}", "limit")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order={order!r:.40} must be 'asc' or 'desc'", "order")
    given = await kept.part("input_items")
    if not given:
        raise ApiError(404, f"response_id: the input of {kept.id!r:.80} was too long to be kept", "response_id")
    items = orjson.loads(given)
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
    kept = await found(request, name)
    if not kept.is_background:
        raise ApiError(400, "only responses with background=true can be cancelled", "response_id")
    await kept.cancel()
    return JSONResponse(await kept.part("response"))


@router.delete("/v1/responses/{name}")
async def delete(request: Request, name: str) -> Response:
    """Forget a response."""
    kept = await found(request, name)
    if isinstance(kept, KeptElsewhere):
        await kept.forget()
    else:
        state_of(request).responses.forget_asked(kept)
    return JSONResponse({"id": kept.id, "object": "response", "deleted": True})


def _keep(responses: KeptResponses, kept: KeptResponse, tree: dict[str, Any]) -> None:
    """A response has ended: it is kept with its conversation."""
    if kept.is_cancelled and tree["status"] == "incomplete" and tree["incomplete_details"] is None:
        tree["status"] = "cancelled"
    kept.answer(messages_of(tree["output"]))
    kept.response = orjson.dumps(tree)
    if not kept.outlives and kept.is_stored:
        responses.add(kept)
