"""Step 7: streams for an asyncio application. The model computes in a thread; tokens arrive with `async for`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from step01_scheduler import Model, Request
from step05_prefix_cache import CachingScheduler
from step06_real_model import Storyteller, expected_streams, story_requests

from actorllm.text.tokenizer import Tokenizer


class Engine:
    def __init__(self, scheduler: CachingScheduler, model: Model) -> None:
        self.scheduler = scheduler
        self.model = model
        self.wake = asyncio.Event()
        self.queues: dict[str, asyncio.Queue[int | None]] = {}
        self.left: list[Request] = []

    async def stream(self, request: Request) -> AsyncIterator[int]:
        """The tokens of a request as they come. Leaving the loop ends the request."""
        queue = self.queues[request.name] = asyncio.Queue()
        self.scheduler.add(request)
        self.wake.set()
        try:
            while (token := await queue.get()) is not None:
                yield token
        finally:
            if self.queues.pop(request.name, None):
                self.left.append(request)

    async def run(self) -> None:
        """The loop of step 1. Requests come and go between two steps, never within one."""
        while True:
            self.drop_left()
            rows = self.scheduler.schedule()
            if not rows:
                self.wake.clear()
                await self.wake.wait()  # idle costs nothing
                continue
            sampled = await asyncio.to_thread(self.model, rows)
            ended = self.scheduler.update(rows, sampled)
            for row, token in zip(rows, sampled, strict=True):
                if token is not None and row.name in self.queues:
                    self.queues[row.name].put_nowait(token)
            for request in ended:
                if queue := self.queues.pop(request.name, None):
                    queue.put_nowait(None)

    def drop_left(self) -> None:
        for request in self.left:
            if request in self.scheduler.running:
                self.scheduler.running.remove(request)
                self.scheduler.release(request)
            elif request in self.scheduler.waiting:
                self.scheduler.waiting.remove(request)
        self.left.clear()


async def main() -> None:
    model = await asyncio.to_thread(Storyteller, 64)
    tokenizer = Tokenizer(model.runner.config.model.path)
    engine = Engine(CachingScheduler(max_seqs=4, num_blocks=64, max_step_tokens=32), model)
    running = asyncio.create_task(engine.run())
    arrived: list[str] = []

    async def read(request: Request, at_most: int) -> list[int]:
        tokens: list[int] = []
        async with aclosing(engine.stream(request)) as stream:
            async for token in stream:
                tokens.append(token)
                arrived.append(request.name)
                if len(tokens) == at_most:
                    break
        return tokens

    king, fox, mill = story_requests(tokenizer)
    streams = await asyncio.gather(read(king, 32), read(fox, 8), read(mill, 32))
    running.cancel()
    engine.drop_left()
    expected = expected_streams()
    print("arrived:", *arrived[:9], "...")
    print(f"fox left after {len(streams[1])} tokens:{tokenizer.decode(streams[1])!r}")
    print(f"the same tokens: {streams == [expected['king'], expected['fox'][:8], expected['mill']]}")
    print(f"all blocks are free again: {len(engine.scheduler.free) == 64}")


if __name__ == "__main__":
    asyncio.run(main())
