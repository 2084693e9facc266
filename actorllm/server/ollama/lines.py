"""`ChatLines` and `TextLines`: answers of Ollama's API, whole or as a line of JSON for each piece. Times are nanoseconds."""

from __future__ import annotations

import datetime
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from actorllm.actors.frontend import Delta
from actorllm.server.output_items import Event, OutputItems
from actorllm.server.shape import PromptState, Shape
from actorllm.types.outputs import CompletionOutput, RequestOutput

DONE_REASONS = {"length": "length", "abort": "stop"}


def timestamp() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


class Lines(Shape):
    CONTENT_TYPE = b"application/x-ndjson"

    def __init__(self, name: str | None, model: str, items: OutputItems) -> None:
        """name: what the client calls the request. items: of its output."""
        self.id = f"ollama-{name or uuid.uuid4().hex}"
        self.is_plain = items.is_plain
        self._model = model
        self._items = items
        self._state = PromptState([])
        self._has_begun = False

    @abstractmethod
    def _piece(self, text: str, calls: list[Any] | None = None, thinking: str | None = None) -> dict[str, Any]:
        """What a line says beside its head."""

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        self._take(outputs[0])
        (one,) = outputs[0].outputs
        for _ in (*self._items.begin(self._state.ids), *self._items.write(one.text, [])):
            pass
        for _ in self._items.end(True):
            pass
        texts = [item["content"][0]["text"] for item in self._items.done if item["type"] == "message"]
        calls = [_call(item) for item in self._items.done if item["type"] == "function_call"]
        thoughts = [item["content"][0]["text"] for item in self._items.done if item["type"] == "reasoning"]
        piece = self._piece("".join(texts), calls or None, "".join(thoughts) or None)
        return self._line(piece, self._end(one))

    def events(self, number: int, output: RequestOutput) -> bytes:
        made: list[bytes] = []
        self._take(output)
        for one in output.outputs:
            if not one.token_ids and one.finish_reason is None:
                continue
            if not self._has_begun:
                self._has_begun = True
                made += self._written(self._items.begin(self._state.ids))
            made += self._written(self._items.write(one.text, []))
            if one.finish_reason is not None:
                made += self._written(self._items.end(True))
                made.append(self._line(self._piece(""), self._end(one)) + b"\n")
        return b"".join(made)

    def plain_events(self, number: int, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        self._state.num_output += sum([len(delta.tokens) for _, delta in deltas])
        text = "".join([delta.text for _, delta in deltas])
        self._items.note(text)
        return self._line(self._piece(text), {"done": False}) + b"\n"

    def close(self) -> bytes:
        return b""

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

    def _take(self, output: RequestOutput) -> None:
        state = self._state
        state.ids = output.prompt_token_ids
        state.num_output += sum(len(one.token_ids) for one in output.outputs)
        if output.finished:
            state.metrics = output.metrics

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
