"""Replicas that Ray places: what is asked of Ray and given back. Ray itself is in `test_ray_cluster`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import actorllm.config
from actorllm import AsyncLLM, EngineConfig
from actorllm.config import RAY
from actorllm.errors import ConfigError, EngineShutdownError, EngineStartError
from actorllm.fleet.nodes import ray_cluster
from actorllm.fleet.nodes.ray_cluster import RayPlacement, bundle_of, check_fit, machines_of
from actorllm.fleet.replica import replica_config

ENGINE: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "standby_worker": False, "data_parallel_backend": "ray"}


def test_what_can_never_fit_is_told_as_a_table() -> None:
    check_fit({"CPU": 2.0}, 2, [{"CPU": 4.0}, {"CPU": 1.0}])
    with pytest.raises(ConfigError, match=r"(?s)cannot place 2 replicas.*room for 1\n.*GPU +2 +2 +3"):
        check_fit({"CPU": 1.0, "GPU": 2.0}, 2, [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 1.0}])
    with pytest.raises(ConfigError, match="its 0 nodes have room for 0"):
        check_fit({"CPU": 1.0}, 1, [])


def config_of(device: str = "cpu", **arguments: Any) -> EngineConfig:
    given = {"num_threads": 2, **arguments}
    return replace(EngineConfig.from_arguments("storyteller", **{**ENGINE, **given}), device=device)


def test_ranks_are_on_as_few_machines_as_have_room() -> None:
    config = config_of(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert [bundle_of(config, machines) for machines in (1, 2, 4)] == [{"CPU": 8.0}, {"CPU": 4.0}, {"CPU": 2.0}]
    assert machines_of(config, 1, [{"CPU": 8.0}, {"CPU": 4.0}]) == 1
    assert machines_of(config, 2, [{"CPU": 8.0}, {"CPU": 8.0}]) == 1
    assert machines_of(config, 2, [{"CPU": 8.0}, {"CPU": 7.0}, {"CPU": 4.0}]) == 2
    assert machines_of(config, 1, [{"CPU": 3.0}] * 4) == 4
    assert machines_of(config, 1, [{"CPU": 2.0}] * 4, [{"CPU": 8.0}]) == 4, "what is free now counts first"
    assert machines_of(config, 1, [{"CPU": 2.0}], [{"CPU": 8.0}]) == 1, "and what will be free then"
    with pytest.raises(
        ConfigError, match=r"(?s)cannot place 1 replicas: its 2 nodes have room for 0\n.*CPU +8 +7 +7.5"
    ):
        machines_of(config, 1, [{"CPU": 7.0}, {"CPU": 0.5}])


def test_a_number_of_machines_that_is_given_counts() -> None:
    config = config_of(pipeline_parallel_size=2, nnodes=2, data_parallel_size=2)
    assert machines_of(config, 2, [{"CPU": 8.0}]) == 2
    with pytest.raises(
        ConfigError, match=r"(?s)cannot place 2 replicas of 2 machines each: its 1 nodes have room for 1"
    ):
        machines_of(config, 2, [{"CPU": 7.0}])
    with pytest.raises(ConfigError, match="nnodes=3: 2 ranks cannot be shared out evenly"):
        config_of(pipeline_parallel_size=2, nnodes=3)


def test_ranks_on_gpus_are_on_one_machine() -> None:
    config = config_of("cuda", tensor_parallel_size=2)
    assert bundle_of(config) == {"CPU": 2.0, "GPU": 2.0}
    assert machines_of(config, 2, [{"CPU": 8.0, "GPU": 4.0}]) == 1
    with pytest.raises(ConfigError, match=r"(?s)cannot place 1 replicas.*GPU +2 +1 +2"):
        machines_of(config, 1, [{"CPU": 8.0, "GPU": 1.0}] * 2)
    with pytest.raises(ConfigError, match="is not supported with device='cuda' yet"):
        actorllm.config._nodes(
            actorllm.config.ARGUMENTS | {"data_parallel_backend": "ray", "tensor_parallel_size": 2, "nnodes": 2}, "cuda"
        )


def test_gpus_of_nodes_need_none_where_the_program_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of clusters often have none. Ranks for which this machine has too few are Ray's, as in vLLM."""
    assert EngineConfig.from_arguments("storyteller", device="cuda", data_parallel_backend="ray").device == "cuda"
    with pytest.raises(ConfigError, match="device='cuda': "):
        EngineConfig.from_arguments(
            "storyteller", device="cuda", data_parallel_backend="ray", data_parallel_size=2, data_parallel_size_local=1
        )
    monkeypatch.setattr("actorllm.types.device.why_not_cuda", lambda: None)
    monkeypatch.setattr("actorllm.config.has_ray", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    def nodes_of(**arguments: Any) -> tuple[str, ...]:
        return EngineConfig.from_arguments(
            "storyteller", **{"device": "cuda", "tensor_parallel_size": 2, **arguments}
        ).nodes

    assert nodes_of() == (RAY,)
    assert (
        nodes_of(distributed_executor_backend="mp") == nodes_of(device="cpu") == nodes_of(tensor_parallel_size=1) == ()
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert nodes_of() == ()


def test_ray_and_nodes_are_not_given_together() -> None:
    with pytest.raises(ConfigError, match="nodes and Ray both say where replicas are"):
        AsyncLLM("storyteller", nodes=["a:1"], node_key_file="k", data_parallel_backend="ray")


def test_ranks_within_a_placement_group_are_placed_by_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM. One that has a process, and one whose caller says where they are, are not."""
    group: list[object] = [None]
    ray = SimpleNamespace(
        is_initialized=lambda: True, util=SimpleNamespace(get_current_placement_group=lambda: group[0])
    )
    monkeypatch.setitem(sys.modules, "ray", ray)

    def nodes_of(**arguments: Any) -> tuple[str, ...]:
        return EngineConfig.from_arguments("storyteller", dtype="float32", **arguments).nodes

    assert nodes_of(tensor_parallel_size=2) == ()
    group[0] = object()
    assert nodes_of(tensor_parallel_size=2) == nodes_of(pipeline_parallel_size=2) == (RAY,)
    assert nodes_of() == nodes_of(tensor_parallel_size=2, distributed_executor_backend="mp") == ()
    assert nodes_of(tensor_parallel_size=2, nodes=["a:1"], node_key_file="k") == ("a:1",)
    ray.is_initialized = lambda: False
    assert nodes_of(tensor_parallel_size=2) == ()


class FakeGroup(NamedTuple):
    number: int
    bundle_count: int
    has_room: threading.Event

    def wait(self, seconds: float) -> bool:
        return self.has_room.wait(0.005)


class FakeRay:
    """What `RayPlacement` asks Ray for."""

    def __init__(self, cores: float) -> None:
        self.groups: list[list[dict[str, float]]] = []
        self.strategies: list[str] = []
        self.removed: list[Any] = []
        self.asked: list[list[dict[str, float]]] = []
        self.killed: list[Any] = []
        self.has_begun = True
        self.has_room = threading.Event()
        self.has_room.set()
        self._cores = cores
        self.util = SimpleNamespace(
            get_current_placement_group=lambda: None,
            placement_group=self._group,
            remove_placement_group=self.removed.append,
        )
        self.exceptions = SimpleNamespace(RayError=RuntimeError, GetTimeoutError=TimeoutError)

    def _group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.groups.append(bundles)
        self.strategies.append(strategy)
        return FakeGroup(len(self.groups) - 1, len(bundles), self.has_room)

    def is_initialized(self) -> bool:
        return self.has_begun

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": self._cores}}]

    def get(self, found: Any, timeout: float) -> Any:
        return found

    def kill(self, agent: Any) -> None:
        self.killed.append(agent)


def test_a_replica_that_comes_and_goes_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(cores=8.0)
    monkeypatch.setattr(ray_cluster, "_ray", lambda: ray)
    sdk = SimpleNamespace(request_resources=lambda bundles: ray.asked.append(bundles))
    monkeypatch.setitem(sys.modules, "ray.autoscaler.sdk", sdk)
    places: list[int] = []

    def start(self: Any, ray: Any, group: Any, bundle: int) -> Any:
        places.append(group.number)
        return SimpleNamespace(listen=SimpleNamespace(remote=lambda: ("10.0.0.1", 7000 + len(places))))

    monkeypatch.setattr(RayPlacement, "_start", start)
    config = EngineConfig.from_arguments("storyteller", max_replicas=4, min_replicas=2, **ENGINE)
    placement = RayPlacement(config)
    for number in (0, 1, 2):
        placement.want(number + 1)
        assert placement.locate(number).address.host == "10.0.0.1"
    assert ray.groups == [[{"CPU": 1.0}] * 2, [{"CPU": 1.0}]], "one for those that always are, one for another"
    assert places == [0, 0, 1]
    assert [len(bundles) for bundles in ray.asked] == [1, 2, 3]
    placement.release(2)
    assert [group.number for group in ray.removed] == [1]
    assert len(ray.killed) == 1
    placement.release(2)
    placement.locate(2)
    assert places[-1] == 2, "a new one"
    placement.close()
    assert [group.number for group in ray.removed] == [1, 0, 2]
    assert len(ray.killed) == 4
    assert ray.asked[-1] == []


class FakeAgent:
    """It says where it listens when it is let."""

    def __init__(self) -> None:
        self.may_listen = threading.Event()
        self.was_asked = threading.Event()
        self.listen = SimpleNamespace(remote=lambda: self)

    def ask(self) -> tuple[str, int]:
        self.was_asked.set()
        if not self.may_listen.wait(0.005):
            raise TimeoutError
        return "10.0.0.1", 7000


def in_thread(locate: Callable[[], object]) -> tuple[threading.Thread, list[Exception]]:
    raised: list[Exception] = []

    def run() -> None:
        try:
            locate()
        except Exception as error:  # what the test looks at
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeRay, RayPlacement, list[FakeAgent]]:
    """One replica that there always is, up to three others, and the agents in the order of their starts."""
    ray, agents = FakeRay(cores=8.0), list[FakeAgent]()
    monkeypatch.setattr(ray_cluster, "_ray", lambda: ray)
    monkeypatch.setattr(ray, "get", lambda agent, timeout: agent.ask())

    def start(self: Any, ray: Any, group: Any, bundle: int) -> Any:
        agents.append(FakeAgent())
        return agents[-1]

    monkeypatch.setattr(RayPlacement, "_start", start)
    return ray, RayPlacement(EngineConfig.from_arguments("storyteller", max_replicas=4, **ENGINE)), agents


def test_a_replica_that_goes_does_not_wait_for_the_place_of_another(
    placed: tuple[FakeRay, RayPlacement, list[FakeAgent]],
) -> None:
    ray, placement, _ = placed
    ray.has_room.clear()
    threads = [in_thread(lambda number=number: placement.locate(number)) for number in (1, 2)]
    while len(ray.groups) < 3:
        threading.Event().wait(0.001)
    placement.release(1)  # returns, though there is no room
    threads[0][0].join()
    assert isinstance(threads[0][1][0], EngineShutdownError)
    assert len(ray.removed) == 1, "the group of that one alone"
    assert threads[1][0].is_alive()
    placement.close()
    threads[1][0].join()
    assert isinstance(threads[1][1][0], EngineShutdownError)
    assert sorted(group.number for group in ray.removed) == [0, 1, 2]


def test_an_agent_that_nothing_waits_for_any_more_is_ended(
    placed: tuple[FakeRay, RayPlacement, list[FakeAgent]],
) -> None:
    """The thread of a start that was stopped runs on; a later start of the same replica has an agent of its own."""
    ray, placement, agents = placed
    first, raised = in_thread(lambda: placement.locate(0))
    while not agents or not agents[0].was_asked.is_set():
        threading.Event().wait(0.001)
    second, failed = in_thread(lambda: placement.locate(0))
    while len(agents) < 2:
        threading.Event().wait(0.001)
    first.join()
    assert isinstance(raised[0], EngineShutdownError)
    assert ray.killed == [agents[0]]
    agents[1].may_listen.set()
    second.join()
    assert failed == []
    placement.release(0)
    assert ray.killed == agents


def test_a_group_without_room_is_given_back_and_asked_for_again(
    placed: tuple[FakeRay, RayPlacement, list[FakeAgent]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ray, placement, agents = placed
    ray.has_room.clear()
    placement._config = replace(placement._config, placement_timeout_s=0.01)
    monkeypatch.setattr(ray_cluster, "TOLD_EVERY_S", 0.0)
    with pytest.raises(EngineStartError, match=r"had no room for 1 x \{'CPU': 1.0\} within"):
        placement.locate(0)
    assert "Ray has no room for 1 x {'CPU': 1.0} yet" in caplog.text, "a wait is told while it lasts"
    assert [group.number for group in ray.removed] == [0]
    ray.has_room.set()
    thread, raised = in_thread(lambda: placement.locate(0))
    while not agents:
        threading.Event().wait(0.001)
    agents[0].may_listen.set()
    thread.join()
    assert raised == []
    assert len(ray.groups) == 2


def test_a_replica_without_room_takes_no_other_one_with_it(
    placed: tuple[FakeRay, RayPlacement, list[FakeAgent]],
) -> None:
    """Its node is gone and no other one has room. The group is that of the replicas which run."""
    ray, placement, agents = placed
    placement._config = replace(placement._config, min_replicas=2)
    for number in (0, 1):
        thread, raised = in_thread(lambda number=number: placement.locate(number))
        while len(agents) <= number:
            threading.Event().wait(0.001)
        agents[number].may_listen.set()
        thread.join()
        assert raised == []
    assert ray.groups == [[{"CPU": 1.0}] * 2]
    ray.has_room.clear()
    placement._config = replace(placement._config, placement_timeout_s=0.01)
    with pytest.raises(EngineStartError, match="had no room"):
        placement.locate(0)
    assert ray.removed == []
    assert ray.killed == [agents[0]]
    placement.release(1)
    with pytest.raises(EngineStartError, match="had no room"):
        placement.locate(0)
    assert [group.number for group in ray.removed] == [0]


def test_a_module_of_another_kind_may_be_named_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    assert EngineConfig.from_arguments("storyteller", dtype="float32", tensor_parallel_size=2).nodes == ()


def test_what_was_asked_for_is_taken_back_though_nothing_was_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(cores=8.0)
    ray.has_begun = False
    monkeypatch.setattr(ray_cluster, "_ray", lambda: ray)
    sdk = SimpleNamespace(request_resources=lambda bundles: ray.asked.append(bundles))
    monkeypatch.setitem(sys.modules, "ray.autoscaler.sdk", sdk)
    placement = RayPlacement(EngineConfig.from_arguments("storyteller", max_replicas=4, **ENGINE))
    placement.want(2)
    assert ray.asked == [], "nothing of Ray runs yet: asking would fail"
    ray.has_begun = True
    placement.want(3)
    placement.close()
    assert [len(bundles) for bundles in ray.asked] == [3, 0]


def test_the_bundle_that_the_program_runs_in_is_the_last_one_that_a_replica_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray, places = FakeRay(cores=8.0), list[int]()
    group = SimpleNamespace(
        id=SimpleNamespace(hex=lambda: "ab"), bundle_specs=[{"CPU": 2.0}, {"CPU": 0.5}, {"CPU": 1.0}, {"CPU": 1.0}]
    )
    ray.util.get_current_placement_group = lambda: group
    monkeypatch.setattr(ray_cluster, "_ray", lambda: ray)
    monkeypatch.setattr(
        ray, "available_resources", lambda: {f"CPU_group_{n}_ab": 1.0 for n in (1, 2, 3)}, raising=False
    )

    def start(self: Any, ray: Any, group: Any, bundle: int) -> Any:
        places.append(bundle)
        return SimpleNamespace(listen=SimpleNamespace(remote=lambda: ("10.0.0.1", 7000)))

    monkeypatch.setattr(RayPlacement, "_start", start)
    placement = RayPlacement(EngineConfig.from_arguments("storyteller", data_parallel_size=4, **ENGINE))
    for number in range(4):
        placement.locate(number)
    assert places == [2, 3, 0, 0], "it has one of two cores of the first"
    assert ray.groups == ray.removed == []
    with pytest.raises(ConfigError, match="cannot place 5 replicas"):
        RayPlacement(EngineConfig.from_arguments("storyteller", data_parallel_size=5, **ENGINE)).locate(0)


def test_ranks_of_a_replica_have_bundles_and_agents_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of two ranks, where no node has room for two."""
    ray, places = FakeRay(cores=1.0), list[tuple[int, int]]()
    monkeypatch.setattr(ray_cluster, "_ray", lambda: ray)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 1.0}}] * 4)

    def start(self: Any, ray: Any, group: Any, bundle: int) -> Any:
        places.append((group.number, bundle))
        port = 7000 + len(places)
        return SimpleNamespace(listen=SimpleNamespace(remote=lambda: ("10.0.0.1", port)))

    monkeypatch.setattr(RayPlacement, "_start", start)
    arguments = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "max_replicas": 3, "min_replicas": 2, **ENGINE}
    placement = RayPlacement(EngineConfig.from_arguments("storyteller", **arguments))
    located = [placement.locate(number) for number in range(3)]
    assert ray.groups == [[{"CPU": 1.0}] * 4, [{"CPU": 1.0}] * 2]
    assert places == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    assert [one.address.port for one in located] == [7001, 7003, 7005]
    assert [one.rank_nodes for one in located] == [("10.0.0.1:7002",), ("10.0.0.1:7004",), ("10.0.0.1:7006",)]
    placement.locate(0)
    assert len(ray.killed) == 2, "its agents of before, both"
    placement.close()
    assert len(ray.killed) == 2 + 6


def test_no_cluster_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(cores=1.0)
    ray.has_begun = False

    def init(**_: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(ray, "init", init, raising=False)
    monkeypatch.setattr(ray_cluster, "_ray", lambda: ray)
    placement = RayPlacement(EngineConfig.from_arguments("storyteller", ray_address="10.0.0.1:6379", **ENGINE))
    with pytest.raises(ConfigError, match=r"no cluster of Ray is found at ray_address='10.0.0.1:6379': Could not find"):
        placement.locate(0)


@pytest.mark.parametrize(("given", "strategy"), [({}, "SPREAD"), ({"placement": "pack"}, "PACK")])
def test_an_agent_is_an_actor_that_ray_does_not_start_again(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], strategy: str
) -> None:
    """It has its bundle, whatever the address of the node. Ray's own sign of its death is heard."""
    ray, options, wait = FakeRay(cores=8.0), list[dict[str, Any]](), Future[None]()
    started: list[Any] = []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("SECRET_OF_THE_DRIVER", "1")
    agent = SimpleNamespace(
        listen=SimpleNamespace(remote=lambda: ("10.0.0.1", 7000)),
        wait=SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: wait)),
    )

    def start(*arguments: Any) -> Any:
        started.append(arguments)
        return agent

    def options_of(**asked: Any) -> Any:
        options.append(asked)
        return SimpleNamespace(remote=start)

    monkeypatch.setattr(ray, "remote", lambda kind: SimpleNamespace(options=options_of), raising=False)
    monkeypatch.setattr(ray_cluster, "_ray", lambda: ray)
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda **where: where)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    sizes = {"data_parallel_size": 2, "num_threads": 2, "resources_per_replica": {"fast_disk": 1}}
    placement = RayPlacement(EngineConfig.from_arguments("storyteller", **{**ENGINE, **sizes, **given}))
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 8.0, "fast_disk": 4.0}}])
    located = placement.locate(1)
    assert (ray.groups, ray.strategies) == ([[{"CPU": 2.0, "fast_disk": 1.0}] * 2], [strategy])
    (asked,) = options
    assert (asked["num_cpus"], asked["num_gpus"], asked["resources"]) == (2.0, 0.0, {"fast_disk": 1.0})
    assert (asked["max_restarts"], asked["max_task_retries"]) == (0, 0)
    assert asked["scheduling_strategy"]["placement_group_bundle_index"] == 1
    ((key, environment, num_cpus),) = started
    assert key == located.key
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert "SECRET_OF_THE_DRIVER" not in environment
    assert num_cpus == 2.0
    told: list[str] = []
    assert located.watch is not None
    located.watch(told.append)
    wait.set_exception(ConnectionError("its node is gone"))
    assert told == ["Ray tells of its death: ConnectionError"]
    placement.close()


def test_a_replica_has_the_threads_and_the_memory_of_the_cores_that_ray_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others of the same node know nothing of it. Without a number of threads it is one core."""
    given = {"dtype": "float32", "data_parallel_backend": "ray", "data_parallel_size": 3, "data_parallel_size_local": 1}
    config = EngineConfig.from_arguments("storyteller", device="cpu", **given)
    assert [replica_config(config, number, 3, "").num_threads for number in range(3)] == [None, 1, 1]
    assert replica_config(replace(config, num_threads=4), 1, 3, "").num_threads == 4
    ray = FakeRay(cores=8.0)
    monkeypatch.setattr(ray_cluster, "_ray", lambda: ray)
    RayPlacement(config)._first_places(ray)
    assert "num_threads says how many it should have" in caplog.text
    context = SimpleNamespace(get_node_id=lambda: "b")
    nodes = [{"NodeID": name, "Resources": {"CPU": cores}} for name, cores in (("a", 2.0), ("b", 8.0))]
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context, raising=False)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert [ray_cluster._share_of_node(cores) for cores in (0.0, 2.0, 8.0, 9.0)] == [1.0, 0.25, 1.0, 1.0]


def test_a_single_replica_may_be_placed_by_ray() -> None:
    given = {"dtype": "float32", "distributed_executor_backend": "ray"}
    config = EngineConfig.from_arguments("storyteller", **given)
    assert (config.nodes, config.data_parallel_size, config.is_fleet) == ((RAY,), 1, True)
