"""Requests of many prompts: begun, collected and written in portions, so that the loop's other tasks have turns between them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import anyio
import anyio.lowlevel
from anyio import to_thread

from actorllm.intake.tokenization import Prompt

PORTION = 16
"""Prompts between two turns of the others: submitting one takes a tenth of a millisecond or two."""
MIN_THREADED = 128
"""An answer with so many items is written by another thread."""

T = TypeVar("T")


class Abortable(Protocol):
    def abort(self) -> None: ...


S = TypeVar("S", bound=Abortable)


async def submitted(prompts: Sequence[Prompt], submit: Callable[[Prompt], S]) -> list[S]:
    """A stream for each prompt. If one of them is refused, or the caller is cancelled, none goes on."""
    streams: list[S] = []
    try:
        for number, prompt in enumerate(prompts, 1):
            streams.append(submit(prompt))
            if number % PORTION == 0:
                await anyio.lowlevel.checkpoint()
    except BaseException:
        for stream in streams:
            stream.abort()
        raise
    return streams


async def collected(outputs: Iterable[Awaitable[T]]) -> list[T]:
    """One after the other. What is there already is taken without waiting, so this pauses by itself."""
    found: list[T] = []
    for number, output in enumerate(outputs, 1):
        found.append(await output)
        if number % PORTION == 0:
            await anyio.lowlevel.checkpoint()
    return found


async def written(write: Callable[[Sequence[T]], bytes], outputs: Sequence[T], num_items: int | None = None) -> bytes:
    """The answer about all outputs. num_items: what there is to be written, where outputs are not what counts."""
    if (len(outputs) if num_items is None else num_items) < MIN_THREADED:
        return write(outputs)
    return await to_thread.run_sync(write, outputs)
