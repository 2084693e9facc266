"""`OutputItems`: what one sequence writes, as items of a response's output, and the events that announce them.

An item is a message or the call of a function. At most one is open: a text or a call that begins closes the one before. Without
tools there is one message, open from the beginning. Blanks between calls belong to no message. Pure; called by `shape`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import orjson

from actorllm.server.tool_parsers import Arguments, Piece, Text, ToolCallStart
from actorllm.server.tools import ToolUse

Event: TypeAlias = tuple[str, dict[str, Any]]
"""The type of an event, and its fields beside the number."""


class OutputItems:
    def __init__(self, use: ToolUse | None) -> None:
        name = uuid.uuid4().hex
        self.first_id = f"msg_{name}"
        """Of the first message."""
        self.done: list[dict[str, Any]] = []
        self._use = use
        self._parser = None if use is None else use.new_parser()
        self._open: dict[str, Any] | None = None
        self._parts: list[str] = []
        self._blanks = ""
        self._entries: list[Any] = []
        self._num_messages = 0

    def begin(self) -> Iterator[Event]:
        """Before the first text."""
        if self._parser is None:
            yield from self._begin_message()

    def write(self, text: str, entries: list[Any]) -> Iterator[Event]:
        """entries: log-probabilities of the text."""
        if self._parser is None or self._use is None:
            yield from self._write_text(text, entries)
            return
        for piece in _allowed(self._parser.push(text), self._use):
            yield from self._take(piece)

    def note(self, text: str) -> None:
        """As `write` of a text to the open message, whose event is made elsewhere."""
        self._parts.append(text)

    def end(self, is_whole: bool) -> Iterator[Event]:
        """is_whole: the sequence has ended by itself, and not by a limit."""
        if self._parser is not None and self._use is not None:
            for piece in _allowed(self._parser.finish(), self._use):
                yield from self._take(piece)
        if self._open is None and not self.done:
            yield from self._begin_message()
            if self._blanks:
                yield from self._delta(self._blanks, [])
        yield from self._close("completed" if is_whole or self._has_whole_call() else "incomplete")

    @property
    def shown(self) -> list[dict[str, Any]]:
        """All items as they are now."""
        return self.done if self._open is None else [*self.done, self._filled("in_progress")]

    def _has_whole_call(self) -> bool:
        """Whether a call is open whose arguments a limit has not cut off: nothing marks their end."""
        if self._open is None or self._open["type"] != "function_call":
            return False
        try:
            orjson.loads("".join(self._parts))
        except orjson.JSONDecodeError:
            return False
        return True

    def _take(self, piece: Any) -> Iterator[Event]:
        match piece:
            case Text(text):
                yield from self._write_text(text, [])
            case ToolCallStart(_, name):
                yield from self._close("completed")
                yield from self._begin_call(name)
            case Arguments(_, text):
                self._parts.append(text)
                yield "response.function_call_arguments.delta", {**self._place, "delta": text}

    def _write_text(self, text: str, entries: list[Any]) -> Iterator[Event]:
        self._entries += entries
        if not text:
            return
        if self._open is None or self._open["type"] != "message":
            if not (self._blanks + text).strip():
                self._blanks += text
                return
            text, self._blanks = self._blanks + text, ""
            yield from self._close("completed")
            yield from self._begin_message()
        yield from self._delta(text, entries)

    def _delta(self, text: str, entries: list[Any]) -> Iterator[Event]:
        self._parts.append(text)
        yield "response.output_text.delta", {**self._place, "content_index": 0, "delta": text, "logprobs": entries}

    def _begin_message(self) -> Iterator[Event]:
        number, self._num_messages = self._num_messages, self._num_messages + 1
        name = f"{self.first_id}_{number}" if number else self.first_id
        self._open = {"id": name, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        yield from self._added()
        yield "response.content_part.added", {**self._place, "content_index": 0, "part": _part("", [])}

    def _begin_call(self, name: str) -> Iterator[Event]:
        assert self._parser is not None
        self._open = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "call_id": self._parser.new_id(),
            "name": name,
            "arguments": "",
            "status": "in_progress",
        }
        yield from self._added()

    def _added(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": len(self.done), "item": dict(self._open or {})}

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        place, item = self._place, self._filled(status)
        if item["type"] == "message":
            (part,) = item["content"]
            place["content_index"] = 0
            yield "response.output_text.done", {**place, "text": part["text"], "logprobs": part["logprobs"]}
            yield "response.content_part.done", {**place, "part": part}
        else:
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**place, **told}
        yield "response.output_item.done", {"output_index": len(self.done), "item": item}
        self.done.append(item)
        self._open, self._parts, self._entries = None, [], []

    def _filled(self, status: str) -> dict[str, Any]:
        """The open item with what is written of it."""
        assert self._open is not None
        text = "".join(self._parts)
        filled = {"content": [_part(text, self._entries)]} if self._open["type"] == "message" else {"arguments": text}
        return {**self._open, "status": status, **filled}

    @property
    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.done)}


def _allowed(pieces: Iterable[Piece], use: ToolUse) -> Iterator[Piece]:
    """Of several calls, the first where there is to be one."""
    return (piece for piece in pieces if use.is_parallel or isinstance(piece, Text) or piece.number == 0)


def _part(text: str, entries: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}


def messages_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of an output as messages of a conversation: calls belong to the message before them.

    A call that a limit has cut off is left out: its arguments are no JSON, which templates want.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        if item["type"] == "message":
            text = "".join(part["text"] for part in item["content"])
            messages.append({"role": "assistant", "content": text})
        elif item["status"] == "completed":
            add_call(messages, item["call_id"], item["name"], item["arguments"])
    return messages


def add_call(messages: list[dict[str, Any]], call_id: str, name: str, arguments: str) -> None:
    """Put a call into the last message of the assistant, or into one of its own."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)
