"""`SamplingRules`: what a request wants done to its logits, and told about its probabilities.

Owns the way of these parameters from the front door to the worker. Most requests have none: then there is no object, no byte
travels, and nothing looks for them. A frontend makes the rules and checks them against the model (`rules_of`). They travel in
`Submit` as one mapping of what is not at its default (`to_fields`). With each new row of a plan they travel as two ragged
segments, one record per row that has any (`encode_rules`). Called by the engine's intake, the scheduler and the worker's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from actorllm.errors import InvalidParameterError
from actorllm.messages import F32, I32
from actorllm.types.params import MAX_BAD_WORDS, MAX_PATTERN_SIZE, RepetitionDetectionParams, SamplingParams

_HEADER = 9
"""Integers before the ids of a record: slot, integers in it, logprobs, prompt logprobs, first position, four counts."""
_PENALTIES = 3

MAX_KNOWN_WORDS = 4096
"""Bad words of a tokenizer whose tokens are remembered."""

MAX_COUNT = 2**31 - 1
MAX_F32 = float(np.finfo(np.float32).max)


class WordEncoder(Protocol):
    """Of a tokenizer, what bad words need."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> I32: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRules:
    """Parameters that act on logits or ask for their values. Ids are within the vocabulary."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias_ids: tuple[int, ...] = ()
    biases: tuple[float, ...] = ()
    allowed_ids: tuple[int, ...] = ()
    """Empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences, none of them empty, whose last token is not sampled where it would complete them."""
    num_logprobs: int = -1
    """How many of the most likely tokens to report beside the sampled one; -1: nothing at all."""
    logprob_ids: tuple[int, ...] = ()
    """Those to report instead of the most likely ones, num_logprobs many; empty: the most likely."""
    num_prompt_logprobs: int = -1
    """The same for every token of the prompt but the first."""
    repetition: tuple[int, int, int] | None = None
    """Largest and smallest pattern, and how many copies of it end the request."""

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def has_logprobs(self) -> bool:
        return self.num_logprobs >= 0 or self.num_prompt_logprobs >= 0

    @property
    def is_for_worker(self) -> bool:
        """Whether any of it is the worker's business."""
        return bool(self.has_penalties or self.bias_ids or self.allowed_ids or self.bad_words or self.has_logprobs)

    @property
    def num_bytes(self) -> int:
        """Of what a plan carries of them (`encode_rules`), about."""
        words = sum(len(word) + 1 for word in self.bad_words)
        return 4 * (2 * len(self.bias_ids) + len(self.allowed_ids) + len(self.logprob_ids) + words)

    def to_fields(self) -> dict[str, Any]:
        """What is not at its default."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> SamplingRules:
        """The rules again, also after a way over the wire that knows no tuples."""
        given: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in values.items()}
        if "bad_words" in given:
            given["bad_words"] = tuple(tuple(word) for word in given["bad_words"])
        return cls(**given)

    def check(self, vocab_size: int) -> None:
        """Raises ValueError or TypeError for what `rules_of` would not have made, and what would harm others."""
        # Ids index arrays in the worker, so each must be an id of the vocabulary.
        for ids in (self.bias_ids, self.allowed_ids, self.logprob_ids, *self.bad_words):
            array = _flat(ids)
            if not isinstance(ids, tuple) or array is None:
                raise TypeError(f"{ids!r:.80} is no list of token ids")
            if array.size and (array.dtype.kind != "i" or array.min() < 0 or array.max() >= vocab_size):
                raise ValueError(f"token ids outside the vocabulary of {vocab_size}, or no integers")
        numbers = _flat((self.presence_penalty, self.frequency_penalty, self.repetition_penalty, *self.biases))
        if (
            numbers is None
            or numbers.dtype.kind not in "fi"
            or not (abs(numbers) <= MAX_F32).all()
            or self.repetition_penalty <= 0
        ):
            raise ValueError("penalties and biases must be finite 32-bit numbers, the repetition penalty more than 0")
        # The worker pairs biases with their ids by position.
        if len(self.biases) != len(self.bias_ids) or not all(self.bad_words) or len(self.bad_words) > MAX_BAD_WORDS:
            raise ValueError("biases do not fit their ids, or bad words are empty or too many")
        for number in (self.num_logprobs, self.num_prompt_logprobs):
            if type(number) is not int or not -1 <= number <= vocab_size:
                raise ValueError(f"{number!r:.80} log-probabilities in a vocabulary of {vocab_size}")
        if self.logprob_ids and len(self.logprob_ids) != self.num_logprobs:
            raise ValueError(f"{len(self.logprob_ids)} ids for {self.num_logprobs!r:.80} log-probabilities")
        # Each token costs work by the number of pattern sizes, so these are bounded.
        if self.repetition is not None:
            largest, smallest, count = self.repetition
            if not 1 <= smallest <= largest <= MAX_PATTERN_SIZE or not 2 <= count <= MAX_COUNT:
                raise ValueError(f"repetitions of {smallest!r:.80} to {largest!r:.80} tokens, {count!r:.80} times")


def _flat(values: Sequence[object]) -> NDArray[Any] | None:
    """None: they are no numbers, but hold others."""
    try:
        array = np.array(values)
    except ValueError:  # lists of several lengths
        return None
    return array if array.ndim == 1 else None


def check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidParameterError for parameters with a token that the model does not have."""
    for name in ("logit_bias", "allowed_token_ids", "logprob_token_ids", "stop_token_ids"):
        ids = getattr(params, name)
        if ids and (highest := max(ids)) >= vocab_size:
            raise InvalidParameterError(f"{name}: {highest} is outside the vocabulary of {vocab_size} tokens")


def rules_of(
    params: SamplingParams, vocab_size: int, max_logprobs: int, tokenizer: Callable[[], WordEncoder]
) -> SamplingRules | None:
    """The rules of checked parameters; None: none. Raises InvalidParameterError for what the model cannot do."""
    detection = cast("RepetitionDetectionParams | None", params.repetition_detection)
    check_ids(params, vocab_size)
    bias = cast("dict[int, float] | None", params.logit_bias) or {}
    allowed = cast("list[int] | None", params.allowed_token_ids) or []
    logged = cast("list[int] | None", params.logprob_token_ids) or []
    rules = SamplingRules(
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        bias_ids=tuple(bias),
        biases=tuple(bias.values()),
        allowed_ids=tuple(allowed),
        bad_words=_token_sequences(cast("list[str]", params.bad_words), vocab_size, tokenizer),
        num_logprobs=len(logged) or _num_logprobs("logprobs", params.logprobs, vocab_size, max_logprobs),
        logprob_ids=tuple(logged),
        num_prompt_logprobs=_num_logprobs("prompt_logprobs", params.prompt_logprobs, vocab_size, max_logprobs),
        repetition=_repetition(detection),
    )
    return None if rules == NO_RULES else rules


def _num_logprobs(name: str, asked: int | None, vocab_size: int, limit: int) -> int:
    if asked is None:
        return -1
    number = vocab_size if asked == -1 else asked
    if number > (vocab_size if limit == -1 else limit):
        raise InvalidParameterError(
            f"{name}={asked} asks for {number} log-probabilities per token, and the limit is "
            + (f"the vocabulary of {vocab_size}" if limit == -1 else f"{limit}; build the engine with max_logprobs")
        )
    return number


def _repetition(detection: RepetitionDetectionParams | None) -> tuple[int, int, int] | None:
    if detection is None or not detection.max_pattern_size:
        return None
    return detection.max_pattern_size, max(1, detection.min_pattern_size), min(detection.min_count, MAX_COUNT)


def _token_sequences(
    words: list[str], vocab_size: int, tokenizer: Callable[[], WordEncoder]
) -> tuple[tuple[int, ...], ...]:
    """Words as tokens, as vLLM makes them.

    As they are, and with a leading space where that only makes another first token: the word within a text.
    """
    sequences = [sequence for word in words for sequence in _sequences_of(word, tokenizer())]
    if len(sequences) > MAX_BAD_WORDS:
        raise InvalidParameterError(
            f"bad_words are {len(sequences)} token sequences, with and without a leading space, and the limit is "
            f"{MAX_BAD_WORDS}"
        )
    for sequence in sequences:
        if max(sequence) >= vocab_size:
            raise InvalidParameterError(
                f"bad_words: token {max(sequence)} is outside the model's vocabulary of {vocab_size} tokens"
            )
    return tuple(sequences)


def _sequences_of(word: str, tokenizer: WordEncoder) -> tuple[tuple[int, ...], ...]:
    """Of one word; remembered, because mostly every request of a program forbids the same ones."""
    known = _known_words.setdefault(tokenizer, {})
    found = known.get(word)
    if found is None:
        if len(known) >= MAX_KNOWN_WORDS:
            known.clear()
        found = known[word] = _tokenized(word, tokenizer)
    return found


def _tokenized(word: str, tokenizer: WordEncoder) -> tuple[tuple[int, ...], ...]:
    bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False).tolist())
    spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False).tolist())
    if not bare:
        raise InvalidParameterError(f"bad_words: {word!r} has no token, so it cannot be kept away; remove it")
    if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
        return bare, spaced
    return (bare,)


_known_words: WeakKeyDictionary[WordEncoder, dict[str, tuple[tuple[int, ...], ...]]] = WeakKeyDictionary()


def encode_rules(rows: Iterable[tuple[int, int, SamplingRules]]) -> tuple[I32, F32]:
    """Records of (slot, first prompt position whose logprobs are wanted, rules), as integers and as numbers."""
    integers: list[int] = []
    numbers: list[float] = []
    for slot, first, rules in rows:
        words = [i for word in rules.bad_words for i in (len(word), *word)]
        size = _HEADER + len(rules.bias_ids) + len(rules.allowed_ids) + len(rules.logprob_ids) + len(words)
        integers += (slot, size, rules.num_logprobs, rules.num_prompt_logprobs, first)
        integers += (len(rules.bias_ids), len(rules.allowed_ids), len(rules.logprob_ids), len(rules.bad_words))
        integers += rules.bias_ids
        integers += rules.allowed_ids
        integers += rules.logprob_ids
        integers += words
        numbers += (rules.presence_penalty, rules.frequency_penalty, rules.repetition_penalty)
        numbers += rules.biases
    return np.array(integers, np.int32), np.array(numbers, np.float32)


def decode_rules(integers: I32, numbers: F32) -> Iterator[tuple[int, int, SamplingRules]]:
    """The records again. Raises ValueError for anything that `encode_rules` does not make."""
    whole, parts = integers.tolist(), numbers.tolist()
    at = number_at = 0
    while at < len(whole):
        if at + _HEADER > len(whole):
            raise ValueError(f"rules: a record of {len(whole) - at} integers is none")
        slot, size, num_logprobs, num_prompt_logprobs, first, num_biases, num_allowed, num_logged, num_words = whole[
            at : at + _HEADER
        ]
        end, number_end = at + size, number_at + _PENALTIES + num_biases
        allowed_end = at + _HEADER + num_biases + num_allowed
        ids_end = allowed_end + num_logged
        if (
            min(num_biases, num_allowed, num_logged, num_words) < 0
            or not ids_end <= end <= len(whole)
            or number_end > len(parts)
        ):
            raise ValueError(f"rules: the record of slot {slot} does not fit its segment")
        bias_ids = tuple(whole[at + _HEADER : at + _HEADER + num_biases])
        words: list[tuple[int, ...]] = []
        word_at = ids_end
        while word_at < end:
            word_end = word_at + 1 + whole[word_at]
            words.append(tuple(whole[word_at + 1 : word_end]))
            if not word_at + 1 < word_end <= end:
                raise ValueError(f"rules: a word of slot {slot} does not fit its record")
            word_at = word_end
        if len(words) != num_words:
            raise ValueError(f"rules: slot {slot} has {len(words)} words, not {num_words}")
        presence, frequency, repetition = parts[number_at : number_at + _PENALTIES]
        yield (
            slot,
            first,
            SamplingRules(
                presence_penalty=presence,
                frequency_penalty=frequency,
                repetition_penalty=repetition,
                bias_ids=bias_ids,
                biases=tuple(parts[number_at + _PENALTIES : number_end]),
                allowed_ids=tuple(whole[at + _HEADER + num_biases : allowed_end]),
                logprob_ids=tuple(whole[allowed_end:ids_end]),
                bad_words=tuple(words),
                num_logprobs=num_logprobs,
                num_prompt_logprobs=num_prompt_logprobs,
            ),
        )
        at, number_at = end, number_end
    if number_at != len(parts):
        raise ValueError(f"rules: {len(parts) - number_at} numbers belong to no record")


NO_RULES = SamplingRules()
