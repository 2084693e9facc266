"""`MessageParts`: thought, text and tool calls of one answer in OpenAI's format, whole or as a stream of deltas.

Both go the same way, so a stream makes the message that the whole answer is. Used by chat's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from actorllm.server.tool_parsers import Arguments, Piece, Text, ToolCallStart, ToolParser
from actorllm.server.tools import ToolUse
from actorllm.text.reasoning.parsers import Part, ReasoningParser, Said, Thought

MAX_ARGUMENTS = 1 << 20
"""Characters of the arguments of one call; what is more of them is text."""


class PieceReader:
    """The pieces of one sequence: its thought, and behind that text and calls."""

    def __init__(self, use: ToolUse | None, reasoning: Callable[[str], ReasoningParser] | None, prompt: str) -> None:
        """prompt: the end of its text."""
        self._tools: ToolParser | None = None if use is None else use.new_parser()
        reads_thoughts = self._tools is not None and self._tools.READS_THOUGHTS
        self._reasoning = None if reasoning is None or reads_thoughts else reasoning(prompt)
        self._space: list[str] = []
        """That the answer begins with. Before calls it is left out."""
        self._has_text = False
        self._seen: Sequence[int] = ()
        self._is_whole = False
        self._sizes: dict[int, int] = {}
        """Of the arguments of calls."""

    @property
    def num_calls(self) -> int:
        return 0 if self._tools is None else self._tools.num_calls

    def new_id(self) -> str:
        return "" if self._tools is None else self._tools.new_id()

    def see(self, token_ids: Sequence[int], is_whole: bool) -> None:
        """Called before a `push` with the ids of its text. is_whole: no other text comes."""
        self._seen = token_ids
        self._is_whole = is_whole
        if self._reasoning is not None:
            self._reasoning.see(token_ids, is_whole)

    def push(self, text: str) -> list[Piece]:
        parts: list[Part] = [Said(text)] if self._reasoning is None else self._reasoning.push(text)
        if self._tools is not None:
            # The ids of a part of the text are not known.
            is_said = len(parts) == 1 and parts[0] == Said(text)
            self._tools.see(self._seen if is_said else (), self._is_whole)
        return [told for piece in self._read(parts) for told in self._allowed(piece)]

    def finish(self) -> list[Piece]:
        pieces = [] if self._reasoning is None else self._read(self._reasoning.finish())
        if self._tools is not None:
            pieces += self._tools.finish()
        told = [one for piece in pieces for one in self._allowed(piece)]
        if self._space and not self.num_calls:
            told.append(Text("".join(self._space)))
        self._space = []
        return told

    def _read(self, parts: list[Part]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in parts:
            if isinstance(part, Thought):
                pieces.append(part)
            elif self._tools is None:
                pieces.append(Text(part.text))
            else:
                pieces += self._tools.push(part.text)
        return pieces

    def _allowed(self, piece: Piece) -> list[Piece]:
        """The same within bounds, and without space where there is nothing but that yet."""
        match piece:
            case Arguments(number, text):
                size = self._sizes.get(number, 0)
                self._sizes[number] = size + len(text)
                if size + len(text) > MAX_ARGUMENTS:
                    room = max(0, MAX_ARGUMENTS - size)
                    return [Arguments(number, text[:room]), *self._allowed(Text(text[room:]))]
            case Text(text) if not self._has_text:
                if not text.strip():
                    self._space.append(text)
                    return []
                self._has_text = True
                space, self._space = "".join(self._space), []
                return [Text(space + text)]
        return [piece]


class MessageParts:
    """Of one request; a reader for each of its sequences."""

    def __init__(
        self,
        use: ToolUse | None,
        reasoning: Callable[[str], ReasoningParser] | None,
        shows_thoughts: bool = True,
    ) -> None:
        """use: None: no tools. reasoning: None: the model marks no thoughts."""
        self._use = use
        self._reasoning = reasoning
        self._shows_thoughts = shows_thoughts
        self._readers: dict[int, PieceReader] = {}
        self.prompt = ""
        """The end of its text."""

    def read_by(self, reasoning: Callable[[str], ReasoningParser] | None) -> None:
        """Of another request from here on, whose thoughts these parsers read."""
        self._reasoning = reasoning

    def put_into(self, choice: dict[str, Any], text: str, before: str, token_ids: Sequence[int] = ()) -> None:
        """Make of a whole choice what it is in parts. before: text that the answer goes on from. token_ids: of the text."""
        reader = PieceReader(self._use, self._reasoning, self.prompt)
        reader.see(token_ids, is_whole=True)
        calls: list[dict[str, Any]] = []
        thoughts: list[str] = []
        texts = [before]
        arguments: list[list[str]] = []
        for piece in self._allowed([*reader.push(text), *reader.finish()]):
            match piece:
                case Thought(part):
                    thoughts.append(part)
                case Text(part):
                    texts.append(part)
                case ToolCallStart(_, name, id):
                    calls.append(_call(reader, name, id))
                    arguments.append([])
                case Arguments(_, part):
                    arguments[-1].append(part)
        for call, parts in zip(calls, arguments, strict=True):
            call["function"]["arguments"] = "".join(parts)
        content = "".join(texts)
        message = choice["message"]
        message["content"] = content if content.strip() or not calls else None
        if thoughts or (self._reasoning is not None and self._shows_thoughts):
            message["reasoning"] = message["reasoning_content"] = "".join(thoughts) or None
        if thoughts and not content:
            message["content"] = None
        if calls:
            message["tool_calls"] = calls
            choice["finish_reason"] = self._reason(choice["finish_reason"])

    def put_into_delta(self, index: int, choice: dict[str, Any], text: str, token_ids: Sequence[int] = ()) -> bool:
        """Make of a choice of a stream what it is in parts. Returns whether it says anything new. token_ids: of the text."""
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = PieceReader(self._use, self._reasoning, self.prompt)
        reader.see(token_ids, is_whole=False)
        pieces = reader.push(text)
        if choice["finish_reason"] is not None:
            pieces += reader.finish()
            if reader.num_calls:
                choice["finish_reason"] = self._reason(choice["finish_reason"])
        choice["delta"] = delta = _delta(self._allowed(pieces), reader)
        return bool(delta) or choice["finish_reason"] is not None

    def _allowed(self, pieces: list[Piece]) -> list[Piece]:
        """Of several calls, the first where there is to be one; and thoughts where they are asked for."""
        is_parallel = self._use is None or self._use.is_parallel
        return [
            piece
            for piece in pieces
            if isinstance(piece, Text)
            or (isinstance(piece, Thought) and self._shows_thoughts)
            or (not isinstance(piece, Thought) and (is_parallel or piece.number == 0))
        ]

    def _reason(self, reason: str | None) -> str | None:
        """Of an answer with calls, as OpenAI tells it: a client that named the function knows that it is called."""
        is_named = self._use is not None and self._use.is_named
        return "tool_calls" if reason == "stop" and not is_named else reason


def _call(reader: PieceReader, name: str, id: str | None) -> dict[str, Any]:
    return {"id": id or reader.new_id(), "type": "function", "function": {"name": name, "arguments": ""}}


def _delta(pieces: list[Piece], reader: PieceReader) -> dict[str, Any]:
    """What is new, with the parts of each call put together."""
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        match piece:
            case ToolCallStart(index, name, id):
                calls[index] = {"index": index, **_call(reader, name, id)}
            case Arguments(index, part):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += part
    delta: dict[str, Any] = {}
    if thought:
        delta["reasoning"] = delta["reasoning_content"] = thought
    if text:
        delta["content"] = text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta
