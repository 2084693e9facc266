"""An engine that was built with one replica gets more: its streams go on with the same tokens, also where it cannot grow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import actorllm.fleet.fleet
from actorllm import AsyncLLM
from actorllm.client.stream import RequestStream
from actorllm.errors import EngineDrainingError, EngineError, InvalidParameterError
from actorllm.fleet.replica import ReplicaFrontend
from tests.fleet.streams import PROMPTS, REQUESTS, Told, assert_same, moved, params, run_all, until

OPTIONS: dict[str, Any] = {"dtype": "float32", "enable_prompt_embeds": True, "standby_worker": False}


@pytest.mark.anyio
async def test_streams_go_on_while_it_gets_replicas_and_loses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are pinned wait for the replica of their number. It is a fleet from then on, also in what it gives up."""
    told: list[tuple[int, int]] = []
    asked = ReplicaFrontend.ask_scheduler

    async def ask(self: ReplicaFrontend, verb: str, **arguments: Any) -> Any:
        answer = await asked(self, verb, **arguments)
        if verb == "limit_threads":
            told.append((arguments["num_threads"], len(answer)))
        return answer

    monkeypatch.setattr(ReplicaFrontend, "ask_scheduler", ask)
    async with AsyncLLM("storyteller", name="growing", **OPTIONS) as llm:
        undisturbed = await run_all(llm)
        pinned: list[RequestStream] = []

        async def grow() -> None:
            await llm.pause_generation(mode="keep")
            pinned.append(llm.generate(*REQUESTS["plain"], data_parallel_rank=0))
            await llm.scale(2)
            assert await llm.is_paused()
            await llm.resume_generation()

        assert_same(await run_all(llm, 10, grow), undisturbed)
        assert moved(llm)
        assert [(one.number, one.state) for one in llm.health().replicas] == [(0, "running"), (1, "running")]
        assert [Told.of(output) async for output in pinned[0]][-1].sequences == undisturbed["plain"].sequences
        assert told == [], "each began with its share of the cores"
        async with AsyncLLM.attach("growing") as guest:
            await guest.start()
            assert len(guest.health().replicas) == 2, "a program that joins now sees both"
        assert_same(await run_all(llm, 10, lambda: llm.scale(1)), undisturbed)
        assert [count for _, count in told] == [1], "the one that is left has all cores"


@pytest.mark.anyio
async def test_it_goes_on_as_it_was_where_it_cannot_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that do not start, and programs that have joined."""
    async with AsyncLLM("storyteller", name="grown", **OPTIONS) as llm:
        stream = llm.generate(PROMPTS[0], params(1, max_tokens=60))
        await anext(stream)
        with pytest.raises(InvalidParameterError, match="num_replicas=65 must be from 1 to 64"):
            await llm.scale(65)
        async with AsyncLLM.attach("grown") as guest:
            await guest.start()
            with pytest.raises(EngineError, match="programs have joined engine 'grown', which know of one replica"):
                await llm.scale(2)
        with monkeypatch.context() as broken:
            config_of = actorllm.fleet.fleet.replica_config

            def wrong(config: Any, *more: Any) -> Any:
                return replace(config_of(config, *more), model=replace(config.model, path="/nowhere"))

            broken.setattr(actorllm.fleet.fleet, "replica_config", wrong)
            with pytest.raises(Exception, match="nowhere"):
                await llm.scale(2)
        assert [(one.number, one.state) for one in llm.health().replicas] == [(0, "running")]
        assert len([output async for output in stream][-1].outputs[0].token_ids) == 60
        assert (await llm.complete(PROMPTS[0], params(1, max_tokens=3))).finished
        await llm.drain()
        with pytest.raises(EngineDrainingError):
            await llm.scale(2)


@pytest.mark.anyio
@pytest.mark.parametrize("ready_replicas", [None, 2])
async def test_as_many_replicas_as_were_asked_for_make_it_ready(
    monkeypatch: pytest.MonkeyPatch, ready_replicas: int | None
) -> None:
    """One by default. The others start behind, and here the second one cannot."""
    config_of = actorllm.fleet.fleet.replica_config

    def wrong(config: Any, number: int, *more: Any) -> Any:
        made = config_of(config, number, *more)
        return made if number == 0 else replace(made, model=replace(made.model, path="/nowhere"))

    monkeypatch.setattr(actorllm.fleet.fleet, "replica_config", wrong)
    more = {} if ready_replicas is None else {"ready_replicas": ready_replicas}
    llm = AsyncLLM("storyteller", data_parallel_size=2, num_threads=1, **OPTIONS, **more)
    if ready_replicas is None:
        await llm.start()
        await until(lambda: llm.health().replicas[1].state == "lost")
        assert "nowhere" in str(llm.health().replicas[1].last_failure)
        assert (await llm.complete(PROMPTS[0], params(1, max_tokens=3))).finished
        assert (llm.health().state, llm.health().replicas[0].state) == ("running", "running")
    else:
        with pytest.raises(Exception, match="nowhere"):
            await llm.start()
    llm.shutdown()
