"""`SeenText`: the text of one sequence so far beside its ids, as parsers with vLLM's interface are given them.

The ids of a text are those that the model has written; where they are not told, those that the tokenizer gives. Pure; the adapters
of both kinds of parsers have one for each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class SeenText:
    def __init__(self, tokenizer: Any, *, is_held: bool = False) -> None:
        """tokenizer: of transformers. is_held: nothing is told of the text before its end."""
        self.text = ""
        self.is_held = is_held
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._told: list[int] = []

    def see(self, token_ids: Sequence[int], is_whole: bool) -> None:
        """The ids of the text that comes next. is_whole: no other text comes."""
        self._told += token_ids
        self.is_held |= is_whole and not self.text

    def streamed(self, text: str, method: Callable[..., Any], *more: Any) -> Any:
        """What a method for streams makes of more of the text; None: nothing yet. One that is not implemented holds the text.

        more: arguments behind vLLM's six of texts and ids.
        """
        ids, self._told = self._told or self._tokenizer.encode(text, add_special_tokens=False), []
        before, self.text = self.text, self.text + text
        ids_before, self._ids = self._ids, [*self._ids, *ids]
        if self.is_held:
            return None
        try:
            return method(before, self.text, text, ids_before, self._ids, ids, *more)
        except NotImplementedError:  # the base class raises it: this parser reads whole answers alone
            if before:
                raise
            self.is_held = True
            return None
