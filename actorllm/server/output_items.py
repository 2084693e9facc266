"""`OutputItems`: what one sequence writes, as items of a response's output, and the events that announce them.

An item is a thought, a message or the call of a function. At most one is open, and another one closes it. Without tools and
thoughts there is one message, open from the beginning. Blanks between calls belong to no message. Pure; called by the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import orjson

from actorllm.server.message_parts import PieceReader
from actorllm.server.random_names import random_name
from actorllm.server.tool_parsers import Arguments, Piece, Text, ToolCallStart
from actorllm.server.tools import ToolUse
from actorllm.text.reasoning.counting import ThoughtCount
from actorllm.text.reasoning.parsers import ReasoningParser, Thought

NUM_LAST = 64
"""Tokens at the end of a prompt in which a template's marker of a thought may be."""

Event: TypeAlias = tuple[str, dict[str, Any]]
"""The type of an event, and its fields beside the number."""


class OutputItems:
    def __init__(
        self,
        use: ToolUse | None,
        reasoning: Callable[[str], ReasoningParser] | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        """use: None: no tools. reasoning: None: the model marks no thoughts. decode: ids to text, of the end of the prompt."""
        name = random_name()
        self.first_id = f"msg_{name}"
        """Of the first message."""
        self.done: list[dict[str, Any]] = []
        self._use = use
        self._reasoning = reasoning
        self._decode = decode
        self.is_plain = use is None and reasoning is None
        """All of the text is one message."""
        self._reader: PieceReader | None = None
        self._count: ThoughtCount | None = None
        self._open: dict[str, Any] | None = None
        self._parts: list[str] = []
        self._blanks = ""
        self._entries: list[Any] = []
        self._num_messages = 0

    def begin(self, prompt: list[int]) -> Iterator[Event]:
        """Before the first text. prompt: its ids, whose end says whether a thought is open."""
        if self.is_plain:
            yield from self._begin_message()
            return
        text = self._decode(prompt[-NUM_LAST:]) if self._decode is not None else ""
        self._reader = PieceReader(self._use, self._reasoning, text)
        if self._reasoning is not None and self._decode is not None:
            self._count = ThoughtCount(self._reasoning(text), self._decode)

    def write(
        self, text: str, entries: list[Any], token_ids: Sequence[int] = (), is_whole: bool = False
    ) -> Iterator[Event]:
        """entries: log-probabilities of the text. token_ids: of the text. is_whole: no other text comes."""
        if self._reader is None:
            yield from self._write_text(text, entries)
            return
        self._reader.see(token_ids, is_whole)
        for piece in self._allowed(self._reader.push(text)):
            yield from self._take(piece)

    def count(self, token_ids: Sequence[int], is_last: bool) -> None:
        """Tokens of the text, for the number of those of the thought."""
        if self._count is not None:
            self._count.push(token_ids)
            if is_last:
                self._count.finish()

    @property
    def num_thought(self) -> int:
        """Counted tokens of the thought."""
        return 0 if self._count is None else self._count.num

    def note(self, text: str) -> None:
        """As `write` of a text to the open message, whose event is made elsewhere."""
        self._parts.append(text)

    def end(self, is_whole: bool) -> Iterator[Event]:
        """is_whole: the sequence has ended by itself, and not by a limit."""
        if self._reader is not None:
            for piece in self._allowed(self._reader.finish()):
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
            case Thought(text):
                if self._open is None or self._open["type"] != "reasoning":
                    yield from self._close("completed")
                    yield from self._begin_thought()
                self._parts.append(text)
                yield "response.reasoning_text.delta", {**self._place, "content_index": 0, "delta": text}
            case ToolCallStart(_, name, call_id):
                yield from self._close("completed")
                yield from self._begin_call(name, call_id)
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

    def _begin_thought(self) -> Iterator[Event]:
        name = f"rs_{random_name()}"
        self._open = {"id": name, "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        yield from self._added()

    def _begin_call(self, name: str, call_id: str | None) -> Iterator[Event]:
        assert self._reader is not None
        self._open = {
            "id": f"fc_{random_name()}",
            "type": "function_call",
            "call_id": call_id or self._reader.new_id(),
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
        elif item["type"] == "reasoning":
            yield "response.reasoning_text.done", {**place, "content_index": 0, "text": item["content"][0]["text"]}
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
        filled: dict[str, Any] = {"arguments": text}
        if self._open["type"] == "message":
            filled = {"content": [_part(text, self._entries)]}
        elif self._open["type"] == "reasoning":
            filled = {"content": [{"type": "reasoning_text", "text": text}]}
        return {**self._open, "status": status, **filled}

    def _allowed(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Of several calls, the first where there is to be one."""
        is_parallel = self._use is None or self._use.is_parallel
        return (p for p in pieces if is_parallel or isinstance(p, Text | Thought) or p.number == 0)

    @property
    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.done)}


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
        elif item["type"] == "function_call" and item["status"] == "completed":
            add_call(messages, item["call_id"], item["name"], item["arguments"])
    return messages


def add_call(messages: list[dict[str, Any]], call_id: str, name: str, arguments: str) -> None:
    """Put a call into the last message of the assistant, or into one of its own."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)
