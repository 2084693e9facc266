"""`MessagesShape`: an answer as a message of Anthropic's API, whole or as its stream of events.

A text or a call is a block of the message's content. Blocks come from the items of the output (`output_items`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from actorllm.actors.frontend import Delta
from actorllm.server.item_shape import ItemShape
from actorllm.server.output_items import Event, OutputItems
from actorllm.server.random_names import random_name
from actorllm.types.outputs import CompletionOutput

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}
DELTA_HEAD = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)


class MessagesShape(ItemShape):
    CONTENT_TYPE = b"text/event-stream; charset=utf-8"

    def __init__(self, name: str | None, model: str, items: OutputItems) -> None:
        """name: what the client calls the request. items: of its output."""
        super().__init__(f"msg_{name or random_name()}", items)
        self._model = model

    def _tree(self, one: CompletionOutput) -> bytes:
        content = [_block(item) for item in self._items.done]
        return orjson.dumps(self._message(content, **self._stop(one)))

    def _opening(self) -> list[bytes]:
        message = self._message([], stop_reason=None, stop_sequence=None)
        began, ping = _event({"type": "message_start", "message": message}), _event({"type": "ping"})
        return [began, *super()._opening(), ping]

    def _ending(self, one: CompletionOutput) -> list[bytes]:
        told = {"type": "message_delta", "delta": self._stop(one), "usage": self._usage()}
        return [_event(told), _event({"type": "message_stop"})]

    def plain_events(self, number: int, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        return DELTA_HEAD + orjson.dumps(self._noted(deltas)) + b"}}\n\n"

    def failure(self, body: bytes) -> bytes:
        """body: the error as this API has it."""
        return b"event: error\ndata: %b\n\n" % body

    def _written(self, events: Iterable[Event]) -> list[bytes]:
        """Events about items, as those about blocks."""
        made = []
        for kind, fields in events:
            index = fields["output_index"]
            match kind.removeprefix("response."):
                case "output_item.added":
                    block = _opened(fields["item"])
                    made.append(_event({"type": "content_block_start", "index": index, "content_block": block}))
                case "output_text.delta":
                    delta = {"type": "text_delta", "text": fields["delta"]}
                    made.append(_event({"type": "content_block_delta", "index": index, "delta": delta}))
                case "reasoning_text.delta":
                    delta = {"type": "thinking_delta", "thinking": fields["delta"]}
                    made.append(_event({"type": "content_block_delta", "index": index, "delta": delta}))
                case "function_call_arguments.delta":
                    delta = {"type": "input_json_delta", "partial_json": fields["delta"]}
                    made.append(_event({"type": "content_block_delta", "index": index, "delta": delta}))
                case "output_item.done":
                    made.append(_event({"type": "content_block_stop", "index": index}))
        return made

    def _message(self, content: list[Any], **stop: Any) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, **stop, "usage": self._usage()}

    def _stop(self, one: CompletionOutput) -> dict[str, Any]:
        """Why the message ends."""
        reason = STOP_REASONS.get(str(one.finish_reason), "end_turn")
        sequence = one.stop_reason if isinstance(one.stop_reason, str) else None
        if reason == "end_turn" and any(item["type"] == "function_call" for item in self._items.done):
            reason = "tool_use"
        elif reason == "end_turn" and sequence is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, Any]:
        """Of the input, what the cache had is counted apart."""
        state = self._state
        return {
            "input_tokens": len(state.ids) - state.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": state.num_cached,
            "output_tokens": state.num_output,
        }


def _event(tree: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (tree["type"].encode(), orjson.dumps(tree))


def _opened(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] == "message":
        return {"type": "text", "text": ""}
    if item["type"] == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": item["call_id"], "name": item["name"], "input": {}}


def _block(item: dict[str, Any]) -> dict[str, Any]:
    """A whole block."""
    if item["type"] == "message":
        return {"type": "text", "text": item["content"][0]["text"]}
    if item["type"] == "reasoning":
        return {**_opened(item), "thinking": item["content"][0]["text"]}
    try:
        given = orjson.loads(item["arguments"])
    except orjson.JSONDecodeError:
        given = {}  # the limit of tokens has cut it off
    return {**_opened(item), "input": given if isinstance(given, dict) else {}}
