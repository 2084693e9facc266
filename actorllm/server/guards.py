"""`Guards`: what every HTTP request passes before any endpoint sees it. One ASGI middleware without per-message work.

API keys, the sizes of headers, address and body, and the time a body may take to arrive. HEAD is answered wherever GET is, as
that without the body. Behind all of it, an unforeseen exception becomes a 500 with OpenAI's envelope, and a line in the
log. Nothing is parsed here.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actorllm.server.envelope import ApiError, ErrorFormat, error_of
from actorllm.server.turnstile import Turnstile

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset(
    (
        *("/", "/page/page.css", "/page/live.js", "/page/chat.js"),
        *("/health", "/ping", "/version", "/load", "/metrics"),
    )
)
"""What a load balancer or a scraper asks without a key; and the live page, which has nothing in it until it is given one."""

SEND = "actorllm.send"
"""Where in the scope there is the way past everything inside of `Guards`, for the middle of a stream: what is there looks at
how a response begins, and at what is raised."""

BEGAN = "actorllm.began"
"""Where in the scope there is when the request came, in epoch seconds."""

DEFAULT_MAX_BODY_BYTES = 8 << 20
"""`bodies` says what of it is parsed where."""
DEFAULT_BODY_TIMEOUT_S = 30.0

MAX_HEADERS = 256
"""Each look-up of a header goes through all of them."""
MAX_ADDRESS_BYTES = 1 << 14
"""Of path and query."""


class Guards:
    def __init__(self, app: ASGIApp, api_keys: Sequence[str], max_body_bytes: int, body_timeout_s: float) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._turnstile = Turnstile()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        if scope["method"] == "HEAD":
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        scope[SEND], scope[BEGAN] = send, time.time()
        try:
            _check_head(scope)
            headers = dict(scope["headers"])
            self._check_key(scope, headers)
            self._check_length(headers)
            await self._turnstile.take()
            limited = receive if scope["method"] == "GET" else _LimitedBody(receive, self).receive
            await self._app(scope, limited, watched_send)
        except ClientDisconnect:
            logger.debug("a client left before its body was here")
        except Exception as error:
            # Of one request: its client is told, and the log unless it is the client's own error.
            told = error_of(error)
            if not has_started:
                self._trace(scope, told, error)
            if told.status == 500:
                logger.exception("%s %r failed", scope["method"], scope["path"])
            if has_started:
                raise  # half of a response went out: the connection ends here
            await send_error(told, send, route_path(scope), scope["app"].state.server.defaults.answers.error_format)

    @staticmethod
    def _trace(scope: Scope, told: ApiError, error: Exception) -> None:
        state = scope["app"].state.server
        if state.tracing is not None:
            state.tracing.record_refusal(scope, state.model_names[0], told, error)

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if not self._digests or scope["method"] == "OPTIONS" or route_path(scope) in OPEN_PATHS:
            return
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":
            kind, key = b"bearer", headers.get(b"x-api-key", b"")  # as Anthropic's clients send it
        digest = _digest(key.strip())
        matches = [
            hmac.compare_digest(digest, known) for known in self._digests
        ]  # all of them: no timing to tell which
        if not any(matches):
            raise ApiError(401, "no valid API key; send the header 'Authorization: Bearer KEY'")

    def _check_length(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            raise self.too_large()

    def too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body_bytes} bytes, which is the limit of this server")


class _LimitedBody:
    """The body of one request as the endpoint receives it."""

    def __init__(self, receive: Receive, guards: Guards) -> None:
        self._receive = receive
        self._guards = guards
        self._num_bytes = 0
        self._until = anyio.current_time() + guards._body_timeout_s
        self._is_whole = False

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()  # what comes now is the disconnect
        try:
            with anyio.fail_after(self._until - anyio.current_time()):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._guards._body_timeout_s:g} seconds") from None
        self._is_whole = message["type"] != "http.request" or not message.get("more_body", False)
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._guards._max_body_bytes:
            raise self._guards.too_large()
        return message


def _check_head(scope: Scope) -> None:
    if len(scope["headers"]) > MAX_HEADERS:
        raise ApiError(431, f"the request has {len(scope['headers'])} headers, and the limit is {MAX_HEADERS}")
    num_bytes = len(scope.get("raw_path") or scope["path"]) + len(scope.get("query_string", b""))
    if num_bytes > MAX_ADDRESS_BYTES:
        raise ApiError(414, f"path and query have {num_bytes} bytes, and the limit is {MAX_ADDRESS_BYTES}")


def _without_body(send: Send) -> Send:
    """Of a response to HEAD: its headers, content-length included, are those of GET."""

    async def send_head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_head


def route_path(scope: Mapping[str, Any]) -> str:
    """The path below the place where the application is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


async def send_error(error: ApiError, send: Send, path: str, error_format: ErrorFormat) -> None:
    body = error.body(path, error_format)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
