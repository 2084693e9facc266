"""Engines of echo actors, for every placement, stopped when the test is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from actorllm.actors.echo import EchoActor, EchoConfig
from actorllm.actors.engine_thread import EngineThread
from actorllm.actors.supervisor import ActorDeath, Supervisor
from actorllm.actors.topology import ActorSpec, LinkSpec, Placement, Topology

ECHO = "actorllm.actors.echo:EchoActor"
ENVIRONMENT = "actorllm.actors.echo:environment"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Actors run on uvloop."""
    return "asyncio", {"use_uvloop": True}


def echo_topology(placement: Placement, num_ranks: int = 2) -> Topology:
    """front (owner) ── middle ══ echo0, echo1 …, like the engine's own."""
    echoes = [ActorSpec(f"echo{rank}", ECHO, rank, placement) for rank in range(num_ranks)]
    middle = ActorSpec(
        "middle",
        ECHO,
        7,
        "owner" if placement == "thread" else placement,
        ENVIRONMENT if placement == "process" else None,
    )
    return Topology(
        (ActorSpec("front", ECHO, 8, "owner"), middle, *echoes),
        (LinkSpec.pair("middle", "front"), LinkSpec.broadcast("echoes", "middle", [echo.name for echo in echoes])),
    )


def total_of(config: EchoConfig, facts: dict[str, dict[str, Any]]) -> EchoConfig:
    return replace(config, total=sum(fact["number"] for fact in facts.values()))


@dataclass
class Engine:
    """A supervisor on its thread, and what it reported."""

    supervisor: Supervisor
    thread: EngineThread
    deaths: list[ActorDeath] = field(default_factory=list)
    died: threading.Event = field(default_factory=threading.Event)

    @property
    def front(self) -> EchoActor:
        actor = self.supervisor.actor("front")
        assert isinstance(actor, EchoActor)
        return actor

    def ask(self, verb: str, **arguments: Any) -> Any:
        """What front hears from middle."""
        return self.thread.call(self.front.ask, self.front.links["middle"], verb, **arguments).result(10)


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """An engine that is not started yet."""
    engines: list[Engine] = []

    def make(placement: Placement | Topology = "process", config: EchoConfig | None = None, **arguments: Any) -> Engine:
        topology = placement if isinstance(placement, Topology) else echo_topology(placement)
        supervisor = Supervisor(
            topology,
            config or EchoConfig(),
            resolve=arguments.pop("resolve", total_of),
            on_death=lambda death: note(engine, death),
            **arguments,
        )
        engine = Engine(supervisor, EngineThread(supervisor))
        engines.append(engine)
        return engine

    def note(engine: Engine, death: ActorDeath) -> None:
        engine.deaths.append(death)
        engine.died.set()

    yield make
    for engine in engines:
        engine.thread.stop()
        assert not engine.thread.is_alive


@pytest.fixture
def run_engine(make_engine: MakeEngine) -> MakeEngine:
    """An engine that runs."""

    def run(*args: Any, **arguments: Any) -> Engine:
        engine = make_engine(*args, **arguments)
        engine.thread.start(30)
        return engine

    return run
