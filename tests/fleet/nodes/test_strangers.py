"""Those on the port of an agent that have not shown the key: few at a time, and none that fails leaves a descriptor."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from actorllm.cli.node import node
from actorllm.errors import AttachError, ConfigError
from actorllm.fleet.nodes.agent import MAX_STRANGERS, NodeAgent
from actorllm.fleet.nodes.handshake import answer_caller, call
from actorllm.fleet.nodes.hosts import NodeAddress
from tests.fleet.nodes.agents import KEY, free_port
from tests.fleet.nodes.stream_pairs import tcp_pair, tls_contexts


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.001)


async def test_many_at_once_are_no_more_than_an_agent_keeps() -> None:
    agent, address = NodeAgent(KEY), NodeAddress("127.0.0.1", free_port())
    callers: list[socket.socket] = []
    async with anyio.create_task_group() as group:
        is_listening = anyio.Event()
        group.start_soon(agent.run, address, lambda _: is_listening.set())
        await is_listening.wait()
        for _ in range(4):  # each as large as the backlog allows, and seen in one turn of the loop or two
            callers += [socket.create_connection(address) for _ in range(MAX_STRANGERS - 2)]
            seen = callers[-1].getsockname()
            await until(lambda seen=seen: any(sock.getpeername() == seen for sock in agent._strangers))  # type: ignore[misc]
            assert len(agent._strangers) <= MAX_STRANGERS
        agent.request_stop()
    for sock in callers:
        sock.close()


async def test_an_agent_listens_on_the_address_that_it_is_given_alone() -> None:
    agent, address = NodeAgent(KEY), NodeAddress("127.0.0.1", free_port())
    async with anyio.create_task_group() as group:
        is_listening = anyio.Event()
        group.start_soon(agent.run, address, lambda _: is_listening.set())
        await is_listening.wait()
        socket.create_connection(address).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", address.port))
        agent.request_stop()


async def test_a_handshake_over_tls_that_fails_closes_what_has_the_descriptor(tmp_path: Path) -> None:
    contexts = tls_contexts(tmp_path)
    near, far = tcp_pair()
    number = len(os.listdir("/proc/self/fd"))
    errors: list[BaseException] = []  # and their frames: nothing is left to the collector

    async def one(function: Callable[..., object], *args: object) -> None:
        with pytest.raises(AttachError) as raised:
            await function(*args)  # type: ignore[misc]
        errors.append(raised.value)

    async with anyio.create_task_group() as group:
        group.start_soon(one, answer_caller, far, KEY, "the caller", contexts[0])
        group.start_soon(one, call, near, b"another key of some bytes", "node a:1", contexts[1], "unix")
    assert len(errors) == 2
    assert len(os.listdir("/proc/self/fd")) <= number - 2


def test_a_timeout_that_no_heartbeat_keeps_is_refused(tmp_path: Path) -> None:
    for wrong in (0.1, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"node_timeout_s=.* must be at least 1 seconds"):
            node(listen="127.0.0.1:1", key_file=tmp_path / "none", node_timeout_s=wrong)
