"""A thought by tokens: how long it may be, and where the grammar of the answer behind it begins.

A request that asks for either travels with the marks of its model's thoughts beside its grammar (`grammar_of`). In the scheduler's
process its matcher is a `ThoughtMatcher` (`matcher_of`). It lets everything through while the model thinks, and counts. Where
the budget is used up it lets through nothing but the tokens of the end. From there on it is the matcher of the answer.

The state is a function of the prompt's end and of the tokens, so a request that is computed again goes on as before. The end of a
thought is found in the text of the last tokens: a tokenizer may write it in several ways. Called by actors.constraints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from actorllm.errors import InvalidParameterError
from actorllm.messages import I32, U32
from actorllm.text.grammar import CompiledGrammar, GrammarCompiler, GrammarError, Matcher
from actorllm.text.reasoning.parsers import MAX_FORCED, Marks
from actorllm.text.tokenizer import Tokenizer
from actorllm.types.structured_outputs import StructuredOutputsParams

NOTHING = "free"
"""The kind of a grammar that asks for nothing: only the thought is bounded."""
NUM_LAST = 64
"""Tokens at the end of a prompt in which the marker of a thought is looked for."""
NEEDS_MARKS = (
    "thinking_token_budget needs an engine that knows a thought: give it reasoning_parser, or reasoning_config"
)


def check_budget(marks: Marks | None, tokenizer: str | None) -> None:
    """Of an engine. Raises InvalidParameterError where no thought can be told from an answer."""
    if marks is None:
        raise InvalidParameterError(NEEDS_MARKS)
    if tokenizer is None:
        raise InvalidParameterError("thinking_token_budget needs a tokenizer, and skip_tokenizer_init=True left it out")


def grammar_of(
    structured: StructuredOutputsParams | None, budget: int | None, marks: Marks | None
) -> dict[str, Any] | None:
    """What an output must match, as it travels. Raises InvalidParameterError."""
    if marks is None or (structured is None and budget is None):
        return None if structured is None else structured.to_fields()
    thought = {**asdict(marks), "budget": budget}
    if structured is None:
        return {"kind": NOTHING, "text": "", "source": "thinking_token_budget", "thought": thought}
    fields = structured.to_fields()
    if not fields.get("is_whole"):
        return {**fields, "thought": thought}
    if budget is not None:
        raise InvalidParameterError(
            "thinking_token_budget beside a grammar of calls that has the thought in it: leave one of them out"
        )
    return fields


def matcher_of(
    compiler: GrammarCompiler, grammar: Mapping[str, Any], prompt: I32, is_wanted: Callable[[], bool]
) -> Matcher:
    """A fresh matcher. On any thread. Raises GrammarError and CompileDropped.

    prompt: its ids, whose end says whether the output begins within a thought.
    """
    thought = grammar.get("thought")
    if thought is None:
        return compiler.compile(grammar, is_wanted)
    marks, budget = _read(thought)
    tokenizer = compiler.tokenizer
    tail = tokenizer.decode(prompt[-NUM_LAST:]).rstrip()
    answer = None
    if grammar.get("kind") != NOTHING:
        answer = compiler.compile({key: value for key, value in grammar.items() if key != "thought"}, is_wanted)
    if tail.endswith(marks.end):
        state = "answer"
    elif tail.endswith(marks.start) or marks.is_assumed:
        state = "thought"
    else:
        state = "before"
    matcher = ThoughtMatcher(tokenizer, compiler.full_mask, marks, budget, answer, state)
    for mark, ids in ((marks.start, matcher.start_ids), (marks.forced, matcher.forced_ids)):
        if not ids or max(ids) >= compiler.vocab_size:
            raise GrammarError(f"the mark {mark!r:.80} of a thought has no tokens in the model's vocabulary")
    return matcher


def _read(thought: Any) -> tuple[Marks, int | None]:
    """As a message has it. Raises GrammarError."""
    if not isinstance(thought, Mapping):
        raise GrammarError("its thought must be a mapping")
    texts = [thought.get(key) for key in ("start", "end", "forced")]
    if not all(isinstance(text, str) and 0 < len(text) <= MAX_FORCED for text in texts):
        raise GrammarError(f"the marks of its thought must be texts of at most {MAX_FORCED} characters")
    budget = thought.get("budget")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
        raise GrammarError("the budget of its thought must be a number of tokens")
    start, end, forced = map(str, texts)
    return Marks(start, end, forced, bool(thought.get("is_assumed"))), budget


class ThoughtMatcher(Matcher):
    """Where an output stands in its thought, or behind it in the grammar of its answer."""

    __slots__ = (
        *("_answer", "_budget", "_end", "forced_ids", "_full", "_num_forced", "_num_thought", "_start", "start_ids"),
        *("_state", "_tail", "_tokenizer"),
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        full: U32,
        marks: Marks,
        budget: int | None,
        answer: Matcher | None,
        state: str,
    ) -> None:
        """full: the mask of the whole vocabulary. answer: None: it is free. state: before, thought or answer."""
        self._tokenizer = tokenizer
        self._full = full
        self._start = marks.start
        self._end = marks.end
        self.start_ids: list[int] = tokenizer.encode(marks.start, add_special_tokens=False).tolist()
        self.forced_ids: list[int] = tokenizer.encode(marks.forced, add_special_tokens=False).tolist()
        self._budget = budget
        self._answer = answer
        self._state = ""
        self._tail = ""
        self._num_thought = 0
        self._num_forced = 0
        """Tokens of the start, or of the end, that are written."""
        self.compiled = CompiledGrammar("", 0, ()) if answer is None else answer.compiled
        self.num_tokens = 0
        self.slow_s = 0.0
        self.is_over = self.is_complete = False
        self._go_to(state)

    @property
    def ends_request(self) -> bool:  # type: ignore[override]
        return self._answer is not None

    def push(self, token_ids: Sequence[int]) -> None:
        for place, token in enumerate(token_ids):
            if self._state == "answer":
                if self._answer is not None:
                    self._answer.push(token_ids[place:])
                    self._see_answer()
                self.num_tokens += len(token_ids) - place
                return
            self.num_tokens += 1
            self._see(token)

    def _see(self, token: int) -> None:
        match self._state:
            case "before":
                self._see_first(token)
            case "start":
                self._num_forced += 1
                if self._num_forced >= len(self.start_ids):
                    self._go_to("thought")
            case "thought":
                self._num_thought += 1
                if self._has_read(token, self._end):
                    self._go_to("answer")
                elif self._is_used_up:
                    self._go_to("end")
            case _:
                self._num_forced += token == self.forced_ids[self._num_forced]
                if self._num_forced >= len(self.forced_ids):
                    self._go_to("answer")

    def _see_first(self, token: int) -> None:
        """A thought may begin, or the answer does without one."""
        if self._answer is None:
            if self._has_read(token, self._start):
                self._go_to("thought")
        elif token == self.start_ids[0] and not self._answer.allows(token):
            self._state, self._num_forced = "start", 1
            if len(self.start_ids) == 1:
                self._go_to("thought")
        else:
            self._go_to("answer")
            self._answer.push([token])
            self._see_answer()

    def _has_read(self, token: int, mark: str) -> bool:
        """Whether the text so far has this mark, now that this token has come."""
        text = self._tail + self._tokenizer.decode([token])
        self._tail = text[-len(mark) :]
        return mark in text

    @property
    def _is_used_up(self) -> bool:
        return self._budget is not None and self._num_thought >= self._budget

    def _go_to(self, state: str) -> None:
        self._state, self._tail, self._num_forced = state, "", 0
        if state == "thought" and self._is_used_up:
            self._state = "end"
        elif state == "answer":
            self._see_answer()

    def _see_answer(self) -> None:
        self.is_over = self._answer is None or self._answer.is_over
        self.is_complete = self._answer is not None and self._answer.is_complete

    def fill(self, row: U32, at: int) -> None:
        match self._state:
            case "answer":
                if self._answer is not None:
                    self._answer.fill(row, at)
            case "start":
                _allow(row, self.start_ids[self._num_forced])
            case "end":
                _allow(row, self.forced_ids[self._num_forced])
            case "before" if self._answer is not None:
                self._answer.fill(row, at)
                _allow(row, self.start_ids[0])
            case _:
                row[: self._full.size] = self._full

    def allows(self, token: int) -> bool:
        match self._state:
            case "answer":
                return self._answer is None or self._answer.allows(token)
            case "start":
                return token == self.start_ids[self._num_forced]
            case "end":
                return token == self.forced_ids[self._num_forced]
            case "before" if self._answer is not None:
                return token == self.start_ids[0] or self._answer.allows(token)
        return True

    def forced(self, most: int) -> list[int]:
        match self._state:
            case "answer" if self._answer is not None:
                return self._answer.forced(most)
            case "start":
                return self.start_ids[self._num_forced :][:most]
            case "end":
                return self.forced_ids[self._num_forced :][:most]
        return []

    def error(self) -> str | None:
        return None if self._answer is None else self._answer.error()

    def end(self) -> None:
        if self._answer is not None:
            self._answer.end()
        super().end()

    def copy(self) -> Matcher:
        made = ThoughtMatcher.__new__(ThoughtMatcher)
        for name in (*ThoughtMatcher.__slots__, "compiled", "num_tokens", "slow_s", "is_over", "is_complete"):
            setattr(made, name, getattr(self, name))
        made._answer = None if self._answer is None else self._answer.copy()
        return made


def _allow(row: U32, token: int) -> None:
    row[token // 32] |= np.uint32(1 << token % 32)
