"""The text of single tokens, as it stands in log-probabilities.

`TokenText` knows it per id, once decoded: shared by all requests. A token that is a part of a character has a text only
together with the tokens before it; `LogprobText` remembers those of one request. Called by the scheduler actor, for
requests that want log-probabilities and text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import cast

from actorllm.messages.logprobs import LogprobSpan
from actorllm.text.detokenizer import REPLACEMENT
from actorllm.text.tokenizer import I32, Tokenizer

NUM_BEFORE = 4
"""Tokens that a character may have begun in."""

SPACE_MARK = "\u2581"
"""How sentencepiece vocabularies spell a space; decoding a single token would swallow the one at its start."""


class TokenText:
    """The text of every token id that was asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._whole: dict[int, str] = {}
        self._parts: set[int] = set()

    def known(self, tokens: list[int]) -> list[str] | None:
        """Their texts, if all of them are known and none is a part of a character."""
        found = list(map(self._whole.get, tokens))
        return None if None in found else cast("list[str]", found)

    def of(self, token: int, before: Iterable[int]) -> str:
        """Its text; of the last part of a character the whole character, of an earlier part nothing."""
        text = self._whole.get(token)
        if text is not None:
            return text
        if token not in self._parts:
            text = self._alone(token)
            if not text.endswith(REPLACEMENT):
                self._whole[token] = text
                return text
            self._parts.add(token)
        return self._completed(token, list(before))

    def _alone(self, token: int) -> str:
        text = self._decode([token])
        spelled: str = self._backend.id_to_token(token) or ""
        num_spaces = len(spelled) - len(spelled.lstrip(SPACE_MARK))
        missing = num_spaces - (len(text) - len(text.lstrip(" ")))
        return " " * missing + text if missing > 0 else text

    def _completed(self, token: int, before: list[int]) -> str:
        for count in range(1, len(before) + 1):
            context = before[-count:]
            text = self._decode([*context, token])
            if text.endswith(REPLACEMENT):
                continue
            while context and self._decode([context[-1]]).endswith(REPLACEMENT):
                context.pop()  # a part of the same character, without a text of its own
            prefix = self._decode(context) if context else ""
            return text[len(prefix) :] if text.startswith(prefix) else text
        return ""

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


class LogprobText:
    """The texts of one request's log-probabilities."""

    __slots__ = ("_output", "_prompt", "_text")

    def __init__(self, text: TokenText, output: Sequence[int] | I32 = ()) -> None:
        """output: its tokens so far."""
        self._text = text
        self._prompt: deque[int] = deque(maxlen=NUM_BEFORE)
        self._output: deque[int] = deque(map(int, output[-NUM_BEFORE:]), maxlen=NUM_BEFORE)

    def texts(self, span: LogprobSpan) -> list[str]:
        """Of every entry of the next span, in order."""
        before = self._prompt if span.is_prompt else self._output
        found = self._text.known(span.ids.reshape(-1).tolist())
        if found is not None:
            before.extend(span.ids[-NUM_BEFORE:, 0].tolist())
            return found
        of, found = self._text.of, []
        for ids in span.ids.tolist():
            found += [of(token, before) for token in ids]
            before.append(ids[0])
        return found
