"""Replicas in a cluster of Ray: three raylets of this machine, of which the tests kill and remove some."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio import to_thread

from actorllm import LLM, AsyncLLM, SamplingParams
from actorllm.errors import ConfigError, EngineStartError
from tests.fleet.nodes.agents import free_port
from tests.fleet.nodes.ray_engine import ENGINE, ON_RAY, SMALL, run_many
from tests.fleet.streams import PROMPTS, Told, all_run, assert_same, moved, params, run_all, until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow(reason="a cluster of Ray takes most of a minute to start"),
    pytest.mark.anyio,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def nothing_leaks() -> None:
    """Ray keeps processes and descriptors of its own."""


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    """A head without cores, and two nodes with two each."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (pip install ray)")
    from ray.cluster_utils import Cluster

    plain = {"worker_niceness": 0}  # it is 15 otherwise, and whatever else runs here starves the workers
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": plain, **SMALL}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.workers = [made.add_node(num_cpus=2, **SMALL) for _ in range(2)]
    made.wait_for_nodes()
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
async def cluster(started: Any) -> AsyncIterator[Any]:
    """It has its two nodes again after each test, and nothing runs on them."""
    yield started
    for node in [node for node in started.workers if not alive(node)]:
        started.workers.remove(node)
        started.workers.append(started.add_node(num_cpus=2, **SMALL))  # which is for the main thread
    import ray

    await until(lambda: ray.available_resources().get("CPU") == 4.0)


def alive(node: Any) -> bool:
    return bool(node.any_processes_alive()) and bool(node.live_processes())


def raylet(node: Any) -> int:
    (told,) = node.all_processes["raylet"]
    return int(told.process.pid)


@pytest.fixture(scope="module")
async def undisturbed() -> dict[str, Told]:
    """As one process on this machine has them."""
    async with AsyncLLM("storyteller", **ENGINE) as llm:
        return await run_all(llm)


async def test_streams_are_those_of_one_machine(cluster: Any, undisturbed: dict[str, Told]) -> None:
    async with AsyncLLM("storyteller", **ON_RAY) as llm:
        await all_run(llm)
        assert_same(await run_all(llm), undisturbed)
        nodes = {one["node"].rsplit(":", 1)[0] for one in (await llm.stats())["supervisor"]["replicas"].values()}
        assert len(nodes) == 1, "all nodes of the cluster have the address of this machine"


async def test_sixteen_streams_outlive_a_raylet_that_is_killed(cluster: Any) -> None:
    async with AsyncLLM("storyteller", **ON_RAY) as llm:
        await all_run(llm)
        wanted = await run_many(llm)
        before = moved(llm)
        assert await run_many(llm, lambda: os.kill(raylet(cluster.workers[0]), signal.SIGKILL)) == wanted
        await until(lambda: moved(llm) > before or any(one.state != "running" for one in llm.health().replicas))
        await all_run(llm)
        assert await run_many(llm) == wanted, "on the node that is left, which had room for both"


async def test_streams_outlive_a_node_that_is_removed(cluster: Any, undisturbed: dict[str, Told]) -> None:
    async with AsyncLLM("storyteller", **ON_RAY) as llm:
        await all_run(llm)

        async def strike() -> None:
            cluster.remove_node(cluster.workers[0], allow_graceful=True)

        assert_same(await run_all(llm, 10, strike), undisturbed)
        await all_run(llm)


async def test_ranks_on_two_nodes_and_a_raylet_that_is_killed(cluster: Any) -> None:
    """A replica here, and one whose two stages Ray has put on two nodes; then its ranks find room on one."""
    import ray

    sizes = {"pipeline_parallel_size": 2, "nnodes": 2, "data_parallel_size_local": 1, "ready_replicas": 2}
    async with AsyncLLM("storyteller", **{**ON_RAY, **sizes}) as llm:
        (group,) = [one for one in ray.util.placement_group_table().values() if one["state"] == "CREATED"]
        assert len(set(group["bundles_to_node_id"].values())) == 2
        wanted = await run_many(llm)
        before = moved(llm)
        assert await run_many(llm, lambda: os.kill(raylet(cluster.workers[0]), signal.SIGKILL)) == wanted
        await until(lambda: moved(llm) > before or any(one.state != "running" for one in llm.health().replicas))
        await all_run(llm)
        assert await run_many(llm) == wanted


async def test_what_cannot_fit_is_refused_before_ray_is_asked_for_it(cluster: Any) -> None:
    import ray

    before = len(ray.util.placement_group_table())
    with pytest.raises(ConfigError, match=r"(?s)Ray cannot place 2 replicas.*CPU +3 +2 +4"):
        await AsyncLLM("storyteller", **{**ON_RAY, "num_threads": 3}).start()
    assert len(ray.util.placement_group_table()) == before


async def test_what_others_use_is_waited_for(cluster: Any) -> None:
    import ray

    others = ray.util.placement_group([{"CPU": 2}, {"CPU": 1}])
    assert await to_thread.run_sync(others.wait)
    with pytest.raises(EngineStartError, match=r"Ray had no room for 2 x \{'CPU': 1.0\} within 1 s: others use it"):
        await AsyncLLM("storyteller", placement_timeout_s=1, **ON_RAY).start()
    llm = AsyncLLM("storyteller", **ON_RAY)
    async with anyio.create_task_group() as group:
        group.start_soon(llm.start)
        await anyio.lowlevel.checkpoint()
        ray.util.remove_placement_group(others)
    assert (await llm.complete(PROMPTS[0], params(1, max_tokens=3))).finished
    llm.shutdown()


DRIVER = """
import os, sys, ray
from actorllm import LLM, SamplingParams
ray.init(address=sys.argv[1], log_to_driver=False)
llm = LLM("storyteller", dtype="float32", num_threads=1, data_parallel_size=2, ready_replicas=2, data_parallel_backend="ray")
print(len(llm.generate(["Once"], SamplingParams(max_tokens=3), use_tqdm=False)), flush=True)
sys.stdin.read()
"""


def with_mark(mark: str) -> set[int]:
    """Processes that were started with this mark in their environment."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    found.add(int(folder.name))
            except OSError:
                continue
    return found


async def test_the_death_of_the_driver_leaves_nothing(cluster: Any) -> None:
    import ray

    mark = f"ACTORLLM_MARK={uuid.uuid4()}"
    name, value = mark.split("=")
    driver = subprocess.Popen(  # noqa: ASYNC220 - the test waits for it
        [sys.executable, "-W", "ignore", "-c", DRIVER, cluster.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {name: value},
    )
    assert driver.stdout is not None
    assert await to_thread.run_sync(driver.stdout.readline) == b"1\n"
    assert len(with_mark(mark)) > 4, "it, and schedulers and workers of its agents"
    driver.kill()
    driver.communicate()
    await until(lambda: not with_mark(mark))
    await until(lambda: ray.available_resources().get("CPU") == 4.0)
    groups = ray.util.placement_group_table().values()
    assert all(group["state"] == "REMOVED" for group in groups)


def story(**arguments: Any) -> tuple[list[int], tuple[str, ...]]:
    """What a task or an actor computes with an engine of its own."""
    llm = LLM("storyteller", dtype="float32", num_threads=1, **arguments)
    try:
        (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=20, seed=1), use_tqdm=False)
        return list(output.outputs[0].token_ids), llm._engine.config.nodes
    finally:
        llm.shutdown()


async def test_an_engine_in_a_task_and_in_an_actor(cluster: Any) -> None:
    """In a placement group each rank gets a bundle of it without being asked for, and not the one that the actor is in."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    wanted, _ = await to_thread.run_sync(story)

    class Writer:
        def write(self, **arguments: Any) -> Any:
            return story(**arguments)

    def answer(found: Any) -> Any:
        return ray.get(found, timeout=200)

    assert await to_thread.run_sync(answer, ray.remote(num_cpus=1)(story).remote()) == (wanted, ())
    group = ray.util.placement_group([{"CPU": 1}] * 3, strategy="PACK")  # no bundle has room for two ranks
    here = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
    writer = ray.remote(Writer).options(num_cpus=1, scheduling_strategy=here).remote()
    assert await to_thread.run_sync(answer, writer.write.remote()) == (wanted, ())
    assert await to_thread.run_sync(answer, writer.write.remote(tensor_parallel_size=2)) == (wanted, ("ray",))
    ray.kill(writer)
    ray.util.remove_placement_group(group)


class Served:
    """`actorllm serve` in an actor, on its main thread."""

    def serve(self, port: int) -> int:
        from actorllm.cli import main

        return main(["serve", "storyteller", "--num-threads", "1", "--host", "127.0.0.1", "--port", str(port)])


class ServedInLoop:
    """The same in the loop of an asynchronous actor, which is on another thread and receives no signals."""

    async def serve(self, port: int) -> None:
        from actorllm import FlexibleArgumentParser
        from actorllm.cli.vllm_server import make_arg_parser, run_server

        words = ["storyteller", "--num-threads", "1", "--host", "127.0.0.1", "--port", str(port)]
        await run_server(make_arg_parser(FlexibleArgumentParser()).parse_args(words))


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("kind", [Served, ServedInLoop])
async def test_a_server_in_an_actor(cluster: Any, kind: Any) -> None:
    import ray

    port = free_port()
    server = ray.remote(kind).options(num_cpus=1).remote()
    serving = server.serve.remote(port)
    body = b'{"model": "storyteller", "prompt": "Once", "max_tokens": 4, "temperature": 0}'
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    answers: list[dict[str, Any]] = []

    def ask() -> bool:
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                answers.append(json.load(answer))
        except OSError:  # it does not listen yet
            assert not ray.wait([serving], timeout=0.2)[0], ray.get(serving)
        return bool(answers)

    while not await to_thread.run_sync(ask):
        pass
    assert answers[0]["usage"]["completion_tokens"] == 4
    if kind is ServedInLoop:
        ray.cancel(serving)
        with pytest.raises(ray.exceptions.TaskCancelledError):
            await to_thread.run_sync(lambda: ray.get(serving, timeout=60))
        await until(lambda: not listens(port))
    ray.kill(server)
    await until(lambda: ray.available_resources().get("CPU") == 4.0)


def test_streams_go_on_without_the_head() -> None:
    """No message of a stream goes over Ray: none of them even moves, and new ones are taken. The program ends in time."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install ray)")
    mark = f"ACTORLLM_MARK={uuid.uuid4()}"
    name, value = mark.split("=")
    # Ray ends its own nodes when the head has been away for 60 s. This machine may be so slow.
    waits = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600", "RAY_worker_niceness": "0", name: value}
    program = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.fleet.nodes.without_head"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | waits,
    )
    for pid in with_mark(mark):  # what Ray has left
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    told = program.stdout.splitlines()
    assert told[-1:] == ["ended"], program.stdout
    assert told[-2] == "16 streams are the same, 0 have moved, 16 new ones are the same", program.stdout


def test_a_deployment_of_ray_serve() -> None:
    """The example, which has a cluster of its own."""
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed (pip install 'ray[serve]')")
    example = Path(__file__).parents[3] / "examples" / "ray_serve.py"
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(example)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_worker_niceness": "0"},
    )
    assert result.returncode == 0, (result.stderr, time.monotonic() - began)
    assert result.stdout.startswith("Once upon a time")
    assert len(result.stdout) > 100
