"""One model over several machines: ranks of a replica that are processes of agents, through the deaths of these and of those."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from anyio.lowlevel import checkpoint

import actorllm.config
from actorllm import AsyncLLM, EngineConfig
from actorllm.actors.topology import engine_topology
from actorllm.errors import ConfigError, EngineStartError
from actorllm.fleet.nodes.hosts import Located, node_of_rank, read_address
from actorllm.fleet.nodes.rank_child import RankChild
from actorllm.model.interfaces import host_and_port, interface_to
from tests.fleet.nodes.agents import KEY, Agent, key_file
from tests.fleet.streams import Told, all_run, assert_same, moved, run_all, until

pytestmark = pytest.mark.leaks_by_module

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "standby_worker": False,
    "enable_prompt_embeds": True,
    "max_num_seqs": 16,
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def undisturbed() -> dict[str, Told]:
    async with AsyncLLM("storyteller", **ENGINE) as llm:
        return await run_all(llm)


def over_two(agent: Agent, folder: Path, **options: Any) -> AsyncLLM:
    return AsyncLLM("storyteller", nnodes=2, nodes=[agent.address], node_key_file=key_file(folder), **ENGINE, **options)


@pytest.mark.anyio
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "victim",
    [
        "stopped",
        pytest.param("stage", marks=pytest.mark.slow(reason="one that is stopped ends by the same signal, later")),
        pytest.param("agent", marks=pytest.mark.slow(reason="the start of an agent and of two stages")),
    ],
)
async def test_stages_on_two_machines_have_the_streams_of_one_through_deaths(
    agent: Agent, folder: Path, undisturbed: dict[str, Told], victim: str
) -> None:
    """The last stage is the one elsewhere. Only its own agent sees that it stands still."""

    async def strike() -> None:
        if victim == "agent":
            agent.close()
            agent.start()
        else:
            os.kill(agent.children[0], signal.SIGSTOP if victim == "stopped" else signal.SIGKILL)

    async with over_two(agent, folder, pipeline_parallel_size=2, heartbeat_timeout_s=3.0) as llm:
        assert [replica.number for replica in llm.health().replicas] == [0]
        assert len(agent.children) == 1, "the second stage, and no scheduler"
        assert_same(await run_all(llm, 10, strike), undisturbed)
        (told,) = llm.health().replicas
        assert (told.num_lives, told.num_recoveries) == (1, 1), "its ranks were started again, and the replica goes on"
        assert told.last_failure is not None
        assert ("the process was stopped for" in told.last_failure) == (victim == "stopped"), (
            "its own agent has found it"
        )
        assert_same(await run_all(llm), undisturbed)
    await until(lambda: not agent.children)


@pytest.mark.anyio
@pytest.mark.timeout(200)
async def test_ranks_that_share_layers_on_two_machines(
    agent: Agent, folder: Path, undisturbed: dict[str, Told]
) -> None:
    async with over_two(agent, folder, tensor_parallel_size=2) as llm:
        assert len(agent.children) == 1
        assert_same(await run_all(llm), undisturbed)


@pytest.fixture
def two_agents(folder: Path) -> Iterator[list[Agent]]:
    made = [Agent(key_file(folder)) for _ in range(2)]
    yield made
    for agent in made:
        agent.close()


@pytest.mark.anyio
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "victim", ["stage", pytest.param("agent", marks=pytest.mark.slow(reason="agents, stages, and another replica"))]
)
async def test_a_replica_on_a_node_has_ranks_on_another(
    two_agents: list[Agent], undisturbed: dict[str, Told], monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """As Ray places them. The agent of the replica calls the other one, and starts its ranks again by itself."""
    head, other = two_agents
    heard: list[Any] = []

    class Placement:
        def __init__(self, config: EngineConfig) -> None: ...
        def close(self) -> None: ...
        def release(self, number: int) -> None: ...
        def locate(self, number: int) -> Located:
            return Located(read_address(head.address), KEY, heard.append, (other.address,))

    monkeypatch.setattr("actorllm.fleet.fleet.RayPlacement", Placement)
    sizes = {"data_parallel_size": 2, "data_parallel_size_local": 1} if victim == "agent" else {}

    async def strike() -> None:
        if victim == "stage":
            os.kill(other.children[0], signal.SIGKILL)
        else:  # by Ray's own sign of its death
            other.send(signal.SIGSTOP)
            heard[0]("it is dead")

    given = {"pipeline_parallel_size": 2, "data_parallel_backend": "ray", "router": "round-robin", **sizes, **ENGINE}
    async with AsyncLLM("storyteller", **given) as llm:
        await all_run(llm)
        assert (len(head.children), len(other.children)) == (2, 1), "a scheduler and the first stage; the second stage"
        assert_same(await run_all(llm, 10, strike), undisturbed)
        told = llm.health().replicas[-1]
        if victim == "stage":
            assert (told.num_lives, told.num_recoveries) == (1, 1)
        else:
            assert moved(llm) > 0
            other.send(signal.SIGCONT)
            await all_run(llm)
            assert llm.health().replicas[-1].num_lives >= 2
        assert_same(await run_all(llm), undisturbed)
    await until(lambda: not head.children and not other.children)


@pytest.mark.anyio
async def test_an_agent_that_is_not_there_is_named(folder: Path, agent: Agent) -> None:
    with pytest.raises(Exception, match=r"node 127\.0\.0\.1:1 cannot be reached"):
        await AsyncLLM(
            "storyteller",
            nnodes=2,
            nodes=["127.0.0.1:1"],
            node_key_file=key_file(folder),
            pipeline_parallel_size=2,
            **ENGINE,
        ).start()


@pytest.mark.anyio
async def test_a_node_that_comes_back_with_another_arithmetic_is_refused() -> None:
    """The tokens that were sent are of the one before."""
    config = EngineConfig.from_arguments(
        "storyteller", nnodes=2, nodes=["a:1"], node_key_file="k", pipeline_parallel_size=2, **ENGINE
    )
    spec, reached = engine_topology(config).actor("worker1"), dict[str, str]()

    async def start(arithmetic: str) -> RankChild:
        child = RankChild("a:1", KEY, reached, spec, lambda *_: None)
        child._stream = SimpleNamespace(synchronize=checkpoint, control=lambda *_, **__: None)  # type: ignore[assignment]
        child._hear({"op": "started", "pid": 7, "facts": {"arithmetic": arithmetic}})
        child._hear({"op": "ready"})
        await child.start(config)
        return child

    for _ in range(2):
        await (await start("torch 2.8.0, x86_64 AVX512")).run()
    with pytest.raises(EngineStartError, match=r"node a:1 computes with .* AVX2, and did with .* AVX512 before"):
        await start("torch 2.8.0, x86_64 AVX2")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"pipeline_parallel_size": 3}, "nnodes=2: 3 ranks cannot be shared out evenly"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "is not supported with data_parallel_size=2 yet"),
        ({"tensor_parallel_size": 2, "max_replicas": 2}, "is not supported with max_replicas=2 yet"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EngineConfig.from_arguments("storyteller", nnodes=2, nodes=["a:1"], node_key_file="k", **given)


def test_each_machine_has_equally_many_ranks() -> None:
    assert [node_of_rank(rank, 6, ("a:1", "b:1")) for rank in range(6)] == [None, None, "a:1", "a:1", "b:1", "b:1"]
    assert [node_of_rank(rank, 2, ()) for rank in range(2)] == [None, None]
    given = {"nodes": ["a:1"], "node_key_file": "k", "tensor_parallel_size": 2}
    assert EngineConfig.from_arguments("storyteller", nnodes=2, **given).rank_nodes == ("a:1",)
    assert EngineConfig.from_arguments("storyteller", **given).nodes == ("a:1",), "a replica on that node, with both"


def test_the_interface_to_an_address_of_this_machine_is_the_one_that_has_it() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("::1") is None
    assert host_and_port("tcp://10.0.0.2:7041") == ("10.0.0.2", 7041)
    assert host_and_port("tcp://[fe80::1]:7041") == ("fe80::1", 7041)


def test_ranks_on_a_gpu_are_refused() -> None:
    """Also where device="auto" finds one."""
    given = {"nnodes": 2, "nodes": ["a:1"], "node_key_file": "k", "tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match="is not supported with device='cuda' yet"):
        actorllm.config._nodes(actorllm.config.ARGUMENTS | given, "cuda")
