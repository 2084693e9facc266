"""Small HTTP requests beside an attack on a server: how many get their answers while a large body is looked at.

As tokens of the bystander do elsewhere, their number tells time: a loop that is held answers none of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import httpx
import pytest

from actorllm import AsyncLLM
from actorllm.server import create_app
from tests.hostile.bystander import Bystander, bystander
from tests.server.conftest import client_of, parse_processes_end

__all__ = ("Beside", "beside", "llm", "parse_processes_end", "refused")

TEXT = "/v1/completions"
LEAST = 5
"""Small requests that are answered while one large body is. A body that holds the loop lets through one at most."""
SMALL_PER_TOKEN = 200
"""Small requests that are answered while the stream gets a token, at most. Beside ordinary requests it is about one; beside
prompts that fill whole steps, each of which takes long, it is tens on a slow machine."""
BETWEEN_S = 0.002
"""Seconds between two small requests. A loop that never sleeps would take the interpreter from the engine's own threads."""


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("storyteller", topology="inline", num_threads=1)
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


class Beside:
    """An application with a bystander on its engine, and a client that asks for its version again and again."""

    def __init__(self, app: Any, client: httpx.AsyncClient, steady: Bystander) -> None:
        self.app = app
        self.client = client
        self.steady = steady
        self.num_small = 0
        """Small requests that were answered."""

    async def ask_on(self) -> None:
        while True:
            assert (await self.client.get("/version")).status_code == 200
            self.num_small += 1
            await anyio.sleep(BETWEEN_S)

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """The stream of the bystander goes on in this block, unless it is over at once."""
        num_small, num_tokens = self.num_small, self.steady.num_tokens
        yield
        least = min(2, (self.num_small - num_small) // SMALL_PER_TOKEN)
        assert self.steady.num_tokens - num_tokens >= least, "the bystander's stream stood still"

    async def attack(self, body: bytes | AsyncIterator[bytes], path: str = TEXT) -> tuple[httpx.Response, int]:
        """The answer, and how many small requests were answered meanwhile."""
        before = self.num_small
        with self.moving():
            response = await self.client.post(path, content=body)
        return response, self.num_small - before


@contextlib.asynccontextmanager
async def beside(llm: AsyncLLM, **options: Any) -> AsyncIterator[Beside]:
    """While the block runs; the parse process has begun already."""
    app = create_app(llm, **options)
    async with client_of(app) as client, bystander(llm, max_tokens=40) as steady, anyio.create_task_group() as tasks:
        one = Beside(app, client, steady)
        warm = await client.post(TEXT, content=b'{"prompt":"a","max_tokens":1,"user":"%b"}' % (b"a" * (1 << 21)))
        assert warm.status_code == 200
        tasks.start_soon(one.ask_on)
        with one.moving():
            yield one
        tasks.cancel_scope.cancel()


def refused(response: httpx.Response, param: str | None, *words: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    for word in words:
        assert word in error["message"]
