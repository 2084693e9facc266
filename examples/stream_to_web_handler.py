"""A web application that streams: GET /?prompt=... answers with the text as it comes.

`app` is plain ASGI, so it needs no framework; any server runs it: uvicorn --app-dir examples stream_to_web_handler:app

A server tells by a message that the client has left, or by an error of `send`. Either ends the request within one step.
"""

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

import anyio

from actorllm import ActorLLMError, AsyncLLM, SamplingParams
from actorllm.errors import EngineOverloaded, InvalidParameterError, InvalidPromptError

llm = AsyncLLM("storyteller")  # starts with the application
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


async def app(scope: Message, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await run_lifespan(receive, send)
    elif scope["type"] == "http":
        prompt = parse_qs(scope["query_string"].decode("latin-1")).get("prompt", [""])[0]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end_when_left, receive, tasks.cancel_scope)
            await tell(prompt, send)
            tasks.cancel_scope.cancel()


async def run_lifespan(receive: Receive, send: Send) -> None:
    await receive()
    try:
        await llm.start()
    except ActorLLMError as error:
        await send({"type": "lifespan.startup.failed", "message": str(error)})
        return
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await anyio.to_thread.run_sync(llm.shutdown)
    await send({"type": "lifespan.shutdown.complete"})


async def end_when_left(receive: Receive, answering: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.cancel()


async def tell(prompt: str, send: Send) -> None:
    start = {"type": "http.response.start", "headers": [(b"content-type", b"text/plain; charset=utf-8")]}
    try:
        pieces = llm.stream(prompt, SamplingParams(temperature=0.8, max_tokens=100))
        text = await anext(pieces, "")  # what is wrong with the request is known before a status is sent
    except (EngineOverloaded, InvalidParameterError, InvalidPromptError) as error:
        await send({**start, "status": 429 if isinstance(error, EngineOverloaded) else 400})
        await send({"type": "http.response.body", "body": str(error).encode()})
        return
    await send({**start, "status": 200})
    async with pieces:
        while text:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            text = await anext(pieces, "")
    await send({"type": "http.response.body", "body": b""})
