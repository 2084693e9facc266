"""`ItemShape`: answers whose text becomes items (`OutputItems`): OpenAI's responses, Anthropic's Messages, Ollama.

The items are opened, written and closed here. An API says how events about them are written, and what stands before and behind
them. Pure; called by `answer`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from actorllm.actors.frontend import Delta
from actorllm.server.output_items import Event, OutputItems
from actorllm.server.shape import PromptState, Shape
from actorllm.types.outputs import CompletionOutput, RequestOutput


class ItemShape(Shape):
    """One sequence of one prompt."""

    def __init__(self, id: str, items: OutputItems) -> None:
        """id: what the client is told that the request is called. items: of its output."""
        self.id = id
        self.is_plain = items.is_plain
        self._items = items
        self._state = PromptState([])

    @abstractmethod
    def _tree(self, one: CompletionOutput) -> bytes:
        """All of the answer, when its items are complete."""

    @abstractmethod
    def _written(self, events: Iterable[Event]) -> list[bytes]:
        """Events about items, in this API's words."""

    def _opening(self) -> list[bytes]:
        """The beginning of a stream, with that of the items."""
        return self._written(self._items.begin(self._state.ids))

    @abstractmethod
    def _ending(self, one: CompletionOutput) -> list[bytes]:
        """The end of a stream, behind the items."""

    def _logprobs_of(self, one: CompletionOutput) -> list[Any]:
        """The log-probabilities of the text; none by default."""
        return []

    def _is_whole(self, one: CompletionOutput) -> bool:
        """Whether the last item is told as complete."""
        return True

    def _see(self, one: CompletionOutput) -> None:
        """What the usage tells of the ids; nothing by default."""

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        self._state.take(outputs[0])
        (one,) = outputs[0].outputs
        items = self._items
        for _ in (
            *items.begin(self._state.ids),
            *items.write(one.text, self._logprobs_of(one), one.token_ids, is_whole=True),
        ):
            pass
        self._see(one)
        for _ in items.end(self._is_whole(one)):
            pass
        return self._tree(one)

    def events(self, number: int, output: RequestOutput) -> bytes:
        made: list[bytes] = []
        state = self._state
        state.take(output)
        for one in output.outputs:
            if not one.token_ids and one.finish_reason is None:
                continue
            if not state.has_begun:
                state.has_begun = True
                made += self._opening()
            self._see(one)
            made += self._written(self._items.write(one.text, self._logprobs_of(one), one.token_ids))
            if one.finish_reason is not None:
                made += self._written(self._items.end(self._is_whole(one)))
                made += self._ending(one)
        return b"".join(made)

    def _noted(self, deltas: Sequence[tuple[int, Delta]]) -> str:
        """The text of `plain_events`, which is counted and kept."""
        self._state.num_output += sum([len(delta.tokens) for _, delta in deltas])
        text = "".join([delta.text for _, delta in deltas])
        self._items.note(text)
        return text

    def close(self) -> bytes:
        return b""
