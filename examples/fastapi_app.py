"""A FastAPI application that has an engine for its lifetime. A client that leaves stops the work of its request.

uvicorn examples.fastapi_app:app
curl -N localhost:8000/story -H 'content-type: application/json' -d '{"prompt": "Once upon a time"}'
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from actorllm import AsyncLLM, RequestOutputKind, SamplingParams
from actorllm.errors import EngineOverloaded, InvalidParameterError, InvalidPromptError


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncLLM("storyteller", max_waiting_requests=64) as llm:
        app.state.llm = llm
        yield
        await llm.drain(timeout=10)  # what is under way may finish


app = FastAPI(lifespan=lifespan)


class Story(BaseModel):
    prompt: str
    max_tokens: int = Field(default=100, gt=0)


@app.post("/story")
async def story(body: Story, request: Request) -> StreamingResponse:
    params = SamplingParams(max_tokens=body.max_tokens, output_kind=RequestOutputKind.DELTA)
    try:
        stream = request.app.state.llm.generate(body.prompt, params)  # raises at once where too many wait
        first = await first_output(stream, request)  # what is wrong is known before the status is sent
    except EngineOverloaded as error:
        raise HTTPException(429, str(error)) from error
    except (InvalidParameterError, InvalidPromptError) as error:
        raise HTTPException(400, str(error)) from error
    return StreamingResponse(texts(first, stream), media_type="text/plain; charset=utf-8")


async def first_output(stream: Any, request: Request) -> Any:
    """A request may wait long for its first token. Its client may leave meanwhile, which is the next message of the server."""
    first, left = asyncio.create_task(anext(stream)), asyncio.create_task(request.receive())
    try:
        await asyncio.wait((first, left), return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            raise HTTPException(499)
        return first.result()
    finally:
        first.cancel()
        left.cancel()


async def texts(first: Any, stream: Any) -> AsyncIterator[str]:
    async with stream:  # a client that leaves ends this block, and with it the request
        yield first.outputs[0].text
        async for output in stream:
            yield output.outputs[0].text
