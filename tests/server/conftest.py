"""One engine per module, and clients that reach its application without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import anyio
import httpx
import orjson
import pytest
from fastapi import FastAPI

from actorllm import AsyncLLM
from actorllm.server import create_app
from actorllm.server.bodies.owned_process import OwnedProcess


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("storyteller", dtype="float32", topology="inline", num_threads=1, max_num_seqs=64, seed=1)
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


def client_of(app: Any, **arguments: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=30, **arguments)


@pytest.fixture(scope="module")
def app(llm: AsyncLLM) -> FastAPI:
    return create_app(llm)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as made:
        yield made


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Of a stream that ended as it should."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") for block in blocks[:-2])
    return [orjson.loads(block[6:]) for block in blocks[:-2]]


async def until(is_true: Callable[[], Awaitable[bool]], timeout_s: float = 20) -> None:
    with anyio.fail_after(timeout_s):
        while not await is_true():
            await anyio.sleep(0.005)


async def is_idle(llm: AsyncLLM) -> bool:
    """No request anywhere, and every block is free."""
    stats = await llm.stats()
    scheduler = stats["scheduler"]["scheduler"]
    return (
        stats["frontend"]["num_requests"] == 0
        and scheduler["num_running"] == scheduler["num_waiting"] == 0
        and scheduler["kv"]["num_free"] == scheduler["kv"]["num_blocks"]
    )


@pytest.fixture(autouse=True)
def parse_processes_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Applications may outlive the test that made their parse process start."""
    started: list[OwnedProcess] = []
    begin = OwnedProcess.__init__

    def note(process: OwnedProcess, module: str) -> None:
        begin(process, module)
        started.append(process)

    monkeypatch.setattr(OwnedProcess, "__init__", note)
    yield
    for process in started:
        process.wait()
