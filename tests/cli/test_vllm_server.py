"""Programs that start vLLM's server by themselves: its parser of options, the whole server, and the application in parts."""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest
from actorllm.compat.engine.arg_utils import AsyncEngineArgs
from actorllm.compat.entrypoints.openai import api_server
from actorllm.compat.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from actorllm import AsyncLLM
from actorllm.client import request_spans
from actorllm.compat import FlexibleArgumentParser
from actorllm.errors import ConfigError
from tests import programs

INLINE = ["storyteller", "--topology", "inline", "--num_threads", "1", "--max-num-seqs", "4"]


def parsed(*words: str) -> argparse.Namespace:
    args: argparse.Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    return args


def test_options_are_those_of_the_server_and_of_the_engine() -> None:
    args = parsed(
        *INLINE, "--port", "0", "--api-key", "a", "b", "--no-vllm-metrics", "--uds", "/tmp/x", "--max_model_len", "64"
    )
    assert (args.model_tag, args.port, args.api_key, args.vllm_metrics) == ("storyteller", 0, ["a", "b"], False)
    assert (args.unix_socket, args.max_model_len, args.host) == ("/tmp/x", 64, "127.0.0.1")
    assert AsyncEngineArgs.from_cli_args(args).max_num_seqs == 4
    validate_parsed_serve_args(args)
    with pytest.raises(ConfigError, match="--grpc"):
        validate_parsed_serve_args(parsed("--grpc"))


@pytest.mark.anyio
async def test_an_application_with_routes_of_the_programs_own(anyio_backend: str) -> None:
    args = parsed(*INLINE, "--served-model-name", "mine")
    app = api_server.build_app(args)

    @app.get("/own")
    async def own() -> dict[str, Any]:
        return {"is_mine": True}

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=30) as client:
        with pytest.raises(RuntimeError, match="init_app_state"):
            await client.get("/v1/models")
        async with api_server.build_async_engine_client(args) as engine:
            await api_server.init_app_state(engine, app.state, args)
            assert (await client.get("/own")).json() == {"is_mine": True}
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "mine"
            body = {"prompt": "Once", "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).json()["usage"]["completion_tokens"] == 2
            assert (await client.get("/nowhere")).status_code == 404
            # As older and as newer programs call it.
            for arguments, named in (
                ((engine.vllm_config, app.state, args), {}),
                ((app.state, args, ("generate",)), {}),
                ((app.state,), {"args": args, "supported_tasks": ("generate",)}),
            ):
                await api_server.init_app_state(engine, *arguments, **named)
                assert (await client.get("/v1/models")).json()["data"][0]["id"] == "mine"
            with pytest.raises(ConfigError, match="what a parser returned"):
                await api_server.init_app_state(engine, app.state)


@pytest.mark.anyio
async def test_requests_to_an_application_of_parts_are_traced(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, endpoints = InMemorySpanExporter(), []

    def provider(endpoint: str, service: Any) -> TracerProvider:
        endpoints.append(endpoint)
        made = TracerProvider()
        made.add_span_processor(SimpleSpanProcessor(exporter))
        return made

    monkeypatch.setattr(request_spans, "otlp_provider", provider)
    args = parsed(*INLINE, "--otlp-traces-endpoint", "http://localhost:1/v1/traces")
    app = api_server.build_app(args)
    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=30) as client,
        api_server.build_async_engine_client(args) as engine,
    ):
        await api_server.init_app_state(engine, app.state, args)
        answer = await client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2})
        assert answer.status_code == 200
    assert endpoints == ["http://localhost:1/v1/traces"]
    assert [span.name for span in exporter.get_finished_spans()] == ["text_completion storyteller"]


@pytest.mark.anyio
@pytest.mark.parametrize("way", ["options", "arguments"])
async def test_the_loop_turns_while_the_engine_of_a_block_ends(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    args = parsed(*INLINE)
    turned = threading.Event()
    shutdown = AsyncLLM.shutdown

    def wait_for_a_turn(llm: AsyncLLM, timeout: float | None = None) -> None:
        assert turned.wait(10), "the loop stands still"
        shutdown(llm, timeout)

    monkeypatch.setattr(AsyncLLM, "shutdown", wait_for_a_turn)
    given = AsyncEngineArgs("storyteller", topology="inline", num_threads=1)
    block = (
        api_server.build_async_engine_client(args)
        if way == "options"
        else api_server.build_async_engine_client_from_engine_args(given)
    )
    async with anyio.create_task_group() as tasks, block:
        pass_on = anyio.Event()

        async def turn() -> None:
            await pass_on.wait()
            turned.set()

        tasks.start_soon(turn)
        await anyio.lowlevel.checkpoint()
        pass_on.set()


PROGRAM = """
import anyio
from actorllm.compat.entrypoints.openai.api_server import run_server
from actorllm.compat.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from actorllm.compat.utils import FlexibleArgumentParser

args = make_arg_parser(FlexibleArgumentParser(description="mine")).parse_args()
validate_parsed_serve_args(args)
anyio.run(run_server, args)
"""


def test_the_whole_server() -> None:
    command = [sys.executable, "-c", PROGRAM, *INLINE, "--port", "0", "--api-key", "k"]
    with programs.popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        url = None
        for line in process.stderr:
            if found := re.search(r"running on (http://\S+)", line):
                url = found[1]
                break
        assert url is not None
        assert httpx.get(f"{url}/v1/models", timeout=30).status_code == 401
        keys = {"authorization": "Bearer k"}
        assert httpx.get(f"{url}/v1/models", headers=keys, timeout=30).json()["data"][0]["id"] == "storyteller"
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(60) == 0


IN_PARTS = """
import asyncio
from actorllm.compat.engine.arg_utils import AsyncEngineArgs
from actorllm.compat.entrypoints.launcher import serve_http
from actorllm.compat.entrypoints.openai.api_server import (
    build_app, build_async_engine_client_from_engine_args, init_app_state, setup_server
)
from actorllm.compat.entrypoints.openai.cli_args import make_arg_parser
from actorllm.compat.utils import FlexibleArgumentParser

async def main(args):
    address, sock = setup_server(args, reuse_port=False)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    engine_args.model = args.model_tag
    async with build_async_engine_client_from_engine_args(engine_args) as engine:
        app = build_app(args)

        @app.get("/own")
        async def own():
            return {"is_mine": True}

        await init_app_state(engine, app.state, args)
        print(address, flush=True)
        shutdown_task = await serve_http(
            app, sock=sock, host=args.host, port=args.port, log_level="warning", timeout_keep_alive=5, h11_max_header_count=9
        )
    await shutdown_task
    sock.close()
    print("ended", flush=True)

asyncio.run(main(make_arg_parser(FlexibleArgumentParser()).parse_args()))
"""


def test_a_server_of_parts_ends_with_its_program() -> None:
    """The way of programs that add routes and listen by themselves."""
    command = [sys.executable, "-c", IN_PARTS, *INLINE, "--port", "0"]
    with programs.popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        # It is told when the socket is bound; the server listens a moment later.
        with httpx.Client(base_url=address, timeout=30, transport=httpx.HTTPTransport(retries=8)) as client:
            assert client.get("/own").json() == {"is_mine": True}
            body = {"prompt": "Once", "max_tokens": 2}
            assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 2
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "ended\n"
        assert process.wait(60) == 0


def test_a_socket_is_bound_before_there_is_an_engine(tmp_path: Path) -> None:
    address, bound = api_server.setup_server(parsed(*INLINE, "--port", "0"), reuse_port=True)
    with bound:
        assert address == f"http://127.0.0.1:{bound.getsockname()[1]}"
    address, bound = api_server.setup_server(parsed(*INLINE, "--uds", str(tmp_path / "s")))
    with bound:
        assert address == f"unix:{tmp_path}/s"


def test_arguments_beside_the_options_are_refused() -> None:
    async def main() -> None:
        await api_server.run_server(parsed(), log_level="debug")

    with pytest.raises(ConfigError, match="log_level"):
        anyio.run(main)
