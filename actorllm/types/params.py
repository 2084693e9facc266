"""What a request asks for: `SamplingParams`, `PoolingParams` and the checks of them. No I/O, no torch.

Names, defaults and meanings are vLLM's wherever both have a field.
"""

from __future__ import annotations

import copy
import enum
import functools
import json
import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, TypeVar, cast

from actorllm.errors import InvalidParameterError, UnknownParameterError, nearest_name, shown
from actorllm.types.structured_outputs import StructuredOutputsParams, structured_outputs_of

MAX_SEED = 2**64 - 1
"""Seeds are 64-bit and unsigned; a negative seed is taken modulo 2**64."""
NO_SEED = -1
"""The same as None, as in vLLM."""

MAX_TEMPERATURE = 2.0

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_CHARACTERS = 4096
"""Of all stop strings of a request together: what the scheduler's loop makes an automaton of in a few milliseconds."""
MAX_STOP_TOKEN_IDS = 1024

FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "flat_logprobs",
)
"""Sampling parameters that are True or False."""
MAX_BAD_WORDS = 128
"""As in vLLM; it counts what the words become as tokens (with and without a leading space), and so do we."""
MAX_BAD_WORD_LENGTH = 1024
MAX_PATTERN_SIZE = 1 << 16
MAX_ALLOWED_TOKEN_IDS = 1 << 22
MAX_LOGPROB_TOKEN_IDS = 128
MAX_EXTRA_ARGS = 1 << 16
"""Bytes of extra_args as JSON."""
MAX_EXTRA_DEPTH = 16
MAX_N = 16_384
"""Sequences of one request."""

BYTES_PER_ID = 8

MAX_FLOAT = sys.float_info.max
MAX_FLOAT32 = 2.0**128 - 2.0**104

T = TypeVar("T")


class RequestOutputKind(enum.Enum):
    """How much each output repeats."""

    CUMULATIVE = 0
    """Every output holds everything so far."""
    DELTA = 1
    """Every output holds only what is new."""
    FINAL_ONLY = 2
    """One output, at the end."""


VLLM_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1.0,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None,),
    "logits_processors": (None, []),
    "skip_clone": (False, True),
    "watermarking": (None, False),
    "routed_experts_prompt_start": (None, 0),
    "trace_decode_token_ids": (None, False),
}
"""Sampling parameters of vLLM that are accepted at these values, where they ask for what is done anyway."""

VLLM_POSITIONS = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "watermarking"),
    *("top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens"),
    *("logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids"),
    *("flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
    *("include_stop_str_in_output", "output_kind", "stream_interval", "skip_clone"),
)
"""What vLLM's `SamplingParams` takes by position, up to what is inside its engine."""

MAX_OPTIONAL_BIAS = 100.0
"""What `SamplingParams.from_optional` makes of a larger bias, as vLLM and OpenAI's API do."""


VLLM_REQUEST_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "prompt_adapter_request": (None,),
    "prompt_text": (None,),
    "reasoning_ended": (None,),
    "session_id": (None,),
    "kv_hints": (None,),
    "reasoning_parser_kwargs": (None, {}),
    "guided_options_request": (None,),
}
"""What vLLM's `generate` and `add_request` take beside prompt and parameters, and where it asks for what is done anyway."""

REQUEST_ARGUMENTS = (
    *("request_id", "priority", "slo", "is_latency_sensitive", "type_info", "tenant", "deadline", "timeout"),
    *("arrival_time", "tokenization_kwargs", "data_parallel_rank", "lora_request", "trace_headers"),
    "mm_processor_kwargs",
    *VLLM_REQUEST_ARGUMENTS,
)
"""What a request may bring beside prompt and parameters, for the error about what it may not."""


def check_request_arguments(arguments: dict[str, Any]) -> None:
    """Raises UnknownParameterError or InvalidParameterError for what asks for more than is done."""
    for name, value in arguments.items():
        if name not in VLLM_REQUEST_ARGUMENTS:
            raise UnknownParameterError(f"a request has no argument {name!r}{nearest_name(name, REQUEST_ARGUMENTS)}")
        _refuse_unless_idle(name, value, VLLM_REQUEST_ARGUMENTS)


def _refuse_unless_idle(name: str, value: object, known: dict[str, tuple[Any, ...]] = VLLM_PARAMETERS) -> None:
    for accepted in known[name]:
        try:
            if isinstance(value, bool) == isinstance(accepted, bool) and bool(value == accepted):
                return
        except Exception:  # an array, or an object's own failure: not one of these values in any case
            continue
    left_at = " or ".join(repr(accepted) for accepted in known[name])
    raise InvalidParameterError(f"{name}={shown(value)} is not supported yet; leave it at {left_at}")


def names_unknown_parameters(
    idle: dict[str, tuple[Any, ...]], positions: tuple[str, ...] = (), older: Mapping[str, str] | None = None
) -> Callable[[type[T]], type[T]]:
    """Make a dataclass answer an unknown keyword with the nearest known one.

    idle: further names that it takes, and the values at which they ask for nothing. positions: what arguments without a
    name are, where the fields of the dataclass are to be named. older: what fields were called in older releases of vLLM.
    """

    def decorate(cls: type[T]) -> type[T]:
        generated: Callable[..., None] = cls.__init__
        names = [f.name for f in fields(cls) if f.init]  # type: ignore[arg-type]
        renamed = older or {}

        @functools.wraps(generated)
        def __init__(self: T, *args: Any, **kwargs: Any) -> None:
            if args and positions:
                args = _name(cls, args, positions, kwargs)
            for name in [name for name in kwargs if name not in names]:
                if name in renamed:
                    _take_older(name, renamed[name], kwargs)
                    continue
                if name not in idle:
                    nearest = nearest_name(name, [*names, *idle])
                    raise UnknownParameterError(f"{cls.__name__} has no parameter {name!r}{nearest}")
                _refuse_unless_idle(name, kwargs.pop(name), idle)
            generated(self, *args, **kwargs)

        cls.__init__ = __init__  # type: ignore[assignment]
        return cls

    return decorate


def _take_older(name: str, newer: str, kwargs: dict[str, Any]) -> None:
    """Rename what has another name now."""
    value = kwargs.pop(name)
    if value is None:
        return
    if kwargs.get(newer) is not None:
        raise InvalidParameterError(f"{name} and {newer} are one parameter; give one of them")
    kwargs[newer] = value


def _name(cls: type[Any], args: tuple[Any, ...], positions: tuple[str, ...], kwargs: dict[str, Any]) -> tuple[()]:
    """Move arguments without a name into kwargs."""
    if len(args) > len(positions):
        raise InvalidParameterError(
            f"{cls.__name__} takes {len(positions)} arguments without a name, not {len(args)}; name the others"
        )
    for name, value in zip(positions, args, strict=False):
        if name in kwargs:
            raise InvalidParameterError(f"{cls.__name__} got {name} twice: {shown(value)}, and {shown(kwargs[name])}")
        kwargs[name] = value
    return ()


@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """End a request whose output has become a loop: finish_reason "repetition".

    It is one when the output ends with copies in a row of the same tokens.

    Arguments:
        max_pattern_size: most tokens of a copy; 0 (default): off.
        min_pattern_size: fewest tokens of a copy; default 0, which means 1.
        min_count: how many copies; at least 2 where it is on.

    Raises:
        InvalidParameterError: one of them cannot be.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            _integer(f"repetition_detection.{name}", getattr(self, name), low=0)
        if self.max_pattern_size > MAX_PATTERN_SIZE:
            raise InvalidParameterError(
                f"repetition_detection.max_pattern_size={shown(self.max_pattern_size)} must be <= {MAX_PATTERN_SIZE}"
            )
        if self.min_pattern_size > self.max_pattern_size:
            raise InvalidParameterError(
                f"repetition_detection.min_pattern_size={shown(self.min_pattern_size)} is more than "
                f"max_pattern_size={self.max_pattern_size}"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise InvalidParameterError(
                f"repetition_detection.min_count={self.min_count} must be >= 2 to tell a repetition; "
                f"max_pattern_size=0 turns the detection off"
            )


@names_unknown_parameters(VLLM_PARAMETERS, VLLM_POSITIONS, {"guided_decoding": "structured_outputs"})
@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request, and when to stop. Fields may be assigned; a request checks them again.

    How tokens are chosen. temperature, min_p, top_k and top_p apply in this order; what changes the logits applies before
    them, in the order in which it stands here:
        allowed_token_ids: nothing else is chosen; None (default): all.
        bad_words: the token that would complete one is not chosen; default none.
        min_tokens: before so many tokens no end of text and no stop token is chosen; default 0.
        logit_bias: what is added to logits, by token id; None (default): nothing.
        repetition_penalty: above 0; divides or multiplies the logits of tokens of prompt and output; default 1.
        frequency_penalty: -2 to 2, times how often the output has the token; default 0.
        presence_penalty: -2 to 2, once if the output has the token; default 0.
        temperature: 0 is greedy, 2 the most; default 1.
        min_p: 0 to 1, relative to the most likely token; default 0.
        top_k: only the so many most likely tokens; 0 (default) or -1: all.
        top_p: only the most likely tokens that have this probability together; above 0, at most 1; default 1.
        seed: any integer (modulo 2**64); None (default) or -1 draws one.
        structured_outputs: what the output must match (StructuredOutputsParams, or a mapping of its fields); None: anything.
            It ends, with finish_reason "stop", where nothing can come any more; where it may end or go on, the model's end of
            text decides. With ignore_eos it goes on as long as it can. min_tokens does not keep it from its end. Of an engine
            with a reasoning_parser it is for what comes behind the thought.
        thinking_token_budget: most tokens of a thought; then its end is written. At least 0; None (default): any number. It needs
            an engine with reasoning_parser or reasoning_config.

    When a request ends:
        max_tokens: most tokens of the output; default 16; None: up to the model's length.
        stop: strings that end the text and are not part of it, MAX_STOP_STRINGS at most; default none.
        stop_token_ids: ids that end it, MAX_STOP_TOKEN_IDS at most; default none.
        ignore_eos: the model's own end-of-text ids do not end it; default False.
        repetition_detection: RepetitionDetectionParams, or a mapping of its fields; None (default): off.

    What outputs hold:
        n: sequences per request, MAX_N at most; default 1. They share the seed and differ by their sample index.
        best_of: only n, or None (default).
        output_kind: what each output repeats (RequestOutputKind); default CUMULATIVE.
        stream_interval: new tokens per output; the first and the last output come at once all the same. None: the engine's.
        detokenize: False makes no text at all, and needs no tokenizer; default True.
        skip_special_tokens: special tokens have no text; default True.
        spaces_between_special_tokens: if they have text, what a decoder puts between two of them stays; default True.
        include_stop_str_in_output: the stop string, or the text of the token that ended it, is part of the text; default
            False.
        logprobs: log-probabilities of the chosen token and of so many of the most likely ones, for every token; -1: of all;
            None (default): none. They are those of the model, before anything above, unless the engine was built with another
            logprobs_mode. At most the engine's max_logprobs.
        prompt_logprobs: the same for the prompt's tokens; such a request never reads the prefix cache.
        logprob_token_ids: in the place of the most likely tokens, these, MAX_LOGPROB_TOKEN_IDS at most; their ranks number
            them. None (default): none.
        flat_logprobs: outputs hold FlatLogprobs, which read like the lists that they stand for; default False.

    How the prompt is read:
        truncate_prompt_tokens: only so many tokens at its end count; -1: as many as the model's length leaves room for;
            None (default): all.
        skip_reading_prefix_cache: compute all of it; None (default): as prompt_logprobs needs.

    For logits processors of the application (`logits_processors=` of the engine):
        extra_args: a mapping that they read, of values that JSON has; MAX_EXTRA_ARGS bytes of JSON at most. None (default): none.

    Other parameters of vLLM are accepted at their defaults (VLLM_PARAMETERS).

    Raises:
        InvalidParameterError: a parameter cannot be; UnknownParameterError: names the nearest one.

    Example:
        params = SamplingParams(temperature=0.7, max_tokens=32, stop=["The end"], seed=1)
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool = False
    skip_reading_prefix_cache: bool | None = None
    repetition_detection: RepetitionDetectionParams | Mapping[str, int] | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    n: int = 1
    best_of: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    truncate_prompt_tokens: int | None = None
    thinking_token_budget: int | None = None
    extra_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        # Each helper returns the value in its final type, or raises with the name of the parameter and the fix.
        self.temperature = _number("temperature", self.temperature, low=0.0, high=MAX_TEMPERATURE)
        self.top_p = _number("top_p", self.top_p, above=0.0, high=1.0)
        self.min_p = _number("min_p", self.min_p, low=0.0, high=1.0)
        self.top_k = _integer("top_k", self.top_k, low=-1)
        if self.thinking_token_budget is not None:
            self.thinking_token_budget = _integer("thinking_token_budget", self.thinking_token_budget, low=0)
        self.presence_penalty = _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        self.frequency_penalty = _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        self.repetition_penalty = _number("repetition_penalty", self.repetition_penalty, above=0.0, high=MAX_FLOAT32)
        self.logit_bias = _logit_bias(self.logit_bias)
        self.allowed_token_ids = _allowed_token_ids(self.allowed_token_ids)
        self.bad_words = _bad_words(self.bad_words)
        self.logprobs = _num_logprobs("logprobs", self.logprobs)
        self.prompt_logprobs = _num_logprobs("prompt_logprobs", self.prompt_logprobs)
        self.logprob_token_ids = _logprob_token_ids(self.logprob_token_ids, self.logprobs)
        self.repetition_detection = _repetition_detection(self.repetition_detection)
        if self.structured_outputs is not None:
            self.structured_outputs = structured_outputs_of(self.structured_outputs)
        if self.skip_reading_prefix_cache is not None and not isinstance(self.skip_reading_prefix_cache, bool):
            raise InvalidParameterError(
                f"skip_reading_prefix_cache={shown(self.skip_reading_prefix_cache)} must be True, False or None"
            )
        if self.seed is not None:
            seed = _integer("seed", self.seed)
            self.seed = None if seed == NO_SEED else seed & MAX_SEED
        # Parameters that depend on each other come after those that they depend on.
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, low=1)
        self.min_tokens = _integer("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                f"min_tokens={shown(self.min_tokens)} is more than max_tokens={shown(self.max_tokens)}"
            )
        self._check_n()
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameterError(f"{name}={shown(getattr(self, name))} must be True or False")
        self.stop = _stop_strings(self.stop)
        if self.stop and not self.detokenize:
            raise InvalidParameterError("stop strings need the text: leave detokenize=True, or use stop_token_ids")
        self.stop_token_ids = _token_ids("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidParameterError(f"output_kind={shown(self.output_kind)} must be a RequestOutputKind")
        if self.stream_interval is not None:
            self.stream_interval = _integer("stream_interval", self.stream_interval, low=1, high=2**31 - 1)
        if self.truncate_prompt_tokens is not None:
            check_truncation(self.truncate_prompt_tokens)
        if self.extra_args is not None:
            self.extra_args = _extra_args(self.extra_args)

    def _check_n(self) -> None:
        if _integer("n", self.n, low=1) > MAX_N:
            raise InvalidParameterError(f"n={shown(self.n)} is more than the limit of {MAX_N}")
        if self.n > 1 and self.temperature == 0:
            raise InvalidParameterError(
                f"n={self.n} with temperature=0 would give the same text {self.n} times; set n=1 or a temperature"
            )
        if self.best_of is not None and _integer("best_of", self.best_of) != self.n:
            raise InvalidParameterError(
                f"best_of={shown(self.best_of)} must equal n={self.n}: every sequence is returned; choose among them"
            )

    @property
    def guided_decoding(self) -> StructuredOutputsParams | Mapping[str, Any] | None:
        """As `structured_outputs`, by the name of older releases of vLLM. May be assigned."""
        return self.structured_outputs

    @guided_decoding.setter
    def guided_decoding(self, value: StructuredOutputsParams | Mapping[str, Any] | None) -> None:
        self.structured_outputs = value

    @property
    def num_logprobs(self) -> int | None:
        """Log-probabilities per token of the output, beside its own: `logprobs`, or one for each of logprob_token_ids."""
        if self.logprobs is not None:
            return self.logprobs
        return len(self.logprob_token_ids) if self.logprob_token_ids else None

    @staticmethod
    def from_optional(**parameters: Any) -> SamplingParams:
        """As the constructor, by name only, of what comes from a request in JSON.

        Arguments:
            parameters: None is the default of n, temperature, top_p and the penalties, too; biases are brought within -100 and
                100.

        Raises:
            InvalidParameterError, UnknownParameterError: as the constructor.
        """
        for name in ("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p"):
            if name in parameters and parameters[name] is None:
                del parameters[name]
        params = SamplingParams(**parameters)
        params.logit_bias = params.logit_bias and {
            token: min(MAX_OPTIONAL_BIAS, max(-MAX_OPTIONAL_BIAS, bias)) for token, bias in params.logit_bias.items()
        }
        return params

    def clone(self) -> SamplingParams:
        """A copy that shares nothing with this one."""
        return copy.deepcopy(self)

    def checked_copy(self) -> SamplingParams:
        """The same parameters as they are now, checked again: fields may have been assigned since.

        Raises:
            InvalidParameterError: one of them cannot be.
        """
        checked = copy.copy(self)
        checked.__post_init__()
        return checked


class SettledParams(SamplingParams):
    """Parameters that were checked, and that do not change any more: requests take them as they are (`settled`)."""

    __slots__ = ()

    def checked_copy(self) -> SamplingParams:
        """Itself: a check of a hundred thousand ids takes milliseconds, and a body may have thousands of prompts.

        Code of the application is given `extra_args`, and may change them: each request has its own.
        """
        if self.extra_args is None:
            return self
        made = copy.copy(self)
        made.extra_args = copy.deepcopy(self.extra_args)
        return made


def settled(params: SamplingParams) -> SamplingParams:
    """A checked copy for many requests, which is not checked again. Raises InvalidParameterError."""
    made = params.checked_copy()
    made.__class__ = SettledParams
    return made


def num_bytes(params: SamplingParams) -> int:
    """About what a request with these parameters carries of ids, biases and texts."""
    lists: tuple[Sized | None, ...] = (params.allowed_token_ids, params.stop_token_ids, params.logprob_token_ids)
    number = BYTES_PER_ID * sum(len(ids or ()) for ids in (*lists, params.logit_bias, params.logit_bias))
    number += sum(map(len, (*(params.stop or ()), *(params.bad_words or ()))))
    if isinstance(params.structured_outputs, StructuredOutputsParams):
        number += len(params.structured_outputs.to_fields()["text"])
    return number if params.extra_args is None else number + len(json.dumps(params.extra_args))


def _extra_args(given: Any) -> dict[str, Any]:
    """A copy as JSON would make it: tuples are lists."""
    if not isinstance(given, Mapping):
        raise InvalidParameterError(f"extra_args={shown(given)} must be a mapping with strings as keys, or None")
    copied: dict[str, Any] = _json_value("extra_args", given, 0, [MAX_EXTRA_ARGS])
    size = len(json.dumps(copied))
    if size > MAX_EXTRA_ARGS:
        raise InvalidParameterError(f"extra_args has {size} bytes of JSON, and the limit is {MAX_EXTRA_ARGS}")
    return copied


def _json_value(name: str, value: Any, depth: int, left: list[int]) -> Any:
    """left: bytes that the rest may have, in its one entry. Nothing beyond them is looked at: lists may hold each other often."""
    if depth > MAX_EXTRA_DEPTH:
        raise InvalidParameterError(f"extra_args is nested more than {MAX_EXTRA_DEPTH} levels deep")
    # Each entry takes a byte at least, and so does each character of a text.
    left[0] -= len(value) if isinstance(value, Mapping | list | tuple | str) else 1
    if left[0] < 0:
        raise InvalidParameterError(f"extra_args has more than {MAX_EXTRA_ARGS} bytes of JSON at {name:.200}")
    if isinstance(value, Mapping):
        for key in value:
            if not is_text(key):
                raise InvalidParameterError(f"{name} has the key {shown(key)}, which must be a string of valid Unicode")
            left[0] -= len(key)
        return {key: _json_value(f"{name}[{shown(key)}]", one, depth + 1, left) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(name, one, depth + 1, left) for one in value]
    is_number = isinstance(value, float) and math.isfinite(value)
    is_integer = isinstance(value, int) and -(2**63) <= value < 2**64
    if value is None or is_number or is_integer or is_text(value):
        return value
    raise InvalidParameterError(
        f"{name}={shown(value)} is no value that JSON has: text, a finite number, True, False, None, or lists and mappings of these"
    )


VLLM_POOLING_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "requires_token_ids": (False,),
    "late_interaction_params": (None,),
    "extra_kwargs": (None, {}),
}
"""Pooling parameters of vLLM that are accepted at these values, where they ask for what is done anyway."""

MAX_RETURNED_IDS = 1024
PoolingType: TypeAlias = Literal["LAST", "MEAN", "CLS"]
POOLING_TYPES: tuple[PoolingType, ...] = ("LAST", "MEAN", "CLS")
"""Of the final states of a prompt: the last one, their mean, the first one."""

POOLING_TASKS = ("embed", "classify", "score", "token_embed", "token_classify")
VLLM_POOLING_TASKS = (
    "plugin",
    "embed&token_classify",
    "encode",
    "reward",
)
"""What vLLM has, or had, and there is not."""


@names_unknown_parameters(VLLM_POOLING_PARAMETERS)
@dataclass(slots=True, kw_only=True)
class PoolingParams:
    """How to make a vector of one prompt, where it is not to be the engine's own way (`PoolerConfig`), which is None.

    Arguments:
        use_activation: scale it to length 1; of scores, make probabilities of them.
        normalize: the older name of use_activation.
        dimensions: only the first so many numbers, of models that are trained for that (Matryoshka); then scaled.
        pooling_type: "LAST", "MEAN" or "CLS": the last final state, their mean, or the first.
        task: "embed", "classify", "score", "token_embed" or "token_classify", as far as the model has it; None: its first.
        skip_reading_prefix_cache: compute all of the prompt; those of "MEAN" and "CLS" do so anyway.
        truncate_prompt_tokens: only so many tokens of the prompt count; -1: as many as the model takes.
        step_tag_id: of vectors of tokens, those of this token alone, which ends a step of reasoning.
        returned_token_ids: of vectors of tokens, these numbers alone, before they become probabilities.
        output_kind: FINAL_ONLY.

    Other parameters of vLLM are accepted at their defaults (VLLM_POOLING_PARAMETERS).

    Raises:
        InvalidParameterError: a parameter cannot be; UnknownParameterError: names the nearest one.
    """

    use_activation: bool | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    pooling_type: str | None = None
    task: str | None = None
    skip_reading_prefix_cache: bool | None = None
    truncate_prompt_tokens: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: Sequence[int] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def __post_init__(self) -> None:
        for name in ("use_activation", "normalize", "skip_reading_prefix_cache"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidParameterError(f"{name}={shown(getattr(self, name))} must be True, False or None")
        if self.normalize is not None:
            if self.use_activation not in (None, self.normalize):
                raise InvalidParameterError(
                    f"use_activation={self.use_activation} and normalize={self.normalize} contradict each other; leave one out"
                )
            self.use_activation = self.normalize
        if self.dimensions is not None:
            self.dimensions = _integer("dimensions", self.dimensions, low=1)
        if self.pooling_type is not None:
            self.pooling_type = check_pooling_type(self.pooling_type)
        if self.task is not None and self.task not in (*POOLING_TASKS, "plugin"):
            instead = "" if self.task in VLLM_POOLING_TASKS else nearest_name(str(self.task), POOLING_TASKS)
            known = ", ".join(map(repr, POOLING_TASKS))
            raise InvalidParameterError(f"task={shown(self.task)} is not supported; use {known}{instead}")
        if self.truncate_prompt_tokens is not None:
            check_truncation(self.truncate_prompt_tokens)
        if self.step_tag_id is not None:
            self.step_tag_id = _integer("step_tag_id", self.step_tag_id, low=0)
        self.returned_token_ids = check_returned_ids(self.returned_token_ids)
        if self.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise InvalidParameterError(
                f"output_kind={shown(self.output_kind)} must be FINAL_ONLY: a vector comes as a whole"
            )

    def clone(self) -> PoolingParams:
        """A copy that shares nothing with this one."""
        return copy.deepcopy(self)

    def checked_copy(self) -> PoolingParams:
        """The same parameters as they are now, checked again: fields may have been assigned since.

        Raises:
            InvalidParameterError: one of them cannot be.
        """
        checked = copy.copy(self)
        checked.__post_init__()
        return checked


def check_returned_ids(given: object) -> list[int] | None:
    """Which numbers of a vector are wanted. Raises InvalidParameterError."""
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) > MAX_RETURNED_IDS:
        raise InvalidParameterError(
            f"returned_token_ids={shown(given)} must be a list of at most {MAX_RETURNED_IDS} integers"
        )
    return [_integer("returned_token_ids", id, low=0) for id in given]


def with_task(params: PoolingParams | None, task: str) -> PoolingParams:
    """The same parameters for a task. Raises InvalidParameterError for a task that is unknown, or not theirs."""
    if params is None:
        return PoolingParams(task=task)
    if params.task not in (None, task):
        raise InvalidParameterError(f"task={params.task!r} of pooling_params contradicts pooling_task={shown(task)}")
    params = copy.copy(params)
    params.task = task
    return params.checked_copy()


def check_pooling_type(value: Any, where: str = "") -> PoolingType:
    """As vLLM spells it, in capitals or not. Raises InvalidParameterError."""
    name = value.upper() if isinstance(value, str) else value
    for known in POOLING_TYPES:
        if name == known:
            return known
    nearest = nearest_name(name, POOLING_TYPES) if isinstance(name, str) else ""
    raise InvalidParameterError(
        f"{where}pooling_type={shown(value)} is not supported; use {', '.join(map(repr, POOLING_TYPES))}{nearest}"
    )


def _number(
    name: str, value: object, *, low: float = -math.inf, high: float = math.inf, above: float | None = None
) -> float:
    if type(value) is not float:  # most often it is one, and asking for the other kinds takes long
        if not isinstance(value, int | float) and isinstance(value, numbers.Real):
            value = float(value)  # of numpy
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidParameterError(f"{name}={shown(value)} must be a finite number")
    if not abs(value) <= MAX_FLOAT:
        raise InvalidParameterError(f"{name}={shown(value)} must be a finite number")
    if not low <= value <= high or (above is not None and value <= above):
        bound = f"> {above:g}" if above is not None else f">= {low:g}" if low > -math.inf else ""
        limit = f"<= {high:g}" if high < math.inf else ""
        raise InvalidParameterError(f"{name}={shown(value)} must be {' and '.join(b for b in (bound, limit) if b)}")
    return float(value)


def _integer(name: str, value: object, *, low: int | None = None, high: int | None = None) -> int:
    if type(value) is not int:
        if not isinstance(value, int) and isinstance(value, numbers.Integral):
            value = int(value)  # of numpy
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidParameterError(f"{name}={shown(value)} must be an integer")
    if low is not None and value < low:
        raise InvalidParameterError(f"{name}={shown(value)} must be >= {low}")
    if high is not None and value > high:
        raise InvalidParameterError(f"{name}={shown(value)} must be <= {high}")
    return value


def check_truncation(value: object) -> int:
    """How many tokens to keep of a prompt: a positive integer, or -1 for as many as the model takes."""
    count = _integer("truncate_prompt_tokens", value)
    if count < 1 and count != -1:
        raise InvalidParameterError(f"truncate_prompt_tokens={shown(value)} must be >= 1, or -1 for the model's length")
    return count


def _stop_strings(stop: object) -> list[str]:
    if stop is None:
        return []
    strings: list[Any] = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, Sequence) else [stop]
    for string in strings:
        if not isinstance(string, str):
            raise InvalidParameterError(f"stop={shown(string)} must be a string or a list of strings")
        if not is_text(string):
            raise InvalidParameterError(f"stop={shown(string)} holds characters that are not valid Unicode")
        if not string:
            raise InvalidParameterError("an empty stop string would stop before the first token; remove it")
        if len(string) > MAX_STOP_STRING_LENGTH:
            raise InvalidParameterError(
                f"a stop string has {len(string)} characters, and the limit is {MAX_STOP_STRING_LENGTH}"
            )
    strings = list(dict.fromkeys(strings))
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidParameterError(f"stop has {len(strings)} strings, and the limit is {MAX_STOP_STRINGS}")
    total = sum(map(len, strings))
    if total > MAX_STOP_CHARACTERS:
        raise InvalidParameterError(
            f"the stop strings have {total} characters together, and the limit is {MAX_STOP_CHARACTERS}"
        )
    return strings


def _num_logprobs(name: str, value: object) -> int | None:
    if value is None:
        return None
    number = 1 if value is True else _integer(name, value)
    if number < -1:
        raise InvalidParameterError(f"{name}={shown(value)} must be >= 0, or -1 for those of all tokens")
    return number


def _logprob_token_ids(ids: object, num_logprobs: int | None) -> list[int] | None:
    if ids is None:
        return None
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise InvalidParameterError(f"logprob_token_ids={shown(ids)} must be a list of token ids")
    if len(ids) > MAX_LOGPROB_TOKEN_IDS:
        raise InvalidParameterError(f"logprob_token_ids has {len(ids)} ids, and the limit is {MAX_LOGPROB_TOKEN_IDS}")
    checked = [_integer("logprob_token_ids", i, low=0) for i in ids]
    if checked and num_logprobs not in (None, len(checked)):
        raise InvalidParameterError(
            f"logprobs={num_logprobs} beside {len(checked)} logprob_token_ids must be their number, or None"
        )
    return checked


def _logit_bias(bias: object) -> dict[int, float] | None:
    """A fresh dictionary; ids may be spelled as text, as JSON has them."""
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise InvalidParameterError(f"logit_bias={shown(bias)} must map token ids to numbers")
    if all(type(key) is int and key >= 0 and _is_bias(value) for key, value in bias.items()):
        return {key: float(value) for key, value in bias.items()}
    checked: dict[int, float] = {}
    for key, value in bias.items():
        if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20:
            key = int(key)
        if isinstance(key, bool) or not isinstance(key, int) or key < 0:
            raise InvalidParameterError(f"logit_bias: {shown(key)} is no token id")
        checked[key] = _number(f"logit_bias[{shown(key)}]", value, low=-MAX_FLOAT32, high=MAX_FLOAT32)
    return checked


def _is_bias(value: object) -> bool:
    return type(value) in (float, int) and -MAX_FLOAT32 <= value <= MAX_FLOAT32  # type: ignore[operator]


def _allowed_token_ids(ids: object) -> list[int] | None:
    if ids is None:
        return None
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise InvalidParameterError(f"allowed_token_ids={shown(ids)} must be a list of token ids")
    if not len(ids):
        raise InvalidParameterError("allowed_token_ids is empty: no token could be chosen; None allows all")
    if len(ids) > MAX_ALLOWED_TOKEN_IDS:
        raise InvalidParameterError(f"allowed_token_ids has {len(ids)} ids, more than any vocabulary")
    global _known_ids
    known = _known_ids
    are_integers = set(map(type, ids)) <= {int}  # a whole vocabulary is checked without a loop in Python
    if are_integers and ids == known:
        return known.copy()
    distinct = ids
    if not are_integers or min(ids) < 0:
        distinct = [_integer("allowed_token_ids", i, low=0) for i in ids]
    _known_ids = checked = list(dict.fromkeys(distinct))
    return checked.copy()


_known_ids: list[int] = []
"""The allowed_token_ids that were checked last: mostly every request of a program has the same, and they are many."""


def _bad_words(words: object) -> list[str]:
    if words is None:
        return []
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise InvalidParameterError(f"bad_words={shown(words)} must be a list of strings")
    for word in words:
        if not is_text(word):
            raise InvalidParameterError(f"bad_words={shown(word)} must be a list of strings of valid Unicode")
        if not word:
            raise InvalidParameterError("bad_words holds an empty string, which forbids nothing; remove it")
        if len(word) > MAX_BAD_WORD_LENGTH:
            raise InvalidParameterError(
                f"one of the bad_words has {len(word)} characters, and the limit is {MAX_BAD_WORD_LENGTH}"
            )
    distinct = list(dict.fromkeys(words))
    if len(distinct) > MAX_BAD_WORDS:
        raise InvalidParameterError(f"bad_words has {len(distinct)} words, and the limit is {MAX_BAD_WORDS}")
    return distinct


def _repetition_detection(given: object) -> RepetitionDetectionParams | None:
    if given is None or isinstance(given, RepetitionDetectionParams):
        return given
    names = [f.name for f in fields(RepetitionDetectionParams)]
    if not isinstance(given, Mapping):
        raise InvalidParameterError(
            f"repetition_detection={shown(given)} must be a RepetitionDetectionParams, or a mapping of {names}"
        )
    for name in given:
        if name not in names:
            raise UnknownParameterError(
                f"repetition_detection has no parameter {shown(name)}{nearest_name(str(name), names)}"
            )
    return RepetitionDetectionParams(**given)


MAX_SECONDS = sys.float_info.max
"""A larger integer is no float, and no time."""


def check_timeout(timeout: object, *, can_be_zero: bool = False) -> float:
    """Seconds that something may take. InvalidParameterError unless it is a number above 0."""
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool) and 0 <= timeout <= MAX_SECONDS
    if not is_number or not (timeout or can_be_zero):
        least = "of at least" if can_be_zero else "above"
        raise InvalidParameterError(f"timeout={shown(timeout)} must be a number of seconds {least} 0, or None")
    return cast(float, timeout)


MAX_LABEL = 1024
"""Characters of what a request or its tenant is called: names are kept for as long as there is something to tell of them."""


def is_text(value: object) -> bool:
    """A string without lone surrogates, which have no encoding and are in no text."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _token_ids(name: str, ids: object) -> list[int]:
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise InvalidParameterError(f"{name}={shown(ids)} must be a list of token ids")
    distinct: dict[int, None] = {}
    for i in ids:
        distinct[_integer(name, i, low=0)] = None
        if len(distinct) > MAX_STOP_TOKEN_IDS:
            raise InvalidParameterError(
                f"{name} has {len(ids)} ids, and the limit is {MAX_STOP_TOKEN_IDS} different ones"
            )
    return list(distinct)
