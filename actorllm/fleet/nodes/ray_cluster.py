"""Agents that Ray places and keeps. The only module that knows Ray (the extra `ray`).

Ray says where a replica may be, starts an agent there, and ends it with the driver. Tokens go over the agent's own stream, so the
death of Ray's head stops none. Restarts are the fleet's: Ray starts no actor again. When an agent is gone, the next life of its
replica asks for another one; Ray moves the bundle of a dead node by itself.

What can never fit is refused at once, with what was asked for and what the largest node has. What may fit is waited for, and
the log says so. The ranks of a replica are on one machine, or on as few as have room. One agent has the replica and its first
ranks. It calls the agents of the others itself (`rank_child`).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
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

    def __init__(self, key: bytes, environment: Mapping[str, str], num_cpus: float = 0.0) -> None:
        """num_cpus: what Ray was asked for here; 0: unknown."""
        os.environ.update({name: value for name, value in environment.items() if name not in os.environ})
        from actorllm.actors.engine_thread import LoopThread
        from actorllm.fleet.nodes.agent import NodeAgent
        from actorllm.fleet.nodes.time_slice import ask_for_short_slices

        self._thread = LoopThread("actorllm:agent")
        self._thread.start_thread()
        self._thread.call(ask_for_short_slices)
        self._agent = NodeAgent(key, memory_share=_share_of_node(num_cpus))
        self._bound: NodeAddress | None = None
        self._has_bound = threading.Event()
        self._over = threading.Event()
        self._is_draining = False
        self._drain_on_sigterm()

    def _drain_on_sigterm(self) -> None:
        """SIGTERM is a drain, as for an agent that was started by hand; then Ray ends the process, as it would have done at once.

        Ray makes actors on the main thread. On another one there are no signals.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        as_ray_ends = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
        told: SimpleQueue[int] = SimpleQueue()  # no lock: a signal may come while the one before is heard

        def hear(number: int, _: object) -> None:
            if self._bound is not None and not self._over.is_set():
                told.put(number)
                return
            signal.signal(number, as_ray_ends)
            os.kill(os.getpid(), number)

        def follow() -> None:
            while True:
                told.get()
                self._is_draining = True
                with contextlib.suppress(EngineShutdownError):
                    self._thread.call(self._agent.leave)

        threading.Thread(target=follow, name="actorllm:signals", daemon=True).start()
        signal.signal(signal.SIGTERM, hear)

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
        if self._is_draining:
            os.kill(os.getpid(), signal.SIGTERM)

    def wait(self) -> None:
        """Until the agent has ended; the death of this process ends the call as well."""
        self._over.wait()


ANY_PORT = -1
"""One that is free."""


def _share_of_node(num_cpus: float) -> float:
    """How much of its node so many of Ray's cores are. Agents of one node know nothing of each other, and share its memory so."""
    if not num_cpus:
        return 1.0
    ray = _ray()
    own = ray.get_runtime_context().get_node_id()
    total = next((node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["NodeID"] == own), 0.0)
    return min(1.0, num_cpus / total) if total else 1.0


def bundle_of(config: EngineConfig, num_machines: int = 1) -> dict[str, float]:
    """Pure. What Ray is asked for one of the machines of a replica: its GPUs, and a core for each thread that was asked for.

    On the CPU each rank has so many threads; those that drive GPUs have them together.
    """
    ranks, threads = config.world_size // num_machines, config.num_threads or 1
    bundle = {"CPU": float(threads if config.device == "cuda" else threads * ranks)}
    if config.device == "cuda":
        bundle["GPU"] = float(ranks)
    return bundle | {name: float(value) for name, value in config.resources_per_replica.items()}


def room_for(bundle: Mapping[str, float], has: Mapping[str, float]) -> int:
    """Pure. How many bundles fit where there is so much."""
    return min(int(has.get(name, 0.0) / asked) for name, asked in bundle.items() if asked)


def fits(bundle: Mapping[str, float], number: int, nodes: Sequence[Mapping[str, float]]) -> bool:
    """Pure. Whether so many bundles can be placed on nodes that have so much."""
    return sum(room_for(bundle, node) for node in nodes) >= number


def machines_of(config: EngineConfig, number: int, *rooms: Sequence[Mapping[str, float]], kind: str = "nodes") -> int:
    """Pure. On how many machines the ranks of each of so many replicas are placed: on as few as have room.

    rooms: what nodes have; one after the other is tried. kind: what they are. Raises ConfigError: none of them has room.
    """
    ranks, given = config.world_size, config.num_machines
    # Ranks on a GPU find each other within a machine only (`config._check_rank_nodes`), and so do parts of a block in KV tiers.
    most = 1 if config.device == "cuda" or config.cache.has_tiers else ranks
    options = [given] if given is not None else [n for n in range(1, most + 1) if ranks % n == 0]
    for nodes in rooms:
        for machines in options:
            if fits(bundle_of(config, machines), number * machines, nodes):
                return machines
    check_fit(bundle_of(config, options[0]), number, rooms[-1], options[0], kind)
    return options[0]


def check_fit(
    bundle: Mapping[str, float],
    number: int,
    nodes: Sequence[Mapping[str, float]],
    num_machines: int = 1,
    kind: str = "nodes",
) -> None:
    """Pure. Raises ConfigError: so many replicas, of a bundle for each of their machines, never fit on nodes with so much."""
    if fits(bundle, number * num_machines, nodes):
        return
    num_fitting = sum(room_for(bundle, node) for node in nodes) // num_machines
    largest = max(nodes, key=lambda node: sum(node.get(name, 0.0) for name in bundle), default={})
    table = "\n".join(
        f"  {name:<12} {asked:>8g} {largest.get(name, 0.0):>14g} {sum(node.get(name, 0.0) for node in nodes):>14g}"
        for name, asked in bundle.items()
    )
    of_machines = f" of {num_machines} machines each" if num_machines > 1 else ""
    raise ConfigError(
        f"Ray cannot place {number} replicas{of_machines}: its {len(nodes)} {kind} have room for {num_fitting}\n"
        f"  {'resource':<12} {'asked':>8} {f'largest {kind[:-1]}':>14} {f'all {kind}':>14}\n{table}\n"
        f"ask for less (data_parallel_size, num_threads, resources_per_replica), or add {kind}"
    )


class RayPlacement:
    """The agents of one fleet. All methods may wait for Ray, and are called on threads beside the loop.

    Invariants: nothing is waited for with `_lock` held, so `release` and `close` do not wait for a place that is looked for. A
    `locate` that was given up, because its replica was released or asked again, leaves no agent and no group behind.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._key = secrets.token_hex(32).encode()
        self._making = threading.Lock()
        """Held while Ray is joined and asked for groups, and not while it has no room for them."""
        self._lock = threading.Lock()
        """Of what follows."""
        self._is_closed = False
        self._num_machines = config.num_machines or 1
        """Of each replica; found with the first places."""
        self._has_machines = config.num_machines is not None or config.world_size == 1
        """That is known, and stays what it is: groups have as many bundles."""
        self._places: list[tuple[Any, int]] | None = None
        """Of the replicas that there always are: groups, and bundles of them, machine by machine."""
        self._more: dict[int, Any] = {}
        """The groups of others, by index."""
        self._ours: list[Any] = []
        """Groups that are removed at the end."""
        self._agents: dict[int, list[Any]] = {}
        """Of each replica: the one that has it, then those that have ranks of it."""
        self._calls: dict[int, int] = {}
        """By index: how often it was located or released. A `locate` goes on while it is the last one."""
        self._has_asked = False

    def locate(self, number: int) -> Located:
        """Agents for the number-th replica. Raises ConfigError, EngineStartError; EngineShutdownError: it was given up."""
        ray = _ray()
        index = number - self._config.data_parallel_size_local
        with self._lock:
            call = self._calls[index] = self._calls.get(index, 0) + 1
            before = self._agents.pop(index, [])
        self._check_wanted(index, call)
        self._end(ray, before)
        places = self._place(ray, index, call)
        for group in {id(group): group for group, _ in places}.values():
            self._wait_for_room(ray, group, index, call)
        agents: list[Any] = []
        try:
            for group, bundle in places:
                agents.append(self._start(ray, group, bundle))
        finally:
            with self._lock:
                is_wanted = self._is_wanted(index, call) and len(agents) == len(places)
                if is_wanted:
                    self._agents[index] = agents  # ended from here on by whatever makes this call void
            if not is_wanted:
                self._end(ray, agents)
        self._check_wanted(index, call)
        address, *others = self._addresses(ray, agents, number, call)

        def watch(told: Callable[[str], object]) -> None:
            for agent in agents:
                _when_over(agent, told)

        return Located(address, self._key, watch, tuple(map(str, others)))

    def _addresses(self, ray: Any, agents: list[Any], number: int, call: int) -> list[NodeAddress]:
        """Where the agents of a replica listen, once all do. Raises EngineStartError, EngineShutdownError."""
        index = number - self._config.data_parallel_size_local
        began = told_at = time.monotonic()
        found = [agent.listen.remote() for agent in agents]
        addresses: list[NodeAddress] = []
        while len(addresses) < len(found):
            try:
                host, port = ray.get(found[len(addresses)], timeout=LOOK_EVERY_S)
                addresses.append(NodeAddress(host, port))
            except ray.exceptions.GetTimeoutError:
                self._check_wanted(index, call)
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
                self._check_wanted(index, call)
                raise EngineStartError(f"Ray could not start replica {number}: {error}") from error
        return addresses

    def _is_wanted(self, index: int, call: int) -> bool:
        """Whether a `locate` goes on; with the lock."""
        return not self._is_closed and self._calls[index] == call

    def _check_wanted(self, index: int, call: int) -> None:
        with self._lock:
            if self._is_closed:
                raise EngineShutdownError("the engine was shut down while Ray placed its replicas")
            if not self._is_wanted(index, call):
                raise EngineShutdownError("the replica was stopped while Ray placed it")

    def _place(self, ray: Any, index: int, call: int) -> list[tuple[Any, int]]:
        """Those of a replica, machine by machine; one that there is not always has a group of its own, which goes with it."""
        with self._making:
            self._check_wanted(index, call)
            places = self._places
            if places is None:
                places = self._places = self._first_places(ray)
            machines = self._num_machines
            if (index + 1) * machines <= len(places):
                return places[index * machines : (index + 1) * machines]
            group = self._more.get(index)
            if group is None:
                group = self._asked_for(ray, 1)
                with self._lock:
                    is_wanted = self._is_wanted(index, call)
                    if is_wanted:
                        self._more[index] = group
                if not is_wanted:
                    self._give_back(ray, group)
                    self._check_wanted(index, call)
        return [(group, bundle) for bundle in range(machines)]

    def _first_places(self, ray: Any) -> list[tuple[Any, int]]:
        """Places for the replicas that there always are. Raises ConfigError: they never fit."""
        if not ray.is_initialized():
            address = self._config.ray_address or "auto"
            try:
                ray.init(address=address, log_to_driver=False)
            except ConnectionError as error:
                raise ConfigError(
                    f"no cluster of Ray is found at ray_address={address!r}: {error}; start one (`ray start --head`), give its "
                    f"address, or keep ranks here with distributed_executor_backend='mp'"
                ) from error
        size = self._config.min_replicas or self._config.data_parallel_size
        number = max(0, size - self._config.data_parallel_size_local)
        if self._config.num_threads is None and self._config.device == "cpu":
            logger.warning(
                "Ray is asked for one core for each rank, which computes with one thread; num_threads says how many it should have"
            )
        group = ray.util.get_current_placement_group()
        if group is not None:  # of a caller that has placed us, such as Ray Serve or a trainer
            free, names = ray.available_resources(), bundle_of(self._config)
            left = [
                {name: free.get(f"{name}_group_{index}_{group.id.hex()}", 0.0) for name in names}
                for index in range(len(group.bundle_specs))
            ]
            self._choose_machines(number, left, group.bundle_specs, kind="bundles")
            bundle = bundle_of(self._config, self._num_machines)
            places = []
            for index, has in enumerate(group.bundle_specs):
                fitting = room_for(bundle, left[index])
                places += [(nth >= fitting, nth, index) for nth in range(room_for(bundle, has))]
            # One after the other; last what is not free, as where the caller is itself.
            return [(group, index) for _, _, index in sorted(places)]
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._choose_machines(number, nodes)
        if not number:
            return []
        made = self._asked_for(ray, number)
        return [(made, bundle) for bundle in range(number * self._num_machines)]

    def _choose_machines(self, number: int, *rooms: Sequence[Mapping[str, float]], kind: str = "nodes") -> None:
        """As `machines_of`, once. Raises ConfigError: so many replicas never fit."""
        if not self._has_machines:
            self._num_machines = machines_of(self._config, max(1, number), *rooms, kind=kind)
            self._has_machines = True
            return
        machines = self._num_machines
        check_fit(bundle_of(self._config, machines), max(1, number), rooms[-1], machines, kind)

    def _bundles(self, number: int) -> list[dict[str, float]]:
        """Of so many replicas."""
        return [bundle_of(self._config, self._num_machines)] * (number * self._num_machines)

    def _asked_for(self, ray: Any, number: int) -> Any:
        """A group for so many replicas, for which Ray may have no room yet. Raises EngineShutdownError."""
        strategy = {"spread": "SPREAD", "pack": "PACK"}[self._config.placement]
        made = ray.util.placement_group(self._bundles(number), strategy=strategy)
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._ours.append(made)
        if is_closed:  # by a thread that did not wait for this one
            self._remove(ray, made)
            raise EngineShutdownError("the engine was shut down while Ray placed its replicas")
        return made

    def _wait_for_room(self, ray: Any, group: Any, index: int, call: int) -> None:
        """Returns when Ray has room for a group of ours. Raises EngineStartError, EngineShutdownError."""
        with self._lock:
            if group not in self._ours:  # we run in it
                return
        began = told_at = time.monotonic()
        asked = f"{group.bundle_count} x {bundle_of(self._config, self._num_machines)}"
        while not group.wait(LOOK_EVERY_S):
            self._check_wanted(index, call)
            waited_s = time.monotonic() - began
            with self._lock:
                is_given_up = group not in self._ours  # by another replica of it, which waited as long
            if is_given_up or waited_s > self._config.placement_timeout_s:
                self._give_back_unused(ray, group, index)
                raise EngineStartError(
                    f"Ray had no room for {asked} within {waited_s:.0f} s: others use it (`ray status`); placement_timeout_s "
                    f"says how long that may take"
                )
            if time.monotonic() - told_at >= TOLD_EVERY_S:
                told_at = time.monotonic()
                logger.warning("Ray has no room for %s yet, after %.0f s: others use it", asked, waited_s)
        self._check_wanted(index, call)

    def _give_back_unused(self, ray: Any, group: Any, index: int) -> None:
        """Unless other replicas run in it, whose agents would end with it: then it keeps the room that it has."""
        with self._lock:
            is_first = self._places is not None and any(place is group for place, _ in self._places)
            num_always = len(self._places or ()) // self._num_machines
            is_used = is_first and any(other < num_always and other != index for other in self._agents)
        if not is_used:
            self._give_back(ray, group)

    def _give_back(self, ray: Any, group: Any) -> None:
        """A group for which there was no room in time, or no use. Later calls ask for another one."""
        with self._lock:
            is_ours = group in self._ours
            if is_ours:
                self._ours.remove(group)
            if self._places is not None and any(place is group for place, _ in self._places):
                self._places = None
            self._more = {index: one for index, one in self._more.items() if one is not group}
        if is_ours:
            self._remove(ray, group)

    def want(self, num_replicas: int) -> None:
        """Ask the autoscaler of the cluster for room for so many replicas in all; it adds nodes, and takes them away."""
        ray = _ray()
        if not ray.is_initialized() or not self._has_machines:
            return  # what a replica takes is found when the first one elsewhere starts, which asks for its places
        self._has_asked = True
        bundles = self._bundles(max(0, num_replicas - self._config.data_parallel_size_local))
        try:
            importlib.import_module("ray.autoscaler.sdk").request_resources(bundles=bundles)
        except ray.exceptions.RayError as error:  # its head is away: places are asked for when replicas start
            logger.warning("Ray was not asked for %d bundles: %s", len(bundles), error)

    def _start(self, ray: Any, group: Any, bundle: int) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        where = strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
        )
        asked = bundle_of(self._config, self._num_machines)
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
        return kind.remote(self._key, given, asked["CPU"] if self._config.device == "cpu" else 0.0)

    @staticmethod
    def _end(ray: Any, agents: list[Any]) -> None:
        for agent in agents:
            with contextlib.suppress(Exception):  # it is dead, or Ray's head is: nothing of it is used any more
                ray.kill(agent)

    @staticmethod
    def _remove(ray: Any, group: Any) -> None:
        with contextlib.suppress(Exception):  # Ray's head is gone, and the group with it
            ray.util.remove_placement_group(group)

    def close(self) -> None:
        """End all agents, and what waits for places. Idempotent; from any thread."""
        with self._lock:
            self._is_closed = True
            groups, self._ours = self._ours, []
            agents, self._agents = self._agents, {}
        if not groups and not agents and not self._has_asked:
            return
        ray = _ray()
        for of_replica in agents.values():
            self._end(ray, of_replica)
        for group in groups:
            self._remove(ray, group)
        if self._has_asked:
            with contextlib.suppress(Exception):  # as above: its head is gone
                importlib.import_module("ray.autoscaler.sdk").request_resources(bundles=[])

    def release(self, number: int) -> None:
        """The number-th replica has ended, and will not come back: what was held for it alone is free again."""
        index = number - self._config.data_parallel_size_local
        with self._lock:
            self._calls[index] = self._calls.get(index, 0) + 1
            agents, group = self._agents.pop(index, []), self._more.pop(index, None)
            is_ours = group in self._ours
            if is_ours:
                self._ours.remove(group)
        if agents or is_ours:
            ray = _ray()
            self._end(ray, agents)
            if is_ours:
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
