"""Grammars: what the output of a request may be, as masks over the vocabulary. llguidance does the work.

`GrammarCompiler` makes a `Matcher` of what a request asks for (`structured_outputs.StructuredOutputsParams.to_fields`). That
takes milliseconds, with a large schema seconds, and the first time also what the vocabulary takes to be read. So it is called
from threads, and lets other threads run meanwhile. A Matcher follows the output of one sequence, token by token: `push`, then
`masks` says what may come next, in microseconds. It is a function of the tokens, so a request that is computed again goes on
from its output so far.

The matchers of one grammar share its lexer, which grows as they are used and can reach its limit. So a compiled grammar is
renewed now and then, and is not used again once one of its matchers has failed (`forget`).

Invariants: matching is bounded by llguidance's own limits, and a matcher that reaches them fails with the reason.
`actors.executor` bounds the resources of compiling. What compiled grammars take, in the cache or in use, is estimated from their
text. Called by actors.constraints.
"""

from __future__ import annotations

import importlib
import json
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from actorllm.messages import U32
from actorllm.text.json_schema import close_objects, held
from actorllm.text.structural_tag import lark_of, schemas_of
from actorllm.text.tokenizer import I32, Tokenizer
from actorllm.types.structured_outputs import MAX_CHARACTERS

logger = logging.getLogger(__name__)

MIB = 1 << 20
MAX_CACHE_BYTES = 256 * MIB
"""Of compiled grammars that are kept, used or not."""
MAX_BYTES = 512 * MIB
"""Of all compiled grammars, those that requests use included: a large one is compiled when there is room for it."""
BYTES_PER_GRAMMAR = 64 << 10
BYTES_PER_CHARACTER = 256
"""What a compiled grammar takes. llguidance does not tell; measured were at most 260 bytes per character (a schema with 1000
properties; tags of 130 KB: 130)."""
SMALL_CHARACTERS = 16 << 10
"""A grammar up to this size is compiled whatever the others take."""
MAX_USES = 256
"""After so many requests a grammar is compiled again: the lexer that they shared has grown."""
MAX_LEXER_STATES = 100_000
"""Of one lexer; some 400 bytes each."""
MAX_TOLD = 5
"""Dropped keywords that a warning names."""

WHITESPACE = r"[ \t]{1,2}|[ \t]?\r?\n(?: {0,24}|\t{0,8})"
"""Between two tokens of JSON, unless the request says what may be there: what people write on a line, or a new line with its
indentation. A model that has lost its way would go on with spaces for ever."""

MAX_MASK_S = 0.02
"""Processor time of a mask. Ordinary grammars take a tenth of a millisecond; every stream waits for the masks of a step."""
MAX_SLOW_S = 1.0
"""Processor time of all masks of a request that took longer than that each."""
MAX_REASON = 600
"""Characters of an error of llguidance, which may quote the whole grammar."""

NOT_INSTALLED = "structured outputs need llguidance: pip install 'actorllm[structured]'"

STOPS = {
    "NoExtensionBias": "there is no text that it allows here",
    "NoExtension": "there is no text that it allows here",
    "ParserTooComplex": "it is too complex to be followed",
    "LexerTooComplex": "it is too complex to be followed",
}
"""llguidance's names of why a matcher stopped, in words."""

NOT_IN_GRAMMAR = "doesn't satisfy the grammar"
"""In llguidance's error about a token; its other errors are limits that were reached."""
COERCE_ONE_OF = "coerce_one_of"
"""In llguidance's error about a `oneOf` whose branches may both match: an option that no request has."""
ONE_OF = (
    "oneOf whose branches can match the same value cannot be held by a grammar; say anyOf, or tell the branches apart"
)


class GrammarError(ValueError):
    """A constraint that cannot be used; the message says why."""


class NotInGrammarError(GrammarError):
    """A token that the grammar does not have where it came."""


class CompileDropped(Exception):
    """The grammar is not waited for any more."""


class CompiledGrammar:
    """A compiled grammar, which all its matchers refer to."""

    __slots__ = ("__weakref__", "dropped", "key", "num_bytes", "num_uses")

    def __init__(self, key: str, num_bytes: int, dropped: Sequence[str]) -> None:
        self.key = key
        self.num_bytes = num_bytes
        self.num_uses = 0
        self.dropped = dropped
        """Keywords of a schema that its grammar does not hold."""


class Matcher:
    """Where the output of one sequence stands in its grammar."""

    __slots__ = ("_eos_ids", "_matcher", "compiled", "is_complete", "is_over", "num_tokens", "slow_s")

    ends_request = True
    """Nothing may follow where it is over."""

    def __init__(self, matcher: Any, eos_ids: frozenset[int], compiled: CompiledGrammar) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self.compiled = compiled
        self.num_tokens = 0
        self.slow_s = 0.0
        """Processor time of its masks that took long."""
        """Of the output, so far."""
        self.is_over = False
        """There was an end of text, or nothing can come any more: the grammar asks for nothing from here on."""
        self.is_complete = False
        """It is over without an end of text (`end`)."""

    def push(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the output. Raises NotInGrammarError for one that the grammar does not have there, and another
        GrammarError where a limit is reached."""
        matcher = self._matcher
        self.num_tokens += len(token_ids)
        for token in token_ids:
            if self.is_over:
                return
            if not matcher.consume_token(token):
                error = matcher.get_error()
                raise (NotInGrammarError if NOT_IN_GRAMMAR in error else GrammarError)(_reason(error))
            if token in self._eos_ids and matcher.is_stopped():
                self.is_over = True

    def fill(self, row: U32, at: int) -> None:
        """Write what may come next. row: of the masks, filled with zeros; at: its address."""
        self._matcher.unsafe_compute_mask_ptr(at, 4 * row.size)

    def forced(self, most: int) -> list[int]:
        """The only tokens that it may go on with before its end, `most` at most; none: there is a choice, or it is over."""
        tokens = () if self.is_over else self._matcher.compute_ff_tokens()[:most]
        return list(takewhile(lambda token: token not in self._eos_ids, tokens))

    def allows(self, token: int) -> bool:
        """Whether it may come next."""
        return bool(self._matcher.validate_tokens([token]))

    def error(self) -> str | None:
        """Why it cannot go on; None: it can."""
        return _reason(self._matcher.get_error()) if self._matcher.is_error() else None

    def end(self) -> None:
        """It ends here, without an end of text."""
        self.is_over = self.is_complete = True

    def copy(self) -> Matcher:
        """Another one that stands at the same place."""
        made = Matcher(self._matcher.deep_copy(), self._eos_ids, self.compiled)
        made.num_tokens, made.is_over, made.is_complete = self.num_tokens, self.is_over, self.is_complete
        return made


class GrammarCompiler:
    """vocab_size: the model's. eos_ids: what ends a text, which comes where a grammar may end."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.eos_ids = self._eos_ids = frozenset(eos_ids)
        self._known: OrderedDict[str, Matcher] = OrderedDict()
        self._lock = threading.Lock()
        """Held for moments only: the loop takes it, too."""
        self._reading = threading.Lock()
        self._vocabulary: Any = None
        self._alive: weakref.WeakSet[CompiledGrammar] = weakref.WeakSet()
        self.num_bytes = 0
        """Of the cache."""
        self.num_compiled = 0
        self.num_forgotten = 0
        """Taken from the cache because a matcher of theirs failed, or after MAX_USES."""
        eos_mask = np.zeros(self._num_words, np.uint32)
        for token in self._eos_ids:
            eos_mask[token // 32] |= np.uint32(1 << token % 32)
        self._not_eos = ~eos_mask
        every = np.arange(32 * self._num_words, dtype=np.int64) < vocab_size
        self.full_mask = np.packbits(every, bitorder="little").view(np.uint32)
        """Of all tokens."""

    @property
    def vocab_size(self) -> int:
        """The model's."""
        return self._vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def _num_words(self) -> int:
        return -(-self._vocab_size // 32)

    @property
    def is_ready(self) -> bool:
        """The vocabulary has been read; a grammar takes only its own time now."""
        return self._vocabulary is not None

    def has_room(self, num_characters: int) -> bool:
        """Whether a grammar of this size may be compiled now, beside those in use. From any thread."""
        if num_characters <= SMALL_CHARACTERS:
            return True
        with self._lock:
            while (num_bytes := self._num_bytes_in_use()) and num_bytes + num_bytes_of(num_characters) > MAX_BYTES:
                if not self._known:
                    return False
                self._remove(next(iter(self._known)))
        return True

    def compile(self, grammar: Mapping[str, Any], is_wanted: Callable[[], bool] = lambda: True) -> Matcher:
        """A fresh matcher. Safe to call from several threads. Raises GrammarError.

        is_wanted: asked between the stages; where it says no, CompileDropped is raised.
        """
        key = json.dumps(dict(grammar), sort_keys=True)
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
        with self._lock:
            known = self._known_copy(key)
        if known is not None:
            known._matcher.compute_bitmask()  # fails where the lexer has reached its limit with other requests
            if not known._matcher.is_error():
                return known
            self.forget(known)
        llguidance = _llguidance()
        limits = llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
        dropped: list[str] = []
        try:
            text = self._grammar_text(llguidance, grammar, dropped)
        except GrammarError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise GrammarError(_reason(str(error) or type(error).__name__)) from error
        if not is_wanted():
            raise CompileDropped
        made = llguidance.LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        if not made.is_error() and not is_wanted():
            raise CompileDropped
        if not made.is_error():
            first = made.compute_bitmask()  # takes longest of all, and every copy of this matcher has it
            _try_first_token(made, first)  # what follows it, and how long that takes
        if made.is_error():
            raise GrammarError(_reason(made.get_error()))
        if dropped:
            logger.warning(
                "%s: %s is not held by the grammar; the model is free there",
                grammar.get("source", "structured_outputs"),
                ", ".join(dropped[:MAX_TOLD]),
            )
        compiled = CompiledGrammar(key, num_bytes_of(len(str(grammar["text"]))), dropped)
        matcher = Matcher(made, self._eos_ids, compiled)
        with self._lock:
            self._alive.add(compiled)
            self.num_compiled += 1
            self._keep(matcher)
            return matcher.copy()

    def warm_up(self) -> None:
        """Read the vocabulary, and compile a grammar that is neither kept nor counted. Raises GrammarError."""
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
        llguidance = _llguidance()
        text = self._grammar_text(llguidance, {"kind": "json", "text": '{"type": "object"}'}, [])
        llguidance.LLMatcher(self._vocabulary, text, log_level=0).compute_bitmask()

    def forget(self, matcher: Matcher) -> None:
        """A matcher has failed: requests for its grammar get one that is compiled anew from now on."""
        with self._lock:
            known = self._known.get(matcher.compiled.key)
            if known is not None and known.compiled is matcher.compiled:
                self._remove(matcher.compiled.key)
                self.num_forgotten += 1

    def _known_copy(self, key: str) -> Matcher | None:
        """Under the lock: two threads must not read one at the same time."""
        known = self._known.get(key)
        if known is None:
            return None
        known.compiled.num_uses += 1
        if known.compiled.num_uses >= MAX_USES:
            self._remove(key)
            self.num_forgotten += 1
            return None
        self._known.move_to_end(key)
        return known.copy()

    def _keep(self, matcher: Matcher) -> None:
        key = matcher.compiled.key
        if key in self._known:
            self._remove(key)
        self._known[key] = matcher
        self.num_bytes += matcher.compiled.num_bytes
        while self.num_bytes > MAX_CACHE_BYTES:
            self._remove(next(iter(self._known)))

    def _remove(self, key: str) -> None:
        self.num_bytes -= self._known.pop(key).compiled.num_bytes

    def _num_bytes_in_use(self) -> int:
        """Of the cache and of the matchers of requests. Under the lock."""
        return sum(compiled.num_bytes for compiled in self._alive)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            num_bytes_in_use = self._num_bytes_in_use()
        return {
            "num_compiled": self.num_compiled,
            "num_cached": len(self._known),
            "num_forgotten": self.num_forgotten,
            "cache_bytes": self.num_bytes,
            "bytes_in_use": num_bytes_in_use,
        }

    def masks(self, matchers: Sequence[Matcher]) -> tuple[U32, list[bool]]:
        """What each may go on with, [len(matchers), ceil(vocab_size / 32)]; bit i of word j allows id 32 * j + i.

        And which of them have nothing but an end of text. A row without a bit: its matcher has failed (`failure_of`), or it is
        at its end and the model has no token for that.
        """
        num_read = 0 if self._vocabulary is None else self._vocabulary.vocab_size  # no grammar needed it yet
        words = -(-max(num_read, self._vocab_size) // 32)
        masks = np.zeros((len(matchers), words), np.uint32)
        at, size = masks.ctypes.data, 4 * words
        for row, matcher in enumerate(matchers):
            began = time.thread_time()
            matcher.fill(masks[row], at)
            if (took := time.thread_time() - began) > MAX_MASK_S:
                matcher.slow_s += took
            at += size
        if words > self._num_words:
            masks = np.ascontiguousarray(masks[:, : self._num_words])
        is_last: list[bool] = (np.bitwise_or.reduce(masks & self._not_eos, axis=1) == 0).tolist()
        for row, matcher in enumerate(matchers):
            if matcher.slow_s > MAX_SLOW_S or (is_last[row] and matcher.error() is not None):
                masks[row] = 0
                is_last[row] = False
        return masks, is_last

    @staticmethod
    def failure_of(matcher: Matcher) -> str | None:
        """Why a matcher cannot go on; None: it can."""
        if matcher.slow_s > MAX_SLOW_S:
            return f"its tokens took {matcher.slow_s:.1f} s of processor time; shorten or simplify it"
        return matcher.error()

    def _read_vocabulary(self) -> Any:
        llguidance = _llguidance()
        num_ids = max(self._vocab_size, self._tokenizer.vocab_size)
        eos = sorted(self._eos_ids) or None
        try:
            return llguidance.LLTokenizer(self._tokenizer.backend.to_str(), n_vocab=num_ids, eos_token=eos)
        except Exception as error:  # whatever the bindings raise for a tokenizer that they cannot read
            raise GrammarError(f"the tokenizer cannot be used with grammars: {_reason(str(error))}") from error

    def _grammar_text(self, llguidance: Any, grammar: Mapping[str, Any], dropped: list[str]) -> str:
        """dropped: gets the keywords that the grammar does not hold."""
        kind, text = grammar["kind"], str(grammar["text"])
        is_hint = grammar.get("strict") is False
        if len(text) > MAX_CHARACTERS:
            raise GrammarError(f"it has {len(text)} characters, and the limit is {MAX_CHARACTERS}")
        if kind == "json":
            schema = json.loads(text)
            if grammar.get("disable_additional_properties"):
                close_objects(schema)
            dropped += held(schema, is_hint=is_hint)
            options = json_options(grammar)
            return str(llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=options))
        if kind == "structural_tag":
            special = {
                name: id for id, name in self._tokenizer.added_tokens.items() if id in self._tokenizer.special_ids
            }
            if grammar.get("disable_additional_properties"):
                raise GrammarError(
                    "disable_additional_properties is for json; say it in the schemas of a structural tag"
                )
            tag = json.loads(text)
            for schema in schemas_of(tag):
                dropped += held(schema, is_hint=is_hint)
            return str(llguidance.grammar_from("lark", lark_of(tag, special, json_options(grammar))))
        if kind == "grammar" and "::=" not in text:  # as vLLM tells it; llguidance takes "?start: ..." for GBNF
            return str(llguidance.grammar_from("lark", text))
        if kind in ("regex", "choice", "grammar"):
            return str(llguidance.grammar_from(kind, text))
        raise GrammarError(f"{kind!r:.80} is no kind of grammar")


def json_options(grammar: Mapping[str, Any]) -> dict[str, Any]:
    """What may be between the tokens of JSON, as llguidance has it; and whether `oneOf` may be taken as `anyOf`."""
    lenient = {"coerce_one_of": True} if grammar.get("strict") is False else {}
    if grammar.get("whitespace_pattern"):
        return {"whitespace_pattern": grammar["whitespace_pattern"], **lenient}
    if grammar.get("disable_any_whitespace"):
        return {"whitespace_flexible": False, **lenient}
    return {"whitespace_pattern": WHITESPACE, **lenient}


def num_bytes_of(num_characters: int) -> int:
    """What a compiled grammar takes, about."""
    return BYTES_PER_GRAMMAR + BYTES_PER_CHARACTER * num_characters


def walked(matcher: Matcher, token_ids: Iterable[int]) -> list[Matcher]:
    """Copies that stand behind each of these tokens, as far as the grammar has them and goes on there. The matcher stays."""
    found: list[Matcher] = []
    for token in token_ids:
        if not matcher.allows(token):
            break
        matcher = matcher.copy()
        try:
            matcher.push((token,))
        except GrammarError:  # a limit: where the token is sampled, the request is told
            break
        if matcher.is_over:
            break
        found.append(matcher)
    return found


def followed(matcher: Matcher, output: I32) -> Matcher:
    """A matcher after the output that a sequence has already. Raises GrammarError."""
    if output.size:
        matcher.push(output.tolist())
    return matcher


def _try_first_token(matcher: Any, mask: bytes) -> None:
    """Of those that may come first, on a copy. A limit of the lexer may be reached by reading what the mask allows. Raises
    GrammarError."""
    ids = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
    if ids.size:
        trial = matcher.deep_copy()
        if not trial.consume_token(int(ids[-1])):
            raise GrammarError(_reason(trial.get_error()))
        began = time.thread_time()
        trial.compute_bitmask()
        took = time.thread_time() - began
        if took > MAX_MASK_S:
            raise GrammarError(
                f"a token of it takes {1e3 * took:.0f} ms of processor time, and the limit is {1e3 * MAX_MASK_S:.0f} ms, since "
                f"every request waits for that; shorten or simplify it"
            )


def _llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise GrammarError(NOT_INSTALLED) from error


def _reason(text: str) -> str:
    """An error of llguidance for its reader: one line, in words."""
    text = " ".join(text.replace("<non-verbose/>", "").split())
    text = ONE_OF if COERCE_ONE_OF in text else STOPS.get(text, text)
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."
