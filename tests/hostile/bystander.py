"""A stream beside an attack: it gets the tokens of an undisturbed run, and no pause of it is long.

Time is counted in steps of the engine and in tokens of the bystander, never in seconds: these tests run on slow machines.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from actorllm import AsyncLLM, RequestOutputKind, SamplingParams
from actorllm.actors.record_file import read_recording, told_scheduler
from actorllm.scheduling.events import Events
from actorllm.scheduling.telemetry.recording import replay

PROMPT = "Once upon a time there was a little girl who lived near the forest."
NAME = "bystander"


@dataclass
class Bystander:
    """Requests of one prompt and seed, one after the other, for as long as the attack takes."""

    llm: AsyncLLM
    params: SamplingParams
    expected: list[int] = field(default_factory=list)
    """The tokens of an undisturbed run."""
    num_tokens: int = 0
    """Tokens so far: the clock of a test."""
    num_rounds: int = 0
    _has_moved: anyio.Event = field(default_factory=anyio.Event)

    async def _round(self) -> list[int]:
        """One request from its begin to its end; its tokens."""
        self.num_rounds += 1
        tokens: list[int] = []
        async for output in self.llm.generate(PROMPT, self.params, f"{NAME}-{self.num_rounds}"):
            new = output.outputs[0].token_ids
            tokens += new
            self.num_tokens += len(new)
            self._has_moved.set()
            self._has_moved = anyio.Event()
        return tokens

    async def run(self) -> None:
        while True:
            tokens = await self._round()
            assert tokens == self.expected, f"round {self.num_rounds} got other tokens than the undisturbed run"

    async def wait(self, num_tokens: int) -> None:
        """Until so many more tokens of the bystander are there."""
        until = self.num_tokens + num_tokens
        while self.num_tokens < until:
            await self._has_moved.wait()

    async def tokens_until_first(
        self, prompt: Any = "One day", params: SamplingParams | None = None, **arguments: Any
    ) -> int:
        """Tokens that the bystander gets between the submission of another small request and its first output."""
        params = params or SamplingParams(max_tokens=1, ignore_eos=True, seed=3)
        before = self.num_tokens
        async for _ in self.llm.generate(prompt, params, **arguments):
            return self.num_tokens - before
        raise AssertionError("the request ended without an output")


@contextlib.asynccontextmanager
async def bystander(llm: AsyncLLM, *, max_tokens: int = 200, **params: Any) -> AsyncIterator[Bystander]:
    """While the block runs, a stream of this engine goes on; its tokens are compared with those of a run before the block.

    At the end one more undisturbed round is compared, so that the engine is known to work. Exceptions come out plainly.
    """
    arguments = {"ignore_eos": True, "seed": 7, "temperature": 0.9, "output_kind": RequestOutputKind.DELTA} | params
    one = Bystander(llm, SamplingParams(max_tokens=max_tokens, **arguments))
    one.expected = await one._round()
    assert len(one.expected) == max_tokens
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.run)
            await one.wait(2)
            yield one
            await one.wait(2)
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    assert await one._round() == one.expected


def steps_by_request(record: Path) -> dict[str, list[int]]:
    """The numbers of the steps that gave a token, by request id, of a recorded engine that has ended."""
    steps: dict[str, list[int]] = {}
    scheduler = told_scheduler(record)
    apply = scheduler.update

    def update(result: Any, now: float) -> Events:
        events = apply(result, now)
        for sequence in events.sequences.tolist():
            steps.setdefault(sequence.submit.name or "", []).append(result.step)
        return events

    scheduler.update = update  # type: ignore[method-assign]
    for _ in replay(read_recording(record), scheduler):
        pass
    return steps


def longest_pause(record: Path) -> int:
    """Steps between two tokens of one round of the bystander, at most. 1: it had a token in every step."""
    return max(_pauses(steps_by_request(record)), default=0)


def _pauses(steps: dict[str, list[int]]) -> Iterator[int]:
    for name, numbers in steps.items():
        if name.startswith(NAME):
            yield from (after - before for before, after in itertools.pairwise(numbers))
