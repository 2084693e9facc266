"""The streams of `/v1/chat/completions` and `/v1/completions` that outlive their readers: read on by their ids."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from actorllm.server.envelope import ApiError
from actorllm.server.outliving.streams import read_on

router = APIRouter()


@router.get("/v1/chat/completions/{name}")
async def read_chat(request: Request, name: str) -> Response:
    """With stream=true: the events of a streamed chat that was asked for with `resume_for`."""
    return await _read(request, name)


@router.get("/v1/completions/{name}")
async def read_completion(request: Request, name: str) -> Response:
    """As that of a chat."""
    return await _read(request, name)


async def _read(request: Request, name: str) -> Response:
    if request.query_params.get("stream", "false").lower() not in ("true", "1"):
        told = "completions are not stored; stream=true reads a stream on that was asked for with resume_for"
        raise ApiError(400, told, "stream")
    return await read_on(request, name)
