"""A stop comes at any point of the life of a replica elsewhere, and is not held up by what that waits for."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio import to_thread

from actorllm import AsyncLLM, EngineConfig
from actorllm.errors import ConfigError, EngineShutdownError, EngineStartError
from actorllm.fleet.nodes import ray_cluster
from actorllm.fleet.nodes import remote as remote_module
from actorllm.fleet.nodes.handshake import answer_caller
from actorllm.fleet.nodes.hosts import Located, NodeAddress, tls_of
from actorllm.fleet.nodes.ray_cluster import RayPlacement
from actorllm.fleet.nodes.remote import RemoteReplica
from tests.fleet.nodes.agents import KEY, key_file


def replica_at(where: Any, config: EngineConfig | None = None) -> RemoteReplica:
    def nothing(*_: object) -> None:
        pass

    config = config or replace(EngineConfig.from_arguments("storyteller"), node="a:1")
    return RemoteReplica(
        config,
        SimpleNamespace(),  # type: ignore[arg-type] - it is not reached
        on_fall=nothing,
        on_leaving=nothing,
        on_facts=nothing,
        board=SimpleNamespace(),  # type: ignore[arg-type]
        locate=where,
    )


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_a_stop_does_not_wait_for_a_place() -> None:
    """As of Ray, which may have none for minutes."""
    may_go_on, is_there = threading.Event(), threading.Event()

    def locate() -> Located:
        is_there.set()
        may_go_on.wait()
        return Located(NodeAddress("a", 1), KEY)

    replica = replica_at(locate)
    ended: list[Exception] = []

    async def run() -> None:
        try:
            await replica.run(lambda: None)
        except Exception as error:  # what the test looks at
            ended.append(error)

    try:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(run)
                await to_thread.run_sync(is_there.wait)
                replica.request_stop()
    finally:
        may_go_on.set()
    assert [type(error) for error in ended] == [EngineShutdownError]
    assert replica.state == "stopped"


@pytest.mark.anyio
async def test_a_place_that_is_found_too_late_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waits for Ray is not waited for: it has to end what it began."""
    may_go_on, is_waiting = threading.Event(), threading.Event()
    removed: list[object] = []

    class Group:
        bundle_count = 1

        def wait(self, timeout: float) -> bool:
            is_waiting.set()
            return may_go_on.wait()

    group = Group()
    ray = SimpleNamespace(
        is_initialized=lambda: True,
        nodes=lambda: [{"Alive": True, "Resources": {"CPU": 4.0}}],
        util=SimpleNamespace(
            get_current_placement_group=lambda: None,
            placement_group=lambda bundles, strategy: group,
            remove_placement_group=removed.append,
        ),
    )
    monkeypatch.setattr(ray_cluster, "_ray", lambda: ray)
    placement = RayPlacement(EngineConfig.from_arguments("storyteller", data_parallel_backend="ray", num_threads=1))
    raised: list[BaseException] = []

    def locate() -> None:
        with pytest.raises(EngineShutdownError) as error:
            placement.locate(0)
        raised.append(error.value)

    threads = [threading.Thread(target=locate)]
    threads[0].start()
    is_waiting.wait()
    threads.append(threading.Thread(target=placement.close))
    threads[1].start()
    while not placement._is_closed:
        await anyio.sleep(0.001)
    may_go_on.set()
    for thread in threads:
        thread.join()
    locate()  # of a replica that asks later
    assert removed == [group]
    assert len(raised) == 2


@pytest.mark.anyio
async def test_a_node_that_answers_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It knows the key and sends heartbeats, and none that answers one."""
    from actorllm.fleet.nodes.frames import BEAT, BEAT_BODY, HEADER, URGENT

    monkeypatch.setattr(remote_module, "CONNECT_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        async def answer() -> None:
            await anyio.wait_readable(listener)
            sock, _ = listener.accept()
            sock.setblocking(False)
            with sock:
                await answer_caller(sock, KEY, "the caller")
                number = 0
                while True:
                    body = BEAT_BODY.pack(1.0, 0.0, 0.0, 0)
                    sock.send(HEADER.pack(len(body), BEAT, 0, URGENT, 0, number) + body)
                    number += 1
                    await anyio.sleep(0.1)

        address = f"127.0.0.1:{listener.getsockname()[1]}"
        llm = AsyncLLM("storyteller", nodes=[address], node_key_file=key_file(tmp_path))
        async with anyio.create_task_group() as group:
            group.start_soon(answer)
            with pytest.raises(EngineStartError, match=f"node {address} does not answer heartbeats within 0.5 s"):
                await llm.start()
            group.cancel_scope.cancel()
        llm.shutdown()


def test_a_file_of_certificates_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "no-pem"
    wrong.write_text("nothing")
    for path, why in ((str(tmp_path / "none"), "No such file"), (str(wrong), "")):
        with pytest.raises(ConfigError, match=f"node_ca_file='{path}' cannot be used: .*{why}.*PEM"):
            tls_of(path)
