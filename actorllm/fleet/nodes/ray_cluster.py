"""Agents that Ray places and keeps. The only module that knows Ray (the extra `ray`).

Ray says where a replica may be, starts an agent there, and ends it with the driver. Tokens go over the agent's own stream, so the
death of Ray's head stops none. Restarts are the fleet's: Ray starts no actor again. When an agent is gone, the next life of its
replica asks for another one; Ray moves the bundle of a dead node by itself.

What can never fit is refused at once, with what was asked for and what the largest node has. What may fit is waited for, and
the log says so.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, EngineShutdownError, EngineStartError
from actorllm.fleet.nodes.hosts import Located, NodeAddress

logger = logging.getLogger(__name__)

TOLD_EVERY_S = 10.0
"""Between two lines about a placement that is waited for."""
LOOK_EVERY_S = 1.0
"""At whether the engine was shut down meanwhile."""
PASSED_ON = ("HF_", "NCCL_", "GLOO_", "TORCH_", "ACTORLLM_", "VLLM_BATCH_INVARIANT")
"""What the names of variables begin with that agents get of the driver's environment."""


class RayAgent:
    """The actor: an agent on a thread of its own."""

    def __init__(self, key: bytes, environment: Mapping[str, str]) -> None:
        os.environ.update({name: value for name, value in environment.items() if name not in os.environ})
        from actorllm.actors.engine_thread import LoopThread
        from actorllm.fleet.nodes.agent import NodeAgent

        self._thread = LoopThread("actorllm:agent")
        self._thread.start_thread()
        self._agent = NodeAgent(key)
        self._bound: NodeAddress | None = None
        self._has_bound = threading.Event()
        self._over = threading.Event()

    def listen(self) -> tuple[str, int]:
        """Where it listens: the address by which Ray knows this node, and a port that was free."""
        if self._bound is None:
            host = str(_ray().util.get_node_ip_address())

            def tell(bound: NodeAddress) -> None:
                self._bound = bound
                self._has_bound.set()

            running = self._thread.call(self._agent.run, NodeAddress(host, ANY_PORT), tell)
            running.add_done_callback(self._end)
            self._has_bound.wait()
            if self._bound is None:
                running.result()
        assert self._bound is not None
        return self._bound.host, self._bound.port

    def _end(self, _: object) -> None:
        self._has_bound.set()
        self._over.set()

    def wait(self) -> None:
        """Until the agent has ended; the death of this process ends the call as well."""
        self._over.wait()


ANY_PORT = -1
"""One that is free."""


def bundle_of(config: EngineConfig) -> dict[str, float]:
    """What Ray is asked for one replica: its GPUs, and a core for each thread that was asked for."""
    bundle = {"CPU": float(config.num_threads or 1)}
    if config.device == "cuda":
        bundle["GPU"] = float(config.world_size)
    return bundle | {name: float(value) for name, value in config.resources_per_replica.items()}


def check_fit(bundle: Mapping[str, float], number: int, nodes: list[Mapping[str, float]]) -> None:
    """Pure. Raises ConfigError: so many bundles can never be placed on nodes that have so much in all."""
    room = [
        min((int(node.get(name, 0.0) / asked) for name, asked in bundle.items() if asked), default=number)
        for node in nodes
    ]
    if nodes and max(room) >= 1 and sum(room) >= number:
        return
    largest = max(nodes, key=lambda node: sum(node.get(name, 0.0) for name in bundle), default={})
    table = "\n".join(
        f"  {name:<12} {asked:>8g} {largest.get(name, 0.0):>14g} {sum(node.get(name, 0.0) for node in nodes):>14g}"
        for name, asked in bundle.items()
    )
    raise ConfigError(
        f"Ray cannot place {number} replicas: its {len(nodes)} nodes have room for {sum(room)}\n"
        f"  {'resource':<12} {'asked':>8} {'largest node':>14} {'all nodes':>14}\n{table}\n"
        f"ask for less (data_parallel_size, num_threads, resources_per_replica), or add nodes"
    )


class RayPlacement:
    """The agents of one fleet. All methods but `close` wait, and are called on threads beside the loop."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._key = secrets.token_hex(32).encode()
        self._lock = threading.Lock()
        self._is_closed = False
        self._places: list[tuple[Any, int]] | None = None
        """Of the replicas that there always are: groups, and bundles of them."""
        self._more: dict[int, Any] = {}
        """The groups of others, by index."""
        self._ours: list[Any] = []
        """Groups that are removed at the end."""
        self._agents: dict[int, Any] = {}
        self._has_asked = False

    def locate(self, number: int) -> Located:
        """An agent for the number-th replica. Raises ConfigError, EngineStartError."""
        ray = _ray()
        with self._lock:
            self._check_open()
            self._prepare(ray)
            index = number - self._config.data_parallel_size_local
            self._end(ray, index)
            agent = self._agents[index] = self._start(ray, *self._place(ray, index))
        began = told_at = time.monotonic()
        found = agent.listen.remote()
        while True:
            try:
                host, port = ray.get(found, timeout=LOOK_EVERY_S)
                break
            except ray.exceptions.GetTimeoutError:
                self._check_open()
                waited_s = time.monotonic() - began
                if waited_s > self._config.placement_timeout_s:
                    raise EngineStartError(
                        f"Ray has not started replica {number} within {waited_s:.0f} s; placement_timeout_s says how long it "
                        f"may take"
                    ) from None
                if time.monotonic() - told_at >= TOLD_EVERY_S:
                    told_at = time.monotonic()
                    logger.warning("Ray has not started replica %d yet, after %.0f s", number, waited_s)
            except ray.exceptions.RayError as error:
                raise EngineStartError(f"Ray could not start replica {number}: {error}") from error
        return Located(NodeAddress(host, port), self._key, lambda told: _when_over(agent, told))

    def _prepare(self, ray: Any) -> None:
        """Places for the replicas that there always are, once."""
        if self._places is not None:
            return
        if not ray.is_initialized():
            ray.init(address=self._config.ray_address or "auto", log_to_driver=False)
        bundle = bundle_of(self._config)
        size = self._config.min_replicas or self._config.data_parallel_size
        number = max(0, size - self._config.data_parallel_size_local)
        group = ray.util.get_current_placement_group()
        if group is not None:  # of a caller that has placed us, such as Ray Serve or a trainer
            fitting = [
                index
                for index, has in enumerate(group.bundle_specs)
                if all(has.get(name, 0.0) >= asked for name, asked in bundle.items())
            ]
            check_fit(bundle, number, [group.bundle_specs[index] for index in fitting])
            self._places = [(group, index) for index in fitting]
            return
        check_fit(bundle, number, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        made = self._placed(ray, bundle, number) if number else None
        self._places = [(made, index) for index in range(number)]

    def _place(self, ray: Any, index: int) -> tuple[Any, int]:
        """That of a replica; one that there is not always has a group of its own, which is given back with it."""
        assert self._places is not None
        if index < len(self._places):
            return self._places[index]
        if index not in self._more:
            self._more[index] = self._placed(ray, bundle_of(self._config), 1)
        return self._more[index], 0

    def _placed(self, ray: Any, bundle: dict[str, float], number: int) -> Any:
        """A group of so many bundles, once Ray has room for it. Raises EngineStartError, EngineShutdownError."""
        strategy = {"spread": "SPREAD", "pack": "PACK"}[self._config.placement]
        made = ray.util.placement_group([bundle] * number, strategy=strategy)
        began = told_at = time.monotonic()
        while not made.wait(LOOK_EVERY_S):
            waited_s = time.monotonic() - began
            if self._is_closed:
                break
            if waited_s > self._config.placement_timeout_s:
                ray.util.remove_placement_group(made)
                raise EngineStartError(
                    f"Ray had no room for {number} x {bundle} within {waited_s:.0f} s: others use it (`ray status`); "
                    f"placement_timeout_s says how long that may take"
                )
            if time.monotonic() - told_at >= TOLD_EVERY_S:
                told_at = time.monotonic()
                logger.warning("Ray has no room for %d x %s yet, after %.0f s: others use it", number, bundle, waited_s)
        if self._is_closed:  # by a thread that did not wait for this one
            ray.util.remove_placement_group(made)
            self._check_open()
        self._ours.append(made)
        return made

    def want(self, num_replicas: int) -> None:
        """Ask the autoscaler of the cluster for room for so many replicas in all; it adds nodes, and takes them away."""
        ray = _ray()
        if not ray.is_initialized():  # all are here so far: places are asked for when the first one elsewhere starts
            return
        self._has_asked = True
        bundle = bundle_of(self._config)
        number = max(0, num_replicas - self._config.data_parallel_size_local)
        try:
            importlib.import_module("ray.autoscaler.sdk").request_resources(bundles=[bundle] * number)
        except ray.exceptions.RayError as error:  # its head is away: places are asked for when replicas start
            logger.warning("Ray was not asked for %d x %s: %s", number, bundle, error)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineShutdownError("the engine was shut down while Ray placed its replicas")

    def _start(self, ray: Any, group: Any, bundle: int) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        where = strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
        )
        asked = bundle_of(self._config)
        kind = ray.remote(RayAgent).options(
            num_cpus=asked["CPU"],
            num_gpus=asked.get("GPU", 0.0),
            resources={name: value for name, value in asked.items() if name not in ("CPU", "GPU")},
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=2,
            scheduling_strategy=where,
        )
        given = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        return kind.remote(self._key, given)

    def _end(self, ray: Any, index: int) -> None:
        agent = self._agents.pop(index, None)
        if agent is not None:
            with contextlib.suppress(Exception):  # it is dead, or Ray's head is: nothing of it is used any more
                ray.kill(agent)

    def close(self) -> None:
        """End all agents, and what waits for places. Idempotent; from any thread."""
        self._is_closed = True
        with self._lock:  # what holds it looks at `_is_closed`
            groups, self._ours = self._ours, []
        if not groups and not self._agents and not self._has_asked:
            return
        ray = _ray()
        for index in list(self._agents):
            self._end(ray, index)
        for group in groups:
            self._remove(ray, group)
        if self._has_asked:
            with contextlib.suppress(Exception):  # as below
                importlib.import_module("ray.autoscaler.sdk").request_resources(bundles=[])

    @staticmethod
    def _remove(ray: Any, group: Any) -> None:
        with contextlib.suppress(Exception):  # Ray's head is gone, and the group with it
            ray.util.remove_placement_group(group)

    def release(self, number: int) -> None:
        """The number-th replica has ended, and will not come back: what was held for it alone is free again."""
        with self._lock:
            index = number - self._config.data_parallel_size_local
            if index not in self._agents or self._is_closed:
                return
            ray = _ray()
            self._end(ray, index)
            group = self._more.pop(index, None)
            if group is not None:
                self._ours.remove(group)
                self._remove(ray, group)


def _when_over(agent: Any, told: Callable[[str], object]) -> None:
    """Ray's own sign of the death of an agent."""

    def tell(future: Any) -> None:
        error = future.exception()
        told("the agent has ended" if error is None else f"Ray tells of its death: {type(error).__name__}")

    agent.wait.remote().future().add_done_callback(tell)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError('data_parallel_backend="ray" needs Ray: pip install "actorllm[ray]"') from error
