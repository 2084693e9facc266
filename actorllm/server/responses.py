"""`POST /v1/responses`: OpenAI's other API for text. Its input becomes a conversation; its answer is an item of output, or a
stream of typed events around one.

Nothing is kept: a response cannot be asked for later, nor gone on from (`previous_response_id` is refused, `store` has no
effect and says so). Invariants of a stream: events are numbered from 0. created, in_progress, the item and its part are
announced once, before the first text, and closed once. The last event is one of completed, incomplete and failed, and has the
whole response.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from actorllm.actors.frontend import Delta
from actorllm.errors import InvalidPromptError
from actorllm.intake.tokenization import Prompt
from actorllm.server.completions import Asked, check_length
from actorllm.server.envelope import ApiError
from actorllm.server.logprob_format import LogprobsView
from actorllm.server.protocol import Generation, Many, Messages
from actorllm.server.sampling import Defaults, extras_of, sampling_params
from actorllm.server.shape import PromptState, Shape, metrics_of
from actorllm.server.tools import warnings_of
from actorllm.text.chat_template import Conversation
from actorllm.types.objective import SLO
from actorllm.types.outputs import CompletionOutput, RequestOutput
from actorllm.types.params import RequestOutputKind, SamplingParams
from actorllm.types.structured_outputs import StructuredOutputsParams

WITH_LOGPROBS = "message.output_text.logprobs"
WITHOUT_EFFECT_INCLUDED = ("reasoning.encrypted_content",)
"""What may be asked to be included, and of which there is none."""

NOT_HERE = (
    *("previous_response_id", "conversation", "prompt", "background", "moderation", "context_management", "image"),
    *("n", "best_of", "echo", "prompt_logprobs", "return_token_ids", "logprob_token_ids"),
)
"""Fields that would have to be honoured, and are not; None and false ask for nothing."""

ROLES = ("system", "developer", "user", "assistant")


DELTA_HEAD = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":'  # and the number


class ResponsesRequest(Generation):
    """`POST /v1/responses`."""

    input: str | Messages
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    tools: Messages | None = None
    tool_choice: str | dict[str, Any] | None = None
    top_logprobs: int | None = None
    include: Many[str] | None = None
    truncation: str | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    stream_options: dict[str, Any] | None = None  # type: ignore[assignment]
    chat_template_kwargs: dict[str, Any] | None = None

    def renamed(self) -> dict[str, str]:
        return {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


def ask(
    body: ResponsesRequest,
    headers: Mapping[str, str],
    defaults: Defaults,
    model: str,
    decode: Callable[[list[int]], str],
) -> Asked:
    """Raises ApiError, InvalidParameterError and InvalidPromptError."""
    _check(body)
    extras = extras_of(body, headers)
    if body.store:
        extras.warnings.append("store: nothing is stored here, and it has no effect")
    if body.reasoning and any(value is not None for value in body.reasoning.values()):
        extras.warnings.append("reasoning: models write their text at once here, and it has no effect")
    if (body.text or {}).get("verbosity") is not None:
        extras.warnings.append("text.verbosity has no effect")
    # From here on as for chat: a conversation, parameters, and a shape of the answer.
    conversation = Conversation.of(_messages(body), is_own=True, chat_template_kwargs=body.chat_template_kwargs)
    for message in conversation.messages:
        if body.truncate_prompt_tokens is None and isinstance(content := message.get("content"), str):
            check_length(content, defaults.max_prompt_characters)
    number = _num_logprobs(body)
    limit = body.max_output_tokens
    decided: dict[str, Any] = {
        "max_tokens": defaults.sampling.get("max_tokens") if limit is None else limit,
        "logprobs": number,
    }
    if (wanted := structured_outputs_of(body.text)) is not None:
        for name in ("structured_outputs", "response_format"):
            if getattr(body, name) is not None:
                raise ApiError(400, f"text.format beside {name}: give one of them", "text")
        decided["structured_outputs"] = wanted
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    if limit is not None and limit < 1:
        raise ApiError(400, f"max_output_tokens={limit} must be at least 1", "max_output_tokens")
    params = sampling_params(body, defaults, kind, **decided)
    extras.warnings += warnings_of(params.structured_outputs)
    logprobs = None if number is None else LogprobsView(number, bool(body.return_tokens_as_token_ids))
    shape = ResponsesShape(body, params, model, logprobs, extras.slo, decode)
    prompt: Prompt = conversation
    if body.cache_salt is not None:
        prompt = {"prompt": conversation, "cache_salt": body.cache_salt}
    return Asked([prompt], params, extras, shape, bool(body.stream))


def _check(body: ResponsesRequest) -> None:
    """Fields that cannot be honoured."""
    given = {**(body.model_extra or {}), **body.given()}
    # Values that ask for nothing are accepted, since clients send them by default.
    for name in NOT_HERE:
        value = given.get(name)
        if value not in (None, False) and not (name in ("n", "best_of") and value == 1):
            raise ApiError(400, f"{name} is not supported by this server; leave it out", name)
    if body.max_tokens is not None:
        raise ApiError(400, "max_tokens: in this API it is called max_output_tokens", "max_tokens")
    # Fields that exist in both APIs, and mean or are called something else here.
    if body.tools and body.tool_choice != "none":
        raise ApiError(
            400, 'tools: this API calls none yet; use /v1/chat/completions, or send tool_choice="none"', "tools"
        )
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, f"tool_choice={body.tool_choice!r:.80} needs tools", "tool_choice")
    if body.truncation not in (None, "disabled"):
        raise ApiError(
            400, f"truncation={body.truncation!r:.80} is not supported; leave it at 'disabled'", "truncation"
        )
    for name in body.include or ():
        if name not in (WITH_LOGPROBS, *WITHOUT_EFFECT_INCLUDED):
            raise ApiError(400, f"include: {name!r:.80} is not supported; {WITH_LOGPROBS!r} is", "include")
    options = body.stream_options
    if options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", "stream_options")
    for name, value in (options or {}).items():
        if name != "include_obfuscation" or value:
            raise ApiError(400, f"stream_options: {name!r:.80} is not supported", "stream_options")


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation that the input is. Roles are those that templates know: developers are the system."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        if not body.input:
            raise InvalidPromptError("input is empty")
        return [*messages, {"role": "user", "content": body.input}]
    for number, item in enumerate(body.input):
        kind = item.get("type", "message")
        if kind != "message":
            raise ApiError(400, f"input[{number}]: items of type {kind!r:.80} are not supported; messages are", "input")
        role = item.get("role")
        if role not in ROLES:
            raise ApiError(400, f"input[{number}]: role={role!r:.80} must be one of {', '.join(ROLES)}", "input")
        messages.append({"role": "system" if role == "developer" else role, "content": item.get("content")})
    return messages


def _num_logprobs(body: ResponsesRequest) -> int | None:
    wanted = WITH_LOGPROBS in (body.include or ())
    if body.top_logprobs is not None and not wanted:
        if body.top_logprobs == 0:
            return None
        raise ApiError(400, f"top_logprobs={body.top_logprobs} needs include=[{WITH_LOGPROBS!r}]", "top_logprobs")
    number = body.top_logprobs or 0
    if number < 0:
        raise ApiError(400, f"top_logprobs={number} must be at least 0", "top_logprobs")
    return number if wanted else None


def structured_outputs_of(text: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    """What `text.format` asks for. Raises ApiError and InvalidParameterError."""
    wanted = (text or {}).get("format")
    for name in text or {}:
        if name not in ("format", "verbosity"):
            raise ApiError(400, f"text: {name!r:.80} is not supported; 'format' is", "text")
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True).named("text.format")
    if kind == "json_schema":
        schema = wanted.get("schema")
        if not isinstance(schema, Mapping):
            raise ApiError(400, "text.format: a json_schema needs its 'schema', an object", "text")
        asked = StructuredOutputsParams(json=dict(schema)).named("text.format")
        return asked.as_hint() if wanted.get("strict") is False else asked
    raise ApiError(400, f"text.format={wanted!r:.80} must be of type 'text', 'json_object' or 'json_schema'", "text")


class ResponsesShape(Shape):
    CONTENT_TYPE = b"text/event-stream; charset=utf-8"

    def __init__(
        self,
        body: ResponsesRequest,
        params: SamplingParams,
        model: str,
        logprobs: LogprobsView | None,
        slo: SLO | None,
        decode: Callable[[list[int]], str],
    ) -> None:
        name = uuid.uuid4().hex
        self.id = f"resp_{body.request_id or name}"
        self._item_id = f"msg_{name}"
        self._created = int(time.time())
        self._body = body
        self._params = params
        self._model = model
        self._logprobs = logprobs
        self.is_plain = logprobs is None
        self._slo = slo
        self._decode = decode
        self._num_events = 0
        self._text: list[str] = []
        self._entries: list[Any] = []
        self._state = PromptState([])
        self._delta = b'"item_id":%b,"output_index":0,"content_index":0,"delta":' % orjson.dumps(self._item_id)

    # All at once

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        self._take(outputs[0])
        (one,) = outputs[0].outputs
        self._text.append(one.text)
        self._entries += self._logprobs_of(one)
        tree, _ = self._ended(one)
        return orjson.dumps(tree)

    # Event by event

    def events(self, number: int, output: RequestOutput) -> bytes:
        made: list[bytes] = []
        self._take(output)
        for one in output.outputs:
            if not one.token_ids and one.finish_reason is None:
                continue
            if not self._num_events:
                made += self._opening()
            entries = self._logprobs_of(one)
            self._entries += entries
            if one.text:
                self._text.append(one.text)
                made.append(self._delta_event(one.text, entries))
            if one.finish_reason is not None:
                made += self._closing(one)
        return b"".join(made)

    def plain_events(self, number: int, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        text = "".join([delta.text for _, delta in deltas])
        self._state.num_output += sum([len(delta.tokens) for _, delta in deltas])
        self._text.append(text)
        return self._delta_event(text, [])

    def close(self) -> bytes:
        return b""

    def failure(self, body: bytes) -> bytes:
        """body: the error as in OpenAI's envelope."""
        error = orjson.loads(body)["error"]
        told = {"code": "server_error", "message": error["message"]}
        return b"".join(self._events(("response.failed", {"response": self._response("failed", error=told)})))

    def _events(self, *events: tuple[str, dict[str, Any]]) -> list[bytes]:
        made = []
        for kind, fields in events:
            data = orjson.dumps({"type": kind, "sequence_number": self._num_events, **fields})
            made.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
            self._num_events += 1
        return made

    def _delta_event(self, text: str, entries: list[Any]) -> bytes:
        """The one that there are many of."""
        number = self._num_events
        self._num_events += 1
        shown = orjson.dumps(entries) if entries else b"[]"
        return b'%b%d,%b%b,"logprobs":%b}\n\n' % (DELTA_HEAD, number, self._delta, orjson.dumps(text), shown)

    def _opening(self) -> list[bytes]:
        begun = self._response("in_progress")
        where = {"output_index": 0, "item": self._item("in_progress", [])}
        part = {**self._place, "part": self._part("", [])}
        return self._events(
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
            ("response.output_item.added", where),
            ("response.content_part.added", part),
        )

    def _closing(self, one: CompletionOutput) -> list[bytes]:
        text = "".join(self._text)
        response, status = self._ended(one)
        part = self._part(text, self._entries)
        return self._events(
            ("response.output_text.done", {**self._place, "text": text, "logprobs": self._entries}),
            ("response.content_part.done", {**self._place, "part": part}),
            ("response.output_item.done", {"output_index": 0, "item": response["output"][0]}),
            (f"response.{status}", {"response": response}),
        )

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    # Both

    def _take(self, output: RequestOutput) -> None:
        state = self._state
        state.ids = output.prompt_token_ids
        state.num_cached = output.num_cached_tokens
        state.num_output += sum(len(one.token_ids) for one in output.outputs)
        if output.finished:
            state.metrics = output.metrics

    def _logprobs_of(self, one: CompletionOutput) -> list[Any]:
        if self._logprobs is None:
            return []
        positions = list(zip(one.token_ids, one.logprobs or (), strict=True))
        content: list[Any] = self._logprobs.of_message(positions)["content"]
        return content

    def _part(self, text: str, entries: list[Any]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}

    def _item(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _ended(self, one: CompletionOutput) -> tuple[dict[str, Any], str]:
        """The response at its end, and its status, which the last event is named after."""
        reason = {"length": "max_output_tokens"}.get(str(one.finish_reason))
        status = "incomplete" if one.finish_reason in ("length", "abort") else "completed"
        output = [self._item(status, [self._part("".join(self._text), self._entries)])]
        details = {"reason": reason} if reason is not None else None
        return self._response(status, output=output, incomplete_details=details, usage=self._usage()), status

    def _usage(self) -> dict[str, Any]:
        num_input, num_output = len(self._state.ids), self._state.num_output
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": self._state.num_cached, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        }

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        body, params = self._body, self._params
        tree = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }
        tree |= fields
        if body.return_metrics and self._state.metrics is not None:
            tree["metrics"] = metrics_of(self._state, self._slo)
        return tree
