"""Step 10: rings in shared memory instead of pipes. A message is scalars and arrays, whose numbers stay as they are."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time

import numpy as np
from step01_scheduler import Row
from step06_real_model import Storyteller, expected_streams, int32, story_requests
from step09_worker_process import SurvivingScheduler, WorkerDied

from actorllm.config import BUNDLED_MODELS
from actorllm.ring.channel import LinkEnd, Message, create_link, open_hub, open_spoke
from actorllm.text.tokenizer import Tokenizer

PLAN, RESULT = 1, 2
NO_TOKEN = -1


def packed(rows: list[Row]) -> Message:
    """Columns: what has one number for each row is a scalar, tokens and blocks are arrays of all rows."""
    scalars = [[row.name, row.num_outputs, row.start, row.count, len(row.tokens), len(row.blocks)] for row in rows]
    tokens = [token for row in rows for token in row.tokens]
    return PLAN, scalars, [int32(tokens), int32([block for row in rows for block in row.blocks])]


def unpacked(message: Message) -> list[Row]:
    _, scalars, (tokens, blocks) = message
    rows, at, block_at = [], 0, 0
    for name, num_outputs, start, count, num_tokens, num_blocks in scalars:
        mine = blocks[block_at : block_at + num_blocks].tolist()
        rows.append(Row(name, tokens[at : at + num_tokens].tolist(), num_outputs, start, count, tuple(mine)))
        at, block_at = at + num_tokens, block_at + num_blocks
    return rows


async def serve(end: LinkEnd, num_blocks: int) -> None:
    """The program of the worker process."""
    asyncio.get_running_loop().add_reader(sys.stdin, sys.exit)  # nothing is ever written: the parent has ended
    spoke, model = open_spoke(end), Storyteller(num_blocks)
    while True:
        sampled = model(unpacked(await spoke.receiver.receive()))
        await spoke.sender.send(RESULT, None, [int32([NO_TOKEN if token is None else token for token in sampled])])


class RingWorker:
    async def start(self, num_blocks: int) -> None:
        """A link of two rings. The worker inherits its end as descriptors, so no name is left behind."""
        ends = create_link()
        self.hub, (end,) = open_hub(ends.hub), ends.spokes
        given = json.dumps([end.generation, *end.fds])
        command = [sys.executable, __file__, "worker", given, str(num_blocks)]
        self.process = await asyncio.create_subprocess_exec(*command, pass_fds=end.fds, stdin=asyncio.subprocess.PIPE)
        end.close()

    async def step(self, rows: list[Row]) -> list[int | None]:
        await self.hub.sender.send(*packed(rows))
        result = asyncio.ensure_future(self.hub.receivers[0].receive())
        death = asyncio.ensure_future(self.process.wait())  # a ring does not know that its peer is dead
        await asyncio.wait((result, death), return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if not result.done():
            result.cancel()
            await asyncio.gather(result, return_exceptions=True)
            raise WorkerDied
        return [None if token == NO_TOKEN else token for token in result.result()[2][0].tolist()]

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        self.hub.close()


async def main() -> None:
    requests = story_requests(Tokenizer(BUNDLED_MODELS["storyteller"]))
    scheduler, worker = SurvivingScheduler(max_seqs=4, num_blocks=64, max_step_tokens=32), RingWorker()
    await worker.start(64)
    for request in requests:
        scheduler.add(request)
    num_deaths, times = 0, []
    while rows := scheduler.schedule():
        if scheduler.num_steps == 12 and not num_deaths:
            os.kill(worker.process.pid, signal.SIGKILL)
        began = time.perf_counter()
        try:
            scheduler.update(rows, await worker.step(rows))
            times.append(time.perf_counter() - began)
        except WorkerDied:
            num_deaths += 1
            await worker.stop()
            await worker.start(64)
            scheduler.lose_worker()
    await worker.stop()
    same = {request.name: request.output for request in requests} == expected_streams()
    print(f"a step over the rings, the model included: {np.median(times) * 1e3:.1f} ms")
    print(f"{num_deaths} death; the same tokens as from an engine without one: {same}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        generation, *fds = json.loads(sys.argv[2])
        asyncio.run(serve(LinkEnd(generation, 1, 0, tuple(fds)), int(sys.argv[3])))
    else:
        asyncio.run(main())
