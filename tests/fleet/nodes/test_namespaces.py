"""Agents with a clock and a network of their own, as other machines have. Namespaces of the kernel give both, to root alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread

from actorllm import AsyncLLM
from actorllm.clock import now
from tests.fleet.nodes.agents import Agent, key_file
from tests.fleet.streams import PROMPTS, all_run, assert_same, moved, params, run_all, until

pytestmark = pytest.mark.leaks_by_module

ENGINE: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "standby_worker": False}


def does(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def is_allowed(*command: str) -> bool:
    return os.geteuid() == 0 and shutil.which(command[0]) is not None and does(*command, "true")


AHEAD = ("unshare", "--time", "--monotonic", "5000", "--fork", "--kill-child")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.skipif(not is_allowed(*AHEAD), reason="time namespaces need root, and a kernel that has them")
@pytest.mark.anyio
async def test_a_timeout_is_as_long_where_the_clock_is_5000_s_ahead(tmp_path: Path) -> None:
    key = key_file(tmp_path)
    agent = Agent(key, prefix=AHEAD)
    try:
        llm = AsyncLLM("storyteller", nodes=[agent.address], node_key_file=key, **ENGINE)
        await llm.start()
        output = await llm.complete(PROMPTS[0], params(1, max_tokens=30), timeout=60)
        assert len(output.outputs[0].token_ids) == 30
        metrics = output.metrics
        assert metrics is not None
        assert metrics.arrival_time <= metrics.first_token_time <= metrics.last_token_time
        assert 0 <= metrics.last_token_time - metrics.arrival_time < 60
        stream = (await llm.stats())["supervisor"]["replicas"][0]["stream"]
        assert abs(stream["offset_s"] - 5000) < 1
        live = await to_thread.run_sync(llm._engine.look({0: 0}, 9).result)
        assert 0 <= now() - live["now"] < 60, "the page of the server has one clock"
        stopped = await llm.complete(PROMPTS[0], params(1, max_tokens=900), timeout=0.05)
        assert stopped.outputs[0].finish_reason == "abort"
        llm.shutdown()
    finally:
        agent.close()


@pytest.fixture
def cable() -> Iterator[dict[str, str]]:
    """A network namespace, and a pair of interfaces between it and this one."""
    names = {"namespace": f"allm{os.getpid()}", "here": f"va{os.getpid()}", "there": f"vb{os.getpid()}"}
    inside = ("ip", "netns", "exec", names["namespace"])
    try:
        for command in (
            ("ip", "netns", "add", names["namespace"]),
            ("ip", "link", "add", names["here"], "type", "veth", "peer", "name", names["there"]),
            ("ip", "link", "set", names["there"], "netns", names["namespace"]),
            ("ip", "addr", "add", "10.213.7.1/30", "dev", names["here"]),
            ("ip", "link", "set", names["here"], "up"),
            (*inside, "ip", "addr", "add", "10.213.7.2/30", "dev", names["there"]),
            (*inside, "ip", "link", "set", names["there"], "up"),
            (*inside, "ip", "link", "set", "lo", "up"),
        ):
            subprocess.run(command, check=True, capture_output=True)
        yield names
    finally:
        subprocess.run(["ip", "link", "del", names["here"]], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", names["namespace"]], capture_output=True, check=False)


@pytest.fixture
def disturbance(cable: dict[str, str]) -> tuple[str, ...]:
    """Of the cable, for `tc qdisc add`."""
    device = ("dev", cable["here"], "root")
    command = (*device, "netem", "delay", "30ms", "10ms", "reorder", "20%", "loss", "3%")
    added = subprocess.run(["tc", "qdisc", "add", *command], capture_output=True, text=True, check=False)
    if added.returncode:
        pytest.skip(f"this kernel has no netem, or refuses it: {added.stderr.strip()}")
    assert does("tc", "qdisc", "del", *device)
    return command


def on_networks(test: Any) -> Any:
    """Marks of a test whose agent is at the other end of the cable."""
    for mark in (
        pytest.mark.skipif(not is_allowed("unshare", "--net"), reason="network namespaces need root"),
        pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip, of iproute2"),
        pytest.mark.timeout(300),
        pytest.mark.anyio,
    ):
        test = mark(test)
    return test


@contextlib.asynccontextmanager
async def engine_over(cable: dict[str, str], folder: Path) -> AsyncIterator[tuple[AsyncLLM, Agent]]:
    """One replica here, and one at the other end."""
    key = key_file(folder)
    agent = Agent(key, prefix=("ip", "netns", "exec", cable["namespace"]), host="10.213.7.2")
    sizes = {"data_parallel_size": 2, "data_parallel_size_local": 1, "ready_replicas": 2}
    llm = AsyncLLM(
        "storyteller",
        nodes=[agent.address],
        node_key_file=key,
        router="round-robin",
        enable_prompt_embeds=True,
        **sizes,
        **ENGINE,
    )
    try:
        await llm.start()
        await all_run(llm)
        yield llm, agent
    finally:
        llm.shutdown()
        agent.close()


@pytest.mark.slow(reason="a network that is slow and loses packets")
@pytest.mark.skipif(shutil.which("tc") is None, reason="needs tc, of iproute2")
@on_networks
async def test_streams_over_a_network_that_is_slow_loses_packets_and_swaps_them(
    cable: dict[str, str], disturbance: tuple[str, ...], tmp_path: Path
) -> None:
    async with engine_over(cable, tmp_path) as (llm, _):
        undisturbed = await run_all(llm)
        assert does("tc", "qdisc", "add", *disturbance)
        assert_same(await run_all(llm), undisturbed)


@pytest.mark.slow(reason="a network that is cut")
@on_networks
async def test_streams_outlive_a_network(cable: dict[str, str], tmp_path: Path) -> None:
    async with engine_over(cable, tmp_path) as (llm, agent):
        undisturbed = await run_all(llm)
        before = moved(llm)

        async def cut() -> None:  # neither end is told
            assert does("ip", "link", "set", cable["here"], "down")

        assert_same(await run_all(llm, 5, cut), undisturbed)
        assert moved(llm) > before
        assert does("ip", "link", "set", cable["here"], "up")
        await until(lambda: not agent.children)  # the other end has found the silence as well
        await all_run(llm)
