"""`resume_for`: for how long the stream of a request outlives its readers."""

from __future__ import annotations

from actorllm.server.answer_options import MAX_RESUME_S
from actorllm.server.envelope import ApiError
from actorllm.server.protocol import ResumableBody
from actorllm.server.responses.kept import KeptResponses
from actorllm.server.sampling import Defaults


def resume_for(body: ResumableBody, defaults: Defaults, responses: KeptResponses) -> float:
    """In seconds; 0: not at all, as for a stream that did not ask for it where there is no room for more. Raises ApiError."""
    asked = body.resume_for
    if asked is None:
        seconds = defaults.answers.resume_streams_for if body.stream else 0.0
        return seconds if seconds and responses.has_room(is_background=False) else 0.0
    if not 0 <= asked <= MAX_RESUME_S:
        raise ApiError(400, f"resume_for={asked!r:.40} must be between 0 and {MAX_RESUME_S:g} seconds", "resume_for")
    if asked and not body.stream:
        raise ApiError(400, "resume_for is for streams; ask for one with stream=true, or leave it out", "resume_for")
    return asked
