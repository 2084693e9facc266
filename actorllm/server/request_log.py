"""The id of the request that a line of the log is about, and a line per request on demand.

Whatever is logged while a request is answered carries its id (`RequestIdFilter`): our lines and the web server's access log. The
lines of an application that this one is mounted into carry it, too, if that application puts the filter on its handlers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar

from actorllm.types.outputs import RequestOutput

logger = logging.getLogger(__name__)

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id that the client was told; empty outside of a request."""


class RequestIdFilter(logging.Filter):
    """Gives every record `request_id`, and `request` to be put before a message: "[id] " or nothing."""

    def filter(self, record: logging.LogRecord) -> bool:
        name = request_id.get()
        record.__dict__ |= {"request_id": name, "request": f"[{name}] " if name else ""}
        return True


def log_request(path: str, seconds: float, outputs: Sequence[RequestOutput], error: Exception | None) -> None:
    """One line about a request that has ended. outputs: as in `Tracing.record`."""
    if error is not None:
        logger.info("%s: %s: %s", path, type(error).__name__, _on_one_line(str(error)))
    elif not outputs:
        logger.info("%s: the client left after %.3f s", path, seconds)
    else:
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        metrics = [output.metrics for output in outputs if output.metrics is not None]
        first = max((one.first_token_latency for one in metrics), default=0.0)
        reasons = [str(one.finish_reason) for output in outputs for one in output.outputs if one.finish_reason]
        num_output = sum(one.num_generation_tokens for one in metrics)
        words = ("%s: %d prompt tokens, %d output tokens (%s), first token after %.3f s, %.3f s in all",)
        logger.info(*words, path, num_prompt, num_output, ", ".join(reasons), first, seconds)


def _on_one_line(text: str) -> str:
    """What clients wrote may be in it: it must not begin a line of its own, nor tell a terminal what to do."""
    return "".join([c if c.isprintable() else " " for c in text])
