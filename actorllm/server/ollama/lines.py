"""`ChatLines` and `TextLines`: answers of Ollama's API, whole or as a line of JSON for each piece. Times are nanoseconds."""

from __future__ import annotations

import datetime
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from actorllm.actors.frontend import Delta
from actorllm.server.item_shape import ItemShape
from actorllm.server.output_items import Event, OutputItems
from actorllm.server.random_names import random_name
from actorllm.types.outputs import CompletionOutput

DONE_REASONS = {"length": "length", "abort": "stop"}


def timestamp() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


class Lines(ItemShape):
    CONTENT_TYPE = b"application/x-ndjson"

    def __init__(self, name: str | None, model: str, items: OutputItems) -> None:
        """name: what the client calls the request. items: of its output."""
        super().__init__(f"ollama-{name or random_name()}", items)
        self._model = model

    @abstractmethod
    def _piece(self, text: str, calls: list[Any] | None = None, thinking: str | None = None) -> dict[str, Any]:
        """What a line says beside its head."""

    def _tree(self, one: CompletionOutput) -> bytes:
        texts = [item["content"][0]["text"] for item in self._items.done if item["type"] == "message"]
        calls = [_call(item) for item in self._items.done if item["type"] == "function_call"]
        thoughts = [item["content"][0]["text"] for item in self._items.done if item["type"] == "reasoning"]
        piece = self._piece("".join(texts), calls or None, "".join(thoughts) or None)
        return self._line(piece, self._end(one))

    def _ending(self, one: CompletionOutput) -> list[bytes]:
        return [self._line(self._piece(""), self._end(one)) + b"\n"]

    def plain_events(self, number: int, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        return self._line(self._piece(self._noted(deltas)), {"done": False}) + b"\n"

    def failure(self, body: bytes) -> bytes:
        """body: the error as this API has it."""
        return body + b"\n"

    def _written(self, events: Iterable[Event]) -> list[bytes]:
        """Texts as they come, and calls when they are whole."""
        made = []
        for kind, fields in events:
            piece = None
            if kind == "response.output_text.delta":
                piece = self._piece(fields["delta"])
            elif kind == "response.reasoning_text.delta":
                piece = self._piece("", thinking=fields["delta"])
            elif kind == "response.output_item.done" and fields["item"]["type"] == "function_call":
                piece = self._piece("", [_call(fields["item"])])
            if piece is not None:
                made.append(self._line(piece, {"done": False}) + b"\n")
        return made

    def _line(self, piece: dict[str, Any], rest: dict[str, Any]) -> bytes:
        return orjson.dumps({"model": self._model, "created_at": timestamp(), **piece, **rest})

    def _end(self, one: CompletionOutput) -> dict[str, Any]:
        metrics = self._state.metrics
        first, last = (metrics.first_token_ts, metrics.last_token_ts) if metrics is not None else (0.0, 0.0)
        arrival = metrics.arrival_time if metrics is not None else 0.0
        has_token = bool(first) and bool(last)
        return {
            "done": True,
            "done_reason": DONE_REASONS.get(str(one.finish_reason), "stop"),
            "total_duration": _ns(last - arrival) if has_token else 0,
            "load_duration": 0,
            "prompt_eval_count": len(self._state.ids),
            "prompt_eval_duration": _ns(first - arrival) if has_token else 0,
            "eval_count": self._state.num_output,
            "eval_duration": _ns(last - first) if has_token else 0,
        }


class ChatLines(Lines):
    def _piece(self, text: str, calls: list[Any] | None = None, thinking: str | None = None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking is not None:
            message["thinking"] = thinking
        return {"message": message if calls is None else {**message, "tool_calls": calls}}


class TextLines(Lines):
    def _piece(self, text: str, calls: list[Any] | None = None, thinking: str | None = None) -> dict[str, Any]:
        return {"response": text} if thinking is None else {"response": text, "thinking": thinking}


def _call(item: dict[str, Any]) -> dict[str, Any]:
    """A call; one that the limit of tokens has cut off has no arguments."""
    try:
        arguments = orjson.loads(item["arguments"])
    except orjson.JSONDecodeError:
        arguments = {}
    return {"id": item["call_id"], "function": {"name": item["name"], "arguments": arguments}}


def _ns(seconds: float) -> int:
    return max(0, int(seconds * 1e9))
