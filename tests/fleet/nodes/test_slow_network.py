"""A network that is slow: what TCP makes of delay, loss and reorder. Streams are the same, and no node counts as lost."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actorllm import AsyncLLM
from tests.fleet.nodes.agents import Agent, key_file
from tests.fleet.streams import assert_same, moved, run_all

ENGINE: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "standby_worker": False, "enable_prompt_embeds": True}
DELAY_S, JITTER_S = 0.02, 0.02
STALL_S, STALL_EVERY = 0.3, 40
"""A packet that is lost, or comes too early, holds up all behind it until it is there: one of so many, from the fifth on."""


class SlowNetwork:
    """Passes bytes on to an address, late and in pieces. Within each direction they keep their order, as TCP gives them."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._target = host, int(port)
        self._rng = random.Random(1)
        self._passing: set[asyncio.Task[None] | None] = set()
        self._num_sent = self.num_stalls = 0
        self.address = ""

    async def serve(self) -> asyncio.Server:
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._passing.add(task := asyncio.current_task())
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._one_way(reader, far_writer))
                group.create_task(self._one_way(far_reader, writer))
        except* ConnectionError:
            pass  # one end has gone; the other one is told
        finally:
            for one in (writer, far_writer):
                one.transport.abort()
            self._passing.discard(task)

    async def close(self) -> None:
        """End what still passes."""
        tasks = [task for task in self._passing if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the next turn

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        async def send() -> None:
            while True:
                due, data = await queue.get()
                self._num_sent += 1
                if self._num_sent % STALL_EVERY == 5:
                    due, self.num_stalls = max(due, loop.time() + STALL_S), self.num_stalls + 1
                await asyncio.sleep(max(0.0, due - loop.time()))
                if not data:
                    writer.close()
                    return
                cut = self._rng.randrange(1, len(data) + 1)
                for piece in (data[:cut], data[cut:]):
                    writer.write(piece)
                await writer.drain()

        sending = asyncio.create_task(send())
        try:
            data = b"-"
            while data:
                data = await reader.read(1 << 16)
                await queue.put((loop.time() + DELAY_S + JITTER_S * self._rng.random(), data))
            await sending
        finally:
            sending.cancel()


@contextmanager
def slow_network(address: str) -> Iterator[SlowNetwork]:
    network, is_ready = SlowNetwork(address), threading.Event()
    over: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def run() -> None:
        ended = asyncio.Event()
        server = await network.serve()
        over.append((asyncio.get_running_loop(), ended))
        is_ready.set()
        await ended.wait()
        server.close()
        await network.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    is_ready.wait()
    try:
        yield network
    finally:
        loop, ended = over[0]
        loop.call_soon_threadsafe(ended.set)
        thread.join()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.timeout(200)
@pytest.mark.anyio
async def test_streams_over_a_slow_network_are_the_same_and_none_moves(tmp_path: Path) -> None:
    key = key_file(tmp_path)
    agent = Agent(key)
    try:
        with slow_network(agent.address) as network:
            async with AsyncLLM("storyteller", **ENGINE) as alone:
                undisturbed = await run_all(alone)
            sizes = {"nodes": [network.address], "node_key_file": key, "node_timeout_s": 30.0}
            async with AsyncLLM("storyteller", **sizes, **ENGINE) as llm:
                assert_same(await run_all(llm), undisturbed)
                assert moved(llm) == 0
                stream = (await llm.stats())["supervisor"]["replicas"][0]["stream"]
                assert stream["offset_s"] == pytest.approx(0.0, abs=DELAY_S + JITTER_S + STALL_S)
        assert network.num_stalls
    finally:
        agent.close()
