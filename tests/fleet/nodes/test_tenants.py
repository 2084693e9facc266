"""What an agent makes of a caller that knows the key: of another version, with other files, or that sends no sense."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from actorllm import EngineConfig, __version__
from actorllm.errors import ConfigError, TransportError
from actorllm.fleet.fleet import Fleet
from actorllm.fleet.nodes.agent import NodeAgent, Tenant
from actorllm.fleet.nodes.fingerprint import SAMPLE_BYTES, facts_of_ranks, model_digest
from actorllm.fleet.nodes.handshake import call
from actorllm.fleet.nodes.hosts import NodeAddress
from actorllm.fleet.nodes.node_stream import NodeStream
from tests.fleet.nodes.agents import KEY, free_port
from tests.fleet.nodes.stream_pairs import tcp_pair

CONFIG = EngineConfig.from_arguments("storyteller", dtype="float32", num_threads=1, standby_worker=False)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def listening() -> AsyncIterator[NodeAddress]:
    agent, address = NodeAgent(KEY), NodeAddress("127.0.0.1", free_port())
    async with anyio.create_task_group() as group:
        is_listening = anyio.Event()
        group.start_soon(agent.run, address, lambda _: is_listening.set())
        await is_listening.wait()
        yield address
        agent.request_stop()


async def answer_to(address: NodeAddress, op: str, **fields: Any) -> dict[str, Any] | str:
    """The last control frame before the connection ends; of none, why it ended."""
    frames: list[dict[str, Any]] = []
    ended: list[TransportError] = []
    stream = NodeStream(
        await called(address),
        on_message=lambda *_: True,
        on_control=lambda frame, arrays: frames.append(frame),
        on_end=ended.append,
    )
    stream.start()
    stream.control(op, **fields)
    with anyio.fail_after(20):
        while not ended:
            await anyio.sleep(0.002)
    return frames[-1] if frames else str(ended[0])


@pytest.mark.anyio
async def test_what_differs_is_told_with_both_sides() -> None:
    config = CONFIG.to_json().decode()
    async with listening() as address:
        told = await answer_to(address, "start", version="0.0.1", config=config, digest=None)
        assert isinstance(told, dict)
        assert (told["op"], told["type_name"]) == ("ended", "AttachError")
        assert f"it runs actorllm {__version__} and the engine 0.0.1; use the same version" in told["message"]
        told = await answer_to(address, "start", version=__version__, config=config, digest="another")
        assert isinstance(told, dict)
        assert (told["op"], told["type_name"]) == ("ended", "ConfigError")
        assert f"the files of model 'storyteller' in {CONFIG.model.path!r} differ from those of" in told["message"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("start", {"version": __version__}),
        ("start", {"version": __version__, "config": "[]", "digest": None}),
        ("start", {"version": __version__, "config": {"model": 3}, "digest": None}),
        ("stop", {"timeout": "soon"}),
        ("ready", {}),
    ],
)
async def test_what_makes_no_sense_ends_that_connection_alone(op: str, fields: dict[str, Any]) -> None:
    async with listening() as address:
        for _ in range(2):
            told = await answer_to(address, op, **fields)
            assert told["op"] == "ended" if isinstance(told, dict) else "the peer is gone" in told


def test_a_digest_tells_of_each_part_that_is_sampled(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    size = 5 * SAMPLE_BYTES
    weights.write_bytes(bytes(size))
    known = model_digest(tmp_path)
    assert known == model_digest(tmp_path)
    for place in (0, size // 2, size - 1):
        changed = bytearray(size)
        changed[place] = 1
        weights.write_bytes(changed)
        assert model_digest(tmp_path) != known, place
    weights.write_bytes(bytes(size))
    (tmp_path / "config.json").write_text("{ }")
    assert model_digest(tmp_path) != known


async def test_a_replica_that_computes_in_another_way_is_refused() -> None:
    fleet = Fleet(CONFIG, 0, lambda error: None)
    first = fleet.replicas[0]
    fleet._check_arithmetic(first, {"arithmetic": "torch 2.8.0, x86_64 AVX2, float32"})
    fleet._check_arithmetic(first, {"arithmetic": "torch 2.8.0, x86_64 AVX2, float32"})
    with pytest.raises(ConfigError, match=r"computes with torch 2.9.0, .* and replica 0 with torch 2.8.0, x86_64"):
        fleet._check_arithmetic(first, {"arithmetic": "torch 2.9.0, x86_64 AVX2, float32"})
    fleet._board_file.close()


async def test_a_replica_of_which_one_rank_computes_in_another_way_is_refused() -> None:
    """Ranks of one replica may differ, if those of the others differ as they do."""
    new, old = ({"arithmetic": f"torch 2.8.0, x86_64 {name}, float32, 2 ranks"} for name in ("AVX512", "AVX2"))
    alike = facts_of_ranks({"scheduler": {}, "worker1": new, "worker0": {**new, "num_blocks": 7}})
    assert alike == {**new, "num_blocks": 7}
    mixed = facts_of_ranks({"worker10": old, "worker1": old, "worker0": new})
    assert mixed == {
        "arithmetic": f"{new['arithmetic']} in worker0; {old['arithmetic']} in worker1; {old['arithmetic']} in worker10"
    }
    assert facts_of_ranks({"scheduler": {}, "worker0": {"num_blocks": 7}}) == {}
    fleet = Fleet(CONFIG, 0, lambda error: None)
    fleet._check_arithmetic(fleet.replicas[0], alike)
    with pytest.raises(
        ConfigError, match=r"AVX2, float32, 2 ranks in worker1.*, and replica 0 with torch 2.8.0, x86_64 AVX512"
    ):
        fleet._check_arithmetic(fleet.replicas[0], mixed)
    fleet._board_file.close()


@pytest.mark.anyio
async def test_a_caller_that_goes_while_a_model_is_sought_ends_its_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model may be downloaded for minutes; neither the tenant nor the agent waits for it."""
    import threading

    from actorllm.fleet.nodes import agent as agent_module

    may_go_on, is_there = threading.Event(), threading.Event()

    def localized(*_: object) -> None:
        is_there.set()
        may_go_on.wait()

    monkeypatch.setattr(agent_module, "localized", localized)
    near, far = tcp_pair()
    try:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                tenant = Tenant(far, "the caller", 3.0)
                group.start_soon(tenant.live)
                stream = NodeStream(near, on_message=lambda *_: True)
                stream.start()
                stream.control("start", version=__version__, config=CONFIG.to_json().decode(), digest=None)
                await anyio.to_thread.run_sync(is_there.wait)
                stream.close()
    finally:
        may_go_on.set()


@pytest.mark.anyio
async def test_what_changes_while_a_replica_is_prepared_counts_when_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading
    from dataclasses import replace

    from actorllm.fleet.nodes import agent as agent_module

    may_go_on, is_there = threading.Event(), threading.Event()
    started: list[EngineConfig] = []

    def localized(config: EngineConfig, board: str) -> EngineConfig:
        is_there.set()
        may_go_on.wait()
        return replace(config, load_board=board)

    def make_supervisor(config: EngineConfig, *_: object, **__: object) -> None:
        started.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr(agent_module, "localized", localized)
    monkeypatch.setattr(agent_module, "make_supervisor", make_supervisor)
    near, far = tcp_pair()
    ended = anyio.Event()
    try:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                tenant = Tenant(far, "the caller", 3.0, memory_share=0.25)
                group.start_soon(tenant.live)
                stream = NodeStream(
                    near,
                    on_message=lambda *_: True,
                    on_control=lambda frame, arrays: ended.set() if frame["op"] == "ended" else None,
                )
                stream.start()
                stream.control("start", version=__version__, config=CONFIG.to_json().decode(), digest=None)
                await anyio.to_thread.run_sync(is_there.wait)
                changed = replace(CONFIG, log_statistics=True, load_board="/elsewhere")
                stream.control("config", config=changed.to_json().decode())
                while tenant._changed is None:
                    await anyio.sleep(0.002)
                may_go_on.set()
                await ended.wait()
                stream.close()
    finally:
        may_go_on.set()
    assert started[0].log_statistics
    assert started[0].cache.machine_share == 0.25, "as the agent was told"
    assert started[0].load_board not in (None, "/elsewhere"), "the board is the one of this machine"


@pytest.mark.anyio
async def test_the_socket_of_a_killed_agent_is_taken_over_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "agent.socket"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    assert path.is_socket(), "as kill -9 leaves it"
    agent, other, is_listening = NodeAgent(KEY), NodeAgent(KEY), anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(agent.run, NodeAddress(str(path), 0), lambda _: is_listening.set())
        await is_listening.wait()
        with pytest.raises(ConfigError, match="cannot be listened on: Address already in use"):
            await other.run(NodeAddress(str(path), 0))
        agent.request_stop()
    assert not path.exists()
    path.write_text("of somebody")
    with pytest.raises(ConfigError, match="cannot be listened on: Address already in use"):
        await other.run(NodeAddress(str(path), 0))
    assert path.read_text() == "of somebody"


@pytest.mark.anyio
async def test_an_agent_that_is_told_to_end_does_not_wait_for_an_owner_that_does_not_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All it may take, the stop of the processes included, is less than the 30 s after which it would be killed."""
    from actorllm.actors.engine_thread import STOP_TIMEOUT_S
    from actorllm.fleet.nodes import agent as agent_module

    assert agent_module.LEAVE_TIMEOUT_S + 2.0 + STOP_TIMEOUT_S + 1.0 < 30.0
    monkeypatch.setattr(agent_module, "LEAVE_TIMEOUT_S", -1.9)
    near, far = tcp_pair()
    told: list[str] = []
    agent, has_ended = NodeAgent(KEY), anyio.Event()

    async def run() -> None:
        await agent.run(NodeAddress("127.0.0.1", free_port()), lambda _: is_listening.set())
        has_ended.set()

    is_listening = anyio.Event()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await is_listening.wait()
            tenant = Tenant(far, "the caller", 3.0)
            agent.tenants.add(tenant)
            group.start_soon(tenant.live)
            stream = NodeStream(
                near, on_message=lambda *_: True, on_control=lambda frame, arrays: told.append(frame["op"])
            )
            stream.start()
            agent.leave()
            await has_ended.wait()
            agent.tenants.discard(tenant)
            while "leaving" not in told:
                await anyio.sleep(0.002)
            stream.close()


@pytest.mark.anyio
@pytest.mark.parametrize("is_owned", [True, False])
async def test_an_agent_that_was_started_for_an_owner_ends_with_it_and_another_one_listens(is_owned: bool) -> None:
    agent, address = NodeAgent(KEY, is_owned=is_owned), NodeAddress("127.0.0.1", free_port())
    is_listening, has_ended = anyio.Event(), anyio.Event()

    async def run() -> None:
        await agent.run(address, lambda _: is_listening.set())
        has_ended.set()

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await is_listening.wait()
            for _ in range(1 if is_owned else 2):
                stream = NodeStream(await called(address), on_message=lambda *_: True)
                stream.start()
                while not agent.tenants:
                    await anyio.sleep(0.002)
                stream.close()
                while agent.tenants:
                    await anyio.sleep(0.002)
            if is_owned:
                await has_ended.wait()
            assert has_ended.is_set() == is_owned
            agent.request_stop()


async def called(address: NodeAddress) -> socket.socket:
    """A connection that has shown the key."""
    sock = socket.create_connection(address)
    sock.setblocking(False)
    return await call(sock, KEY, "the node")
