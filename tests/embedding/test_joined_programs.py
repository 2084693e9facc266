"""A program that joins another one's engine is as little changed, and ends as it would, as one with an engine of its own.

What the owner notices of it is in tests/attach, and in tests/fleet/nodes for programs on other machines.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.actors.scripted_topology import LIGHT_WORKERS
from tests.embedding.host_program import run_host, running_host
from tests.embedding.snapshots import ASYNC, SNAPSHOT
from tests.embedding.stopping_programs import CANCELLED, HEAD
from tests.embedding.stopping_programs import PROGRAMS as SOURCES

OWNER = """
import sys, time
from actorllm import LLM
llm = LLM("storyteller", name=sys.argv[1], num_threads=1)
print("ready", flush=True)
time.sleep(600)
"""

JOINED = """
def engine():
    return AsyncLLM.attach(sys.argv[2])
def print_pids(llm):
    print("joined", flush=True)
"""
"""In place of what these programs have an engine by."""

PROGRAMS = (
    "streams are open",
    "streams were left",
    "no shutdown, asyncio",
    "a daemon thread streams",
    "the consumer raises",
)


@pytest.fixture(scope="module")
def name() -> Iterator[str]:
    """Of an engine of another program."""
    name = f"owned-{os.getpid()}"
    with running_host("-c", LIGHT_WORKERS + OWNER, name) as owner:
        owner.read_until("ready")
        yield name


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_exit_code_is_the_applications_and_nothing_is_written(program: str, name: str) -> None:
    source, code = SOURCES[program]
    host = run_host("-X", "dev", "-c", HEAD + JOINED + source, "joined", name, code=code)
    assert "joined" in host.output
    assert host.errors == ""


def test_requests_are_cancelled_and_the_application_is_terminated(name: str) -> None:
    with running_host("-c", HEAD + JOINED + CANCELLED, "joined", name) as host:
        host.read_until("cancelled")
        assert host.wait() == -signal.SIGTERM, "as without the engine"
        assert host.errors == ""


def test_nothing_of_the_process_is_changed(name: str) -> None:
    own = 'AsyncLLM("storyteller", topology=TOPOLOGY, num_threads=1)'
    assert own in ASYNC
    joined = ASYNC.replace(own, f"AsyncLLM.attach({name!r})")
    host = run_host("-c", SNAPSHOT + joined)
    assert "CHANGED" not in host.output, host.output
