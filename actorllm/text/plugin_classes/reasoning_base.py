"""vLLM's base classes of parsers of thoughts, by its interface: whole texts and deltas, with the token ids beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from actorllm.text.plugin_classes.deltas import DeltaMessage


class PluginReasoningParser:
    """What vLLM calls `ReasoningParser`. A subclass has `extract_reasoning` and `extract_reasoning_streaming`, or older names of
    them that end in `_content`."""

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        """tokenizer: the model's, as transformers has it."""
        self.model_tokenizer = tokenizer

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Ids by token."""
        found: dict[str, int] = self.model_tokenizer.get_vocab()
        return found

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the thought is over behind these tokens."""
        raise NotImplementedError(f"{type(self).__name__}.is_reasoning_end")

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """The same, of tokens that end with `delta_ids`."""
        return self.is_reasoning_end(input_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The tokens of the answer."""
        raise NotImplementedError(f"{type(self).__name__}.extract_content_ids")

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """The number of tokens of the thought."""
        return 0


class BaseThinkingReasoningParser(PluginReasoningParser):
    """Of models with a token before the thought and one behind it: `start_token` and `end_token` of a subclass."""

    start_token = ""
    end_token = ""

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        if not self.start_token or not self.end_token:
            raise ValueError("start_token and end_token must be defined in subclasses")
        ids = [self.vocab.get(token) for token in (self.start_token, self.end_token)]
        if None in ids:
            raise RuntimeError(f"{self.start_token!r} and {self.end_token!r} are not both in the vocabulary")
        self.start_token_id, self.end_token_id = ids

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        marks = (id for id in reversed(input_ids) if id in (self.start_token_id, self.end_token_id))
        return next(marks, self.start_token_id) == self.end_token_id

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        ids = list(input_ids)
        return ids[ids.index(self.end_token_id) + 1 :] if self.end_token_id in ids[:-1] else []

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        number = depth = 0
        for id in token_ids:
            if id == self.start_token_id:
                depth += 1
            elif id == self.end_token_id:
                depth = max(0, depth - 1)
            else:
                number += depth > 0
        return number

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """The thought and the answer in a whole text."""
        before, start, after = model_output.partition(self.start_token)
        thought, end, answer = (after if start else before).partition(self.end_token)
        return thought, (answer or None) if end else None

    def extract_reasoning_content(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """The older name."""
        return BaseThinkingReasoningParser.extract_reasoning(self, model_output, request)

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """What is new."""
        if len(delta_token_ids) == 1 and delta_token_ids[0] in (self.start_token_id, self.end_token_id):
            return None
        if self.start_token_id not in current_token_ids and not self._is_assumed:
            return DeltaMessage(content=delta_text)
        if self.end_token_id in previous_token_ids:
            return DeltaMessage(content=delta_text)
        if self.start_token_id in delta_token_ids:
            delta_text = delta_text.partition(self.start_token)[2]
        thought, _, answer = delta_text.partition(self.end_token)
        return DeltaMessage(reasoning=thought or None, content=answer or None) if thought or answer else None

    extract_reasoning_content_streaming = extract_reasoning_streaming
    _is_assumed = False
    """The thought needs no token before it."""


class DeepSeekR1ReasoningParser(BaseThinkingReasoningParser):
    """`<think>`, which may be missing, and `</think>`."""

    start_token = "<think>"
    end_token = "</think>"
    _is_assumed = True


class Qwen3ReasoningParser(BaseThinkingReasoningParser):
    """`<think>` and `</think>`. Without both of them a whole text is an answer."""

    start_token = "<think>"
    end_token = "</think>"

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        if self.start_token not in model_output or self.end_token not in model_output:
            return None, model_output
        return super().extract_reasoning(model_output, request)

    def extract_reasoning_content(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        return Qwen3ReasoningParser.extract_reasoning(self, model_output, request)
