"""Engines with scripted workers, whose processes import no torch: what takes the place of `engine_topology` in a test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from actorllm.actors.topology import Topology, engine_topology
from actorllm.config import EngineConfig

LIGHT_WORKERS = """
import actorllm.client.engine_supervisor
from tests.actors.scripted_topology import with_workers
actorllm.client.engine_supervisor.engine_topology = with_workers("SlowWorkerActor", inline_too=False)
"""
"""Before the text of a program: the workers of its engines import no torch."""


def with_workers(name: str, *, inline_too: bool = True) -> Callable[[EngineConfig], Topology]:
    """The engine's topology with this class of `tests.actors.scripted_worker` for its workers.

    Arguments:
        name: the class.
        inline_too: whether engines of topology "inline" have such workers as well; False: they have the model.
    """

    def build(config: EngineConfig) -> Topology:
        topology = engine_topology(config)
        if config.topology == "inline" and not inline_too:
            return topology
        path = f"tests.actors.scripted_worker:{name}"
        actors = tuple(
            dataclasses.replace(a, path=path, environment=None, preload=("numpy",))
            if a.name.startswith("worker")
            else a
            for a in topology.actors
        )
        return dataclasses.replace(topology, actors=actors)

    return build
