"""vLLM's classes that answer requests within a program (`OpenAIServingChat` ...), for those that have HTTP endpoints of their own.

    chat = OpenAIServingChat(engine, models, "assistant")
    answer = await chat.create_chat_completion(request)

Each asks the application of `create_app` in memory, so the answers are those of `actorllm serve`. They are an `ErrorResponse`, a
mapping with attributes, or a generator of the lines of a stream. Arguments are told apart by their types, since their order has
changed from release to release.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import orjson
from anyio.streams.memory import MemoryObjectReceiveStream

from actorllm.actors.engine_thread import HostLoop
from actorllm.api.async_llm import AsyncLLM
from actorllm.cli.vllm_bodies import (
    ChatCompletionResponse,
    CompletionResponse,
    EmbeddingResponse,
    ErrorResponse,
    Tree,
    as_tree,
    body_of,
)
from actorllm.config import ModelConfig
from actorllm.errors import ConfigError, UnknownArgumentError, nearest_name

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

ANSWERS = (
    *("chat_template", "chat_template_content_format", "response_role", "return_tokens_as_token_ids"),
    *("enable_force_include_usage", "exclude_tools_when_tool_choice_none", "default_chat_template_kwargs"),
    *("trust_request_chat_template", "tool_parser"),
)
"""Arguments that change answers, as those of `create_app`."""
IDLE = (
    *("model_config", "enable_auto_tools", "enable_prompt_tokens_details", "enable_log_outputs", "enable_log_deltas"),
    *("log_error_stack", "openai_serving_render", "prompt_adapters", "tool_server", "reasoning_parser"),
)
"""Arguments of vLLM that change nothing here. The reasoning parser is that of the engine."""
LEFT_OUT = (b"content-length", b"content-type", b"transfer-encoding", b"authorization", b"host")
"""Headers of the program's own request that are not handed on: its key is not for this application."""


@dataclass(frozen=True)
class BaseModelPath:
    """A name under which requests may ask for the model, and where it came from."""

    name: str | Sequence[str]
    model_path: str = ""


@dataclass(frozen=True)
class LoRAModulePath:
    """An adapter by its name."""

    name: str
    path: str
    base_model_name: str | None = None


class RequestLogger:
    """Asks for a line in the log about each request.

    Arguments:
        max_log_len: of vLLM; prompts are not written at all.
    """

    def __init__(self, *, max_log_len: int | None = None) -> None:
        self.max_log_len = max_log_len


class OpenAIServingModels:
    """What requests may call the model, and its adapters.

    Arguments:
        engine_client: the engine.
        positional: `BaseModelPath`s, and behind them `LoRAModulePath`s or texts such as 'name=path'.
        base_model_paths, lora_modules: the same by name. Further arguments of vLLM have no effect.

    Raises:
        ConfigError: an adapter cannot be used.
    """

    def __init__(
        self,
        engine_client: AsyncLLM,
        *positional: Any,
        base_model_paths: Sequence[BaseModelPath] | None = None,
        lora_modules: Sequence[Any] | None = None,
        **_: Any,
    ) -> None:
        from actorllm.server.served_models import ServedModels

        lists = [one for one in positional if isinstance(one, list | tuple)]
        paths = base_model_paths if base_model_paths is not None else lists.pop(0) if lists else ()
        modules = lora_modules if lora_modules is not None else lists.pop(0) if lists else ()
        self.engine_client = engine_client
        self.base_model_paths = list(paths)
        names = [
            name for path in paths for name in ([path.name] if isinstance(path.name, str) else path.name or ())
        ] or [engine_client.config.model.name]
        adapts = engine_client.config.lora is not None
        self.served = ServedModels(names, [_module(one) for one in modules], adapts=adapts)
        self._app: FastAPI | None = None

    @property
    def lora_requests(self) -> dict[str, Any]:
        """The adapters, by their names."""
        return self.served.adapters

    def is_base_model(self, model_name: str) -> bool:
        """Whether it is a name of the model itself.

        Arguments:
            model_name: as a request has it.
        """
        return model_name in self.served.names

    def model_name(self, lora_request: Any = None) -> str:
        """What answers call the model.

        Arguments:
            lora_request: an adapter; None: none.
        """
        return self.served.names[0] if lora_request is None else str(lora_request.lora_name)

    async def init_static_loras(self) -> None:
        """Have the workers read the adapters.

        Raises:
            ConfigError: one does not fit the model.
        """
        await self._application().state.server.load_adapters()

    async def show_available_models(self) -> Any:
        """As `GET /v1/models`."""
        return await asked(self._application(), "GET", "/v1/models", b"", (), Tree)

    async def load_lora_adapter(self, request: Any, *_: Any, **__: Any) -> Any:
        """As `POST /v1/load_lora_adapter`: a text, or an ErrorResponse.

        Arguments:
            request: its body, with lora_name and lora_path.
        """
        return await asked(self._application(), "POST", "/v1/load_lora_adapter", body_of(request), (), Tree)

    async def unload_lora_adapter(self, request: Any, *_: Any, **__: Any) -> Any:
        """As `POST /v1/unload_lora_adapter`: a text, or an ErrorResponse.

        Arguments:
            request: its body, with lora_name.
        """
        return await asked(self._application(), "POST", "/v1/unload_lora_adapter", body_of(request), (), Tree)

    def _application(self) -> FastAPI:
        if self._app is None:
            self._app = self.application()
        return self._app

    def application(self, **answers: Any) -> FastAPI:
        """An application of this engine, these names and adapters.

        Arguments:
            answers: of `create_app`.
        """
        from actorllm.server import adapter_routes
        from actorllm.server.app import create_app

        made = create_app(self.engine_client, **answers)
        made.state.server.models = self.served
        made.include_router(adapter_routes.router)
        return made


def _module(one: Any) -> Any:
    if not isinstance(one, LoRAModulePath):
        return one
    base = {} if one.base_model_name is None else {"base_model_name": one.base_model_name}
    return {"name": one.name, "path": one.path, **base}


class OpenAIServing:
    """What the classes below share.

    Arguments:
        engine_client: the engine, which starts with the first request if it has not.
        positional: an `OpenAIServingModels`, or names of the model; texts are the role of answers, and then a chat template.
        options: of vLLM; those of ANSWERS change answers, those of IDLE nothing.

    Raises:
        ConfigError: an option is wrong. UnknownArgumentError: there is none of this name.
    """

    def __init__(self, engine_client: AsyncLLM, *positional: Any, **options: Any) -> None:
        # Releases differ in the order of what has no name, so each is known by its type.
        texts = [one for one in positional if isinstance(one, str)]
        named = dict(zip(("response_role", "chat_template"), texts, strict=False))
        lists = [one for one in positional if isinstance(one, list | tuple)]
        given = {**named, **options}
        for one in positional:
            if not isinstance(one, str | list | tuple | OpenAIServingModels | ModelConfig | RequestLogger | None):
                raise ConfigError(f"{type(self).__name__}: give the argument {one!r:.80} by its name")
        models = next((one for one in positional if isinstance(one, OpenAIServingModels)), given.pop("models", None))
        # The oldest have the names and the adapters here, and no OpenAIServingModels.
        names = given.pop("served_model_names", None) or next(iter(lists), ())
        modules = given.pop("lora_modules", None) or next(iter(lists[1:]), ())
        if models is None:
            paths = [BaseModelPath(names)] if names else []
            models = OpenAIServingModels(engine_client, base_model_paths=paths, lora_modules=modules)
        self.engine_client, self.models = engine_client, models
        self.model_config = engine_client.config.model
        loggers = [given.pop("request_logger", None), *(one for one in positional if isinstance(one, RequestLogger))]
        self._check(given)
        answers = {name: given[name] for name in ANSWERS if given.get(name) is not None}
        if "tool_parser" in answers:
            answers["tool_call_parser"] = answers.pop("tool_parser")
        self._app = models.application(enable_log_requests=any(one is not None for one in loggers), **answers)

    def _check(self, given: Mapping[str, Any]) -> None:
        for name in given:
            if name not in (*ANSWERS, *IDLE):
                near = nearest_name(name, (*ANSWERS, *IDLE))
                raise UnknownArgumentError(f"{type(self).__name__} has no argument {name!r}{near}")
        wanted, own = given.get("reasoning_parser") or None, self.model_config.reasoning_parser
        if wanted not in (None, own):
            raise ConfigError(
                f"reasoning_parser={wanted!r:.80}: the engine has {own!r:.80}; build it with reasoning_parser={wanted!r:.80}"
            )

    async def _ask(self, path: str, request: Any, raw_request: Any, kind: type[Tree]) -> Any:
        headers = () if raw_request is None else raw_request.scope["headers"]
        return await asked(self._app, "POST", path, body_of(request), headers, kind)


class OpenAIServingChat(OpenAIServing):
    """Answers conversations. Arguments as of `OpenAIServing`."""

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        """As `POST /v1/chat/completions`: a ChatCompletionResponse, a generator of lines, or an ErrorResponse.

        Arguments:
            request: the body, as ChatCompletionRequest or a mapping.
            raw_request: of starlette, for its headers; None: there are none.
        """
        return await self._ask("/v1/chat/completions", request, raw_request, ChatCompletionResponse)


class OpenAIServingCompletion(OpenAIServing):
    """Goes on from prompts. Arguments as of `OpenAIServing`."""

    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        """As `POST /v1/completions`: a CompletionResponse, a generator of lines, or an ErrorResponse.

        Arguments:
            request: the body, as CompletionRequest or a mapping.
            raw_request: of starlette, for its headers; None: there are none.
        """
        return await self._ask("/v1/completions", request, raw_request, CompletionResponse)


class OpenAIServingResponses(OpenAIServing):
    """Answers by the protocol of responses. Arguments as of `OpenAIServing`."""

    async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
        """As `POST /v1/responses`: a mapping with attributes, a generator of lines, or an ErrorResponse.

        Arguments:
            request: the body, as a mapping.
            raw_request: of starlette, for its headers; None: there are none.
        """
        return await self._ask("/v1/responses", request, raw_request, Tree)


class OpenAIServingEmbedding(OpenAIServing):
    """Makes vectors. Arguments as of `OpenAIServing`."""

    async def create_embedding(self, request: Any, raw_request: Any = None) -> Any:
        """As `POST /v1/embeddings`: an EmbeddingResponse, or an ErrorResponse.

        Arguments:
            request: the body, as EmbeddingRequest or a mapping.
            raw_request: of starlette, for its headers; None: there are none.
        """
        return await self._ask("/v1/embeddings", request, raw_request, EmbeddingResponse)


class OpenAIServingTokenization(OpenAIServing):
    """Tells of tokens. Arguments as of `OpenAIServing`."""

    async def create_tokenize(self, request: Any, raw_request: Any = None) -> Any:
        """As `POST /tokenize`.

        Arguments:
            request: the body, as TokenizeRequest or a mapping.
            raw_request: of starlette, for its headers; None: there are none.
        """
        return await self._ask("/tokenize", request, raw_request, Tree)

    async def create_detokenize(self, request: Any, raw_request: Any = None) -> Any:
        """As `POST /detokenize`.

        Arguments:
            request: the body, as DetokenizeRequest or a mapping.
            raw_request: of starlette, for its headers; None: there are none.
        """
        return await self._ask("/detokenize", request, raw_request, Tree)


class _Lines(AsyncGenerator[str, None]):
    """The events of a stream, one at a time. When it is closed or dropped, the request is aborted."""

    def __init__(self, messages: MemoryObjectReceiveStream[Any], has_left: anyio.Event) -> None:
        self._messages, self._has_left = messages, has_left
        self._rest = b""
        self._is_whole = False

    async def asend(self, value: None, /) -> str:
        while not self._is_whole and b"\n\n" not in self._rest:
            try:
                self._rest += (await self._messages.receive()).get("body", b"")
            except (anyio.EndOfStream, anyio.ClosedResourceError):
                self._is_whole = True
            except BaseException:
                self._end()
                raise
        line, end, self._rest = self._rest.partition(b"\n\n")
        if not line + end:
            self._end()
            raise StopAsyncIteration
        return (line + end).decode()

    async def athrow(self, typ: Any, val: Any = None, tb: Any = None, /) -> str:
        self._end()
        return await super().athrow(typ, val, tb)

    def _end(self) -> None:
        self._is_whole, self._rest = True, b""
        self._has_left.set()
        self._messages.close()

    def __del__(self) -> None:
        self._end()


async def asked(
    app: FastAPI, method: str, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]], kind: type[Tree]
) -> Any:
    """One request to an application of this process.

    Arguments:
        app: of `create_app`.
        method, path, body: of the request.
        headers: of the program's own request, as ASGI has them.
        kind: what JSON becomes.

    Returns an ErrorResponse for a status from 400 on; else `kind`, a text, or a generator of the lines of a stream.
    """
    send, messages = anyio.create_memory_object_stream[Any]()
    has_left = anyio.Event()
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    kept = [(name, value) for name, value in headers if name.lower() not in LEFT_OUT]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "client": None,
        "server": None,
        "headers": [*kept, (b"content-type", b"application/json")],
    }

    async def receive() -> Any:
        if parts:
            return parts.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def answer() -> None:
        with send:
            try:
                await app(scope, receive, send.send)
            except anyio.BrokenResourceError:
                logger.debug("a program left before %s was answered", path)
            except Exception:  # the log has it already, and half of an answer ends here
                logger.debug("%s ended early", path)

    tasks: set[object] = set()
    HostLoop.current().spawn(answer, tasks)
    lines = _Lines(messages, has_left)
    try:
        start = await messages.receive()
        told = dict(start["headers"])
        content_type = told.get(b"content-type", b"")
        if start["status"] < 400 and content_type.startswith(b"text/event-stream"):
            return lines
        data = b"".join([message.get("body", b"") async for message in messages])
    except BaseException:
        lines._end()
        raise
    lines._end()
    if start["status"] >= 400:
        return ErrorResponse(as_tree(orjson.loads(data)))
    return kind(as_tree(orjson.loads(data))) if content_type.startswith(b"application/json") else data.decode()
