"""Connections that are opened and left silent, more than the server keeps: those of others are served all the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from actorllm import AsyncLLM
from actorllm.server import create_app
from actorllm.server.launcher import Server, config_of
from actorllm.server.listener import Listener
from tests.hostile.bystander import Bystander, bystander
from tests.hostile.small_requests import llm  # noqa: F401

LIMIT = 8
GET = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def server_of(llm: AsyncLLM) -> AsyncIterator[int]:  # noqa: F811
    """The port of a server that keeps LIMIT connections."""
    listener = Listener(port=0, max_connections=LIMIT, access_log=False, log_level="critical")
    bound = listener.bind()
    server = Server(config_of(listener, create_app(llm)))
    bound.listen()
    task = asyncio.ensure_future(server.serve(bound.sockets))
    try:
        yield bound.sockets[0].getsockname()[1]
    finally:
        server.end(is_forced=True)
        await task
        bound.close()


class Connections:
    """Of one client. They are closed with the block."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.all: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def open(self, data: bytes = b"") -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.all.append((reader, writer))
        writer.write(data)
        return reader

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(self, *_: Any) -> None:
        for _reader, writer in self.all:
            writer.transport.abort()


def endless() -> bytes:
    body = json.dumps({"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def status(reader: asyncio.StreamReader) -> int:
    with anyio.fail_after(60):
        return int((await reader.readline()).split()[1])


async def test_silent_connections_give_way(llm: AsyncLLM) -> None:  # noqa: F811
    """A stream over HTTP that is under way, and a stream of the application, go on; each new request is answered."""
    async with (
        server_of(llm) as port,
        bystander(llm) as steady,
        Connections(port) as attack,
        Connections(port) as others,
    ):
        stream = await others.open(endless())
        assert await status(stream) == 200
        answered = await flood(attack, others, steady)
        assert answered == 5
        with anyio.fail_after(60):
            rest = await stream.read(1 << 20)
        assert b"data: " in rest


async def flood(attack: Connections, others: Connections, steady: Bystander) -> int:
    """Open silent connections in five waves, three times as many as are kept. Requests between them that were answered."""
    answered = 0
    for _ in range(5):
        silent = [await attack.open(b"GET / HTTP/1.1\r\n") for _ in range(3 * LIMIT)]
        answered += await status(await others.open(GET)) == 200
        with anyio.fail_after(60), contextlib.suppress(ConnectionResetError):  # what the server has not read resets it
            assert await silent[0].read() == b""  # the first of them has been closed
        await steady.wait(1)
    return answered


async def test_if_all_are_busy_the_next_one_is_told(llm: AsyncLLM) -> None:  # noqa: F811
    async with server_of(llm) as port, bystander(llm) as steady, Connections(port) as attack:
        for _ in range(LIMIT):
            assert await status(await attack.open(endless())) == 200
        reader = await attack.open(GET)
        with anyio.fail_after(60):
            head, body = (await reader.read()).split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head
        assert json.loads(body)["error"]["code"] == 503
        await steady.wait(1)


async def test_an_answered_connection_is_idle_again(llm: AsyncLLM) -> None:  # noqa: F811
    """As many clients as there are connections keep theirs open; another one takes the place of the longest idle one."""
    async with server_of(llm) as port, bystander(llm), Connections(port) as kept, Connections(port) as others:
        readers = []
        for _ in range(LIMIT):
            readers.append(await kept.open(GET))
            assert await status(readers[-1]) == 200
        assert await status(await others.open(GET)) == 200
        with anyio.fail_after(60), contextlib.suppress(ConnectionResetError):
            await readers[0].read()  # ends
        kept.all[1][1].write(GET)
        with anyio.fail_after(60):
            await readers[1].readuntil(b"HTTP/1.1 200")
