"""Paths of OpenAI's API that make sound and pictures, which are answered with an error that names the reason."""

from __future__ import annotations

from fastapi import APIRouter

from actorllm.server.envelope import ApiError

router = APIRouter(include_in_schema=False)

PATHS = (
    "audio/speech",
    "images/generations",
    "images/edits",
    "images/variations",
)


async def refuse() -> None:
    raise ApiError(404, "no model of this server makes sound or pictures; those for text are at /v1/chat/completions")


for path in PATHS:
    router.add_api_route(f"/v1/{path}", refuse, methods=["POST"])
