"""vLLM's functions for programs that start its server by themselves: a parser of its options, and the server, whole or in parts.
`actorllm.compat` has them under vLLM's modules.

    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    anyio.run(run_server, args)

The options are those of `actorllm serve` and the arguments of the engine. A program that wants routes of its own builds the
application (`build_app`), adds them, and gives it an engine (`build_async_engine_client`, `init_app_state`). `setup_server` and
`serve_http` listen for it.
"""

from __future__ import annotations

import argparse
import inspect
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from actorllm.api.engine_args import DEFAULTS, AsyncEngineArgs
from actorllm.errors import ConfigError
from actorllm.types.serve_options import VLLMServeOptions

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Receive, Scope, Send

    from actorllm.api.async_llm import AsyncLLM
    from actorllm.cli.serve import ServePlan

LEFT_OUT = ("model_tag", "engine_options", "their_options", "other_options", "config")
"""Arguments of `actorllm serve` that are no options, or options of the command line only."""
SAME = {"unix_socket": "uds", "api_processes": "api_server_count"}
"""vLLM's names of options."""


def _server_options() -> dict[str, tuple[Any, Any]]:
    """By name: the type and the default of each option that is none of the engine."""
    from actorllm.cli.serve import planned

    hints = get_type_hints(planned)
    own = {
        name: (hints[name], parameter.default)
        for name, parameter in inspect.signature(planned).parameters.items()
        if name not in LEFT_OUT
    }
    theirs = get_type_hints(VLLMServeOptions)
    fields = VLLMServeOptions.__dataclass_fields__
    return {**own, **{name: (theirs[name], field.default) for name, field in fields.items()}}


def make_arg_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of the server and of its engine to a parser.

    Arguments:
        parser: of argparse; the same is returned.

    Raises:
        ConfigError: serving needs more packages.

    Example:
        from actorllm import FlexibleArgumentParser
        from actorllm.compat.entrypoints.openai.cli_args import make_arg_parser

        args = make_arg_parser(FlexibleArgumentParser()).parse_args(["storyteller", "--port", "0"])
        assert args.port == 0
    """
    parser.add_argument("model_tag", nargs="?", default=None, help="the model, as --model")
    AsyncEngineArgs.add_cli_args(parser)
    # Some names are arguments of vLLM's engine, too: the server's meaning counts.
    group = parser.add_argument_group("server", conflict_handler="resolve")
    for name, (hint, default) in _server_options().items():
        spelled = [name, *([SAME[name]] if name in SAME else [])]
        options = [text for one in spelled for text in dict.fromkeys((f"--{one.replace('_', '-')}", f"--{one}"))]
        group.add_argument(*options, dest=name, default=default, **_option_of(name, hint))
    return parser


def _option_of(name: str, hint: Any) -> dict[str, Any]:
    kinds = [one for one in (get_args(hint) or (hint,)) if one is not type(None)]
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if any(get_origin(one) is list for one in kinds):
        return {"nargs": "+", "metavar": name.upper()}
    return {"type": kinds[0], "metavar": name.upper()}


def validate_parsed_serve_args(args: argparse.Namespace) -> None:
    """Check options without starting anything.

    Arguments:
        args: what a parser of `make_arg_parser` returned.

    Raises:
        ConfigError: names the option and the fix.
    """
    _their_options(args).warnings()


class _EngineOptions:
    """The arguments of the engine, as `actorllm serve` reads them."""

    def __init__(self, args: argparse.Namespace) -> None:
        given = AsyncEngineArgs.from_cli_args(args)
        self.model: Any = getattr(args, "model_tag", None) or given.model
        self._arguments = {
            name: value
            for name in DEFAULTS.keys() - _server_options().keys() - {"model"}
            if (value := getattr(given, name)) != DEFAULTS[name]
        }
        self.reasoning_parser: str | None = self._arguments.get("reasoning_parser")
        self.io_processor_plugin: str | None = self._arguments.get("io_processor_plugin")

    def arguments(self) -> dict[str, Any]:
        return dict(self._arguments)


def _their_options(args: argparse.Namespace) -> Any:
    names = [name for name in VLLMServeOptions.__dataclass_fields__ if hasattr(args, name)]
    return VLLMServeOptions(**{name: getattr(args, name) for name in names})


def _plan(args: argparse.Namespace) -> ServePlan:
    from actorllm.cli.serve import planned

    names = [name for name in inspect.signature(planned).parameters if name not in LEFT_OUT and hasattr(args, name)]
    options: dict[str, Any] = {name: getattr(args, name) for name in names}
    engine: Any = _EngineOptions(args)
    return planned(engine_options=engine, their_options=_their_options(args), **options)


async def run_server(args: argparse.Namespace, **uvicorn_kwargs: Any) -> None:
    """Start the engine and serve it until a signal comes and everything is answered.

    Arguments:
        args: what a parser of `make_arg_parser` returned.
        uvicorn_kwargs: of vLLM; those that are given are refused, since options say all of it.

    Raises:
        ConfigError: what is wrong with the options, and what kept the server from starting.
    """
    if uvicorn_kwargs:
        raise ConfigError(f"run_server: {', '.join(uvicorn_kwargs)} cannot be given here; the options of args say it")
    await _plan(args).run()


@asynccontextmanager
async def build_async_engine_client(args: argparse.Namespace, **_: Any) -> AsyncIterator[AsyncLLM]:
    """An engine of these options that has started; it ends behind the block.

    Arguments:
        args: what a parser of `make_arg_parser`, or one with `AsyncEngineArgs.add_cli_args`, returned.
    """
    from actorllm.api.async_llm import AsyncLLM

    options = _EngineOptions(args)
    async with AsyncLLM(options.model, **options.arguments()) as llm:
        yield llm


@asynccontextmanager
async def build_async_engine_client_from_engine_args(engine_args: AsyncEngineArgs, **_: Any) -> AsyncIterator[AsyncLLM]:
    """As `build_async_engine_client`, from the arguments of an engine.

    Arguments:
        engine_args: the arguments. Further arguments of vLLM have no effect.
    """
    from actorllm.api.async_llm import AsyncLLM

    async with AsyncLLM.from_engine_args(engine_args) as llm:
        yield llm


def create_server_socket(addr: tuple[str, int], *, reuse_port: bool = False) -> socket.socket:
    """A TCP socket that is bound, and does not listen yet.

    Arguments:
        addr: host and port; an empty host is every interface, port 0 one that is free.
        reuse_port: other processes may bind it, too.
    """
    made = socket.socket(socket.AF_INET6 if ":" in addr[0] else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(addr)
    except OSError:
        made.close()
        raise
    return made


def setup_server(args: argparse.Namespace, *, reuse_port: bool = False) -> tuple[str, socket.socket]:
    """Check options, and bind the socket that they name. Returns its address as text, and the socket.

    Arguments:
        args: what a parser of `make_arg_parser` returned.
        reuse_port: other processes may bind it, too.

    Raises:
        ConfigError: names the option and the fix.
    """
    validate_parsed_serve_args(args)
    if args.unix_socket:
        made = socket.socket(socket.AF_UNIX)
        made.bind(args.unix_socket)
        return f"unix:{args.unix_socket}", made
    made = create_server_socket((args.host or "", args.port), reuse_port=reuse_port)
    host, port = made.getsockname()[:2]
    scheme = "https" if args.ssl_keyfile and args.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", made


NOT_OF_UVICORN = ("enable_ssl_refresh", "peer_loads", "h11_max_incomplete_event_size", "h11_max_header_count")


async def serve_http(
    app: FastAPI, sock: socket.socket | None = None, **uvicorn_kwargs: Any
) -> Coroutine[Any, Any, None]:
    """Serve an application of `build_app` by uvicorn until SIGINT or SIGTERM, or until this is cancelled.

    Arguments:
        app: the application.
        sock: a socket that is bound; None: where uvicorn_kwargs say.
        uvicorn_kwargs: of `uvicorn.Config`.

    Returns what is to be awaited for the end, as vLLM's does.
    """
    import anyio
    import uvicorn

    from actorllm.server.launcher import Server, end_on_signal

    config = uvicorn.Config(app, **{k: v for k, v in uvicorn_kwargs.items() if k not in NOT_OF_UVICORN})
    server = Server(config)

    async def end() -> None:
        server.end()

    async with anyio.create_task_group() as group:
        await group.start(end_on_signal, end, partial(server.end, True))
        await server.serve(None if sock is None else [sock])
        group.cancel_scope.cancel()
    return _ended()


async def _ended() -> None:
    """Nothing is left to be done."""


class _Server:
    """The application of an engine, which comes later (`init_app_state`)."""

    def __init__(self) -> None:
        self.app: FastAPI | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is None:
            raise RuntimeError("the application has no engine yet; await init_app_state(engine, app.state, args) first")
        await self.app(scope, receive, send)


def build_app(args: argparse.Namespace, *_: Any, **__: Any) -> FastAPI:
    """The application without its engine: routes and middleware may be added to it, and come first.

    Arguments:
        args: what a parser of `make_arg_parser` returned. Further arguments of vLLM have no effect.

    Raises:
        ConfigError: serving needs more packages.
    """
    try:
        from fastapi import FastAPI
    except ModuleNotFoundError as error:
        raise ConfigError(f"serving needs more packages ({error.name}): pip install 'actorllm[serve]'") from error
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.state.args = args
    app.state.actorllm = server = _Server()
    app.router.default = server
    return app


async def init_app_state(engine_client: AsyncLLM, *arguments: Any, **named: Any) -> None:
    """Give an application of `build_app` its engine. The first chat may come then.

    Arguments:
        engine_client: the engine.
        arguments: the `state` of the application and the options. Older programs give the configuration before these, newer ones
            the tasks of the model behind them.

    Raises:
        ConfigError: what is wrong with the options.
    """
    from actorllm.server.warmup import warm_up

    given = [*arguments, *(named[name] for name in ("state", "args") if name in named)]
    place = next((at for at, one in enumerate(given) if isinstance(one, argparse.Namespace)), 0)
    if not place:
        raise ConfigError("init_app_state: give the state of the application, and behind it what a parser returned")
    state, args = given[place - 1 : place + 1]
    plan = _plan(args)
    plan.llm.shutdown()  # it never started: only its options are asked for
    from actorllm.server.app import create_app

    state.actorllm.app = create_app(engine_client, **plan.app, tracer_provider=plan.tracer_provider)
    state.engine_client = engine_client
    await warm_up(state.actorllm.app)
