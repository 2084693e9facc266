"""`POST /start_profile` and `/stop_profile`: traces of the workers. They are there where the engine has a `profiler_config`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from actorllm.server.operations import state_of

router = APIRouter()


@router.post("/start_profile")
async def start_profile(request: Request) -> Response:
    """Begin to record what the workers do. Query: profile_prefix=NAME, what the names of the files begin with."""
    await state_of(request).llm.start_profile(request.query_params.get("profile_prefix"))
    return Response()


@router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """Write the traces, one file per rank."""
    await state_of(request).llm.stop_profile()
    return Response()
