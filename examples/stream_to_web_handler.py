"""A web application that streams: GET /?prompt=... answers with the text as it comes.

`app` is plain ASGI, so it needs no framework; any server runs it:

    uvicorn --app-dir examples stream_to_web_handler:app

When the client goes away the handler is cancelled or its next send fails: the request ends within one step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

from actorllm import ActorLLMError, AsyncLLM, SamplingParams

llm = AsyncLLM("storyteller")  # starts with the first request, or with the application

Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]


async def app(scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
    if scope["type"] == "lifespan":
        await run_lifespan(receive, send)
    elif scope["type"] == "http":
        query = parse_qs(scope["query_string"].decode())
        await tell(query.get("prompt", [""])[0], send)


async def run_lifespan(receive: Callable[[], Awaitable[Message]], send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await llm.start()
        else:
            llm.shutdown()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def tell(prompt: str, send: Send) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    is_started = False
    try:
        async for piece in llm.stream(prompt, SamplingParams(temperature=0.8, max_tokens=100)):
            if not is_started:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                is_started = True
            await send({"type": "http.response.body", "body": piece.encode(), "more_body": True})
    except ActorLLMError as error:
        if is_started:
            raise  # too late for a status: let the server cut the connection
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        await send({"type": "http.response.body", "body": str(error).encode()})
        return
    await send({"type": "http.response.body", "body": b""})
