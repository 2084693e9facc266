"""Replicas on other machines, which here are agents of this one: killed, stopped, drained, and asked for what cannot be."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import torch
from anyio import to_thread

from actorllm import AsyncLLM, EngineConfig
from actorllm.errors import AttachError, ConfigError, ModelNotFoundError
from actorllm.fleet.nodes import agent as agent_module
from tests import programs
from tests.fleet.nodes.agents import KEY, Agent, free_port, key_file
from tests.fleet.streams import PROMPTS, Told, all_run, assert_same, moved, params, run_all, until

pytestmark = pytest.mark.leaks_by_module

ENGINE = {"dtype": "float32", "num_threads": 1, "standby_worker": False}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def agents(folder: Path) -> Iterator[list[Agent]]:
    key = key_file(folder)
    made = [Agent(key), Agent(key)]
    yield made
    for one in made:
        one.close()


@pytest.fixture(scope="module")
async def fleet(agents: list[Agent], folder: Path) -> AsyncIterator[AsyncLLM]:
    """A replica on each of two nodes, and none here."""
    llm = AsyncLLM(
        "storyteller",
        nodes=[one.address for one in agents],
        node_key_file=key_file(folder),
        node_timeout_s=1.5,
        enable_prompt_embeds=True,
        router="round-robin",
        **ENGINE,
    )
    await llm.start()
    await all_run(llm)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
async def undisturbed(fleet: AsyncLLM) -> dict[str, Told]:
    return await run_all(fleet)


@pytest.mark.anyio
async def test_streams_over_nodes_are_those_of_one_machine(undisturbed: dict[str, Told]) -> None:
    llm = AsyncLLM("storyteller", enable_prompt_embeds=True, **ENGINE)
    assert_same(await run_all(llm), undisturbed)
    llm.shutdown()


@pytest.mark.anyio
async def test_streams_outlive_an_agent_that_is_killed(
    fleet: AsyncLLM, agents: list[Agent], undisturbed: dict[str, Told]
) -> None:
    await all_run(fleet)
    before = moved(fleet)

    async def strike() -> None:
        busiest = max(fleet.health().replicas, key=lambda replica: replica.num_requests)
        assert busiest.num_requests
        victim = agents[busiest.number]
        victim.close()
        victim.start()

    assert_same(await run_all(fleet, 20, strike), undisturbed)
    assert moved(fleet) > before
    await all_run(fleet)  # the agent that came again has a replica again


@pytest.mark.anyio
async def test_streams_outlive_an_agent_that_falls_silent(
    fleet: AsyncLLM, agents: list[Agent], undisturbed: dict[str, Told], caplog: pytest.LogCaptureFixture
) -> None:
    """Its kernel answers for it, and its processes go on: only heartbeats tell."""
    await all_run(fleet)
    before = moved(fleet)
    victim = agents[0]

    async def strike() -> None:
        victim.send(signal.SIGSTOP)

    try:
        assert_same(await run_all(fleet, 10, strike), undisturbed)
        assert moved(fleet) > before
        assert fleet.health().replicas[0].state in ("lost", "starting")  # it is called again
        assert "nothing has come from the peer for" in caplog.text
    finally:
        victim.send(signal.SIGCONT)
    await all_run(fleet)


@pytest.mark.anyio
async def test_streams_outlive_the_scheduler_of_a_node(
    fleet: AsyncLLM, agents: list[Agent], undisturbed: dict[str, Told]
) -> None:
    await all_run(fleet)

    async def strike() -> None:
        busiest = max(fleet.health().replicas, key=lambda replica: replica.num_requests)
        pid = busiest.actors["scheduler"].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    assert_same(await run_all(fleet, 10, strike), undisturbed)
    await all_run(fleet)


@pytest.mark.anyio
async def test_an_agent_that_is_told_to_end_moves_its_streams_first(
    fleet: AsyncLLM, agents: list[Agent], undisturbed: dict[str, Told]
) -> None:
    await all_run(fleet)
    before = moved(fleet)
    told: list[int] = []

    async def strike() -> None:
        busiest = max(fleet.health().replicas, key=lambda replica: replica.num_requests)
        victim = agents[busiest.number]
        victim.send(signal.SIGTERM)
        await until(lambda: victim.process.poll() is not None)
        told.append(victim.process.returncode)
        victim.close()
        victim.start()

    assert_same(await run_all(fleet, 5, strike), undisturbed)
    assert told == [0]
    assert moved(fleet) > before
    await all_run(fleet)


RAY_ACTOR = f"""
import signal, sys, threading, time, types
ray = types.ModuleType("ray")
ray.util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
sys.modules["ray"] = ray
from actorllm.fleet.nodes.ray_cluster import RayAgent
def end(number, frame):
    print("as Ray ends it; has left:", agent._over.is_set(), flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
agent = RayAgent({KEY!r}, {{}})
def listen():
    print(*agent.listen(), flush=True)
    agent.wait()
threading.Thread(target=listen, daemon=True).start()
while True:
    time.sleep(0.01)
"""
"""What a process of Ray does with the actor, whose methods run on other threads."""


@contextmanager
def ray_actor() -> Iterator[subprocess.Popen[str]]:
    process = programs.popen([sys.executable, "-c", RAY_ACTOR], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.anyio
async def test_an_agent_of_ray_moves_its_streams_at_sigterm_as_well(
    agents: list[Agent], folder: Path, undisturbed: dict[str, Told]
) -> None:
    with ray_actor() as actor:
        assert actor.stdout is not None
        address = ":".join((await to_thread.run_sync(actor.stdout.readline)).split())
        nodes = {"nodes": [address, agents[0].address], "node_key_file": key_file(folder), "router": "round-robin"}
        async with AsyncLLM("storyteller", enable_prompt_embeds=True, **nodes, **ENGINE) as llm:
            await all_run(llm)

            async def strike() -> None:
                assert llm.health().replicas[0].num_requests
                actor.terminate()
                await until(lambda: actor.poll() is not None)

            assert_same(await run_all(llm, 5, strike), undisturbed)
            assert moved(llm) > 0
        assert actor.returncode == 7
        assert actor.stdout.read() == "as Ray ends it; has left: True\n"


def test_an_agent_of_ray_that_does_not_listen_ends_at_once() -> None:
    source = RAY_ACTOR.replace("threading.Thread(target=listen, daemon=True).start()", "print('made', flush=True)")
    process = programs.popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "made\n"
    process.terminate()
    assert process.communicate(timeout=40)[0] == "as Ray ends it; has left: False\n"
    assert process.returncode == 7


@pytest.mark.slow(reason="a start, and a second in which a scheduler stands still")
@pytest.mark.anyio
async def test_a_scheduler_that_stands_still_is_replaced_once_something_is_waited_for(
    agents: list[Agent], folder: Path
) -> None:
    """With nothing to do, its node does not look at it."""
    given = {"nodes": [agents[0].address], "node_key_file": key_file(folder), "heartbeat_timeout_s": 1.0, **ENGINE}
    async with AsyncLLM("storyteller", **given) as llm:
        undisturbed = await llm.complete(PROMPTS[0], params(1))
        replica = llm._engine._fleet.replicas[0].supervisor  # type: ignore[attr-defined]
        await until(lambda: replica._rested_after == (replica._link.generation, replica._link.num_sent))
        pid = llm.health().replicas[0].actors["scheduler"].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert (await llm.complete(PROMPTS[0], params(1))).outputs[0].token_ids == undisturbed.outputs[0].token_ids
        await until(lambda: llm.health().num_recoveries == 1)


@contextmanager
def held_up(pid: int) -> Iterator[None]:
    """A process that stands still for most of the time."""
    over = threading.Event()

    def hold_up() -> None:
        while not over.wait(0.005):
            os.kill(pid, signal.SIGSTOP)
            over.wait(0.045)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=hold_up)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.slow(reason="a node that computes ten times slower")
@pytest.mark.anyio
async def test_a_slow_node_is_no_dead_one_and_gets_less(
    agents: list[Agent], folder: Path, undisturbed: dict[str, Told]
) -> None:
    addresses = [one.address for one in agents]
    given = {"nodes": addresses, "node_key_file": key_file(folder), "enable_prompt_embeds": True, **ENGINE}
    async with AsyncLLM("storyteller", router="seconds", **given) as llm:
        await all_run(llm)
        await run_all(llm)  # the steps of both are known
        pid = llm.health().replicas[0].actors["worker0"].pid
        assert pid is not None
        with held_up(pid):
            assert_same(await run_all(llm), undisturbed)
            before = dict(llm._engine.statistics()["frontend"]["num_routed"])
            limit = anyio.CapacityLimiter(6)

            async def one(number: int) -> None:
                async with limit:
                    assert (await llm.complete(PROMPTS[number % 6], params(number, max_tokens=20))).finished

            async with anyio.create_task_group() as group:
                for number in range(40):
                    group.start_soon(one, number)
            after = llm._engine.statistics()["frontend"]["num_routed"]
            assert 2 * (after[0] - before.get(0, 0)) < after[1] - before.get(1, 0)
        assert [replica.num_lives for replica in llm.health().replicas] == [1, 1]
        assert moved(llm) == 0


@pytest.mark.anyio
async def test_routers_know_the_load_and_the_cache_of_a_node(fleet: AsyncLLM) -> None:
    await all_run(fleet)
    prompt = {"prompt_token_ids": list(range(5, 205))}
    for number in (0, 1):
        await fleet.complete(prompt, params(1, max_tokens=40), data_parallel_rank=number)
    replicas = fleet._engine._fleet.replicas  # type: ignore[attr-defined]
    await until(lambda: all(replica.load() is not None for replica in replicas.values()))
    for replica in replicas.values():
        free, _ = replica.load()
        assert free > 0
        words = replica._board.hash_words(replica.number)
        await until(lambda words=words: int((words[8:] != 0).sum()) >= 200 // 32)


@pytest.mark.anyio
async def test_an_owner_that_goes_leaves_nothing_and_the_agent_listens(folder: Path) -> None:
    """It listens on a unix socket here."""
    key = key_file(folder)
    one = Agent(key, host=str(folder / "agent.socket"))
    try:
        for _ in range(2):
            llm = AsyncLLM("storyteller", nodes=[one.address], node_key_file=key, **ENGINE)
            await llm.start()
            assert one.children
            await llm.complete(PROMPTS[0], params(1, max_tokens=3))
            llm._engine._fleet.kill()  # type: ignore[attr-defined] - as the end of its process would
            await until(lambda: not one.children)
            llm.shutdown()
    finally:
        one.close()


@pytest.mark.slow(reason="a replica here, and one that fails to start")
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch has no lower instructions to compute with here"
)
@pytest.mark.anyio
async def test_a_node_that_computes_in_another_way_is_refused(folder: Path) -> None:
    """As an older processor would. The tokens of a stream that moves there might be others."""
    key = key_file(folder)
    one = Agent(key, prefix=("env", "ATEN_CPU_CAPABILITY=default"))
    sizes = {"data_parallel_size": 2, "data_parallel_size_local": 1, "ready_replicas": 2}
    try:
        llm = AsyncLLM("storyteller", nodes=[one.address], node_key_file=key, **sizes, **ENGINE)
        with pytest.raises(
            ConfigError, match=r"computes with torch .*, and replica . with torch .*: streams that move"
        ):
            await llm.start()
        await until(lambda: not one.children)
    finally:
        one.close()


@pytest.mark.anyio
async def test_what_cannot_be_names_the_node(agents: list[Agent], folder: Path, tmp_path: Path) -> None:
    address = agents[0].address
    model = Path(shutil.copytree(EngineConfig.from_arguments("storyteller").model.path, tmp_path / "model"))
    given = {"load_format": "dummy", "skip_tokenizer_init": True, "node_key_file": key_file(folder), **ENGINE}
    llm = AsyncLLM(str(model), nodes=[address], **given)
    shutil.rmtree(model)  # so that the other machine does not have it
    with pytest.raises(ModelNotFoundError, match=f"node {address}: '{model}' is not here"):
        await llm.start()
    wrong = key_file(folder, b"another key of sixteen bytes")
    with pytest.raises(AttachError, match=f"node {address} refuses the key"):
        await AsyncLLM("storyteller", nodes=[address], node_key_file=wrong, **ENGINE).start()
    nowhere = f"127.0.0.1:{free_port()}"
    with pytest.raises(AttachError, match=f"node {nowhere} cannot be reached: Connection refused; does `actorllm node"):
        await AsyncLLM("storyteller", nodes=[nowhere], node_key_file=key_file(folder), **ENGINE).start()
    with pytest.raises(ConfigError, match="nodes need node_key_file"):
        AsyncLLM("storyteller", nodes=[address])
    with pytest.raises(ConfigError, match=r"nodes='a:1' is no|nodes='a' must be a list|is no address"):
        await AsyncLLM("storyteller", nodes=["a"], node_key_file=wrong).start()
    with pytest.raises(ConfigError, match=r"data_parallel_size_local=1 of data_parallel_size=2"):
        AsyncLLM("storyteller", data_parallel_size=2, data_parallel_size_local=1)
    with pytest.raises(ConfigError, match=r"node_rank=1: only the first machine builds an engine; run `actorllm node"):
        AsyncLLM("storyteller", node_rank=1)
    with pytest.raises(ConfigError, match=r"nnodes=3 with 1 nodes beside this machine"):
        AsyncLLM("storyteller", nodes=[address], node_key_file=wrong, nnodes=3)


def test_a_model_that_is_not_on_the_node_is_named(tmp_path: Path) -> None:
    config = EngineConfig.from_arguments("storyteller")
    found = agent_module.localized(
        replace(config, model=replace(config.model, path="/elsewhere", tokenizer="/elsewhere")), "board"
    )
    assert (found.model.path, found.model.tokenizer) == (config.model.path, config.model.path)
    missing = replace(config, model=replace(config.model, name="/models/x", path="/models/x"))
    with pytest.raises(ModelNotFoundError, match=r"'/models/x' is not here"):
        agent_module.localized(missing, "board")


@pytest.mark.anyio
async def test_strangers_on_the_port_harm_no_tenant(fleet: AsyncLLM, agents: list[Agent]) -> None:
    """Some say nothing, some dribble, some speak HTTP, and more come than an agent keeps."""
    await all_run(fleet)
    host, port = agents[0].address.split(":")
    strangers: list[socket.socket] = []
    for number in range(3 * agent_module.MAX_STRANGERS):
        sock = socket.create_connection((host, int(port)))
        sock.settimeout(10)
        strangers.append(sock)
        if number % 3 == 0:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
        elif number % 3 == 1:
            sock.sendall(b"acto")
    output = await fleet.complete(PROMPTS[0], params(3, max_tokens=20), data_parallel_rank=0)
    assert len(output.outputs[0].token_ids) == 20

    def is_left(sock: socket.socket) -> bool:
        try:
            while sock.recv(1000):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True

    assert all([await anyio.to_thread.run_sync(is_left, sock) for sock in strangers])
    for sock in strangers:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    assert fleet.health().replicas[0].num_lives >= 1
    assert fleet.health().replicas[0].state == "running"
