"""`actorllm serve`: an engine and its server in one process or several, until a signal ends them.

Owns the options, most of which are those of `vllm serve` by name. What they mean is in `actorllm.server`, which is imported
only here, so that the other commands work without the extra.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from actorllm.cli.options import Number, SeededEngineFlags, see_own_folder, with_meanings
from actorllm.cli.other_options import OtherOptions, other_engine_options
from actorllm.errors import ConfigError, innermost
from actorllm.types.serve_options import VLLMServeOptions

if TYPE_CHECKING:
    from fastapi import FastAPI
    from opentelemetry.trace import TracerProvider

    from actorllm.api.async_llm import AsyncLLM
    from actorllm.server.listener import Listener

logger = logging.getLogger(__name__)

KEY_VARIABLES = ("ACTORLLM_API_KEY", "VLLM_API_KEY")
"""The first that is set counts. A deployment that is moved here from vLLM must not stand open."""


def keys_of_environment() -> list[str] | None:
    """The key that is set, if one is."""
    return next(([os.environ[name]] for name in KEY_VARIABLES if os.environ.get(name)), None)


@Parameter(name="*")
@with_meanings
@dataclass(frozen=True, kw_only=True)
class ServedEngineOptions(SeededEngineFlags):
    """What a server's engine may be told beside the rest."""

    name: str | None = None
    runner: str | None = None
    convert: str | None = None
    pooler_config: str | None = None
    io_processor_plugin: str | None = None
    hf_overrides: str | None = None
    override_generation_config: str | None = None
    skip_tokenizer_init: bool | None = None
    stream_interval: int | None = None
    reasoning_parser: str | None = None
    watermark: float | None = None
    standby_worker: bool | None = None
    max_waiting_requests: Number = None
    max_waiting_tokens: Number = None
    enable_chunked_prefill: bool | None = None
    """Always so here."""
    disable_log_requests: bool | None = None
    disable_log_stats: bool | None = None
    swap_space: float | None = None

    def arguments(self) -> dict[str, Any]:
        given = super().arguments()
        if "override_generation_config" in given:
            given["override_generation_config"] = json_option(
                "override-generation-config", given["override_generation_config"]
            )
        return given


@Parameter(name="*", show=False)
@dataclass(frozen=True, kw_only=True)
class TheirServeOptions(VLLMServeOptions):
    """Of vLLM only."""


if TYPE_CHECKING:
    OtherEngineOptions = OtherOptions
else:
    OtherEngineOptions = other_engine_options(
        {
            *ServedEngineOptions.__dataclass_fields__,
            *VLLMServeOptions.__dataclass_fields__,
            *("served_model_name", "enable_log_requests", "reasoning_parser_plugin", "otlp_traces_endpoint"),
        }
    )


NO_OTHER_OPTIONS = OtherEngineOptions()


def json_option(name: str, text: str) -> Any:
    """The value of an option that is JSON. Raises ConfigError."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--{name} {text:.80} must be JSON: {error}") from error


@dataclass(frozen=True, slots=True)
class ServePlan:
    """A server that may be started. app: the arguments of `create_app` beside the engine, of which `made` is made."""

    llm: AsyncLLM
    app: dict[str, Any]
    made: FastAPI
    listener: Listener
    api_processes: int
    otlp_traces_endpoint: str | None
    tracer_provider: TracerProvider | None

    async def run(self) -> None:
        """Serve until a signal ends it."""
        from actorllm.server.launcher import serve as run_server
        from actorllm.server.processes import ApiProcesses

        if self.api_processes > 1:
            await ApiProcesses(self.llm, self.api_processes, self.app, self.listener, self.otlp_traces_endpoint).run()
        else:
            await run_server(self.made, self.listener)


def planned(
    model_tag: str | None = None,
    /,
    *,
    engine_options: ServedEngineOptions = ServedEngineOptions(),
    host: str = "127.0.0.1",
    port: int = 8000,
    unix_socket: Annotated[str | None, Parameter(name=["--unix-socket", "--uds"])] = None,
    unix_socket_mode: str | None = None,
    api_key: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    served_model_name: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    api_processes: Annotated[int, Parameter(name=["--api-processes", "--api-server-count"])] = 1,
    max_concurrent_requests: int | None = None,
    max_connections: int | None = None,
    max_body_bytes: int = 8 << 20,
    body_timeout: float = 30.0,
    drain_timeout: float = 30.0,
    chat_template: str | None = None,
    chat_template_content_format: str = "auto",
    default_chat_template_kwargs: str | None = None,
    trust_request_chat_template: bool = False,
    response_role: str = "assistant",
    return_tokens_as_token_ids: bool = False,
    enable_force_include_usage: bool = False,
    exclude_tools_when_tool_choice_none: bool = False,
    resume_streams_for: float = 0.0,
    error_format: str = "vllm",
    enable_log_requests: bool = False,
    otlp_traces_endpoint: str | None = None,
    vllm_metrics: bool = True,
    tool_call_parser: str | None = None,
    tool_parser_plugin: str | None = None,
    reasoning_parser_plugin: str | None = None,
    enable_auto_tool_choice: bool | None = None,
    allowed_origins: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    allowed_methods: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    allowed_headers: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    allow_credentials: bool = False,
    ssl_keyfile: str | None = None,
    ssl_certfile: str | None = None,
    ssl_ca_certs: str | None = None,
    ssl_cert_reqs: int = 0,
    uvicorn_log_level: str = "info",
    disable_uvicorn_access_log: bool = False,
    root_path: str | None = None,
    middleware: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    disable_fastapi_docs: bool = False,
    lora_modules: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    enable_dev_endpoints: bool = False,
    config: str | None = None,
    their_options: TheirServeOptions = TheirServeOptions(),
    other_options: OtherEngineOptions = NO_OTHER_OPTIONS,
) -> ServePlan:
    """Serve MODEL over OpenAI's API (needs the extra actorllm[serve]).

    Parameters
    ----------
    model_tag
        The model, as --model.
    host
        0.0.0.0 for every interface.
    port
        0 for one that is free.
    unix_socket
        Listen there instead.
    unix_socket_mode
        The users who may connect to it, as in chmod: 600 for the user of the server alone, which is the default; 660 for its group.
    api_key
        Clients must send one of these as a bearer token; without the option $ACTORLLM_API_KEY, or $VLLM_API_KEY.
    served_model_name
        What clients call the model; default: what it is loaded by.
    api_processes
        Processes that take requests and write answers, in front of the one engine. One that dies loses its own
        connections and is started again.
    max_concurrent_requests
        More than so many requests under way are refused with 429.
    max_connections
        Connections that each API process keeps open. One more replaces the longest idle one, or gets a 503 if all are
        busy. Default: 8192, or what the limit on open files allows.
    max_body_bytes
        Of a request.
    body_timeout
        Seconds that the body of a request may take to arrive.
    drain_timeout
        Seconds that requests have to end after SIGTERM or Ctrl-C; a second one ends them at once.
    chat_template
        A file with a Jinja template, or its text, in place of the model's.
    chat_template_content_format
        Whether the template is given text ("string") or lists of parts ("openai"); "auto" reads it.
    default_chat_template_kwargs
        Variables of the template, as JSON; those of a request count first.
    response_role
        Of messages in answers of chats.
    return_tokens_as_token_ids
        Log-probabilities call a token 'token_id:N', unless the request says otherwise.
    enable_force_include_usage
        Every stream ends with its usage.
    exclude_tools_when_tool_choice_none
        With tool_choice "none" the template is not shown the tools.
    resume_streams_for
        Seconds for which streams go on without a reader, and may be read on; a request says otherwise with resume_for.
    error_format
        The code of an error: its status as a number ("vllm"), or OpenAI's name for it ("openai").
    trust_request_chat_template
        Requests may bring a chat template of their own, which is a program.
    enable_log_requests
        A line in the log about every request that has ended.
    otlp_traces_endpoint
        Send an OpenTelemetry span about every request there, over HTTP (needs the extra actorllm[otel]).
    vllm_metrics
        /metrics also has what vLLM counts, under its names.
    tool_call_parser
        How the model writes tool calls: hermes, llama3_json, mistral, qwen3_coder, another name of docs/tools.md, or a class
        of yours as 'module:Class'. Default: as its chat template shows.
    tool_parser_plugin
        A Python file; --tool-call-parser may then be the name of a class of it.
    reasoning_parser_plugin
        A Python file; --reasoning-parser may then be the name of a class of it.
    enable_auto_tool_choice
        Always so here: a model that is given tools may call them.
    allowed_origins
        Of web pages that may call this server; '*' for all.
    ssl_certfile
        With --ssl-keyfile: serve HTTPS.
    root_path
        The path under which a proxy serves all of this.
    middleware
        A class of ASGI, or an asynchronous function of request and next, as 'module.name'; may be given several times.
    disable_fastapi_docs
        Without /docs and /openapi.json.
    lora_modules
        Adapters that requests may name as their model, each as name=path or as JSON with name, path and base_model_name;
        needs --enable-lora.
    enable_dev_endpoints
        With /sleep, /wake_up, /pause, /collective_rpc, /update_weights_from_disk and others that stop or change the engine.
    config
        A YAML file with options by name; those of the command line count first.
    """
    try:
        from actorllm.server import adapter_routes, developer_routes
        from actorllm.server.answer_options import template_text
        from actorllm.server.app import create_app
        from actorllm.server.listener import SOCKET_MODE, Listener
    except ModuleNotFoundError as error:
        raise ConfigError(f"serving needs more packages ({error.name}): pip install 'actorllm[serve]'") from error
    from actorllm.api.async_llm import AsyncLLM

    assert config is None, "the command line was read without it"
    for warning in their_options.warnings():
        logger.warning("%s", warning)
    classes = (tool_call_parser, engine_options.reasoning_parser, engine_options.io_processor_plugin)
    if middleware or any(":" in path for path in classes if path is not None):
        see_own_folder()
    keys = api_key or keys_of_environment()
    arguments: dict[str, Any] = engine_options.arguments() | other_options.arguments()
    from actorllm.server.tool_formats import FORMATS
    from actorllm.server.tool_parsers import PARSERS
    from actorllm.types.plugin_file import parser_of_file

    if tool_parser_plugin:
        known = {*PARSERS, *FORMATS}
        tool_call_parser = parser_of_file("--tool-parser-plugin", tool_parser_plugin, tool_call_parser, known)
    if reasoning_parser_plugin:
        arguments["reasoning_parser_plugin"] = reasoning_parser_plugin
    if api_processes < 1:
        raise ConfigError(f"--api-processes {api_processes} must be at least 1")
    adapter_routes.check_processes(api_processes)
    developer_routes.check_processes(api_processes, enable_dev_endpoints)
    if unix_socket_mode is not None and unix_socket is None:
        raise ConfigError(f"--unix-socket-mode {unix_socket_mode} is for --unix-socket PATH, which is missing")
    if api_processes > 1 and arguments.get("name") is None:
        arguments["name"] = f"serve-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    # What is wrong with the arguments of the listener, the engine or the application is said before anything is started.
    listener = Listener(
        host=host,
        port=port,
        unix_socket=unix_socket,
        unix_socket_mode=SOCKET_MODE if unix_socket_mode is None else _mode(unix_socket_mode),
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
        ssl_ca_certs=ssl_ca_certs,
        ssl_cert_reqs=ssl_cert_reqs,
        log_level=uvicorn_log_level,
        access_log=not disable_uvicorn_access_log,
        drain_timeout_s=drain_timeout,
        max_connections=max_connections,
    )
    listener.tls()
    llm = AsyncLLM(model_tag or engine_options.model, **arguments)
    app: dict[str, Any] = {
        "served_model_name": served_model_name,
        "api_key": keys,
        "allowed_origins": allowed_origins or (),
        "allowed_methods": allowed_methods or ("*",),
        "allowed_headers": allowed_headers or ("*",),
        "allow_credentials": allow_credentials,
        "max_body_bytes": max_body_bytes,
        "body_timeout_s": body_timeout,
        "max_concurrent_requests": max_concurrent_requests,
        "trust_request_chat_template": trust_request_chat_template,
        "enable_log_requests": enable_log_requests,
        "tool_call_parser": tool_call_parser,
        "vllm_metrics": vllm_metrics,
        "chat_template": template_text(chat_template),
        "chat_template_content_format": chat_template_content_format,
        "default_chat_template_kwargs": {}
        if default_chat_template_kwargs is None
        else json_option("default-chat-template-kwargs", default_chat_template_kwargs),
        "response_role": response_role,
        "return_tokens_as_token_ids": return_tokens_as_token_ids,
        "enable_force_include_usage": enable_force_include_usage,
        "exclude_tools_when_tool_choice_none": exclude_tools_when_tool_choice_none,
        "resume_streams_for": resume_streams_for,
        "error_format": error_format,
        "root_path": root_path or "",
        "middleware": middleware or (),
        "disable_fastapi_docs": disable_fastapi_docs,
        "lora_modules": lora_modules,
        "enable_dev_endpoints": enable_dev_endpoints,
    }
    # Spans need a package of their own.
    provider: Any = None
    if otlp_traces_endpoint is not None:
        try:
            from actorllm.client.request_spans import otlp_provider
        except ModuleNotFoundError as error:
            raise ConfigError(f"tracing needs more packages ({error.name}): pip install 'actorllm[otel]'") from error
        provider = otlp_provider(otlp_traces_endpoint, {})
    made = create_app(llm, **app, tracer_provider=provider)  # says what is wrong with them before anything is started
    return ServePlan(llm, app, made, listener, api_processes, otlp_traces_endpoint, provider)


@functools.wraps(planned)
def serve(*arguments: Any, **options: Any) -> None:
    plan = planned(*arguments, **options)
    import anyio

    try:
        anyio.run(plan.run, backend_options={"use_uvloop": True})
    except BaseExceptionGroup as group:  # of the task that waits for signals
        raise innermost(group) from group


def _mode(text: str) -> int:
    """As chmod has it: 600, 0660 or 0o660."""
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777 or not text[:1].isdigit():
        raise ConfigError(f"--unix-socket-mode {text} must be an octal number between 000 and 777, like 660")
    return mode
