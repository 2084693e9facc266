"""An application ends as it would without the engine: the same exit code, and nothing of ours in what it writes."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.actors.scripted_topology import LIGHT_WORKERS
from tests.embedding.host_program import assert_gone, run_host, running_host
from tests.embedding.stopping_programs import CANCELLED, HEAD, PROGRAMS


def cases() -> list[Any]:
    """Every program in both topologies, some with two replicas or ranks. Loops other than asyncio's start processes alike:
    these are slow."""
    slow = pytest.mark.slow(reason="each starts an engine of several processes; asyncio's does the same")
    others = ("no shutdown, anyio", "no shutdown, uvloop", "no shutdown, trio")
    return (
        [
            pytest.param(name, topology, marks=[slow] if topology == "process" and name in others else [])
            for name in PROGRAMS
            for topology in ("process", "inline")
        ]
        + [
            pytest.param(name, "fleet")
            for name in ("streams were left", "a daemon thread streams", "the consumer raises")
        ]
        + [pytest.param(name, "ranks") for name in ("a daemon thread streams", "a consumer of several raises")]
    )


@pytest.mark.parametrize(("name", "topology"), cases())
def test_the_exit_code_is_the_applications_and_nothing_is_written(name: str, topology: str) -> None:
    program, code = PROGRAMS[name]
    light = "" if name == "streams are open" else LIGHT_WORKERS
    options = "-X", "dev", "-W", "ignore::DeprecationWarning"
    is_copied = (name, topology) != (
        "streams are open",
        "process",
    )  # one of all is told what is written while modules are loaded
    host = run_host(*options, "-c", light + HEAD + program, topology, code=code, is_copied=is_copied)
    assert host.errors == ""
    assert len(host.engine_pids) == {"process": 2, "inline": 0, "fleet": 4, "ranks": 3}[topology]


@pytest.mark.parametrize("topology", ["process", "inline", "fleet"])
def test_requests_are_cancelled_and_the_application_is_terminated(topology: str) -> None:
    with running_host("-c", LIGHT_WORKERS + HEAD + CANCELLED, topology, is_copied=True) as host:
        host.read_until("cancelled")
        assert host.wait() == -signal.SIGTERM, "as without the engine"
        assert_gone(host.engine_pids)
        assert host.errors == ""


JOINED_AT_EXIT = """
import atexit, threading
thread = None
atexit.register(lambda: thread.join())  # before the engine's own: it is called behind that
"""

ENDS_WITH_THE_ENGINE = """
from actorllm import LLM
from actorllm.errors import EngineError
def use():
    llm = LLM("storyteller", topology=topology, num_threads=1)
    print_pids(llm)
    started.set()
    try:
        while True:
            llm.generate("Once", SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)
    except EngineError:
        print("ended", flush=True)
started = threading.Event()
thread = threading.Thread(target=use, daemon=True)
thread.start()
started.wait()
"""


def test_the_application_may_join_a_daemon_thread_at_its_end() -> None:
    """The thread stays for a while, so that nothing is written where nobody joins it, and then it is told."""
    program = JOINED_AT_EXIT + HEAD + ENDS_WITH_THE_ENGINE
    with running_host("-c", program, "inline") as host:
        host.read_until("ended")
        assert host.wait() == 0


WITHOUT_DESCRIPTORS = """
import os
for descriptor in (0, 1, 2):
    if str(descriptor) not in sys.argv[2]:
        os.close(descriptor)
def main():
    with LLM("storyteller", topology=topology, num_threads=1) as llm:
        (output,) = llm.generate("Once", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    opened = os.open(os.devnull, os.O_RDONLY)
    assert opened < 3, "a number that was free before is free again"
from actorllm import LLM
main()
os._exit(7)
"""


@pytest.mark.parametrize(("topology", "left"), [("process", "2"), ("inline", "2"), ("inline", "none")])
def test_a_daemon_without_standard_descriptors(topology: str, left: str) -> None:
    """libuv ends a process in which it is to close a descriptor of such a number."""
    run_host("-c", LIGHT_WORKERS + HEAD + WITHOUT_DESCRIPTORS, topology, left, code=7)
