"""The bodies of Ollama's API as those of chats and completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import orjson

from actorllm.server import chat, completions
from actorllm.server.completions import Asked
from actorllm.server.envelope import ApiError, shown
from actorllm.server.ollama.lines import ChatLines, Lines, TextLines
from actorllm.server.output_items import OutputItems
from actorllm.server.protocol import Body, ChatCompletionRequest, CompletionRequest, Messages, Prompts, checked
from actorllm.server.sampling import Defaults
from actorllm.server.vectors.bodies import Pooled

OPTIONS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
"""Of `options`: what each is called elsewhere. Others have no effect, and a header says so."""

EFFORTS = ("low", "medium", "high")
"""Of `think`, beside true and false."""

MAX_TOLD = 10
NOT_HERE = ("images", "suffix", "template", "context")
"""Fields that would have to be honoured, and are not; empty ones ask for nothing."""


class OllamaBody(Body):
    """What both have. Fields that Ollama does not have, such as `slo`, are those of the other APIs."""

    model: str
    stream: bool | None = None
    options: dict[str, Any] | None = None
    format: str | dict[str, Any] | None = None
    keep_alive: Any = None
    think: Any = None
    request_id: str | None = None

    def renamed(self) -> dict[str, str]:
        named = {there: f"options.{here}" for here, there in OPTIONS.items()}
        return {**named, "response_format": "format"}


class ChatBody(OllamaBody):
    """`POST /api/chat`."""

    messages: Messages
    tools: Messages | None = None


class GenerateBody(OllamaBody):
    """`POST /api/generate`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: Any = None


class EmbedBody(Pooled):
    """`POST /api/embed`."""

    input: Prompts
    model: str
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None


def ask_chat(
    body: ChatBody, headers: Mapping[str, str], defaults: Defaults, model: str, decode: Callable[[list[int]], str]
) -> Asked:
    """Raises ApiError, InvalidParameterError and InvalidPromptError."""
    messages = [_message(message, number) for number, message in enumerate(body.messages)]
    return _as_chat(body, messages, body.tools, ChatLines, (headers, defaults, model, decode))


def ask_text(
    body: GenerateBody, headers: Mapping[str, str], defaults: Defaults, model: str, decode: Callable[[list[int]], str]
) -> Asked:
    """Raises ApiError, InvalidParameterError and InvalidPromptError."""
    context = (headers, defaults, model, decode)
    if not body.raw:
        system = [] if body.system is None else [{"role": "system", "content": body.system}]
        content = _with_images(body.images, body.prompt, "", "images") if body.images else body.prompt
        return _as_chat(body, [*system, {"role": "user", "content": content}], None, TextLines, context)
    if body.images:
        raise ApiError(400, "images cannot be placed with raw=true; leave raw out", "images")
    asked = completions.ask(
        checked(CompletionRequest, {**_fields(body), "prompt": body.prompt}, body.renamed()), *context
    )
    if "max_tokens" not in _options(body):
        asked.params.max_tokens = defaults.sampling.get("max_tokens")  # this API has no limit by default
    asked.extras.warnings += _warnings(body)
    if body.think is not None:
        asked.extras.warnings.append("think has no effect beside raw=true: no chat template tells it to the model")
    return replace(asked, shape=TextLines(body.request_id, model, OutputItems(None)))


def _as_chat(
    body: OllamaBody,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    lines: type[Lines],
    context: tuple[Mapping[str, str], Defaults, str, Callable[[list[int]], str]],
) -> Asked:
    fields = {**_with_thinking(body, _fields(body)), "messages": messages, "tools": tools or None}
    _, defaults, model, decode = context
    asked = chat.ask(checked(ChatCompletionRequest, fields, body.renamed()), *context)
    told = [one.replace("reasoning_effort has", "think has", 1) for one in asked.extras.warnings]
    asked.extras.warnings = told + _warnings(body)
    if body.think is True and "enable_thinking" not in defaults.read_by_templates:
        asked.extras.warnings.append(
            "think=true has no effect here: the model's chat template does not read enable_thinking"
        )
    assert isinstance(asked.shape, chat.ChatShape)
    return replace(
        asked, shape=lines(body.request_id, model, OutputItems(asked.shape.tool_use, asked.shape.reasoning, decode))
    )


def _with_thinking(body: OllamaBody, fields: dict[str, Any]) -> dict[str, Any]:
    """With how much the model is to think, as chats say it. What fields of chats say goes before. Raises ApiError."""
    if body.think is None:
        return fields
    if body.think is True:
        given = fields.get("chat_template_kwargs") or {}
        is_known = isinstance(given, Mapping)  # else the check of a chat refuses it
        return {**fields, "chat_template_kwargs": {"enable_thinking": True, **given} if is_known else given}
    if body.think is not False and body.think not in EFFORTS:
        told = f"think={shown(body.think)} must be true, false, or one of {', '.join(map(repr, EFFORTS))}"
        raise ApiError(400, told, "think")
    return {"reasoning_effort": body.think or "none", **fields}


def _fields(body: OllamaBody) -> dict[str, Any]:
    """Of either body: all but the prompt."""
    extra = body.model_extra or {}
    for name in NOT_HERE:
        if extra.get(name):
            raise ApiError(400, f"{name} is not supported by this server; leave it out", name)
    fields: dict[str, Any] = {name: value for name, value in extra.items() if name not in NOT_HERE}
    for name in ("n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "echo"):
        if fields.get(name) not in (None, False):
            raise ApiError(400, f"{name} is not supported by this API; leave it out", name)
    fields |= _options(body)
    fields |= {"stream": body.stream is not False, "request_id": body.request_id}
    if isinstance(body.format, Mapping):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format}}
    elif body.format:
        if body.format != "json":
            raise ApiError(400, f"format={shown(body.format)} must be 'json' or a JSON schema", "format")
        fields["response_format"] = {"type": "json_object"}
    return fields


def _options(body: OllamaBody) -> dict[str, Any]:
    found = {OPTIONS[name]: value for name, value in (body.options or {}).items() if name in OPTIONS}
    if found.get("max_tokens") in (-1, -2):  # as many as there is room for
        del found["max_tokens"]
    return found


def _warnings(body: OllamaBody) -> list[str]:
    warnings: list[str] = []
    unused = [name for name, value in (body.options or {}).items() if name not in OPTIONS and value is not None]
    told = [f"options.{name:.40} has no effect" for name in unused[:MAX_TOLD]]
    return [*warnings, *(one.encode("ascii", "replace").decode() for one in told)]


def _message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A message as chats have it: calls have ids there, and their arguments are text."""
    made = {name: value for name, value in message.items() if name not in ("images", "thinking", "tool_name")}
    if message.get("tool_name") is not None:
        made["name"] = message["tool_name"]
    if message.get("images"):
        made["content"] = _with_images(message["images"], message.get("content"), f"messages[{number}]: ", "messages")
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise ApiError(400, f"messages[{number}]: tool_calls must be a list", "messages")
        made["tool_calls"] = [_call(call, number) for call in calls]
    return made


def _with_images(images: Any, text: Any, place: str, field: str) -> list[dict[str, Any]]:
    """The content of a message as chats have it; images stand in front of its text, as in Ollama."""
    if not isinstance(images, list) or not all(isinstance(one, str) for one in images):
        raise ApiError(400, f"{place}images must be a list of files in base64", field)
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:image;base64,{one}"}} for one in images
    ]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"messages[{number}]: a call needs a function with a name", "messages")
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return {"type": "function", "function": {"name": function["name"], "arguments": text}}
