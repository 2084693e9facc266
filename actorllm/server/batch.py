"""Requests of many prompts: begun, collected and written in portions, so that the loop's other tasks have turns between them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import anyio
import anyio.lowlevel
import orjson
from anyio import to_thread

from actorllm.clock import now
from actorllm.intake.tokenization import Prompt

PORTION = 16
"""Prompts between two turns of the others, at most: submitting a short one takes a tenth of a millisecond or two."""
PORTION_S = 0.002
"""What a portion takes, about. A long prompt takes more, as it is copied."""
MIN_THREADED = 128
"""An answer with so many items is written by another thread."""
MIN_IDS_THREADED = 1 << 14
"""A list of so many ids, or texts of tokens, is."""

T = TypeVar("T")


class Abortable(Protocol):
    def abort(self) -> None: ...


S = TypeVar("S", bound=Abortable)


class Portions:
    """Of what is done in a row: after each, the loop's other tasks have a turn."""

    def __init__(self) -> None:
        self._number, self._began = 0, now()

    async def count(self) -> None:
        """One item is done."""
        self._number += 1
        if self._number >= PORTION or now() - self._began >= PORTION_S:
            await anyio.lowlevel.checkpoint()
            self._number, self._began = 0, now()


async def submitted(prompts: Sequence[Prompt], submit: Callable[[Prompt], S]) -> list[S]:
    """A stream for each prompt. If one of them is refused, or the caller is cancelled, none goes on."""
    streams: list[S] = []
    portions = Portions()
    try:
        for prompt in prompts:
            streams.append(submit(prompt))
            await portions.count()
    except BaseException:
        for stream in streams:
            stream.abort()
        raise
    return streams


async def json_of(values: Sequence[int] | Sequence[str]) -> bytes:
    """A list of token ids or of their texts, which may be long, as JSON."""
    return _written_list(values) if len(values) < MIN_IDS_THREADED else await to_thread.run_sync(_written_list, values)


def _written_list(values: Sequence[Any]) -> bytes:
    """In parts: one call for a million of them would keep all threads from running."""
    if len(values) <= MIN_IDS_THREADED:
        return orjson.dumps(values)
    parts = [orjson.dumps(values[at : at + MIN_IDS_THREADED])[1:-1] for at in range(0, len(values), MIN_IDS_THREADED)]
    return b"[%b]" % b",".join(parts)


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
