"""Paths of OpenAI's API for sound and pictures, which are answered with an error that names the reason."""

from __future__ import annotations

from fastapi import APIRouter

from actorllm.server.envelope import ApiError

router = APIRouter(include_in_schema=False)

PATHS = (
    "audio/transcriptions",
    "audio/translations",
    "audio/speech",
    "images/generations",
    "images/edits",
    "images/variations",
)


async def refuse() -> None:
    raise ApiError(404, "this server has a model for text only: it takes and makes neither sound nor pictures")


for path in PATHS:
    router.add_api_route(f"/v1/{path}", refuse, methods=["POST"])
