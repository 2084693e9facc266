"""Nodes that are away while no other replica runs: what the engine has waits for one that comes back, and not for ever."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

import actorllm.fleet.attached
import actorllm.fleet.fleet
from actorllm import AsyncLLM, EngineConfig
from actorllm.clock import now
from actorllm.errors import EngineDeadError, EngineError, EngineShutdownError
from actorllm.fleet.fleet import Fleet
from actorllm.fleet.replica import Replica, ReplicaEvents
from tests.fleet.nodes.agents import Agent, key_file
from tests.fleet.streams import PROMPTS, assert_same, params, run_all, until

pytestmark = [pytest.mark.anyio, pytest.mark.leaks_by_module]

ENGINE: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "standby_worker": False, "enable_prompt_embeds": True}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def own_agent(tmp_path: Path) -> Iterator[Agent]:
    """The only one of an engine."""
    made = Agent(key_file(tmp_path))
    yield made
    made.close()


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "victim",
    ["stopped", pytest.param("killed", marks=pytest.mark.slow(reason="its connection ends sooner, as of others"))],
)
async def test_streams_wait_for_the_only_node(own_agent: Agent, tmp_path: Path, victim: str) -> None:
    """As of a switch that starts again: all machines are away at a time. Requests are taken meanwhile."""
    given = {"nodes": [own_agent.address], "node_key_file": key_file(tmp_path), "node_timeout_s": 1.5, **ENGINE}
    async with AsyncLLM("storyteller", **given) as llm:
        undisturbed = await run_all(llm)
        late: list[int] = []

        async def ask_meanwhile() -> None:
            output = await llm.complete(PROMPTS[0], params(1))
            late.extend(output.outputs[0].token_ids)

        async with anyio.create_task_group() as group:

            async def strike() -> None:
                own_agent.send(signal.SIGSTOP if victim == "stopped" else signal.SIGKILL)
                await until(lambda: llm.health().replicas[0].state == "lost")
                assert llm.health().state == "recovering"
                group.start_soon(ask_meanwhile)
                if victim == "stopped":
                    own_agent.send(signal.SIGCONT)
                else:
                    own_agent.close()
                    own_agent.start()

            assert_same(await run_all(llm, 10, strike), undisturbed)
        assert late == undisturbed["plain"].sequences[0][0]
        assert llm.health().replicas[0].num_lives >= 2


@pytest.mark.timeout(200)
async def test_streams_of_programs_that_joined_wait_as_well(
    own_agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the node of all, and for that of their own connection alone, of which the owner knows nothing."""
    given = {"nodes": [own_agent.address], "node_key_file": key_file(tmp_path), "node_timeout_s": 1.5, **ENGINE}
    async with AsyncLLM("storyteller", name="away", **given) as owner, AsyncLLM.attach("away") as guest:
        undisturbed = await run_all(guest)

        async def strike() -> None:
            own_agent.send(signal.SIGSTOP)
            await until(lambda: owner.health().replicas[0].state == guest.health().replicas[0].state == "lost")
            own_agent.send(signal.SIGCONT)

        assert_same(await run_all(guest, 10, strike), undisturbed)
        assert guest.health().replicas[0].num_lives == 2
        replica = guest._engine._fleet.replicas[0]  # type: ignore[attr-defined]

        async def cut() -> None:
            replica.node._stream.cut()
            await until(lambda: replica.state == "lost")

        assert_same(await run_all(guest, 10, cut), undisturbed)
        assert owner.health().replicas[0].num_lives == 2, "the replica is the one that it was"
        await until(lambda: replica.state == "running")
        monkeypatch.setattr(actorllm.fleet.attached, "AWAY_TIMEOUT_S", 0.0)
        stream = guest.generate(PROMPTS[0], params(1, max_tokens=900))
        await anext(stream)
        replica.node._stream.cut()
        with pytest.raises(EngineDeadError, match="is lost"):
            async for _ in stream:
                pass


@pytest.mark.parametrize(
    ("on_failure", "told"),
    [
        ("restart", "no replica came back within 0.1 s; the last one: node .* cannot be reached"),
        ("raise", "node .* is lost"),
    ],
)
async def test_no_node_is_waited_for_without_bound(
    own_agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_failure: str, told: str
) -> None:
    monkeypatch.setattr(actorllm.fleet.fleet, "AWAY_TIMEOUT_S", 0.1)
    given = {"nodes": [own_agent.address], "node_key_file": key_file(tmp_path), "on_failure": on_failure, **ENGINE}
    async with AsyncLLM("storyteller", **given) as llm:
        stream = llm.generate(PROMPTS[0], params(1, max_tokens=900))
        await anext(stream)
        own_agent.close()
        with pytest.raises(EngineDeadError, match=told):
            async for _ in stream:
                pass
        await until(lambda: llm.health().state == "dead")


async def test_a_drain_waits_for_the_only_node_and_questions_do_not(own_agent: Agent, tmp_path: Path) -> None:
    """The engine is not shut down, so nothing may say that it was."""
    given = {"nodes": [own_agent.address], "node_key_file": key_file(tmp_path), **ENGINE}
    async with AsyncLLM("storyteller", **given) as llm:
        stream = llm.generate(PROMPTS[0], params(1, max_tokens=600))
        await anext(stream)
        own_agent.close()
        await until(lambda: llm.health().replicas[0].state == "lost")
        with pytest.raises(EngineError, match="no replica of the engine runs now") as raised:
            await llm.stats()
        assert not isinstance(raised.value, EngineShutdownError)
        drained: list[bool] = []

        async def drain() -> None:
            drained.append(await llm.drain())

        async with anyio.create_task_group() as group:
            group.start_soon(drain)
            await anyio.wait_all_tasks_blocked()
            own_agent.start()
            outputs = [output async for output in stream]
        assert drained == [True]
        assert len(outputs[-1].outputs[0].token_ids) == 600


def fleet_of_two(ended: list[EngineError]) -> Fleet:
    """Which has been ready. Its replicas are to be given supervisors."""
    fleet = Fleet(EngineConfig.from_arguments("storyteller", data_parallel_size=2), 0, ended.append)
    fleet._over, fleet._is_ready = anyio.Event(), anyio.Event()
    fleet._is_ready.set()
    return fleet


async def test_a_node_is_waited_for_though_another_one_fails_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """That one was lost before, and is just being called again when the last one falls silent."""
    ended: list[EngineError] = []
    fleet = fleet_of_two(ended)
    called, silent = fleet.replicas[0], fleet.replicas[1]
    for replica, state in ((called, "starting"), (silent, "running")):
        replica.supervisor = SimpleNamespace(state=state)  # type: ignore[assignment]
    monkeypatch.setattr(Replica, "is_away", True)
    silent.has_run = True
    fleet._on_lost(silent, {}, EngineDeadError("the last one is away"))
    assert fleet.dispatcher.waits, "the other one may fail"
    fleet._on_lost(called, {}, EngineDeadError("it cannot be reached"))
    assert fleet.dispatcher.waits
    assert not ended
    # The time is over while it is called once more.
    called.is_lost, silent.has_run, fleet._away_until = False, False, now() - 1
    fleet._on_lost(silent, {}, EngineDeadError("it cannot be reached"))
    assert fleet.dispatcher.waits, "the other one may run in a moment"
    fleet._on_lost(called, {}, EngineDeadError("it cannot be reached"))
    assert [str(error).partition(";")[0] for error in ended] == ["no replica came back within 60 s"]
    fleet._board_file.close()


async def test_calls_that_never_fail_while_no_other_is_under_way_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two nodes is called for as long as it takes until the other one is called again, or for a while."""
    num_calls, ended = [0, 0], list[EngineError]()

    def renew(replica: Replica) -> None:
        async def run(on_ready: object) -> None:
            other = 1 - replica.number
            num_calls[replica.number] += 1
            known = num_calls[other]
            with anyio.move_on_after(0.2):
                while num_calls[other] == known:
                    await anyio.sleep(0.001)
            raise EngineDeadError("it cannot be reached")

        replica.supervisor = SimpleNamespace(  # type: ignore[assignment]
            state="starting", run=run, failure=None, request_stop=lambda timeout: None
        )

    monkeypatch.setattr(Replica, "renew", renew)
    monkeypatch.setattr(actorllm.fleet.fleet, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(actorllm.fleet.fleet, "AWAY_PAUSE_S", 0.01)
    fleet = fleet_of_two(ended)
    fleet._away_until = now()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as fleet._tasks:
            for replica in fleet.replicas.values():
                fleet._spawn(replica)
            assert fleet._over is not None
            await fleet._over.wait()
            for replica in fleet.replicas.values():
                replica.request_stop(1.0)
    assert len(ended) == 1
    fleet._board_file.close()


async def test_a_node_in_a_long_pause_is_called_at_once_when_the_last_one_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_calls = 0

    async def run(on_ready: object) -> None:
        nonlocal num_calls
        num_calls += 1
        raise EngineDeadError("it cannot be reached")

    def renew(replica: Replica) -> None:
        state = "running" if replica.number else "starting"
        replica.supervisor = SimpleNamespace(  # type: ignore[assignment]
            state=state, run=run, failure=None, request_stop=lambda timeout: None
        )

    monkeypatch.setattr(Replica, "renew", renew)
    monkeypatch.setattr(Replica, "is_away", True)
    monkeypatch.setattr(actorllm.fleet.fleet, "FIRST_PAUSE_S", 1000.0)
    fleet = fleet_of_two([])
    paused, silent = fleet.replicas[0], fleet.replicas[1]
    silent.events, silent.has_run = ReplicaEvents(), True
    async with anyio.create_task_group() as fleet._tasks:
        fleet._spawn(paused)
        await until(lambda: num_calls == 1 and paused.state == "lost")
        await anyio.wait_all_tasks_blocked()
        fleet._on_lost(silent, {}, EngineDeadError("the last one is away"))
        await until(lambda: num_calls == 2)
        fleet.request_stop()
        paused.request_stop(1.0)
    fleet._board_file.close()
