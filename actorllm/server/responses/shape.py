"""`ResponsesShape`: one response as JSON, whole or as a stream of typed events.

Invariants of a stream: events are numbered from 0. created and in_progress come first. Each item and its part are announced once,
before the first text, and closed once. The last event is one of completed, incomplete and failed, and has the whole response.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import orjson

from actorllm.actors.frontend import Delta
from actorllm.server.item_shape import ItemShape
from actorllm.server.logprob_format import LogprobsView
from actorllm.server.output_items import Event, OutputItems
from actorllm.server.random_names import random_name
from actorllm.server.shape import metrics_of
from actorllm.types.objective import SLO
from actorllm.types.outputs import CompletionOutput

DELTA_HEAD = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":'  # and the number

FAILURES = {
    **dict.fromkeys(("BadRequestError", "invalid_request_error"), "invalid_prompt"),
    **dict.fromkeys(("RateLimitError", "requests"), "rate_limit_exceeded"),
}
"""The code of a failed response, by the type of the error in either format of the envelope."""


class ResponsesShape(ItemShape):
    CONTENT_TYPE = b"text/event-stream; charset=utf-8"

    on_end: Callable[[dict[str, Any]], None] | None = None
    """Is given the whole response before it is written."""

    def __init__(
        self,
        name: str | None,
        told: Mapping[str, Any],
        logprobs: LogprobsView | None,
        items: OutputItems,
        slo: SLO | None,
        has_metrics: bool,
    ) -> None:
        """name: what the client calls the request. told: what a response repeats of it."""
        super().__init__(f"resp_{name or random_name()}", items)
        self._created = int(time.time())
        self._told = told
        self._logprobs = logprobs
        self.is_plain = logprobs is None and items.is_plain
        self._slo = slo
        self._has_metrics = has_metrics
        self._num_events = 0
        self._delta = b'"item_id":%b,"output_index":0,"content_index":0,"delta":' % orjson.dumps(self._items.first_id)

    def _tree(self, one: CompletionOutput) -> bytes:
        return orjson.dumps(self._ended(one))

    def _ending(self, one: CompletionOutput) -> list[bytes]:
        tree = self._ended(one)
        kind = "completed" if tree["status"] == "completed" else "incomplete"
        return self._written([(f"response.{kind}", {"response": tree})])

    def plain_events(self, number: int, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        text = self._noted(deltas)
        number = self._num_events
        self._num_events += 1
        return b'%b%d,%b%b,"logprobs":[]}\n\n' % (DELTA_HEAD, number, self._delta, orjson.dumps(text))

    def failure(self, body: bytes) -> bytes:
        """body: the error as in OpenAI's envelope."""
        error = orjson.loads(body)["error"]
        told = {"code": FAILURES.get(error["type"], "server_error"), "message": error["message"]}
        tree = self.response("failed", error=told)
        if self.on_end is not None:
            self.on_end(tree)
        return b"".join(self._written([("response.failed", {"response": tree})]))

    def _written(self, events: Iterable[Event]) -> list[bytes]:
        made = []
        for kind, fields in events:
            data = orjson.dumps({"type": kind, "sequence_number": self._num_events, **fields})
            made.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
            self._num_events += 1
        return made

    def _opening(self) -> list[bytes]:
        begun = self.response("in_progress")
        announced: list[Event] = [(f"response.{kind}", {"response": begun}) for kind in ("created", "in_progress")]
        return self._written([*announced, *self._items.begin(self._state.ids)])

    def _logprobs_of(self, one: CompletionOutput) -> list[Any]:
        if self._logprobs is None:
            return []
        positions = list(zip(one.token_ids, one.logprobs or (), strict=True))
        content: list[Any] = self._logprobs.of_message(positions)["content"]
        return content

    def _see(self, one: CompletionOutput) -> None:
        self._items.count(one.token_ids, one.finish_reason is not None)

    def _is_whole(self, one: CompletionOutput) -> bool:
        return one.finish_reason not in ("length", "abort")

    def _ended(self, one: CompletionOutput) -> dict[str, Any]:
        """The response at its end."""
        reason = {"length": "max_output_tokens"}.get(str(one.finish_reason))
        status = "completed" if self._is_whole(one) else "incomplete"
        details = {"reason": reason} if reason is not None else None
        tree = self.response(status, incomplete_details=details, usage=self._usage())
        if self.on_end is not None:
            self.on_end(tree)
        return tree

    def _usage(self) -> dict[str, Any]:
        num_input, num_output = len(self._state.ids), self._state.num_output
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": self._state.num_cached, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._items.num_thought},
            "total_tokens": num_input + num_output,
        }

    def response(self, status: str, **fields: Any) -> dict[str, Any]:
        """The response as it is now."""
        is_over = status not in ("queued", "in_progress")
        tree = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._items.shown if is_over else [],
            "usage": None,
            **self._told,
            **fields,
        }
        if self._has_metrics and self._state.metrics is not None:
            tree["metrics"] = metrics_of(self._state, self._slo)
        return tree
