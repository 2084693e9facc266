"""The body of `POST /v1/responses`: its input becomes a conversation, and its tools those of a chat.

Messages, calls of functions and their results are items of the input. `previous_response_id` puts the conversation of a kept
response before them. Called by `endpoints`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from actorllm.errors import InvalidPromptError
from actorllm.intake.tokenization import Prompt
from actorllm.server.completions import Asked, check_length
from actorllm.server.envelope import ApiError, shown
from actorllm.server.logprob_format import LogprobsView
from actorllm.server.outliving.resume import resume_for
from actorllm.server.output_items import OutputItems, add_call
from actorllm.server.protocol import Many, Messages, ResumableBody
from actorllm.server.random_names import random_name
from actorllm.server.responses.kept import MAX_CONVERSATION_BYTES, KeptResponse, KeptResponses
from actorllm.server.responses.shape import ResponsesShape
from actorllm.server.sampling import Defaults, extras_of, sampling_params
from actorllm.server.tools import ToolUse, tool_use_of, warnings_of
from actorllm.types.params import RequestOutputKind, SamplingParams
from actorllm.types.structured_outputs import StructuredOutputsParams

WITH_LOGPROBS = "message.output_text.logprobs"
WITHOUT_EFFECT_INCLUDED = ("reasoning.encrypted_content",)
"""What may be asked to be included, and of which there is none."""

NOT_HERE = (
    *("conversation", "prompt", "moderation", "context_management", "image"),
    *("n", "best_of", "echo", "prompt_logprobs", "return_token_ids", "logprob_token_ids"),
)
"""Fields that would have to be honoured, and are not; None and false ask for nothing."""

ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}

ROLES = ("system", "developer", "user", "assistant")


class ResponsesRequest(ResumableBody):
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
    parallel_tool_calls: bool | None = None
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


@dataclass(frozen=True, slots=True)
class AskedResponse(Asked):
    """kept: what is kept of it, if anything is. wants_stream: the client, which may not wait for the end."""

    kept: KeptResponse | None
    wants_stream: bool


def ask(
    body: ResponsesRequest,
    headers: Mapping[str, str],
    defaults: Defaults,
    model: str,
    decode: Callable[[list[int]], str],
    responses: KeptResponses | None = None,
    earlier: Sequence[dict[str, Any]] = (),
) -> AskedResponse:
    """responses: that are kept; None: none are. earlier: the conversation that the request goes on from.

    Raises ApiError, InvalidParameterError and InvalidPromptError."""
    _check(body)
    extras = extras_of(body, headers)
    extras.warnings += _warnings(body)
    # From here on as for chat: a conversation, parameters, and a shape of the answer.
    messages = [*earlier, *messages_of_input(body.input)]
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    tools = [_chat_tool(tool, number) for number, tool in enumerate(body.tools or ())]
    conversation = defaults.conversation(
        [*instructions, *messages],
        tools=tools or None,
        chat_template_kwargs=body.chat_template_kwargs,
        effort=_effort(body),
    )
    extras.warnings += defaults.warnings_of_effort(_effort(body))
    for message in conversation.messages:
        if body.truncate_prompt_tokens is None and isinstance(content := message.get("content"), str):
            check_length(content, defaults.max_prompt_characters)
    number = _num_logprobs(body)
    limit = body.max_output_tokens
    if limit is not None and limit < 1:
        raise ApiError(400, f"max_output_tokens={limit} must be at least 1", "max_output_tokens")
    decided: dict[str, Any] = {
        "max_tokens": defaults.sampling.get("max_tokens") if limit is None else limit,
        "logprobs": number,
    }
    # The form of the answer: a schema, or calls, or both by one grammar.
    if (wanted := _structured(body)) is not None:
        decided["structured_outputs"] = wanted
    use = _tool_use(body, tools, wanted, defaults)
    if use is not None or defaults.reasoning is not None:
        decided["skip_special_tokens"] = False  # markers may be special
        if number is not None:
            refused = f"include: {WITH_LOGPROBS!r} does not go together with tools, nor with a reasoning parser"
            raise ApiError(400, refused, "include")
    if use is not None:
        decided["structured_outputs"] = use.structured
        extras.warnings += use.warnings(defaults.shows_tools)
    is_streamed = bool(body.stream or body.background)
    kind = RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY
    params = sampling_params(body, defaults, kind, **decided)
    extras.warnings += warnings_of(params.structured_outputs)
    logprobs = None if number is None else LogprobsView(number, bool(body.return_tokens_as_token_ids))
    # What goes back, and what is kept of it.
    is_stored = responses is not None and body.store is not False
    told = _told(body, tools, model, params, is_stored)
    items = OutputItems(use, defaults.reasoning_of(body), decode)
    has_metrics = bool(body.return_metrics)
    shape = ResponsesShape(body.request_id, told, logprobs, items, extras.slo, has_metrics)
    seconds = 0.0 if responses is None or body.background else resume_for(body, defaults, responses)
    kept = None
    if is_stored or body.background or seconds:
        is_short = conversation.num_characters <= MAX_CONVERSATION_BYTES
        kept = _kept(body, shape, messages if is_short else None, seconds or None, is_stored)
    prompt: Prompt = conversation
    if body.cache_salt is not None:
        prompt = {"prompt": conversation, "cache_salt": body.cache_salt}
    return AskedResponse([prompt], params, extras, shape, is_streamed, kept, bool(body.stream))


def _kept(
    body: ResponsesRequest,
    shape: ResponsesShape,
    messages: list[dict[str, Any]] | None,
    seconds: float | None,
    is_stored: bool,
) -> KeptResponse:
    """What is kept of a response that begins. messages, seconds: as of `KeptResponse`."""
    begun = orjson.dumps(shape.response("queued"))
    kept = KeptResponse(shape.id, messages, begun, bool(body.background), seconds, is_stored)
    if messages is not None:
        kept.input_items = orjson.dumps(items_of_input(body.input))
    return kept


def _effort(body: ResponsesRequest) -> str | None:
    """How much the model is to think. Raises ApiError."""
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise ApiError(400, f"reasoning: effort={shown(effort)} must be a string", "reasoning")
    return effort


def _warnings(body: ResponsesRequest) -> list[str]:
    """Of fields without effect."""
    warnings = []
    ignored = [name for name, value in (body.reasoning or {}).items() if name != "effort" and value is not None]
    if ignored:
        warnings.append(f"reasoning: {', '.join(map(repr, ignored))} has no effect")
    if (body.text or {}).get("verbosity") is not None:
        warnings.append("text.verbosity has no effect")
    return warnings


def _told(
    body: ResponsesRequest, tools: Sequence[Mapping[str, Any]], model: str, params: SamplingParams, is_stored: bool
) -> dict[str, Any]:
    """What a response repeats of its request."""
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": _effort(body), "summary": None},
        "store": is_stored,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **(body.text or {})},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"type": "function", "strict": None, "parameters": None, **tool["function"]} for tool in tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


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
    if body.background and body.store is False:
        raise ApiError(400, "background needs store: no client waits for the response; leave store out", "store")
    # Fields that exist in both APIs, and mean or are called something else here.
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, f"tool_choice={shown(body.tool_choice)} needs tools", "tool_choice")
    if body.truncation not in (None, "disabled"):
        raise ApiError(
            400, f"truncation={shown(body.truncation)} is not supported; leave it at 'disabled'", "truncation"
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


def items_of_input(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items that a checked input is, each with an id and a status, as OpenAI lists them."""
    items = []
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        kind = item.get("type", "message")
        made = {"type": kind, "id": f"{ID_PREFIXES[kind]}_{random_name()}", "status": "completed", **item}
        if kind == "message" and isinstance(made["content"], str):
            part = "output_text" if item["role"] == "assistant" else "input_text"
            more: dict[str, Any] = {"annotations": [], "logprobs": []} if part == "output_text" else {}
            made["content"] = [{"type": part, "text": made["content"], **more}]
        items.append(made)
    return items


def messages_of_input(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation that an input is. Roles are those that templates know: developers are the system. Raises ApiError."""
    if isinstance(given, str):
        if not given:
            raise InvalidPromptError("input is empty")
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(given):
        match item.get("type", "message"):
            case "message":
                role = item.get("role")
                if role not in ROLES:
                    told = f"input[{number}]: role={shown(role)} must be one of {', '.join(ROLES)}"
                    raise ApiError(400, told, "input")
                role = "system" if role == "developer" else role
                messages.append({"role": role, "content": _content(item.get("content"))})
            case "function_call":
                name, arguments = _text(item, "name", number), _text(item, "arguments", number)
                add_call(messages, _text(item, "call_id", number), name, arguments)
            case "function_call_output":
                output = item.get("output")
                if not isinstance(output, str | list):
                    raise ApiError(400, f"input[{number}]: output must be text, or a list of texts", "input")
                messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", number), "content": output})
            case "reasoning":
                pass  # templates leave the thoughts of earlier answers out
            case kind:
                told = f"items of type {shown(kind)} are not supported; messages and calls of functions are"
                raise ApiError(400, f"input[{number}]: {told}", "input")
    return messages


def _content(content: Any) -> Any:
    """A refusal, which only other servers write, is what the assistant has said."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "output_text", "text": part.get("refusal")}
        if isinstance(part, Mapping) and part.get("type") == "refusal"
        else part
        for part in content
    ]


def _text(item: Mapping[str, Any], field: str, number: int) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise ApiError(400, f"input[{number}]: {field}={shown(value)} must be a string", "input")
    return value


def _chat_tool(tool: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A tool as chats have it: this API has the fields of a function beside its type."""
    kind = tool.get("type", "function")
    if kind != "function":
        raise ApiError(400, f"tools[{number}]: type={shown(kind)} is not supported; 'function' is", "tools")
    given = tool.get("function") if isinstance(tool.get("function"), Mapping) else tool
    assert isinstance(given, Mapping)
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: given[name] for name in names if given.get(name) is not None}}


@dataclass(frozen=True, slots=True)
class _ToolFields:
    """What `tool_use_of` reads of a body."""

    tools: list[dict[str, Any]] | None
    tool_choice: Any
    parallel_tool_calls: bool | None
    structured_outputs: Any
    response_format: Any


def _structured(body: ResponsesRequest) -> StructuredOutputsParams | None:
    wanted = structured_outputs_of(body.text)
    for name in ("structured_outputs", "response_format") if wanted is not None else ():
        if getattr(body, name) is not None:
            raise ApiError(400, f"text.format beside {name}: give one of them", "text")
    return wanted


def _tool_use(
    body: ResponsesRequest, tools: list[dict[str, Any]], wanted: StructuredOutputsParams | None, defaults: Defaults
) -> ToolUse | None:
    choice = body.tool_choice
    if isinstance(choice, Mapping) and choice.get("type") == "function" and "name" in choice:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    structured = wanted if wanted is not None else body.structured_outputs
    fields = _ToolFields(tools or None, choice, body.parallel_tool_calls, structured, body.response_format)
    return tool_use_of(fields, defaults.tool_parser)


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
    raise ApiError(400, f"text.format={shown(wanted)} must be of type 'text', 'json_object' or 'json_schema'", "text")
