"""Programs that joined an engine of several replicas: they route for themselves, and their streams outlive a replica."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import numpy as np
import pytest

import actorllm.client.engine_supervisor
from actorllm import AsyncLLM
from actorllm.attach.rendezvous import running_engines
from actorllm.errors import EngineDeadError, EngineError, EngineShutdownError, InvalidParameterError, ReplicaLostError
from actorllm.fleet import attached
from actorllm.fleet.views import views_of
from actorllm.kvcache.prefix_index import hash_blocks
from actorllm.messages import Submit
from actorllm.scheduling.router import Routable, make_router
from actorllm.supervision.restart import RestartLimits
from tests.fleet.streams import (
    PROMPTS,
    REQUESTS,
    Told,
    all_run,
    assert_same,
    kill,
    moved,
    params,
    run_all,
    until,
)

pytestmark = pytest.mark.leaks_by_module

GUEST = Path(__file__).parents[1] / "attach" / "guest.py"


def new_owner(name: str) -> AsyncLLM:
    options = {"dtype": "float32", "num_threads": 1, "enable_prompt_embeds": True, "standby_worker": False}
    return AsyncLLM("storyteller", data_parallel_size=2, name=name, router="least-load", **options)


@pytest.fixture(scope="module")
async def owner() -> AsyncIterator[AsyncLLM]:
    async with new_owner("fleet") as llm:
        await all_run(llm)
        yield llm


@pytest.fixture(scope="module")
async def undisturbed(owner: AsyncLLM) -> dict[str, Told]:
    return await run_all(owner)


@pytest.fixture
async def guest(owner: AsyncLLM, undisturbed: dict[str, Told]) -> AsyncIterator[AsyncLLM]:
    await all_run(owner)
    async with AsyncLLM.attach("fleet") as llm:
        yield llm


@pytest.mark.anyio
@pytest.mark.parametrize("victims", [("scheduler",), ("worker0",), ("scheduler", "worker0")], ids="+".join)
async def test_its_streams_outlive_a_replica(
    owner: AsyncLLM, guest: AsyncLLM, undisturbed: dict[str, Told], victims: tuple[str, ...]
) -> None:
    assert [replica.state for replica in guest.health().replicas] == ["running", "running"]

    async def strike() -> None:
        assert all(replica.num_requests for replica in guest.health().replicas), "it has requests on both"
        kill(owner.health().replicas[0].pids[name] for name in victims)

    assert_same(await run_all(guest, 10, strike), undisturbed)
    assert moved(guest)
    await until(lambda: all(replica.state == "running" for replica in guest.health().replicas))
    assert_same(await run_all(guest), undisturbed)


@pytest.mark.anyio
async def test_its_streams_follow_what_the_owner_does(
    owner: AsyncLLM, guest: AsyncLLM, undisturbed: dict[str, Told]
) -> None:
    assert_same(await run_all(guest, 10, lambda: owner.drain_replica(0)), undisturbed)
    assert [(one.state, one.num_requests) for one in guest.health().replicas] == [("draining", 0), ("running", 0)]
    await owner.drain_replica(0, is_draining=False)
    assert_same(await run_all(guest, 10, lambda: owner.scale(1)), undisturbed)
    assert [replica.number for replica in guest.health().replicas] == [0]
    pinned = guest.generate(PROMPTS[0], params(1), data_parallel_rank=0)
    assert_same(await run_all(guest, 10, lambda: owner.scale(2)), undisturbed)
    await until(lambda: len(guest.health().replicas) == 2)
    assert [output async for output in pinned][-1].finished
    pinned_to = owner._engine._fleet.dispatcher.num_pinned  # type: ignore[attr-defined]
    assert pinned_to(1) == 0
    stream = guest.generate(PROMPTS[0], params(1, max_tokens=1000), data_parallel_rank=1)
    await anext(stream)
    assert pinned_to(1) == 1, "so the demand lets it stay"
    await owner.scale(1)
    with pytest.raises(ReplicaLostError, match="data_parallel_rank=1: this replica is lost for good"):
        async for _ in stream:
            pass
    with pytest.raises(InvalidParameterError, match="data_parallel_rank=1 is no replica of this engine"):
        guest.generate("x", data_parallel_rank=1)
    await owner.scale(2)
    with pytest.raises(EngineError, match="belongs to another process"):
        await guest.scale(1)
    with pytest.raises(EngineError, match="belongs to another process"):
        await guest.drain_replica(0)


@pytest.mark.anyio
async def test_a_program_that_joins_later_knows_which_replicas_are_drained(owner: AsyncLLM) -> None:
    await all_run(owner)
    await owner.drain_replica(0)
    async with AsyncLLM.attach("fleet") as llm:
        assert [replica.state for replica in llm.health().replicas] == ["draining", "running"]
        for seed in range(4):
            await llm.complete(PROMPTS[0], params(seed, max_tokens=2))
        assert (await llm.stats())["frontend"]["num_routed"] == {1: 4}
        await owner.drain_replica(0, is_draining=False)
        await until(lambda: llm.health().replicas[0].state == "running")


def links_of(owner: AsyncLLM) -> list[str]:
    """The names of the links that other programs have."""
    visitors = owner._engine._fleet.attached._visitors  # type: ignore[attr-defined]
    return sorted(child.spec.name for visitor in visitors for child in visitor.children.values())


@pytest.mark.anyio
async def test_a_link_that_its_scheduler_has_dropped_is_made_once_more(
    owner: AsyncLLM, guest: AsyncLLM, undisturbed: dict[str, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has died: the program has both replicas again, and the scheduler believes it no more than before."""
    monkeypatch.setattr(attached, "LOSS_GRACE_S", 0.05)
    replica = guest._engine._fleet.replicas[0]  # type: ignore[attr-defined]
    pids = [(one.pids["scheduler"], one.pids["worker0"]) for one in owner.health().replicas]

    async def spoil() -> None:
        assert replica.frontend.num_open
        wrong = Submit(rid=999, arrival=0.0, prompt=np.array([1], np.int32), max_tokens=5, temperature="hot")  # type: ignore[arg-type]
        guest._engine._thread.call(replica.frontend._scheduler.send_nowait, wrong).result(10)

    for _ in range(2):
        assert_same(await run_all(guest, 10, spoil), undisturbed)
        await until(lambda: replica.state == "running" and replica.frontend.is_linked)
        now = [(one.pids["scheduler"], one.pids["worker0"]) for one in owner.health().replicas]
        assert now == pids, "nothing was started again"
        assert_same(await run_all(guest, data_parallel_rank=0), undisturbed)
    # What was asked for once more while the answer was on its way: the program keeps the link that it has.
    fleet, links = guest._engine._fleet, links_of(owner)  # type: ignore[attr-defined]
    guest._engine._thread.call(fleet._send, "relink", replica=0, link=replica.lost_link).result(10)
    assert_same(await run_all(guest, data_parallel_rank=0), undisturbed)
    assert links_of(owner) == links
    assert moved(guest)


@pytest.mark.anyio
async def test_controls_of_a_program_reach_every_replica(owner: AsyncLLM, guest: AsyncLLM) -> None:
    await guest.pause_generation(mode="keep")
    assert await owner.is_paused()
    await guest.resume_generation()
    assert not await owner.is_paused()
    (engine,) = [engine for engine in running_engines() if engine.name == "fleet"]
    assert (engine.num_replicas, engine.num_frontends, engine.num_running) == (2, 2, 0)
    stats = await guest.stats()
    assert set(stats["scheduler"]["replicas"]) == {0, 1}
    assert stats["frontend"]["num_routed"] == {}


@pytest.mark.anyio
async def test_each_program_counts_the_load_of_all(owner: AsyncLLM, guest: AsyncLLM) -> None:
    """Whether it has been taken up or not; what has gone does not count."""
    busy = [guest.generate(PROMPTS[0], params(seed, max_tokens=1500), data_parallel_rank=0) for seed in range(6)]
    for stream in busy:
        await anext(stream)
    quick = [owner.generate(PROMPTS[1], params(seed, max_tokens=300)) for seed in range(6)]
    for stream in quick:
        await anext(stream)
    loads = [replica.num_requests for replica in owner.health().replicas]
    assert loads == [0, 6], "those of the owner are where those of the program are not"
    for stream in (*busy, *quick):
        stream.abort()
        async for _ in stream:
            pass
    even = [owner.generate(PROMPTS[1], params(seed, max_tokens=300)) for seed in range(4)]
    for stream in even:
        await anext(stream)
    assert [replica.num_requests for replica in owner.health().replicas] == [2, 2]
    for stream in even:
        stream.abort()
        async for _ in stream:
            pass


def new_program() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, GUEST, "fleet"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.anyio
async def test_routers_of_all_programs_see_what_each_cache_has(owner: AsyncLLM, guest: AsyncLLM) -> None:
    """They ask no process, and it is true at once: also when the cache has been emptied, or its scheduler died."""
    tokens = np.arange(100, 200, dtype=np.int32)
    size = owner._engine.config.cache.block_size
    request = Routable(100, hash_blocks(tokens, size).tobytes())
    replicas = [llm._engine._fleet.replicas for llm in (owner, guest)]  # type: ignore[attr-defined]

    def found(number: int) -> list[int]:
        return [of_program[number].find(request.block_hashes) for of_program in replicas]

    async def ask() -> None:
        prompt = {"prompt_token_ids": tokens.tolist()}
        await owner.complete(prompt, params(1, max_tokens=2), data_parallel_rank=1)

    await ask()
    assert (found(0), found(1)) == ([0, 0], [100 // size] * 2)
    for of_program in replicas:
        assert make_router("seconds").route(request, views_of(list(of_program.values()))) == 1
    await guest.reset_prefix_cache()
    assert found(1) == [0, 0]
    await ask()
    assert found(1) == [100 // size] * 2
    kill([owner.health().replicas[1].pids["scheduler"]])
    await until(lambda: found(1) == [0, 0])
    await all_run(owner)
    await ask()
    assert found(1) == [100 // size] * 2
    kill([owner.health().replicas[1].pids["worker0"]])
    await until(lambda: found(1) == [0, 0])
    await all_run(owner)


@pytest.mark.anyio
async def test_a_program_that_dies_leaves_no_load_behind(owner: AsyncLLM) -> None:
    await all_run(owner)
    program = new_program()
    assert program.stdin is not None
    assert program.stdout is not None
    assert json.loads(program.stdout.readline()) == {"attached": True}
    for seed in range(4):
        command = {"do": "stream", "prompt": [5, 6, 7], "max_tokens": 1500, "seed": seed}
        program.stdin.write(json.dumps(command) + "\n")
    program.stdin.flush()
    for _ in range(4):
        assert json.loads(program.stdout.readline()) == {"first": True}
    board = owner._engine._fleet.board[0]  # type: ignore[attr-defined]
    assert [sum(journal[::2]) for journal in board.journals_of_others(0)[:2]] == [2, 2]
    os.kill(program.pid, signal.SIGKILL)
    program.communicate()
    await until(lambda: not any(sum(journal) for journal in board.journals_of_others(0)))
    with anyio.fail_after(30):
        while (await owner.stats())["scheduler"]["scheduler"]["num_running"]:
            await anyio.sleep(0.01)


@pytest.mark.anyio
async def test_a_replica_that_is_lost_and_the_end_of_the_engine(
    undisturbed: dict[str, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actorllm.client.engine_supervisor, "RestartLimits", lambda: RestartLimits(max_deaths=1))
    async with new_owner("doomed") as owner:
        await all_run(owner)
        guest = AsyncLLM.attach("doomed")
        pinned = guest.generate(*REQUESTS["plain"], data_parallel_rank=0)

        async def strike() -> None:
            kill([owner.health().replicas[0].pids["scheduler"]])

        assert_same(await run_all(guest, 10, strike), undisturbed)
        assert moved(guest)
        told = [Told.of(output) async for output in pinned]
        assert told[-1] == undisturbed["plain"], "it has waited for the next life of its replica"
        await all_run(owner)
        assert [replica.num_lives for replica in guest.health().replicas] == [2, 1]
        async with AsyncLLM.attach("doomed") as leaving:
            kill([owner.health().replicas[0].pids["scheduler"]])
            await until(lambda: leaving.health().replicas[0].state == "lost")
            waiting = leaving.generate(*REQUESTS["plain"], data_parallel_rank=0)
            await until(lambda: leaving.health().replicas[0].num_requests == 1)
        with pytest.raises(EngineShutdownError):
            await anext(waiting)
        await until(lambda: owner.health().replicas[0].num_lives == 3)
        await all_run(owner)
        stream = guest.generate(PROMPTS[0], params(1, max_tokens=1000))
        await anext(stream)
        for replica in owner.health().replicas:
            kill([replica.pids["scheduler"]])
        with pytest.raises(EngineDeadError, match="scheduler was killed by signal 9"):
            async for _ in stream:
                pass
        await until(lambda: guest.health().state == "dead")
        guest.shutdown()
