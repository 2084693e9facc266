"""The middle of a stream is written by callbacks, with the same bytes in the same order as through ASGI."""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import orjson
import pytest
from fastapi import FastAPI
from starlette.middleware.gzip import GZipMiddleware
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from actorllm import AsyncLLM
from actorllm.server import create_app
from actorllm.server.chunk_writer import ChunkWriter, keeps_bodies
from actorllm.server.launcher import Server, config_of
from actorllm.server.listener import Listener

BODY = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "stream": True, "seed": 4}


@asynccontextmanager
async def served(app: FastAPI, send_buffer: int | None = None) -> AsyncIterator[tuple[str, int]]:
    """The application behind uvicorn, in this loop. send_buffer: bytes that the server may have unsent to a client."""
    listener = Listener(port=0, log_level="critical")
    config = config_of(listener, app)
    if send_buffer is not None:
        base = config.http_protocol_class

        class SmallBuffer(base):  # type: ignore[misc, valid-type]
            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                transport.set_write_buffer_limits(high=send_buffer)

        config.http_protocol_class = SmallBuffer
    bound = listener.bind()
    if send_buffer is not None:
        bound.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    started = anyio.Event()
    server = Server(config, on_started=started.set)
    async with anyio.create_task_group() as tasks:
        bound.listen()
        tasks.start_soon(server.serve, bound.sockets)
        await started.wait()
        try:
            yield bound.sockets[0].getsockname()
        finally:
            server.end()
    bound.close()


@pytest.fixture
def callback_writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What callbacks have written."""
    written: list[bytes] = []
    write = ChunkWriter.write

    def note(writer: ChunkWriter, body: bytes) -> None:
        written.append(body)
        write(writer, body)

    monkeypatch.setattr(ChunkWriter, "write", note)
    return written


async def read(address: tuple[str, int], pause_s: float = 0.0, receive_buffer: int | None = None) -> bytes:
    """The response of one request on a connection of its own, head and all."""
    one = socket.socket()
    if receive_buffer is not None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    one.connect(address)
    one.setblocking(False)
    body = orjson.dumps(BODY)
    one.send(b"POST /v1/completions HTTP/1.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    data = b""
    with one:
        while True:
            await anyio.wait_readable(one)
            piece = one.recv(1 << 10)
            if not piece:
                return data
            data += piece
            if pause_s:
                await anyio.sleep(pause_s)


def text_of(response: bytes) -> str:
    """The text of a stream in chunks, each of which has the length that it says."""
    head, _, rest = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body, end, rest = body + rest[:length], rest[length : length + 2], rest[length + 2 :]
        assert end == b"\r\n"
        if not length:
            assert not rest
            break
    events = re.findall(rb"data: (.*)\n\n", body)
    assert events[-1] == b"[DONE]"
    choices = [orjson.loads(event)["choices"][0] for event in events[:-1]]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices)


async def expected(llm: AsyncLLM) -> str:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(llm)), base_url="http://test") as client:
        answer = await client.post("/v1/completions", json=BODY | {"stream": False})
    text: str = answer.json()["choices"][0]["text"]
    return text


async def test_callbacks_write_the_middle_of_a_stream(llm: AsyncLLM, callback_writes: list[bytes]) -> None:
    async with served(create_app(llm)) as address:
        assert text_of(await read(address)) == await expected(llm)
    assert len(callback_writes) > 50


async def test_a_slow_client_gets_the_chunks_of_callbacks_and_of_the_task_in_order(
    llm: AsyncLLM, callback_writes: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_ready = ChunkWriter.is_ready.fget
    assert is_ready is not None
    answers: list[bool] = []

    def note(writer: ChunkWriter) -> bool:
        answers.append(is_ready(writer))
        return answers[-1]

    monkeypatch.setattr(ChunkWriter, "is_ready", property(note))
    async with served(create_app(llm), send_buffer=2048) as address:
        text = text_of(await read(address, pause_s=0.1, receive_buffer=2048))
    assert False in answers, "the client was never too slow"
    assert callback_writes
    assert text == await expected(llm)


async def test_no_callback_writes_while_the_task_sends(
    llm: AsyncLLM, callback_writes: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third chunk goes through the task, and every fourth `send` takes long enough for others to come."""
    asked, sent = itertools.count(), itertools.count()
    monkeypatch.setattr(ChunkWriter, "is_ready", property(lambda writer: next(asked) % 3 != 0))
    send = RequestResponseCycle.send

    async def send_late(cycle: RequestResponseCycle, message: Any) -> None:
        if next(sent) % 4 == 0:
            await anyio.sleep(0.01)
        await send(cycle, message)

    monkeypatch.setattr(RequestResponseCycle, "send", send_late)
    async with served(create_app(llm)) as address:
        assert text_of(await read(address)) == await expected(llm)
    assert callback_writes


async def test_middleware_of_an_application_sees_every_chunk(llm: AsyncLLM, callback_writes: list[bytes]) -> None:
    app = create_app(llm, allowed_origins=["http://here"])
    assert keeps_bodies(app)
    app.add_middleware(GZipMiddleware)
    assert not keeps_bodies(app)
    async with served(app) as (host, port), httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
        answer = await client.post("/v1/completions", json=BODY)
        texts = [orjson.loads(event)["choices"][0]["text"] for event in re.findall(r"data: ({.*})\n\n", answer.text)]
    assert not callback_writes
    assert "".join(texts) == await expected(llm)


async def test_what_a_callback_raises_ends_its_own_stream_alone(
    llm: AsyncLLM, callback_writes: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    note = ChunkWriter.write
    broken: list[ChunkWriter] = []

    def write(writer: ChunkWriter, body: bytes) -> None:
        if not broken or writer in broken:
            broken.append(writer)
            raise RuntimeError("planted")
        note(writer, body)

    monkeypatch.setattr(ChunkWriter, "write", write)
    responses: list[bytes] = []
    async with served(create_app(llm)) as address, anyio.create_task_group() as tasks:

        async def one() -> None:
            responses.append(await read(address))

        for _ in range(3):
            tasks.start_soon(one)
    assert len(broken) == 1
    responses.sort(key=len)
    assert b'"code":500' in responses[0]
    assert [text_of(response) for response in responses[1:]] == [await expected(llm)] * 2
