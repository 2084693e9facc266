"""Replicas that Ray places: what cannot fit, and nodes of a cluster that die. The cluster is three raylets of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from actorllm import AsyncLLM
from actorllm.errors import ConfigError
from actorllm.nodes.ray_cluster import check_fit
from tests.fleet.streams import all_run, assert_same, moved, run_all

ENGINE: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "standby_worker": False, "data_parallel_backend": "ray"}


def test_what_can_never_fit_is_told_as_a_table() -> None:
    check_fit({"CPU": 2.0}, 2, [{"CPU": 4.0}, {"CPU": 1.0}])
    with pytest.raises(ConfigError, match=r"(?s)cannot place 2 replicas.*room for 1\n.*GPU +2 +2 +3"):
        check_fit({"CPU": 1.0, "GPU": 2.0}, 2, [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 1.0}])
    with pytest.raises(ConfigError, match="its 0 nodes have room for 0"):
        check_fit({"CPU": 1.0}, 1, [])


def test_ray_and_nodes_are_not_given_together() -> None:
    with pytest.raises(ConfigError, match="nodes and Ray both say where replicas are"):
        AsyncLLM("storyteller", nodes=["a:1"], node_key_file="k", data_parallel_backend="ray")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without cores, and two nodes with two each."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (pip install ray)")
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
    made.workers = [made.add_node(num_cpus=2, **small) for _ in range(2)]
    made.wait_for_nodes()
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(autouse=True)
def nothing_leaks() -> None:
    """Ray keeps processes and descriptors of its own."""


@pytest.mark.ray
@pytest.mark.slow(reason="a cluster of Ray takes most of a minute to start")
@pytest.mark.anyio
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
async def test_streams_outlive_a_node_of_the_cluster(cluster: Any) -> None:
    with pytest.raises(ConfigError, match="Ray cannot place 2 replicas"):
        await AsyncLLM("storyteller", data_parallel_size=2, **{**ENGINE, "num_threads": 3}).start()
    llm = AsyncLLM("storyteller", data_parallel_size=2, enable_prompt_embeds=True, router="round-robin", **ENGINE)
    await llm.start()
    await all_run(llm)
    undisturbed = await run_all(llm)
    before = moved(llm)

    async def strike() -> None:
        cluster.remove_node(cluster.workers[0], allow_graceful=False)

    assert_same(await run_all(llm, 10, strike), undisturbed)
    assert moved(llm) > before
    llm.shutdown()
