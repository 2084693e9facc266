"""An application ends as it would without the engine: the same exit code, and nothing of ours in what it writes."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.actors.scripted_topology import LIGHT_WORKERS
from tests.embedding.host_program import PRINT_PIDS, assert_gone, run_host, running_host

HEAD = f"""
import asyncio, logging, os, signal, sys
import anyio
# asyncio's debug mode tells which callbacks took long; on a busy machine any may
logging.getLogger("asyncio").addFilter(lambda record: not str(record.msg).startswith("Executing"))
from actorllm import AsyncLLM, SamplingParams
{PRINT_PIDS}
topology = sys.argv[1]
endless = SamplingParams(max_tokens=None, ignore_eos=True)
how = {{"data_parallel_size": 2, "ready_replicas": 2}} if topology == "fleet" else {{"topology": topology}}
def engine():
    return AsyncLLM("storyteller", **how, num_threads=1)
"""

OPEN_STREAMS = """
async def main():
    global llm
    llm = engine()
    streams = [llm.generate("Once", endless) for _ in range(4)]
    for stream in streams:
        await anext(stream)
    print_pids(llm)
asyncio.run(main())
"""

DROPPED_STREAMS = """
async def main():
    llm = engine()
    async for output in llm.generate("Once", endless):
        print_pids(llm)
        break
    asyncio.create_task(consume(llm))
    await asyncio.sleep(0.1)
async def consume(llm):
    async for output in llm.generate("Once", endless):
        pass
asyncio.run(main())
"""

FORGOTTEN = """
llm = engine()
async def main():
    output = await llm.complete("Once", SamplingParams(max_tokens=3))
    print_pids(llm)
RUN(main)
"""

IN_A_DAEMON_THREAD = """
import threading
def use():
    llm = LLM("storyteller", topology=topology, num_threads=1)
    llm.generate("Once", SamplingParams(max_tokens=1), use_tqdm=False)
    print_pids(llm)
    started.set()
    while True:
        llm.generate("Once", SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)
from actorllm import LLM
started = threading.Event()
threading.Thread(target=use, daemon=True).start()
started.wait()
"""

STREAM_IN_A_DAEMON_THREAD = """
import threading
async def main():
    llm = engine()
    async for output in llm.generate("Once", endless):
        if not started.is_set():
            print_pids(llm)
            started.set()
started = threading.Event()
threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
started.wait()
"""

CANCELLED = """
async def main():
    llm = engine()
    async def consume():
        async for output in llm.generate("Once", endless):
            started.release()
    started = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(consume()) for _ in range(5)]
    for _ in tasks:
        await started.acquire()
    print_pids(llm)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print("cancelled", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(20)
asyncio.run(main())
"""

CONSUMER_FAILS = """
class Ours(Exception):
    pass
async def main():
    async with engine() as llm:
        async for output in llm.generate("Once", endless):
            print_pids(llm)
            raise Ours("of the application")
try:
    asyncio.run(main())
except Ours:
    sys.exit(7)
"""

CONSUMER_IN_A_GROUP_FAILS = """
async def consume(llm, fails):
    async for output in llm.generate("Once", endless):
        if fails:
            raise ValueError("of the application")
async def main():
    llm = engine()
    await llm.start()
    print_pids(llm)
    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(consume(llm, number == 2))
code = 0
try:
    asyncio.run(main())
except* ValueError:  # what is raised in here is raised as a group
    code = 7
sys.exit(code)
"""

ASYNCIO = "def RUN(main): asyncio.run(main())\n"
ANYIO = "def RUN(main): anyio.run(main)\n"
UVLOOP = "import uvloop\ndef RUN(main): uvloop.run(main())\n"
TRIO = "def RUN(main): anyio.run(main, backend='trio')\n"

PROGRAMS = {
    "streams are open": (OPEN_STREAMS, 0),
    "streams were left": (DROPPED_STREAMS, 0),
    "no shutdown, asyncio": (ASYNCIO + FORGOTTEN, 0),
    "no shutdown, anyio": (ANYIO + FORGOTTEN, 0),
    "no shutdown, uvloop": (UVLOOP + FORGOTTEN, 0),
    "no shutdown, trio": (TRIO + FORGOTTEN, 0),
    "a daemon thread generates": (IN_A_DAEMON_THREAD, 0),
    "a daemon thread streams": (STREAM_IN_A_DAEMON_THREAD, 0),
    "the consumer raises": (CONSUMER_FAILS, 7),
    "a consumer of several raises": (CONSUMER_IN_A_GROUP_FAILS, 7),
}


def cases() -> list[Any]:
    """Every program in both topologies, some with two replicas. Loops other than asyncio's start processes alike: these are
    slow."""
    slow = pytest.mark.slow(reason="each starts an engine of several processes; asyncio's does the same")
    others = ("no shutdown, anyio", "no shutdown, uvloop", "no shutdown, trio")
    return [
        pytest.param(name, topology, marks=[slow] if topology == "process" and name in others else [])
        for name in PROGRAMS
        for topology in ("process", "inline")
    ] + [
        pytest.param(name, "fleet") for name in ("streams were left", "a daemon thread streams", "the consumer raises")
    ]


@pytest.mark.parametrize(("name", "topology"), cases())
def test_the_exit_code_is_the_applications_and_nothing_is_written(name: str, topology: str) -> None:
    program, code = PROGRAMS[name]
    light = "" if name == "streams are open" else LIGHT_WORKERS
    options = "-X", "dev", "-W", "ignore::DeprecationWarning"
    host = run_host(*options, "-c", light + HEAD + program, topology, code=code)
    assert host.errors == ""
    assert len(host.engine_pids) == {"process": 2, "inline": 0, "fleet": 4}[topology]


@pytest.mark.parametrize("topology", ["process", "inline"])
def test_requests_are_cancelled_and_the_application_is_terminated(topology: str) -> None:
    with running_host("-c", LIGHT_WORKERS + HEAD + CANCELLED, topology) as host:
        host.read_until("cancelled")
        assert host.wait() == -signal.SIGTERM, "as without the engine"
        assert_gone(host.engine_pids, within_s=3)
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
