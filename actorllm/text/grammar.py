"""Grammars: what the output of a request may be, as masks over the vocabulary. llguidance does the work.

`GrammarCompiler` makes a `Matcher` of what a request asks for (`structured_outputs.StructuredOutputsParams.to_fields`). That
takes milliseconds, with a large schema a second, and the first time also what the vocabulary takes to be read; so it is called
from threads, and lets other threads run meanwhile. A Matcher follows the output of one sequence, token by token: `push`, then
`masks` says what may come next, in microseconds. It is a function of the tokens, so who is computed again goes on from its
output so far.

Invariants: compiling and matching are bounded by llguidance's own limits, and whoever reaches them fails with the reason; a
grammar is compiled once while it is used. Called by actors.constraints.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from actorllm.messages import U32
from actorllm.structured_outputs import MAX_CHARACTERS
from actorllm.text.structural_tag import lark_of
from actorllm.text.tokenizer import I32, Tokenizer

MAX_GRAMMARS = 128
"""Compiled ones that are kept."""

WHITESPACE = r"[ \t]{1,2}|[ \t]?\r?\n(?: {0,24}|\t{0,8})"
"""Between two tokens of JSON, unless the request says what may be there: what people write on a line, or a new line with its
indentation. A model that has lost its way would go on with spaces for ever."""

MAX_REASON = 600
"""Characters of an error of llguidance, which may quote the whole grammar."""

NOT_INSTALLED = "structured outputs need llguidance: pip install 'actorllm[structured]'"


class GrammarError(ValueError):
    """A constraint that cannot be used; the message says why."""


class Matcher:
    """Where the output of one sequence stands in its grammar."""

    __slots__ = ("_eos_ids", "_matcher", "is_complete", "is_over")

    def __init__(self, matcher: Any, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self.is_over = False
        """Nothing can come any more."""
        self.is_complete = False
        """It is over with a token that belongs to the text, and not with an end of text."""

    def push(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the output. Raises GrammarError for one that the grammar does not have there."""
        matcher = self._matcher
        for token in token_ids:
            if self.is_over:
                return
            if not matcher.consume_token(token):
                raise GrammarError(_reason(matcher.get_error()))
            if matcher.is_stopped():
                self.is_over = True
                self.is_complete = token not in self._eos_ids

    def end(self) -> None:
        """It is found that nothing but an end of text can follow: that is not waited for."""
        self.is_over = self.is_complete = True

    def copy(self) -> Matcher:
        """Another one that stands at the same place."""
        made = Matcher(self._matcher.deep_copy(), self._eos_ids)
        made.is_over, made.is_complete = self.is_over, self.is_complete
        return made


class GrammarCompiler:
    """vocab_size: the model's. eos_ids: what ends a text, which comes where a grammar may end."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._known: OrderedDict[str, Matcher] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self.num_compiled = 0
        eos_mask = np.zeros(self._num_words, np.uint32)
        for token in self._eos_ids:
            eos_mask[token // 32] |= np.uint32(1 << token % 32)
        self._not_eos = ~eos_mask

    @property
    def _num_words(self) -> int:
        return -(-self._vocab_size // 32)

    def compile(self, grammar: Mapping[str, Any]) -> Matcher:
        """A fresh matcher. Safe to call from several threads. Raises GrammarError."""
        key = json.dumps(dict(grammar), sort_keys=True)
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known.copy()  # under the lock: two threads must not read one at the same time
        llguidance = _llguidance()
        limits = llguidance.LLParserLimits(verbose_errors=False)
        try:
            text = self._grammar_text(llguidance, grammar)
        except GrammarError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise GrammarError(_reason(str(error) or type(error).__name__)) from error
        made = llguidance.LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        if not made.is_error():
            made.compute_bitmask()  # the first mask takes longest, and whoever copies this matcher has it
        if made.is_error():
            raise GrammarError(_reason(made.get_error()))
        matcher = Matcher(made, self._eos_ids)
        with self._lock:
            self.num_compiled += 1
            self._known[key] = matcher
            if len(self._known) > MAX_GRAMMARS:
                self._known.popitem(last=False)
            return matcher.copy()

    def masks(self, matchers: Sequence[tuple[Matcher, bool]]) -> tuple[U32, list[bool]]:
        """What each may go on with, [len(matchers), ceil(vocab_size / 32)]; bit i of word j allows id 32 * j + i.

        And which of them have nothing but an end of text. With True, that is not offered where there is anything else. A
        row without a bit: its matcher has failed (`failure_of`).
        """
        words = -(-max(self._vocabulary.vocab_size, self._vocab_size) // 32)
        masks = np.zeros((len(matchers), words), np.uint32)
        at, size = masks.ctypes.data, 4 * words
        for matcher, _ in matchers:
            matcher._matcher.unsafe_compute_mask_ptr(at, size)
            at += size
        if words > self._num_words:
            masks = np.ascontiguousarray(masks[:, : self._num_words])
        others = masks & self._not_eos
        is_last: list[bool] = (np.bitwise_or.reduce(others, axis=1) == 0).tolist()
        for row, (matcher, goes_on) in enumerate(matchers):
            if matcher._matcher.is_error():
                masks[row] = 0
                is_last[row] = False
            elif goes_on and not is_last[row]:
                masks[row] = others[row]
        return masks, is_last

    @staticmethod
    def failure_of(matcher: Matcher) -> str | None:
        """Why a matcher cannot go on; None: it can."""
        return _reason(matcher._matcher.get_error()) if matcher._matcher.is_error() else None

    def _read_vocabulary(self) -> Any:
        llguidance = _llguidance()
        num_ids = max(self._vocab_size, self._tokenizer.vocab_size)
        eos = sorted(self._eos_ids) or None
        try:
            return llguidance.LLTokenizer(self._tokenizer.backend.to_str(), n_vocab=num_ids, eos_token=eos)
        except Exception as error:  # whatever the bindings raise for a tokenizer that they cannot read
            raise GrammarError(f"the tokenizer cannot be used with grammars: {_reason(str(error))}") from error

    def _grammar_text(self, llguidance: Any, grammar: Mapping[str, Any]) -> str:
        kind, text = grammar["kind"], str(grammar["text"])
        if len(text) > MAX_CHARACTERS:
            raise GrammarError(f"it has {len(text)} characters, and the limit is {MAX_CHARACTERS}")
        if kind == "json":
            schema = json.loads(text)
            if grammar.get("disable_additional_properties"):
                close_objects(schema)
            return str(llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=json_options(grammar)))
        if kind == "structural_tag":
            special = {
                name: id for id, name in self._tokenizer.added_tokens.items() if id in self._tokenizer.special_ids
            }
            if grammar.get("disable_additional_properties"):
                raise GrammarError(
                    "disable_additional_properties is for json; say it in the schemas of a structural tag"
                )
            return str(llguidance.grammar_from("lark", lark_of(json.loads(text), special, json_options(grammar))))
        if kind in ("regex", "choice", "grammar"):
            return str(llguidance.grammar_from(kind, text))
        raise GrammarError(f"{kind!r:.80} is no kind of grammar")


def json_options(grammar: Mapping[str, Any]) -> dict[str, Any]:
    """What may be between the tokens of JSON, as llguidance has it."""
    if grammar.get("whitespace_pattern"):
        return {"whitespace_pattern": grammar["whitespace_pattern"]}
    if grammar.get("disable_any_whitespace"):
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": WHITESPACE}


PART_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
PARTS = ("items", "prefixItems", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "contains", "propertyNames")


def close_objects(schema: Any) -> None:
    """Objects have the properties that are named and no other, where the schema says nothing of it. In place."""
    if isinstance(schema, list):
        for part in schema:
            close_objects(part)
    if not isinstance(schema, dict):
        return
    for name in PART_MAPS:
        for part in schema[name].values() if isinstance(schema.get(name), dict) else ():
            close_objects(part)
    for name in PARTS:
        close_objects(schema.get(name))
    if "additionalProperties" not in schema and any(
        isinstance(schema.get(name), dict) for name in ("properties", "patternProperties")
    ):
        schema["additionalProperties"] = False


def followed(matcher: Matcher, output: I32) -> Matcher:
    """A matcher after the output that a sequence has already. Raises GrammarError."""
    if output.size:
        matcher.push(output.tolist())
    return matcher


def _llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise GrammarError(NOT_INSTALLED) from error


def _reason(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."
