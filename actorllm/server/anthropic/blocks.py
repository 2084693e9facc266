"""The body of `POST /v1/messages` as that of a chat: blocks become messages, calls and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import orjson

from actorllm.server import chat
from actorllm.server.anthropic.message import MessagesShape
from actorllm.server.completions import Asked
from actorllm.server.envelope import ApiError, shown
from actorllm.server.output_items import OutputItems
from actorllm.server.protocol import Body, ChatCompletionRequest, Many, Messages, checked
from actorllm.server.sampling import Defaults

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
NOT_HERE = (
    *("n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "return_token_ids", "stream_options"),
    "resume_for",
)
"""Fields of a chat that a message has no place for."""
LEFT_OUT = ("thinking", "redacted_thinking")
"""Blocks of earlier answers that templates leave out."""


class CountTokensRequest(Body):
    """`POST /v1/messages/count_tokens`."""

    messages: Messages
    model: str | None = None
    system: str | Messages | None = None
    tools: Messages | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    request_id: str | None = None


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`. Sampling parameters of vLLM, and the fields about latency, may stand beside these."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: Many[str] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    def renamed(self) -> dict[str, str]:
        return {"stop": "stop_sequences", "response_format": "output_config"}


def ask(
    body: MessagesRequest,
    headers: Mapping[str, str],
    defaults: Defaults,
    model: str,
    decode: Callable[[list[int]], str],
) -> Asked:
    """Raises ApiError, InvalidParameterError and InvalidPromptError."""
    if body.max_tokens < 1:
        raise ApiError(400, f"max_tokens={body.max_tokens} must be at least 1", "max_tokens")
    asked = chat.ask(chat_body(body), headers, defaults, model, decode)
    assert isinstance(asked.shape, chat.ChatShape)
    kind = (body.thinking or {}).get("type")
    if kind not in (None, "disabled"):
        asked.extras.warnings.append("thinking: the model decides whether it thinks, and it has no effect")
    return replace(
        asked,
        shape=MessagesShape(body.request_id, model, OutputItems(asked.shape.tool_use, asked.shape.reasoning, decode)),
    )


def chat_body(body: CountTokensRequest) -> ChatCompletionRequest:
    """The same as the body of a chat. Raises ApiError."""
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _text_of(body.system, "system")})
    for number, message in enumerate(body.messages):
        messages += _messages_of(message, f"messages[{number}]")
    fields: dict[str, Any] = {**(body.model_extra or {}), "messages": messages, "request_id": body.request_id}
    fields |= {"model": body.model, "chat_template_kwargs": body.chat_template_kwargs}
    # Chats have one field for how much the model is to think, where this API has two.
    if (effort := (body.output_config or {}).get("effort")) is not None:
        fields["reasoning_effort"] = effort
    elif (body.thinking or {}).get("type") == "disabled":
        fields["reasoning_effort"] = "none"
    if body.tools:
        fields["tools"] = [_tool(tool, number) for number, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _choice(body.tool_choice)
    format = (body.output_config or {}).get("format")
    if format is not None:
        if not isinstance(format, Mapping) or format.get("type") != "json_schema":
            raise ApiError(400, f"output_config: format={shown(format)} must be of type 'json_schema'", "output_config")
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": format.get("schema")}}
    if isinstance(body, MessagesRequest):
        fields |= {"max_tokens": body.max_tokens, "stream": body.stream, "stop": body.stop_sequences}
    for name in NOT_HERE:
        if fields.get(name) not in (None, False):
            raise ApiError(400, f"{name} is not supported by this API; leave it out", name)
    return checked(ChatCompletionRequest, fields, body.renamed())


def _messages_of(message: Mapping[str, Any], place: str) -> Iterator[dict[str, Any]]:
    """One message, or several: each result of a tool is one of its own, in front of the text beside it."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(400, f"{place}: role={shown(role)} must be one of user, assistant, system", "messages")
    texts: list[str] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in _blocks(content, place):
        kind = block.get("type")
        if kind == "text":
            texts.append(_string(block, "text", place))
            parts.append({"type": "text", "text": texts[-1]})
        elif kind == "image" and role == "user":
            parts.append(_image_part(block, place))
        elif kind == "tool_use" and role == "assistant":
            name, arguments = _string(block, "name", place), orjson.dumps(block.get("input") or {}).decode()
            function = {"name": name, "arguments": arguments}
            calls.append({"id": _string(block, "id", place), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = [] if block.get("content") is None else _blocks(block["content"], place)
            # Only users show images in a chat: those of a result stand in the message behind it.
            parts += (_image_part(one, place) for one in result if one.get("type") == "image")
            text = _text_of([one for one in result if one.get("type") != "image"], place)
            yield {"role": "tool", "tool_call_id": _string(block, "tool_use_id", place), "content": text}
        elif kind not in LEFT_OUT:
            told = f"blocks of type {shown(kind)} are not supported here; text, image, tool_use and tool_result are"
            raise ApiError(400, f"{place}: {told}", "messages")
    if calls:
        yield {"role": role, "content": "\n".join(texts) or None, "tool_calls": calls}
    # Parts only where an image stands among them: every template takes text as one string, and not all take parts.
    elif len(parts) > len(texts):
        yield {"role": role, "content": parts}
    elif texts:
        yield {"role": role, "content": "\n".join(texts)}


def _image_part(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if isinstance(source, Mapping) and kind == "base64":
        url = f"data:{_string(source, 'media_type', place)};base64,{_string(source, 'data', place)}"
    elif isinstance(source, Mapping) and kind == "url":
        url = _string(source, "url", place)
    else:
        told = f"{place}: the source of an image must be of type 'base64' or 'url', not {shown(kind)}"
        raise ApiError(400, told, "messages")
    return {"type": "image_url", "image_url": {"url": url}}


def _blocks(content: Any, place: str) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise ApiError(400, f"{place}: content must be text or a list of blocks", place.partition("[")[0])
    return content


def _text_of(content: Any, place: str) -> str:
    """Of text, or of blocks that must be text."""
    texts = []
    for block in _blocks(content, place):
        if block.get("type") != "text":
            told = f"{place}: blocks of type {block.get('type')!r:.80} are not supported here; text is"
            raise ApiError(400, told, place.partition("[")[0])
        texts.append(_string(block, "text", place))
    return "\n".join(texts)


def _string(block: Mapping[str, Any], field: str, place: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise ApiError(400, f"{place}: {field}={shown(value)} must be a string", place.partition("[")[0])
    return value


def _tool(tool: Mapping[str, Any], number: int) -> dict[str, Any]:
    kind = tool.get("type", "custom")
    if kind not in ("custom", None):
        raise ApiError(400, f"tools[{number}]: type={shown(kind)} is not supported; 'custom' is", "tools")
    function = {"name": tool.get("name"), "description": tool.get("description"), "strict": tool.get("strict")}
    function["parameters"] = tool.get("input_schema")
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    if kind == "tool":
        named: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in CHOICES:
        named = CHOICES[kind]
    else:
        told = f"tool_choice: type={shown(kind)} must be one of {', '.join(CHOICES)}, tool"
        raise ApiError(400, told, "tool_choice")
    return {"tool_choice": named, "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False)}
