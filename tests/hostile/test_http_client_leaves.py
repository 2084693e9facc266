"""Clients that leave while their bodies are parsed, or wait for that: the work is dropped, and others have their turn."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import pytest

from actorllm import AsyncLLM
from actorllm.server.bodies.reader import BodyReader
from tests.hostile.small_requests import TEXT, beside, llm, parse_processes_end  # noqa: F401

pytestmark = pytest.mark.anyio

BODY = b'{"prompt":"a","max_tokens":1,"user":"%b"}' % (b"," * (1 << 21))


async def test_work_for_clients_that_have_left_is_dropped(llm: AsyncLLM) -> None:  # noqa: F811
    async with beside(llm) as one:
        bodies: BodyReader = one.app.state.server.bodies
        assert bodies.process is not None
        stopped = bodies.process
        os.kill(stopped.pid, signal.SIGSTOP)
        leave, sent = anyio.Event(), []

        async def leaves() -> None:
            has_sent = False

            async def receive() -> Any:
                nonlocal has_sent
                if not has_sent:
                    has_sent = True
                    return {"type": "http.request", "body": BODY}
                await leave.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                sent.append(message)

            scope = {"type": "http", "method": "POST", "path": TEXT, "headers": [], "query_string": b""}
            await one.app(scope, receive, send)

        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(leaves)
                while stopped.is_idle or bodies.num_waiting < number:
                    await anyio.sleep(0.002)
            assert (await one.client.get("/load")).json() == {"server_load": 5}
            await one.steady.wait(3)
            leave.set()
        assert not sent
        assert not stopped.is_alive
        assert not bodies.num_waiting
        assert (await one.client.get("/load")).json() == {"server_load": 0}
        response, _ = await one.attack(BODY)
        assert response.status_code == 200
