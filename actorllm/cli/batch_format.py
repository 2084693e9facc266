"""The OpenAI batch format: a line of JSON to a request, and its output to a line of JSON.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 8}}
    {"id": "...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

Pure: owns the mapping and nothing else. Fields of a body are OpenAI's, and by their names all sampling parameters of this
library; what is neither is an error of that line. As in vLLM, the response of a failed line has no body, and `error` is
OpenAI's error object. Called by actorllm.cli.run_batch.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from actorllm.errors import (
    ActorLLMError,
    EngineOverloaded,
    InvalidParameterError,
    InvalidPromptError,
    RequestFailedError,
)
from actorllm.intake.tokenization import Prompt
from actorllm.server.logprob_format import LogprobsView, Position, of_prompt
from actorllm.text.chat_template import Conversation
from actorllm.types.outputs import CompletionOutput, RequestOutput
from actorllm.types.params import RequestOutputKind, SamplingParams

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

IGNORED = ("model", "user", "metadata", "store", "service_tier", "stream", "stream_options", "parallel_tool_calls")
"""Fields that ask for nothing here (`stream` is refused when it is true)."""

OF_THE_PROMPT = ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")
OF_A_CONVERSATION = (
    "messages",
    "tools",
    "chat_template",
    "chat_template_content_format",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)

ONLY_AS: dict[str, tuple[Any, ...]] = {
    "tool_choice": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "suffix": (None,),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None,),
}
"""Fields that are accepted at these values only."""


class UnknownModelError(InvalidParameterError):
    """The line asks for another model than the one that runs."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    url: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    tokenization: dict[str, Any]
    priority: int
    echo: bool
    num_logprobs: int | None
    """Most likely tokens to show beside each of the output; -1: all; None: no log-probabilities."""


def custom_id_of(line: bytes) -> str | None:
    """The id of a line, or None when it has none that can be read."""
    try:
        tree = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    found = tree.get("custom_id") if isinstance(tree, dict) else None
    return found if isinstance(found, str) else None


def parse_line(line: bytes, defaults: Mapping[str, Any], model: str) -> BatchRequest:
    """A request, checked as far as it can be without the model. defaults: sampling parameters of bodies without them.

    Raises InvalidParameterError or InvalidPromptError.
    """
    try:
        tree = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InvalidParameterError(f"the line is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise InvalidParameterError(f"a line must be a JSON object, not {type(tree).__name__}")
    custom_id, url, body = tree.get("custom_id"), tree.get("url"), tree.get("body")
    # The envelope: what every line has.
    if not isinstance(custom_id, str):
        raise InvalidParameterError(f"custom_id={custom_id!r:.80} must be a string")
    if tree.get("method") != "POST":
        raise InvalidParameterError(f"method={tree.get('method')!r:.80} must be 'POST'")
    if url not in (CHAT, COMPLETIONS):
        raise InvalidParameterError(f"url={url!r:.80} must be {CHAT!r} or {COMPLETIONS!r}")
    if not isinstance(body, dict):
        raise InvalidParameterError(f"body={body!r:.80} must be an object")
    if body.get("model") not in (None, model):
        raise UnknownModelError(
            f"model={body['model']!r:.80}: this engine runs {model!r}; leave it out, or run with --served-model-name"
        )
    if body.get("stream"):
        raise InvalidParameterError("stream=true: the responses of a batch are whole; leave it out")
    # From here on fields are taken out of `given`. What is left is sampling parameters, and an unknown one is refused
    # by name.
    given = {name: value for name, value in body.items() if name not in IGNORED}
    for name, values in ONLY_AS.items():
        if name in given and given.pop(name) not in values:
            shown = " or ".join(orjson.dumps(value).decode() for value in values)
            raise InvalidParameterError(f"{name}={body[name]!r:.80} is not supported in a batch; leave it at {shown}")
    tokenization = {name: given.pop(name) for name in OF_THE_PROMPT if name in given}
    salt = given.pop("cache_salt", None)
    priority = given.pop("priority", None) or 0
    prompts: tuple[Prompt, ...]
    # The two endpoints name the prompt and the limit of tokens differently, and the limit has different defaults.
    if url == CHAT:
        if salt is not None:
            raise InvalidParameterError(f"cache_salt={salt!r:.80} is not supported for conversations; leave it out")
        conversation = {name: given.pop(name) for name in OF_A_CONVERSATION if name in given}
        prompts = (Conversation.of(conversation.pop("messages", None), **conversation),)
        if "max_completion_tokens" in given:
            given["max_tokens"] = given.pop("max_completion_tokens")
    else:
        texts = _prompts_of(given.pop("prompt", None))
        prompts = tuple(text if salt is None else _salted(text, salt) for text in texts)
        given.setdefault("max_tokens", 16)
    # With echo, the log-probabilities of a completion are those of the prompt as well.
    echo = bool(given.pop("echo", False))
    num_logprobs = _num_logprobs(url, given)
    if num_logprobs is not None:
        given["logprobs"] = None if given.get("logprob_token_ids") else num_logprobs
        if echo and url == COMPLETIONS and given.get("prompt_logprobs") is None:
            given["prompt_logprobs"] = num_logprobs
    if "output_kind" in given:
        raise InvalidParameterError("output_kind: the responses of a batch are whole; leave it out")
    fields = {name: value for name, value in given.items() if value is not None}  # null means: not given
    params = SamplingParams(**{"max_tokens": None, **defaults, **fields, "output_kind": RequestOutputKind.FINAL_ONLY})
    return BatchRequest(custom_id, url, prompts, params, tokenization, priority, echo, num_logprobs)


def _num_logprobs(url: str, given: dict[str, Any]) -> int | None:
    """Take what asks for log-probabilities out of a body: a number in one API, a switch and a number in the other."""
    logprobs, top = given.pop("logprobs", None), given.pop("top_logprobs", None)
    if url == COMPLETIONS:
        if top:
            raise InvalidParameterError(f"top_logprobs={top!r:.80} is for conversations; use logprobs={top!r:.80}")
        asked = None if logprobs is False else logprobs
    elif not isinstance(logprobs, bool | None):
        raise InvalidParameterError(f"logprobs={logprobs!r:.80} must be true or false; the number goes to top_logprobs")
    elif not logprobs and top:
        raise InvalidParameterError(f"top_logprobs={top!r:.80} needs logprobs=true")
    else:
        asked = (top or 0) if logprobs else None
    if asked is None:
        if given.get("logprob_token_ids"):
            raise InvalidParameterError("logprob_token_ids needs logprobs too")
        return None
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < -1:
        name = "logprobs" if url == COMPLETIONS else "top_logprobs"
        raise InvalidParameterError(f"{name}={asked!r:.80} must be a number >= 0, or -1 for those of all tokens")
    return asked


def _prompts_of(prompt: Any) -> list[Prompt]:
    """A text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidPromptError(f"prompt={prompt!r:.80} must be text, token ids, or a list of either")
    if all(isinstance(item, int) for item in prompt):
        return [prompt]
    return prompt


def _salted(prompt: Prompt, salt: Any) -> Prompt:
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": salt}


def success_line(
    request: BatchRequest, outputs: list[RequestOutput], model: str, decode: Callable[[list[int]], str]
) -> bytes:
    """The line of a request whose prompts are all answered; outputs in the order of its prompts.

    decode: the text of tokens, for what comes without one: prompts of token ids, and the first token of a prompt.
    """
    choices = [
        _choice(request, len(output.outputs) * number + one.index, output, one, decode)
        for number, output in enumerate(outputs)
        for one in output.outputs
    ]
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_completion = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if request.url == CHAT else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if request.url == CHAT else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "total_tokens": num_prompt + num_completion,
            "completion_tokens": num_completion,
        },
    }
    if request.url == CHAT and request.params.prompt_logprobs is not None:
        body["prompt_logprobs"] = of_prompt(outputs[0])
    return _line(request.custom_id, {"status_code": 200, "request_id": _request_id(), "body": body}, None)


def _choice(
    request: BatchRequest, index: int, output: RequestOutput, one: CompletionOutput, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    prompt = ""
    if request.echo:
        prompt = output.prompt if output.prompt is not None else decode(output.prompt_token_ids)
        if request.url == CHAT:  # as vLLM: the last message, when it is continued
            conversation = request.prompts[0]
            assert isinstance(conversation, Conversation)
            content = conversation.messages[-1].get("content")
            prompt = content if isinstance(content, str) else ""
    text = prompt + one.text
    said = {"message": {"role": "assistant", "content": text}} if request.url == CHAT else {"text": text}
    logprobs: dict[str, Any] | None = None
    if request.num_logprobs is not None:
        view = LogprobsView(-1 if request.params.logprob_token_ids else request.num_logprobs)
        positions: list[Position] = list(zip(one.token_ids, one.logprobs or (), strict=True))
        if request.url == CHAT:
            logprobs = view.of_message(positions)
        else:
            offset = 0
            if request.echo:
                assert output.prompt_logprobs is not None
                echoed: list[Position] = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))
                offset = view.offset_of_prompt(prompt, echoed, decode)
                positions = [*echoed, *positions]
            logprobs = view.of_text(positions, decode, offset)
    choice: dict[str, Any] = {
        "index": index,
        **said,
        "logprobs": logprobs,
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
    }
    if request.url == COMPLETIONS and request.params.prompt_logprobs is not None:
        choice["prompt_logprobs"] = of_prompt(output)
    return choice


# Lines that failed


def error_line(custom_id: str | None, error: ActorLLMError, message: str) -> bytes:
    """The line of a request that failed: 404 for another model, 400 when it is wrong, 500 when the engine failed it, 503
    when it was turned away."""
    status, kind = 400, "BadRequestError"
    if isinstance(error, UnknownModelError):
        status, kind = 404, "NotFoundError"
    elif isinstance(error, RequestFailedError):
        status, kind = 500, "InternalServerError"
    elif isinstance(error, EngineOverloaded):
        status, kind = 503, "ServiceUnavailableError"
    told = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return _line(custom_id, {"status_code": status, "request_id": _request_id(), "body": None}, told)


def _request_id() -> str:
    return f"actorllm-batch-{uuid.uuid4().hex}"


def _line(custom_id: str | None, response: dict[str, Any], error: dict[str, Any] | None) -> bytes:
    tree = {"id": f"actorllm-{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return orjson.dumps(tree) + b"\n"
