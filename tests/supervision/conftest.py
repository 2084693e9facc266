"""Engines of echo actors, for every placement, stopped when the test is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from actorllm.actors.actor import Actor
from actorllm.actors.engine_thread import EngineThread
from actorllm.actors.link import Link
from actorllm.actors.topology import ActorSpec, LinkSpec, Placement, Topology
from actorllm.messages import Message
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.supervisor import Supervisor
from tests.actors.echo import EchoConfig

ECHO = "tests.actors.echo:EchoActor"
ENVIRONMENT = "tests.actors.echo:environment"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Actors run on uvloop."""
    return "asyncio", {"use_uvloop": True}


def echo_topology(placement: Placement) -> Topology:
    """front (owner) ── middle, front ══ echo0, echo1."""
    middle = ActorSpec("middle", ECHO, 7, "owner" if placement == "thread" else placement, ENVIRONMENT)
    echoes = [ActorSpec(f"echo{rank}", ECHO, rank, placement) for rank in range(2)]
    return Topology(
        (ActorSpec("front", ECHO, 8, "owner"), middle, *echoes),
        (LinkSpec.pair("front", "middle"), LinkSpec.broadcast("echoes", "front", ["echo0", "echo1"])),
    )


def total_of(config: EchoConfig, facts: dict[str, dict[str, Any]]) -> EchoConfig:
    return replace(config, total=sum(fact.get("number", 0) for fact in facts.values()))


class Client(Actor):
    """The owner's actor: writes down what comes back, and which peers are lost."""

    def __init__(self, name: str = "front", rank: int = 8) -> None:
        super().__init__(name, rank)
        self.received: list[tuple[Link, Message]] = []
        self.lost: list[Link] = []
        self.expected = 0
        self.has_all = threading.Event()

    def on_message(self, link: Link, message: Message) -> None:
        self.received.append((link, message))

    def on_batch(self) -> None:
        if len(self.received) >= self.expected:
            self.has_all.set()

    def on_peer_lost(self, link: Link) -> None:
        self.lost.append(link)

    def send(self, peer: str, *messages: Message) -> None:
        for message in messages:
            self.links[peer].send_nowait(message)


@dataclass
class Engine:
    """A supervisor on its thread, and what it reported."""

    supervisor: Supervisor
    thread: EngineThread
    front: Client
    deaths: list[ActorDeath] = field(default_factory=list)
    died: threading.Event = field(default_factory=threading.Event)

    def ask(self, verb: str, peer: str = "middle", **arguments: Any) -> Any:
        return self.thread.call(self.front.ask, self.front.links[peer], verb, **arguments).result(10)

    def ask_echoes(self, verb: str, **arguments: Any) -> list[Any]:
        answers: list[Any] = self.thread.call(self.front.ask_all, self.front.links["echoes"], verb, **arguments).result(
            10
        )
        return answers

    def exchange(self, peer: str, *messages: Message, num_replies: int) -> list[tuple[Link, Message]]:
        """What comes back for these messages."""
        self.front.received.clear()
        self.front.has_all.clear()
        self.front.expected = num_replies
        self.thread.call(self.front.send, peer, *messages).result(10)
        assert self.front.has_all.wait(10)
        return list(self.front.received)


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """An engine that is not started yet: of a placement, or of a topology whose owner-placed actor is "front"."""
    engines: list[Engine] = []

    def make(placement: Placement | Topology = "process", config: EchoConfig | None = None, **arguments: Any) -> Engine:
        def note(death: ActorDeath) -> None:
            engine.deaths.append(death)
            engine.died.set()

        front = Client()
        arguments = {"resolve": total_of, "on_death": note, "actors": {"front": front}} | arguments
        topology = placement if isinstance(placement, Topology) else echo_topology(placement)
        supervisor = Supervisor(topology, config or EchoConfig(), **arguments)
        engine = Engine(supervisor, EngineThread(supervisor), front)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.thread.stop()
        assert not engine.thread.is_alive
        assert not engine.supervisor.pids


@pytest.fixture
def run_engine(make_engine: MakeEngine) -> MakeEngine:
    """An engine that runs."""

    def run(*args: Any, **arguments: Any) -> Engine:
        engine = make_engine(*args, **arguments)
        engine.thread.start(30)
        return engine

    return run
