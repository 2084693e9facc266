"""Programs that join an engine with replicas on other machines: they call the agents themselves, and outlive them."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from anyio import to_thread

from actorllm import AsyncLLM
from actorllm.attach.rendezvous import running_engines
from actorllm.errors import EngineDeadError
from actorllm.fleet.nodes.joined_node import JoinedNode
from tests.fleet.nodes.agents import Agent, key_file
from tests.fleet.streams import PROMPTS, Told, all_run, assert_same, moved, params, run_all, until
from tests.server.certificates import certified

pytestmark = [pytest.mark.leaks_by_module, pytest.mark.anyio]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certified(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1")


@pytest.fixture(scope="module")
def agent(folder: Path, certificate: tuple[Path, Path]) -> Iterator[Agent]:
    """All of this is over TLS."""
    key, chain = map(str, certificate)
    made = Agent(key_file(folder), ("--tls-certificate", chain, "--tls-key", key))
    yield made
    made.close()


@pytest.fixture(scope="module")
async def owner(agent: Agent, folder: Path, certificate: tuple[Path, Path]) -> AsyncIterator[AsyncLLM]:
    """Replica 0 is here, and replica 1 is on a node."""
    async with AsyncLLM(
        "storyteller",
        name="over-nodes",
        nodes=[agent.address],
        node_key_file=key_file(folder),
        node_ca_file=str(certificate[1]),
        node_timeout_s=1.5,
        data_parallel_size=2,
        data_parallel_size_local=1,
        ready_replicas=2,
        enable_prompt_embeds=True,
        router="round-robin",
        dtype="float32",
        num_threads=1,
        standby_worker=False,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
async def undisturbed(owner: AsyncLLM) -> dict[str, Told]:
    return await run_all(owner)


@pytest.fixture
async def guest(owner: AsyncLLM, undisturbed: dict[str, Told]) -> AsyncIterator[AsyncLLM]:
    await all_run(owner)
    async with AsyncLLM.attach("over-nodes") as llm:
        yield llm


async def test_a_program_has_links_to_all_replicas(
    owner: AsyncLLM, guest: AsyncLLM, undisturbed: dict[str, Told]
) -> None:
    assert [(one.number, one.state) for one in guest.health().replicas] == [(0, "running"), (1, "running")]
    before = (await owner.stats())["frontend"]["num_routed"]
    assert_same(await run_all(guest), undisturbed)
    assert (await owner.stats())["frontend"]["num_routed"] == before
    assert set((await guest.stats())["frontend"]["num_routed"]) == {0, 1}, "it chose for itself"
    (engine,) = [engine for engine in running_engines() if engine.name == "over-nodes"]
    assert (engine.num_replicas, engine.num_frontends) == (2, 2)
    stream = guest.generate(PROMPTS[0], params(1, max_tokens=1500), data_parallel_rank=1)
    await anext(stream)
    await guest.abort(stream.request_id)
    dispatcher = owner._engine._fleet.dispatcher  # type: ignore[attr-defined]
    await until(lambda: not any(view.load for view in dispatcher.views()))


@pytest.mark.parametrize(
    "victim", [pytest.param("scheduler", marks=pytest.mark.slow(reason="an agent that dies takes it along")), "agent"]
)
async def test_its_streams_outlive_what_dies_on_a_node(
    owner: AsyncLLM, guest: AsyncLLM, agent: Agent, undisturbed: dict[str, Told], victim: str
) -> None:
    async def strike() -> None:
        assert all(replica.num_requests for replica in guest.health().replicas), "it has requests on both"
        if victim == "agent":
            agent.close()
            agent.start()
        else:
            pid = owner.health().replicas[1].actors["scheduler"].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    assert_same(await run_all(guest, 10, strike), undisturbed)
    assert moved(guest)
    await all_run(owner)
    await until(lambda: all(replica.state == "running" for replica in guest.health().replicas))
    assert_same(await run_all(guest), undisturbed)


async def test_its_streams_leave_a_node_that_is_told_to_end(
    owner: AsyncLLM, guest: AsyncLLM, agent: Agent, undisturbed: dict[str, Told]
) -> None:
    """They move as those of the owner do: nothing of them is suspected. Programs that join meanwhile do without the node."""
    replicas = guest._engine._fleet.replicas  # type: ignore[attr-defined]
    staying = owner.generate(PROMPTS[0], params(1, max_tokens=1500), data_parallel_rank=1)
    await anext(staying)

    async def strike() -> None:
        assert replicas[1].frontend.num_open
        agent.send(signal.SIGTERM)
        await until(lambda: moved(guest))
        assert not any(replica.frontend.has_suspects for replica in replicas.values())
        assert [one.state for one in guest.health().replicas] == ["running", "draining"]

    assert_same(await run_all(guest, 10, strike), undisturbed)
    async with AsyncLLM.attach("over-nodes") as late:
        assert [(one.number, one.state) for one in late.health().replicas] == [(0, "running")]
        staying.abort()
        async for _ in staying:
            pass
        assert await to_thread.run_sync(agent.process.wait) == 0
        agent.close()
        agent.start()
        await all_run(owner)
        await until(lambda: [one.state for one in late.health().replicas] == ["running", "running"])
        assert_same(await run_all(late), undisturbed)


@pytest.mark.slow(reason="the agent starts once more; the drain itself is quick to see above")
async def test_a_node_is_left_when_the_programs_that_joined_have_moved_as_well(
    owner: AsyncLLM, guest: AsyncLLM, agent: Agent, undisturbed: dict[str, Told]
) -> None:
    """The owner has nothing there. It waits for the programs, whose streams would be suspects of a death otherwise."""
    pinned = guest.generate(PROMPTS[0], params(1), data_parallel_rank=1)
    await anext(pinned)
    agent.send(signal.SIGTERM)
    tokens = [list(output.outputs[0].token_ids) async for output in pinned][-1]
    assert tokens == undisturbed["plain"].sequences[0][0]
    assert await to_thread.run_sync(agent.process.wait) == 0
    agent.close()
    agent.start()
    await all_run(owner)


async def test_its_streams_outlive_its_own_connection(
    owner: AsyncLLM, guest: AsyncLLM, undisturbed: dict[str, Told]
) -> None:
    """The owner's goes on, so nothing but the program knows; it calls the agent again."""
    replica = guest._engine._fleet.replicas[1]  # type: ignore[attr-defined]

    async def strike() -> None:
        assert replica.frontend.num_open
        replica.node._stream.cut()

    first, lives = replica.node, owner.health().replicas[1].num_lives
    assert_same(await run_all(guest, 10, strike), undisturbed)
    await until(lambda: replica.node is not first and replica.state == "running")
    assert owner.health().replicas[1].num_lives == lives, "the replica is the one that it was"
    assert_same(await run_all(guest), undisturbed)


async def test_a_replica_that_comes_and_goes_is_followed(
    owner: AsyncLLM, guest: AsyncLLM, agent: Agent, undisturbed: dict[str, Told]
) -> None:
    assert_same(await run_all(guest, 10, lambda: owner.scale(1)), undisturbed)
    assert [replica.number for replica in guest.health().replicas] == [0]
    await owner.scale(2)
    await until(lambda: [one.state for one in guest.health().replicas] == ["running", "running"])
    assert_same(await run_all(guest), undisturbed)


async def test_what_was_never_told_joins_nothing(owner: AsyncLLM, agent: Agent) -> None:
    place = owner._engine._fleet.places()[1]  # type: ignore[attr-defined]
    node = JoinedNode({**place, "tenant": "x"}, lambda link: None, lambda frame: None, lambda: None)
    with pytest.raises(EngineDeadError, match=f"node {agent.address}: the replica was stopped"):
        await node.join()
    node.close()
