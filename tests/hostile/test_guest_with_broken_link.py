"""A scheduler is started again, and the link of one attached program cannot be opened: that program alone is told."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import anyio
import pytest

from actorllm import AsyncLLM, EngineDeadError, RequestOutputKind
from actorllm.actors.topology import LinkSpec
from actorllm.ring.channel import LinkEnds
from actorllm.supervision.wiring import Wiring
from tests.hostile.scripted import counts_of, harmless, scripted_engine

NUM_TOKENS = 300


@pytest.fixture(params=["a descriptor is missing", "the ring is truncated"])
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its second generation on, the link of the first program that joined is damaged."""
    make = Wiring._rings

    def damaged(self: Wiring, link: LinkSpec) -> LinkEnds | None:
        ends = make(self, link)
        if ends is None or "attached1" not in link.ends or ends.hub.generation == 1:
            return ends
        if request.param == "the ring is truncated":
            os.ftruncate(ends.hub.fds[0], 0)
            return ends
        os.close(ends.hub.fds[-1])
        return replace(ends, hub=replace(ends.hub, fds=ends.hub.fds[:-1]))

    monkeypatch.setattr(Wiring, "_rings", damaged)


@pytest.mark.usefixtures("broken")
async def test_its_program_is_told_and_everybody_else_goes_on() -> None:
    with scripted_engine(name="hostile-link") as llm:
        await llm.start()
        guests: list[AsyncLLM] = []
        tokens: dict[int, list[int]] = {}
        errors: dict[int, Exception] = {}
        running = anyio.Event()

        async def stream(number: int, engine: AsyncLLM) -> None:
            prompt, params, expected = harmless(number, NUM_TOKENS)
            params.output_kind = RequestOutputKind.DELTA
            tokens[number] = []
            try:
                async for output in engine.generate(prompt, params):
                    tokens[number] += output.outputs[0].token_ids
                    if all(tokens.values()) and len(tokens) == 3:
                        running.set()
            except EngineDeadError as error:
                errors[number] = error
            else:
                assert tokens[number] == expected

        try:
            for _ in range(2):
                guests.append(AsyncLLM.attach("hostile-link"))
                await guests[-1].start()
            os.kill(llm._engine.pids["worker0"], signal.SIGSTOP)  # until all of them are there
            async with anyio.create_task_group() as tasks:
                for number, engine in enumerate((guests[0], guests[1], llm)):
                    tasks.start_soon(stream, number, engine)
                counts = await counts_of(llm)
                while counts["num_running"] + counts["num_waiting"] < 3:
                    await anyio.sleep(0.001)
                    counts = await counts_of(llm)
                os.kill(llm._engine.pids["worker0"], signal.SIGCONT)
                await running.wait()
                os.kill(llm._engine.pids["scheduler"], signal.SIGKILL)
            assert list(errors) == [0]
            health = llm.health()
            assert (health.state, health.num_recoveries) == ("running", 1)
            guests.append(AsyncLLM.attach("hostile-link"))
            prompt, params, expected = harmless(5)
            assert (await guests[-1].complete(prompt, params)).outputs[0].token_ids == expected
        finally:
            for guest in guests:
                guest.shutdown()
