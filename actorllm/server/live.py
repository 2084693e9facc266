"""The page: files of the package (`page/`) without a build or another host, and what it asks for while it is visible.

`GET /` is the page, `GET /page/...` its style and scripts, `GET /live` what it shows. The engine is asked when the page asks,
once a second and only while it is visible. A server whose page is not open does nothing for it.
"""

from __future__ import annotations

import functools
import re
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request, Response

from actorllm import __version__
from actorllm.actors.engine_thread import HostLoop
from actorllm.errors import InvalidParameterError
from actorllm.server.envelope import ApiError
from actorllm.server.operations import JSONResponse, state_of

router = APIRouter()

OWN_FRONTEND = "0"
"""Of the process that owns the engine; requests of other programs have names that only these know."""
MAX_REQUESTS = 100
"""So many running and so many waiting ones are listed."""


KINDS = {"page.css": "text/css", "live.js": "text/javascript", "chat.js": "text/javascript"}
"""The files of the page beside index.html."""

POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
POLICY += "form-action 'self'; frame-ancestors 'none'"
HEADERS = {"content-security-policy": POLICY, "cache-control": "no-cache", "x-content-type-options": "nosniff"}


@functools.cache
def _file(name: str) -> bytes:
    return (resources.files("actorllm.server") / "page" / name).read_bytes()


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The page, for a browser."""
    return Response(_file("index.html"), media_type="text/html; charset=utf-8", headers=HEADERS)


@router.get("/page/{name}", include_in_schema=False)
async def part(name: str) -> Response:
    """A file of the page."""
    if name not in KINDS:
        raise ApiError(404, f"the page has no file {name!r:.80}")
    return Response(_file(name), media_type=f"{KINDS[name]}; charset=utf-8", headers=HEADERS)


@router.get("/live")
async def live(request: Request) -> Response:
    """What the engine does now.

    Query: after=N for the steps behind N only, the newest if there are many; after=R.N,R.N with a number for each replica.
    """
    state = state_of(request)
    after = _after(request.query_params.get("after", "0"))
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
        asked = state.engine.look(after, MAX_REQUESTS)
        tree["engine"] = engine = await HostLoop.current().result_of(asked)
        names = {} if state.has_peers else state.names_by_number()
        for one in (*engine["requests"]["running"], *engine["requests"]["waiting"]):
            frontend, _, number = one["id"].partition(".")
            one["name"] = names.get(int(number)) if frontend == OWN_FRONTEND else None
    return JSONResponse(tree)


def _after(text: str) -> dict[int, int]:
    """The last step that the page knows, by replica. Raises InvalidParameterError."""
    if re.fullmatch(r"[0-9]{1,18}", text):
        return {0: int(text)}
    if not re.fullmatch(r"[0-9]{1,2}\.[0-9]{1,18}(,[0-9]{1,2}\.[0-9]{1,18}){0,63}", text):
        raise InvalidParameterError(
            f"after={text!r:.40} must be the number of a step, or 0.N,1.N with one for each replica"
        )
    return {int(number): int(step) for number, _, step in (one.partition(".") for one in text.split(","))}
