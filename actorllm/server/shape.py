"""`Shape`: how the outputs of one HTTP request become JSON, whole or event by event; `OpenAIShape`: in OpenAI's two APIs.

The hot path is an event with nothing but text: bytes that were made once, around the text. Whatever asks for more (the end,
log-probabilities, token ids, usage in every event) goes through a dictionary. Pure; called by `answer`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from actorllm.actors.frontend import Delta
from actorllm.server.logprob_format import LogprobsView, Position
from actorllm.server.protocol import Generation
from actorllm.server.random_names import random_name
from actorllm.types.objective import SLO
from actorllm.types.outputs import CompletionOutput, RequestOutput
from actorllm.types.request_metrics import RequestMetrics

NOTHING_SERVED: dict[str, Any] = {"service_tier": None, "kv_transfer_params": None}
"""Fields of a whole answer, of OpenAI and of vLLM, that have no value here."""
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class PromptState:
    """What is known of one prompt of a request while its answer is streamed."""

    ids: list[int]
    num_cached: int = 0
    num_output: int = 0
    metrics: RequestMetrics | None = None
    logprobs: list[Any] | None = None
    has_begun: bool = False
    echoed: tuple[orjson.Fragment, int] | None = None
    """The prompt's log-probabilities as JSON, and where the text behind them begins. Made once for all its sequences."""

    def take(self, output: RequestOutput) -> None:
        """What an output says of the prompt, and how many tokens it adds."""
        self.ids, self.num_cached = output.prompt_token_ids, output.num_cached_tokens
        self.num_output += sum([len(one.token_ids) for one in output.outputs])
        if output.finished:
            self.metrics = output.metrics


@dataclass(frozen=True, slots=True)
class AnswerView:
    """What the client wants to see."""

    model: str
    logprobs: LogprobsView | None
    echo: bool
    has_usage: bool
    """At the end of a stream."""
    has_usage_everywhere: bool
    has_token_ids: bool
    has_metrics: bool

    @classmethod
    def of(cls, body: Generation, model: str, logprobs: LogprobsView | None) -> AnswerView:
        options = body.stream_options
        return cls(
            model,
            logprobs,
            bool(body.echo),
            options is not None and bool(options.include_usage),
            options is not None and bool(options.include_usage) and bool(options.continuous_usage_stats),
            bool(body.return_token_ids),
            bool(body.return_metrics),
        )


class Shape(ABC):
    """One request. `whole` for all of it at once; or `events` for each output as it comes, and `close` after the last."""

    CONTENT_TYPE: ClassVar[bytes]
    """Of a stream."""
    id: str
    """What the client is told that this request is called."""

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """outputs: the last one of each prompt, in their order."""

    @abstractmethod
    def events(self, number: int, output: RequestOutput) -> bytes:
        """What is new of a prompt; empty when there is nothing to show."""

    def num_opening(self, number: int) -> int:
        """Sequences and tokens of a prompt that the next events are to open the answer with; 0: it has begun."""
        return 0

    is_plain = False
    """Whether `plain_events` is for the outputs between the first one and an end."""

    def plain_events(self, number: int, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        """As `events`, of what is new of the sequences of a prompt; each of them has begun, and none ends."""
        raise NotImplementedError(f"{type(self).__name__} is not plain")

    @abstractmethod
    def close(self) -> bytes:
        """What comes after the last output."""

    @abstractmethod
    def failure(self, body: bytes) -> bytes:
        """The end of a stream that fails. body: the error as JSON."""


class OpenAIShape(Shape):
    """What both of OpenAI's APIs share."""

    CONTENT_TYPE = b"text/event-stream; charset=utf-8"

    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]
    PREFIX: ClassVar[str]
    PLAIN: ClassVar[tuple[bytes, bytes]]
    """What stands in a choice of an event between its index and its text, and after it."""

    def __init__(
        self,
        view: AnswerView,
        num_prompts: int,
        n: int,
        slo: SLO | None,
        decode: Callable[[list[int]], str],
        name: str | None,
    ) -> None:
        """n: sequences per prompt. decode: ids to text. name: what the client calls the request."""
        self.id = f"{self.PREFIX}-{name or random_name()}"
        self.view = view
        self._n = n
        self._slo = slo
        self._decode = decode
        self._created = int(time.time())
        self._states: list[PromptState | None] = [None] * num_prompts
        self._num_tokens = [0] * (num_prompts * n)
        head = self._head(self.CHUNK)
        self._event_head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._plain_begin, self._plain_end = self.PLAIN
        self._plain_end += b"]}\n\n"
        self._plain = [b""] * len(self._num_tokens)
        """By choice, what an event of text begins with. Made when there is a first one: most choices are never streamed."""
        self.is_plain = view.logprobs is None and not view.has_usage_everywhere and not view.has_token_ids

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.view.model}

    # All at once

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        states = [self._state_of(output) for output in outputs]
        for state, output in zip(states, outputs, strict=True):
            state.num_output = sum(len(one.token_ids) for one in output.outputs)
            state.metrics = output.metrics
        tree = self._head(self.WHOLE)
        tree["choices"] = [  # one by one: writing all of them in one call would keep other threads from running
            orjson.Fragment(orjson.dumps(self._whole_choice(number * self._n + one.index, output, one)))
            for number, output in enumerate(outputs)
            for one in output.outputs
        ]
        tree["usage"] = self._usage(states)
        tree |= NOTHING_SERVED
        if len(outputs) == 1:
            tree["kv_transfer_params"] = outputs[0].kv_transfer_params
        self._add_to_whole(tree, outputs)
        if self.view.has_metrics:
            tree["metrics"] = self._metrics(states)
        return orjson.dumps(tree)

    @abstractmethod
    def _whole_choice(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]: ...

    def _add_to_whole(self, tree: dict[str, Any], outputs: Sequence[RequestOutput]) -> None:
        """What stands beside the choices."""

    # Event by event

    def events(self, number: int, output: RequestOutput) -> bytes:
        state = self._states[number]
        if state is None:
            state = self._states[number] = self._state_of(output)
        if output.prompt_logprobs is not None:
            state.logprobs = (state.logprobs or []) + list(output.prompt_logprobs)
        if output.finished:
            state.metrics = output.metrics
        made: list[bytes] = []
        for one in output.outputs:
            if not one.token_ids and one.finish_reason is None:
                continue  # log-probabilities of the prompt, which goes on
            index = number * self._n + one.index
            if not state.has_begun:
                state.has_begun = True
                for sibling in range(number * self._n, (number + 1) * self._n):
                    self._plain[sibling] = b'%b{"index":%d%b' % (self._event_head, sibling, self._plain_begin)
                    made += self._opening(sibling, state, output)
            num_new = len(one.token_ids)
            state.num_output += num_new
            self._num_tokens[index] += num_new
            if self.is_plain and one.finish_reason is None:
                made.append(self._plain[index] + orjson.dumps(one.text) + self._plain_end)
            elif (choice := self._choice(index, one)) is not None:
                made.append(self._event(choice, state, self._num_tokens[index]))
        if made and output.kv_transfer_params is not None and len(self._states) == 1:  # with the end
            told = orjson.dumps({"kv_transfer_params": output.kv_transfer_params})
            made[-1] = made[-1].removesuffix(b"}\n\n") + b"," + told[1:] + b"\n\n"
        return b"".join(made) if len(made) != 1 else made[0]

    def num_opening(self, number: int) -> int:
        state = self._states[number]
        if state is not None and state.has_begun:
            return 0
        return self._n + (0 if state is None else len(state.logprobs or ()))

    def plain_events(self, number: int, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        state = self._states[number]
        assert state is not None
        if len(deltas) == 1:  # as nearly always
            index, delta = deltas[0]
            state.num_output += len(delta.tokens)
            return self._plain[number * self._n + index] + orjson.dumps(delta.text) + self._plain_end
        made: list[bytes] = []
        texts: dict[int, str] = {}
        for index, delta in deltas:
            texts[index] = texts[index] + delta.text if index in texts else delta.text
            state.num_output += len(delta.tokens)
        for index, text in texts.items():
            made += self._plain[number * self._n + index], orjson.dumps(text), self._plain_end
        return b"".join(made)

    @abstractmethod
    def _opening(self, index: int, state: PromptState, output: RequestOutput) -> list[bytes]:
        """The events of a choice before its first token."""

    @abstractmethod
    def _choice(self, index: int, one: CompletionOutput) -> dict[str, Any] | None:
        """What is new of a choice; None: nothing that can be told yet."""

    def _event(self, choice: dict[str, Any], state: PromptState, num_output: int) -> bytes:
        tail = b"]}\n\n"
        if self.view.has_usage_everywhere:
            tail = b'],"usage":%b}\n\n' % orjson.dumps(usage(len(state.ids), num_output))
        return self._event_head + orjson.dumps(choice) + tail

    def failure(self, body: bytes) -> bytes:
        return b"data: %b\n\n" % body + DONE

    def close(self) -> bytes:
        states = [state for state in self._states if state is not None]
        made = b""
        if self.view.has_usage or self.view.has_metrics:
            tail: dict[str, Any] = {}
            if self.view.has_usage:
                tail["usage"] = self._usage(states)
            if self.view.has_metrics:
                tail["metrics"] = self._metrics(states)
            made = self._event_head + b"]," + orjson.dumps(tail)[1:] + b"\n\n"
        return made + DONE

    # Both

    @staticmethod
    def _state_of(output: RequestOutput) -> PromptState:
        return PromptState(output.prompt_token_ids, output.num_cached_tokens)

    def _usage(self, states: Sequence[PromptState]) -> dict[str, Any]:
        told = usage(sum(len(state.ids) for state in states), sum(state.num_output for state in states))
        told["prompt_tokens_details"] = {"cached_tokens": sum(state.num_cached for state in states)}
        return told

    def _metrics(self, states: Sequence[PromptState]) -> Any:
        """Of a request with one prompt an object, else a list."""
        told = [metrics_of(state, self._slo) for state in states]
        return told[0] if len(told) == 1 else told

    @staticmethod
    def _positions(one: CompletionOutput) -> list[Position]:
        return list(zip(one.token_ids, one.logprobs or (), strict=True))


def versions_of(one: CompletionOutput) -> list[dict[str, Any]]:
    """Which tokens of a sequence which version of the weights has sampled, for clients that are told of its token ids."""
    return [span._asdict() for span in one.weight_versions or ()]


def usage(num_prompt: int, num_output: int) -> dict[str, Any]:
    return {"prompt_tokens": num_prompt, "total_tokens": num_prompt + num_output, "completion_tokens": num_output}


def metrics_of(state: PromptState, slo: SLO | None) -> dict[str, Any] | None:
    """How long a request waited and took, in seconds; None for what did not happen. slo_met: whether its objective was."""
    metrics = state.metrics
    if metrics is None:
        return None
    first, last, num = metrics.first_token_ts, metrics.last_token_ts, metrics.num_generation_tokens
    started = bool(first) and bool(last)
    met = None
    if slo is not None:
        met = started and slo.is_met(
            arrival=metrics.arrival_time, first_token=first, last_token=last, num_prompt=len(state.ids), num_output=num
        )
    return {
        "arrival_time": metrics.arrival_time,
        "intake_s": metrics.intake_time,
        "queue_s": metrics.queue_time,
        "ttft_s": metrics.time_to_first_token,
        "tpot_s": (last - first) / (num - 1) if started and num > 1 else None,
        "e2e_s": last - metrics.arrival_time if last else None,
        "num_output_tokens": num,
        "num_cached_tokens": metrics.num_cached_tokens,
        "num_preemptions": metrics.num_preemptions,
        "num_wasted_tokens": metrics.num_wasted_tokens,
        "num_recoveries": metrics.num_recoveries,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
        "num_accepted_tokens_per_pos": list(metrics.num_accepted_tokens_per_pos),
        "slo_met": met,
    }
