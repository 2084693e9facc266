"""`BodyReader`: the body of a request as a tree, without a stall of the loop, however large the body is.

A small body is parsed where it is. Each separator in a body may be an object to be made. So what is large in bytes, or in
separators, goes to a parse process, which starts when it is first needed. It takes one body at a time. Of those that wait, the
next one is the oldest, where a byte of a body counts as SECONDS_PER_BYTE of age less. So short ones go before long ones, and
none waits for ever. A client that leaves ends the work for its body; so does the time limit. A process that ends by itself is
replaced, and the body is tried once more. Owned by `ServerState`.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import anyio
import orjson
from anyio import to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from actorllm.clock import now
from actorllm.server.bodies.body_codec import question, refusal_of_json, unpack
from actorllm.server.bodies.limits import MAX_DEPTH, BodyRefusal, depth_refusal_of, refusal_of
from actorllm.server.bodies.owned_process import OwnedProcess, ProcessGone
from actorllm.server.envelope import ApiError

logger = logging.getLogger(__name__)

ALWAYS_SMALL = 1 << 14
"""Bytes of a body that is parsed on the loop, whatever is in it."""
ALWAYS_LARGE = 1 << 20
MAX_SEPARATORS = 1 << 13
"""Of a body between these two that is parsed on the loop."""
SEPARATORS = b",:[{"

MAX_HELD_BYTES = 256 << 20
"""Of bodies that arrive or wait, all together; bodies of ALWAYS_SMALL are always taken."""
MAX_WAITING = 64
"""Large bodies that wait to be parsed."""
SECONDS_PER_BYTE = 1e-6
PARSE_TIMEOUT_S = 30.0
MAX_ATTEMPTS = 2

PROGRAM = "actorllm.server.bodies.parse_process"


@dataclass(slots=True, order=True)
class _WaitingBody:
    """One body that waits for the process."""

    due: float
    has_come: anyio.Event = field(default_factory=anyio.Event, compare=False)


class BodyReader:
    def __init__(self) -> None:
        self._num_held = 0
        self._process: OwnedProcess | None = None
        self._is_busy = False
        self._waiting: list[_WaitingBody] = []

    @property
    def process(self) -> OwnedProcess | None:
        """The parse process, once there is one."""
        return self._process

    @property
    def num_waiting(self) -> int:
        """Large bodies that wait for their turn."""
        return len(self._waiting)

    def close(self) -> None:
        """End the parse process. The next large body starts another one."""
        if self._process is not None:
            self._process.wait()

    async def read(self, request: Request, token_fields: Collection[str] = ()) -> dict[str, Any]:
        """The body of a request. Raises ApiError and ClientDisconnect.

        token_fields: of the body, those that may be long lists of token ids, or lists of such lists; they come as arrays then.
        """
        data = bytearray()
        try:
            await self._collect(request, data)
            if is_small(data):
                tree = _parsed(data)
            else:
                tree = await self._parsed_elsewhere(question(data, token_fields), request.receive)
        finally:
            self._num_held -= len(data)
        if isinstance(tree, BodyRefusal):
            raise ApiError(400, *tree)
        return tree

    async def read_bytes(self, request: Request) -> bytes:
        """A body that is no tree, as it came. Raises ApiError and ClientDisconnect."""
        data = bytearray()
        try:
            await self._collect(request, data)
            return bytes(data)
        finally:
            self._num_held -= len(data)

    async def _collect(self, request: Request, data: bytearray) -> None:
        """Add a body to what is empty. The caller gives back its room."""
        async for chunk in request.stream():
            if len(data) + len(chunk) > ALWAYS_SMALL:
                self._check_room(len(chunk), len(data))
            data += chunk
            self._num_held += len(chunk)

    def _check_room(self, num_more: int, num_own: int) -> None:
        if self._num_held + num_more > MAX_HELD_BYTES and self._num_held > num_own:
            raise ApiError(429, f"bodies of other requests take {self._num_held} bytes already; try again later")

    # What is large

    async def _parsed_elsewhere(self, asked: list[bytes | bytearray], receive: Receive) -> dict[str, Any] | BodyRefusal:
        """Raises ClientDisconnect as soon as the client leaves."""
        reply: bytearray | None = None
        error: ApiError | None = None

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            try:
                reply = await self._in_turn(asked)
            except ApiError as caught:  # not from within the group, which would wrap it
                error = caught
            tasks.cancel_scope.cancel()
        if error is not None:
            raise error
        if reply is None:
            raise ClientDisconnect
        return unpack(reply)

    async def _in_turn(self, asked: list[bytes | bytearray]) -> bytearray:
        if self._is_busy:
            await self._wait_for_turn(sum(map(len, asked)))
        self._is_busy = True
        try:
            return await self._reply(asked)
        finally:
            self._pass_on()

    async def _wait_for_turn(self, num_bytes: int) -> None:
        if len(self._waiting) >= MAX_WAITING:
            raise ApiError(429, f"{len(self._waiting)} large bodies wait to be parsed; try again later")
        turn = _WaitingBody(now() + num_bytes * SECONDS_PER_BYTE)
        heapq.heappush(self._waiting, turn)
        try:
            await turn.has_come.wait()
        except BaseException:
            if turn.has_come.is_set():
                self._pass_on()
            else:
                self._waiting = [other for other in self._waiting if other is not turn]
                heapq.heapify(self._waiting)
            raise

    def _pass_on(self) -> None:
        """The process is free: the next body has its turn."""
        self._is_busy = bool(self._waiting)
        if self._waiting:
            heapq.heappop(self._waiting).has_come.set()

    async def _reply(self, asked: list[bytes | bytearray]) -> bytearray:
        for _ in range(MAX_ATTEMPTS):
            process = await self._running()
            try:
                with anyio.fail_after(PARSE_TIMEOUT_S):
                    return await process.ask(asked)
            except ProcessGone:
                logger.warning(
                    "the process that parses large bodies ended while it had one of %d bytes", len(asked[-1])
                )
            except TimeoutError:
                logger.warning("a body of %d bytes was not parsed within %g s", len(asked[-1]), PARSE_TIMEOUT_S)
                break
            finally:
                if not process.is_idle:
                    await _end(process)
        raise ApiError(503, "the body could not be parsed in time; try again later, or send a smaller one")

    async def _running(self) -> OwnedProcess:
        if self._process is None or not self._process.is_alive:
            try:
                self._process = await OwnedProcess.start(PROGRAM)
            except OSError as error:
                logger.warning("a process for large bodies cannot be started: %s", error)
                raise ApiError(503, "the server has no process for a body of this size now; try again later") from error
        return self._process


async def _end(process: OwnedProcess) -> None:
    """Kill it; its memory may take a while to be gone, and the loop does not wait for that."""
    process.kill()
    with anyio.CancelScope(shield=True):
        await to_thread.run_sync(process.wait, limiter=anyio.CapacityLimiter(1))


def is_small(data: bytearray) -> bool:
    """Few enough bytes, or separators, to be parsed on the loop."""
    if len(data) <= ALWAYS_SMALL:
        return True
    if len(data) > ALWAYS_LARGE:
        return False
    return len(data) - len(data.translate(None, SEPARATORS)) <= MAX_SEPARATORS


def _parsed(data: bytearray) -> dict[str, Any] | BodyRefusal:
    try:
        tree = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        return refusal_of_json(error)
    if not isinstance(tree, dict):
        return BodyRefusal(f"the body must be a JSON object, not {type(tree).__name__}", None)
    refusal = refusal_of(tree)
    if refusal is None and data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        refusal = depth_refusal_of(tree)
    return refusal or tree
