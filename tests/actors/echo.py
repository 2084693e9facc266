"""The smallest actor: it sends every message back, counts, and misbehaves on demand. An example, and the tests' actor.

An actor is a class with handlers. This one has no main loop of its own (the base waits until it is stopped), answers a
few verbs, and reports what it was told at start as a fact.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import anyio
import orjson

from actorllm.actors.actor import Actor
from actorllm.actors.link import Link
from actorllm.errors import UnsupportedModelError
from actorllm.messages import Message


@dataclass(frozen=True, slots=True)
class EchoConfig:
    """What an echo is configured with."""

    greeting: str = "hello"
    fail_at: str = ""
    """ "start", "configure", "unsupported", "hang", "kill", "exit": what goes wrong while it starts."""
    fail_rank: int = 0
    """Where."""
    total: int | None = None
    """Sum of the ranks' facts, known after the resolution."""

    def to_json(self) -> bytes:
        return orjson.dumps(asdict(self))

    @classmethod
    def from_json(cls, data: bytes | str) -> EchoConfig:
        return cls(**orjson.loads(data))


def environment(config: EchoConfig) -> dict[str, str]:
    """Shows how an ActorSpec sets variables of its process."""
    return {"ACTORLLM_ECHO": config.greeting}


class EchoActor(Actor):
    """Sends back what it gets."""

    VERBS = (*Actor.VERBS, "echo", "later", "never", "raise", "configuration", "pid", "crash", "progress")

    def __init__(self, name: str = "echo", rank: int = 0) -> None:
        super().__init__(name, rank)
        self.config = EchoConfig()
        self.num_messages = 0
        self.num_batches = 0

    async def on_start(self, config: EchoConfig) -> dict[str, Any]:
        self.config = config
        if self.rank == config.fail_rank:
            await self._fail_at_start(config.fail_at)
        return {"number": self.rank + 1, "pid": os.getpid()}

    def on_configure(self, config: EchoConfig) -> None:
        if config.fail_at == "configure" and self.rank == config.fail_rank:
            raise ValueError("this configuration is no good")
        self.config = config

    def on_message(self, link: Link, message: Message) -> None:
        self.num_messages += 1
        (link.group or link).send_nowait(message)

    def on_batch(self) -> None:
        self.num_batches += 1
        super().on_batch()

    def answer(self, verb: str, arguments: dict[str, Any]) -> Any:
        match verb:
            case "echo":
                return arguments
            case "later":
                return self._later(arguments["seconds"])
            case "never":
                return anyio.sleep_forever()
            case "raise":
                raise UnsupportedModelError(arguments["text"])
            case "configuration":
                return asdict(self.config) | {"environment": os.environ.get("ACTORLLM_ECHO")}
            case "pid":
                return os.getpid()
            case "progress":
                self.report_progress()
                return True
            case "crash":
                self.start_soon(self._crash, arguments["how"], arguments.get("text", ""))
                return "soon"
        return super().answer(verb, arguments)

    def statistics(self) -> dict[str, Any]:
        return super().statistics() | {"num_messages": self.num_messages, "num_batches": self.num_batches}

    async def _later(self, seconds: float) -> str:
        await anyio.sleep(seconds)
        return f"after {seconds:g} s"

    async def _crash(self, how: str, text: str) -> None:
        print(text, file=sys.stderr, flush=True) if text else None
        match how:
            case "raise":
                raise RuntimeError("told to raise")
            case "exit":
                os._exit(3)
            case "abort":
                os.abort()
            case "hang":
                time.sleep(3600)  # noqa: ASYNC251 - the point: a loop that does not react

    async def _fail_at_start(self, fail_at: str) -> None:
        match fail_at:
            case "start":
                raise RuntimeError("told to fail")
            case "unsupported":
                raise UnsupportedModelError("architecture 'Parrot' is not supported")
            case "hang":
                await anyio.sleep_forever()
            case "exit":
                print("these are my last words", file=sys.stderr, flush=True)
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), 9)
