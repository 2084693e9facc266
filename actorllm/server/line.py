"""`ControlLine`: questions and answers between the owner of a server and its API processes, over one socket, in both directions.

A SEQPACKET pair with the frames of `actors.child`: ask {id, verb, arguments} + descriptors, answer {id, value} or
{id, type_name, message}. No side waits for a peer that is gone: the end of the socket ends every open question. Used by
`processes` (the owner) and `api_process`.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from anyio.abc import TaskGroup

from actorllm.actors.actor import own_class
from actorllm.actors.child import receive_frame, send_frame
from actorllm.errors import ActorLLMError, EngineError, PeerLostError

logger = logging.getLogger(__name__)

MAX_TEXT = 1 << 14

Answerer = Callable[[str, dict[str, Any], tuple[int, ...]], Awaitable[Any]]
"""(verb, arguments, descriptors, which it owns) -> a JSON value. What it raises is the answer as well."""


class ControlLine:
    def __init__(self, control: socket.socket, answer: Answerer) -> None:
        control.setblocking(False)
        self._control = control
        self._answer = answer
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Question] = {}
        self._is_open = True

    async def run(self) -> None:
        """Take what the other side says until it is gone."""
        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    await anyio.wait_readable(self._control)
                    if not self._take_all(tasks):
                        tasks.cancel_scope.cancel()
                        break
        finally:
            self._is_open = False
            for question in self._asked.values():
                question.done.set()

    def _take_all(self, tasks: TaskGroup) -> bool:
        """False: the other side is gone."""
        while True:
            try:
                frame, fds = receive_frame(self._control)
            except BlockingIOError:
                return True
            if frame is None:
                return False
            if frame["op"] == "ask":
                tasks.start_soon(self._reply, frame, fds)
            else:
                question = self._asked.get(frame["id"])
                if question is not None:
                    question.frame = frame
                    question.done.set()

    async def ask(self, verb: str, timeout: float, fds: tuple[int, ...] = (), **arguments: Any) -> Any:
        """Raises PeerLostError, TimeoutError, or what the other side raised if that is an error of ours."""
        number = next(self._numbers)
        question = self._asked[number] = _Question()
        try:
            self._send("ask", fds, id=number, verb=verb, arguments=arguments)
            with anyio.fail_after(timeout):
                await question.done.wait()
        finally:
            del self._asked[number]
        frame = question.frame
        if frame is None:
            raise PeerLostError(f"the other process ended before it answered {verb!r}")
        if "type_name" in frame:
            raise (own_class(frame["type_name"]) or ActorLLMError)(frame["message"])
        return frame["value"]

    async def _reply(self, frame: dict[str, Any], fds: tuple[int, ...]) -> None:
        try:
            told = {"value": await self._answer(frame["verb"], frame["arguments"], fds)}
        except Exception as error:  # of one question: the process that asked is told
            if not isinstance(error, ActorLLMError):
                logger.exception("%r cannot be answered", frame["verb"])
            told = {"type_name": type(error).__name__, "message": str(error)[:MAX_TEXT]}
        try:
            self._send("answer", id=frame["id"], **told)
        except PeerLostError as error:
            logger.debug("an answer came too late: %s", error)

    def _send(self, op: str, fds: tuple[int, ...] = (), **fields: Any) -> None:
        if not self._is_open:
            raise PeerLostError("the other process is gone")
        try:
            send_frame(self._control, op, fds, **fields)
        except OSError as error:
            raise PeerLostError(f"the other process does not listen: {os.strerror(error.errno or 0)}") from error
        except ValueError as error:  # too long for a frame
            raise EngineError(str(error)) from error


class _Question:
    __slots__ = ("done", "frame")

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.frame: dict[str, Any] | None = None
