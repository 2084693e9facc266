"""What comes out of a request that generates: `RequestOutput` and its `CompletionOutput`s. Names are vLLM's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field
from itertools import zip_longest
from typing import Any, ClassVar, Literal

from actorllm.clock import to_epoch
from actorllm.types.flat_logprobs import FlatLogprobs
from actorllm.types.logprob import Logprob
from actorllm.types.lora_request import LoRARequest
from actorllm.types.request_end import RequestEnd
from actorllm.types.request_metrics import RequestMetrics
from actorllm.types.weight_version import WeightVersionSpan, spans_until

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


class _Sparse:
    """Of an output of a stream only those fields are set that differ from one to the next; the others when they are asked for.

    An output is made for every token. Most are read for their text and dropped.
    """

    __slots__ = ("_origin",)
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _origin: Any
    """What its fields are made of."""

    def __getattr__(self, name: str) -> Any:
        field_of_name = self.__dataclass_fields__.get(name)
        if field_of_name is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        value = self._made(field_of_name)
        setattr(self, name, value)
        return value

    def _made(self, missing: Field[Any]) -> Any:
        if missing.default_factory is not MISSING:
            return missing.default_factory()
        return missing.default


class RequestFacts:
    """What all outputs of one request repeat. Its stream has one, and outputs look into it when they are asked."""

    __slots__ = ("arrival", "first_token", "lora_request", "prompt", "prompt_token_ids", "request_id")

    def __init__(self, request_id: str, prompt: str | None, arrival: float) -> None:
        """arrival: in monotonic seconds."""
        self.request_id = request_id
        self.prompt = prompt
        self.arrival = arrival
        self.prompt_token_ids: list[int] = []
        self.lora_request: LoRARequest | None = None
        self.first_token: float | None = None
        """When it came, in monotonic seconds; None: it has not come."""

    def metrics_at_end(self, ends: Sequence[RequestEnd], last_token: float | None, num_tokens: int) -> RequestMetrics:
        """ends: of its sequences. last_token: when the last output of any came, in monotonic seconds."""
        num_recoveries = sum([end.num_recoveries for end in ends])
        # A scheduler that took over knows of no earlier token than its own first one.
        first = [self.first_token] if num_recoveries else []
        return RequestMetrics(
            to_epoch(self.arrival),
            queued_ts=_epoch([*first, *[end.queued for end in ends]], min),
            scheduled_ts=_epoch([*first, *[end.scheduled for end in ends]], min),
            first_token_ts=_epoch([*first, *[end.first_token for end in ends]], min),
            last_token_ts=_epoch([end.last_token for end in ends], max),
            finished_time=_epoch([last_token], max),
            num_generation_tokens=num_tokens,
            num_preemptions=sum([end.num_preemptions for end in ends]),
            num_cached_tokens=ends[0].num_cached_tokens,
            num_wasted_tokens=sum([end.num_wasted_tokens for end in ends]),
            is_corrupted=any(end.num_nonfinite for end in ends),
            num_nonfinite=sum([end.num_nonfinite for end in ends]),
            num_recoveries=num_recoveries,
            recovery_time=max([end.recovery_s for end in ends]),
            num_draft_tokens=sum([end.num_draft_tokens for end in ends]),
            num_accepted_tokens=sum([end.num_accepted_tokens for end in ends]),
            num_accepted_tokens_per_pos=tuple(
                map(sum, zip_longest(*(end.accepted_per_position for end in ends), fillvalue=0))
            ),
            scheduler_time=max([end.planning_s for end in ends]),
            model_forward_time=max([end.forward_s for end in ends]),
            model_execute_time=max([end.execution_s for end in ends]),
        )


def _epoch(monotonic_s: list[float | None], choose: Callable[[list[float]], float]) -> float:
    """One of the times that are known, in epoch seconds; 0.0 when none is."""
    known = [time_s for time_s in monotonic_s if time_s is not None]
    return to_epoch(choose(known)) if known else 0.0


@dataclass(slots=True)
class CompletionOutput(_Sparse):
    """One generated sequence of a request, so far or at its end (see RequestOutputKind)."""

    index: int
    """Which of the n sequences."""
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Of all tokens so far, when logprobs were asked for."""
    logprobs: list[dict[int, Logprob]] | FlatLogprobs | None = None
    """By token id, for each of token_ids: the chosen token first, then the most likely ones in order."""
    routed_experts: None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or the stop string that ended it; None for the model's own end-of-text."""
    lora_request: LoRARequest | None = None
    sampling_mask: None = None
    spec_decode_metrics: None = None
    weight_versions: list[WeightVersionSpan] | None = None
    """Which version of the weights sampled which of its tokens so far; in a DELTA, too, those from the first token on."""
    kv_transfer_params: None = None

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    @classmethod
    def _of_stream(
        cls, index: int, text: str, token_ids: list[int], starts: tuple[tuple[int, str], ...], num_tokens: int
    ) -> CompletionOutput:
        """One of a stream. starts, num_tokens: as `spans_until` takes them."""
        made = cls.__new__(cls)
        made.index = index
        made.text = text
        made.token_ids = token_ids
        made.finish_reason = made.stop_reason = None
        made._origin = (starts, num_tokens)
        return made

    def _made(self, missing: Field[Any]) -> Any:
        return spans_until(*self._origin) if missing.name == "weight_versions" else _Sparse._made(self, missing)


@dataclass(slots=True, init=False)
class RequestOutput(_Sparse):
    """What a request has produced.

    outputs: its sequences by index. While n > 1 sequences are streamed, an output holds those that have something new.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | FlatLogprobs | None = None
    """By token id, for each of prompt_token_ids, when asked for; the first has None: nothing came before it."""
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    """Whether every sequence has ended."""
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    encoder_prompt: str | None = None
    """The text that the encoder got, of a model with an encoder and a decoder."""
    encoder_prompt_token_ids: list[int] | None = None
    """Its token ids."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was in the cache."""
    num_cache_creation_tokens: None = None
    prompt_token_id_logprobs: None = None
    multi_modal_placeholders: dict[str, Any] = field(default_factory=dict)
    kv_transfer_params: dict[str, Any] | None = None
    """What is sent with the prompt to have it decoded, where `do_remote_decode` had it computed."""
    ec_transfer_params: None = None

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        prompt_logprobs: list[dict[int, Logprob] | None] | FlatLogprobs | None = None,
        outputs: list[CompletionOutput] | None = None,
        finished: bool = False,
        metrics: RequestMetrics | None = None,
        lora_request: LoRARequest | None = None,
        encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None,
        num_cached_tokens: int = 0,
        num_cache_creation_tokens: None = None,
        prompt_token_id_logprobs: None = None,
        multi_modal_placeholders: dict[str, Any] | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        ec_transfer_params: None = None,
        **unknown: Any,
    ) -> None:
        """Written out, since one is made for every token: `unknown` costs nothing where no program gives it."""
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = [] if outputs is None else outputs
        self.finished = finished
        self.metrics = metrics
        self.lora_request = lora_request
        self.encoder_prompt = encoder_prompt
        self.encoder_prompt_token_ids = encoder_prompt_token_ids
        self.num_cached_tokens = num_cached_tokens
        self.num_cache_creation_tokens = num_cache_creation_tokens
        self.prompt_token_id_logprobs = prompt_token_id_logprobs
        self.multi_modal_placeholders = {} if multi_modal_placeholders is None else multi_modal_placeholders
        self.kv_transfer_params = kv_transfer_params
        self.ec_transfer_params = ec_transfer_params
        if unknown:
            warnings.warn(f"RequestOutput has no {', '.join(unknown)}; what is given is dropped", stacklevel=2)

    @classmethod
    def _of_stream(
        cls,
        facts: RequestFacts,
        outputs: list[CompletionOutput],
        num_cached_tokens: int,
        last_token: float | None,
        num_tokens: int,
        ends: Sequence[RequestEnd] = (),
    ) -> RequestOutput:
        """One of a stream. last_token: when it came, in monotonic seconds; None: none has. ends: of a request that has ended."""
        made = cls.__new__(cls)
        made.outputs = outputs
        made.finished = False
        made.num_cached_tokens = num_cached_tokens
        made._origin = (facts, last_token, num_tokens, ends)
        return made

    @classmethod
    def _of_delta(
        cls,
        facts: RequestFacts,
        text: str,
        token_ids: list[int],
        num_cached_tokens: int,
        last_token: float | None,
        num_tokens: int,
        starts: tuple[tuple[int, str], ...],
    ) -> RequestOutput:
        """As both `_of_stream`, of a request with one sequence: nearly all outputs are such, and one call takes less than two."""
        completion = CompletionOutput.__new__(CompletionOutput)
        completion.index = 0
        completion.text = text
        completion.token_ids = token_ids
        completion.finish_reason = completion.stop_reason = None
        completion._origin = (starts, num_tokens)
        made = cls.__new__(cls)
        made.outputs = [completion]
        made.finished = False
        made.num_cached_tokens = num_cached_tokens
        made._origin = (facts, last_token, num_tokens, ())
        return made

    def _made(self, missing: Field[Any]) -> Any:
        facts, last_token, num_tokens, ends = self._origin
        match missing.name:
            case "request_id" | "prompt" | "prompt_token_ids" | "lora_request":
                return getattr(facts, missing.name)
            case "metrics" if ends:
                return facts.metrics_at_end(ends, last_token, num_tokens)
            case "metrics":
                return RequestMetrics(
                    to_epoch(facts.arrival),
                    first_token_ts=to_epoch(facts.first_token) if num_tokens and facts.first_token is not None else 0.0,
                    last_token_ts=0.0 if last_token is None else to_epoch(last_token),
                    num_generation_tokens=num_tokens,
                    num_cached_tokens=self.num_cached_tokens,
                )
        return _Sparse._made(self, missing)

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Merge a later output of the same request into this one.

        Arguments:
            next_output: the later one.
            aggregate: append its text and tokens (DELTA); else its sequences replace those here (CUMULATIVE).
        """
        self.finished |= next_output.finished
        self.metrics = next_output.metrics
        self.num_cached_tokens = next_output.num_cached_tokens
        at = {completion.index: i for i, completion in enumerate(self.outputs)}
        for new in next_output.outputs:
            i = at.get(new.index)
            if i is None:
                self.outputs.append(new)
            elif aggregate:
                _append(self.outputs[i], new)
            else:
                self.outputs[i] = new


def _append(completion: CompletionOutput, new: CompletionOutput) -> None:
    completion.text += new.text
    completion.token_ids = [*completion.token_ids, *new.token_ids]
    if new.logprobs:
        merged: Any = completion.logprobs[:] if completion.logprobs is not None else type(new.logprobs)()
        merged.extend(new.logprobs)
        completion.logprobs = merged
    completion.cumulative_logprob = new.cumulative_logprob
    completion.weight_versions = new.weight_versions
    completion.finish_reason = new.finish_reason
    completion.stop_reason = new.stop_reason
