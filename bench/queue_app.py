"""What a server costs at the least: an application that streams the events of bench/serving.py from an asyncio queue.

Every PERIOD seconds one token of text is put into the queue of every request under way, as an engine does with a step; each is
one event of the same JSON. Run by bench/serving.py: python bench/queue_app.py PORT PERIOD.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

WORDS = [" there", " was", " a", " king", " who", " had", " three", " sons", ".", " The"]

left: dict[asyncio.Queue[str | None], int] = {}


async def produce(period_s: float) -> None:
    number = 0
    due = time.monotonic()
    while True:
        due = max(due + period_s, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        number += 1
        for queue in list(left):
            queue.put_nowait(WORDS[number % len(WORDS)])
            left[queue] -= 1
            if not left[queue]:
                del left[queue]
                queue.put_nowait(None)


async def events(body: dict[str, Any]) -> AsyncIterator[bytes]:
    queue: asyncio.Queue[str | None] = asyncio.Queue()
    left[queue] = body["max_tokens"]
    name, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
    while (text := await queue.get()) is not None:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
        event = {
            "id": name,
            "object": "text_completion",
            "created": created,
            "model": "storyteller",
            "choices": [choice],
        }
        yield b"data: " + orjson.dumps(event) + b"\n\n"
    yield b"data: [DONE]\n\n"


async def complete(request: Request) -> StreamingResponse:
    return StreamingResponse(events(orjson.loads(await request.body())), media_type="text/event-stream")


async def main(port: int, period_s: float) -> None:
    app = Starlette(routes=[Route("/v1/completions", complete, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=port, lifespan="off", access_log=False))
    async with asyncio.TaskGroup() as tasks:
        producer = tasks.create_task(produce(period_s))
        await server.serve()
        producer.cancel()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(int(sys.argv[1]), float(sys.argv[2])))
