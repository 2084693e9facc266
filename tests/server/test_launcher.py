"""The life of a server: what ends it where no signals come."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

import pytest
import uvloop

from actorllm import AsyncLLM
from actorllm.server import create_app, launcher
from actorllm.server.listener import Listener


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_server_in_another_thread_ends_when_it_is_cancelled(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """As in an asynchronous actor of Ray. uvloop listens on a copy of the socket."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    found: list[bool] = []

    async def run() -> None:
        app = create_app(AsyncLLM("storyteller", topology="inline", num_threads=1))
        serving = asyncio.ensure_future(launcher.serve(app, Listener("127.0.0.1", port, log_level="critical")))
        while not listens(port):
            assert not serving.done()
            await asyncio.sleep(0.01)
        found.append(listens(port))
        serving.cancel()
        await asyncio.wait([serving])
        found.extend((serving.cancelled(), listens(port)))

    def in_loop() -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(run())

    thread = threading.Thread(target=in_loop)
    thread.start()
    thread.join()
    assert found == [True, True, False]
