"""Errors as clients expect them: a status, and OpenAI's `{"error": {"message", "type", "param", "code"}}` or their API's form.

`code` has one value: the status as a number, as in vLLM, or a name such as "context_length_exceeded", as in OpenAI. The server's
`error_format` says which. Owns which exception is which status, and which field of the body an error is about. Called by
everything in this package that answers.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any, Literal, TypeAlias

import orjson
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from actorllm.errors import (
    MAX_SHOWN,
    ActorLLMError,
    EngineError,
    EngineOverloaded,
    InvalidPromptError,
    RequestError,
    RequestFailedError,
    ShortRepr,
)

KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    414: "URITooLongError",
    429: "RateLimitError",
    431: "RequestHeaderFieldsTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
OPENAI_KINDS = {429: "requests", 500: "server_error", 501: "server_error", 503: "server_error"}
"""OpenAI's `type` by status; others are "invalid_request_error"."""
OPENAI_CODES = {401: "invalid_api_key", 413: "request_too_large", 429: "rate_limit_exceeded"}
TOO_LONG = "maximum context length"
"""What every message about a prompt that is too long says."""
ErrorFormat: TypeAlias = Literal["vllm", "openai"]

RETRY_AFTER_S = 1
"""What a client is told that comes when there is too much to do, or when the engine is about to end."""

MAX_MESSAGE = 2000
_WORD = re.compile(r"[A-Za-z_]\w*")
NOTHING_RENAMED: Mapping[str, str] = {}


class ApiError(Exception):
    """A request that is answered with an error. param: the field of the body that it is about, if it is about one."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    def tree(self, error_format: ErrorFormat = "vllm") -> dict[str, Any]:
        if error_format == "openai":
            return {"error": self._of_openai()}
        return {
            "error": {
                "message": self.message[:MAX_MESSAGE],
                "type": KINDS.get(self.status, "APIError"),
                "param": self.param,
                "code": self.status,
            }
        }

    def body(self, path: str = "", error_format: ErrorFormat = "vllm") -> bytes:
        """path: of the request, since APIs have forms of their own."""
        form = next((form for prefix, form in FORMS if path.startswith(prefix)), None)
        return orjson.dumps(self.tree(error_format) if form is None else form(self))

    def _of_openai(self) -> dict[str, Any]:
        """As the description of OpenAI's API has it: the code is text or null."""
        code = OPENAI_CODES.get(self.status)
        if self.status == 404 and self.param == "model":
            code = "model_not_found"
        elif self.status == 400 and TOO_LONG in self.message:
            code = "context_length_exceeded"
        kind = OPENAI_KINDS.get(self.status, "invalid_request_error")
        return {"message": self.message[:MAX_MESSAGE], "type": kind, "param": self.param, "code": code}

    def _of_anthropic(self) -> dict[str, Any]:
        kind = ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message[:MAX_MESSAGE]}}

    def _of_ollama(self) -> dict[str, Any]:
        return {"error": self.message[:MAX_MESSAGE]}

    def headers(self) -> dict[str, str]:
        if self.status in (429, 503):
            return {"retry-after": str(RETRY_AFTER_S)}
        if self.status in (408, 413):
            return {"connection": "close"}  # the rest of the body is not read
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}


FORMS = (("/v1/messages", ApiError._of_anthropic), ("/api/", ApiError._of_ollama))
"""Of errors, by what a path begins with; others are OpenAI's."""


def error_of(
    error: BaseException,
    fields: Container[str] = (),
    prompt: str | None = None,
    renamed: Mapping[str, str] = NOTHING_RENAMED,
) -> ApiError:
    """What a client is told of an exception. fields: what its body may hold; prompt: where in it the prompt is; renamed:
    what parameters are called there, by their names.

    What is not an error of this library is not shown to any client: its text may be about anything.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail)
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply")
    if not isinstance(error, ActorLLMError):
        return ApiError(500, "the server failed to answer this request; its log has the reason")
    message = str(error)[: 2 * MAX_MESSAGE]
    if isinstance(error, EngineOverloaded):
        return ApiError(429, message)
    if isinstance(error, RequestFailedError):
        return ApiError(500, message)
    if isinstance(error, RequestError):
        message = _WORD.sub(lambda word: renamed.get(word[0], word[0]), message)
        named = [word for word in map(str.lower, _WORD.findall(message)) if word in fields]
        if isinstance(error, InvalidPromptError) and not (named and message.startswith(f"{named[0]}=")):
            return ApiError(400, message, prompt)
        return ApiError(400, message, named[0] if named else None)
    return ApiError(503 if isinstance(error, EngineError) else 500, message)


def error_of_validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body, by the name of its field."""
    first = error.errors(include_url=False, include_context=False)[0]
    # Below the field there are the names of the alternatives of a type, which no client wrote.
    location = [str(part)[:MAX_SHOWN] for part in first["loc"]]
    param = location[0] if location else None
    told = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return ApiError(400, f"{'.'.join(location)}: this field is required", param)
    return ApiError(400, f"{'.'.join(location)}={shown(first['input'])}: {told}", param)


class _BodyRepr(ShortRepr):
    """Of what a body holds."""

    def repr_ndarray(self, x: Any, level: int) -> str:
        """Token ids that came as a list."""
        return self.repr_list(x[: self.maxlist + 1].tolist(), level)


def shown(value: Any) -> str:
    """A value of a body in a message, at a cost that does not depend on its size."""
    text = _BodyRepr().repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
