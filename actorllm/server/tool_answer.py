"""`ToolAnswer`: the tool calls of one answer in OpenAI's format, whole or as a stream of deltas. Used by chat's shape."""

from __future__ import annotations

from typing import Any

from actorllm.server.tool_parsers import Arguments, Piece, Text, ToolCallStart, ToolParser
from actorllm.server.tools import ToolUse


class ToolAnswer:
    """Of one request; a parser for each of its sequences."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._parsers: dict[int, ToolParser] = {}

    def put_into(self, choice: dict[str, Any], text: str, before: str) -> None:
        """Make of a whole choice what it is with calls. before: text that the answer goes on from."""
        parser = self._use.new_parser()
        calls: list[dict[str, Any]] = []
        for piece in self._allowed([*parser.push(text), *parser.finish()]):
            match piece:
                case Text(part):
                    before += part
                case ToolCallStart(_, name):
                    calls.append(_call(parser, name))
                case Arguments(_, part):
                    calls[-1]["function"]["arguments"] += part
        choice["message"]["content"] = before if before.strip() or not calls else None
        if calls:
            choice["message"]["tool_calls"] = calls
            choice["finish_reason"] = self._reason(choice["finish_reason"])

    def put_into_delta(self, index: int, choice: dict[str, Any], text: str) -> bool:
        """Make of a choice of a stream what it is with calls. Returns whether it says anything new."""
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._use.new_parser()
        pieces = parser.push(text)
        if choice["finish_reason"] is not None:
            pieces += parser.finish()
            if parser.num_calls:
                choice["finish_reason"] = self._reason(choice["finish_reason"])
        choice["delta"] = delta = _delta(self._allowed(pieces), parser)
        return bool(delta) or choice["finish_reason"] is not None

    def _allowed(self, pieces: list[Piece]) -> list[Piece]:
        """Of several calls, the first where there is to be one."""
        if self._use.is_parallel:
            return pieces
        return [piece for piece in pieces if isinstance(piece, Text) or piece.number == 0]

    def _reason(self, reason: str | None) -> str | None:
        """Of an answer with calls, as OpenAI tells it: a client that named the function knows that it is called."""
        return "tool_calls" if reason == "stop" and not self._use.is_named else reason


def _call(parser: ToolParser, name: str) -> dict[str, Any]:
    return {"id": parser.new_id(), "type": "function", "function": {"name": name, "arguments": ""}}


def _delta(pieces: list[Piece], parser: ToolParser) -> dict[str, Any]:
    """What is new, with the parts of each call put together."""
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        match piece:
            case ToolCallStart(index, name):
                calls[index] = {"index": index, **_call(parser, name)}
            case Arguments(index, part):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += part
    delta: dict[str, Any] = {"content": text} if text else {}
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta
