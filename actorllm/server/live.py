"""The live page: one file without a build or a network, and what it asks for while it is visible.

`GET /` is the page, `GET /live` what it shows. The engine is asked when the page asks, once a second and only while it is
visible. A server whose page is not open does nothing for it.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request, Response

from actorllm import __version__
from actorllm.actors.engine_thread import HostLoop
from actorllm.errors import InvalidParameterError
from actorllm.server.operations import JSONResponse, state_of

router = APIRouter()

MAX_REQUESTS = 100
"""So many running and so many waiting ones are listed."""


@functools.cache
def _page() -> bytes:
    return (resources.files("actorllm.server") / "live.html").read_bytes()


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The live page, for a browser."""
    policy = (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
    )
    headers = {"content-security-policy": policy, "cache-control": "no-cache", "x-content-type-options": "nosniff"}
    return Response(_page(), media_type="text/html; charset=utf-8", headers=headers)


@router.get("/live")
async def live(request: Request) -> Response:
    """What the engine does now. Query: after=N for the steps behind N only, the newest if there are many."""
    state = state_of(request)
    text = request.query_params.get("after", "0")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InvalidParameterError(f"after={text!r:.40} must be the number of a step")
    model = state.engine.config.model
    tree: dict[str, Any] = {
        "model": state.model_names[0],
        "version": __version__,
        "max_model_len": model.max_model_len,
        "num_in_flight": state.num_in_flight,
        "num_api_processes": state.board.num_rows,
        "is_draining": state.is_draining,
        "state": state.engine.health().state,
        "engine": None,
    }
    if not state.engine.is_new:  # an engine without a request so far is not started to be looked at
        asked = state.engine.ask_scheduler("live", after=int(text), at_most=MAX_REQUESTS)
        tree["engine"] = await HostLoop.current().result_of(asked)
    return JSONResponse(tree)
