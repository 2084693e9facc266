"""The engine works on loops, streams and threads of an application, whatever it has done with them."""

from __future__ import annotations

import _thread
import queue
import subprocess
from types import ModuleType

import pytest

from actorllm import LLM
from actorllm.errors import EngineStartError
from tests.actors.scripted_topology import LIGHT_WORKERS
from tests.embedding.host_program import run_host

HEAD = """
import asyncio, io, sys, threading
from actorllm import LLM, AsyncLLM, SamplingParams
topology = sys.argv[1]
params = SamplingParams(max_tokens=20, ignore_eos=True, seed=5)
async def stream(llm):
    count = 0
    async for output in llm.generate("Once upon a time", params):
        count = len(output.outputs[0].token_ids)
    return count
"""

NESTED = """
import nest_asyncio
nest_asyncio.apply()
async def main():
    async with AsyncLLM("storyteller", topology=topology, num_threads=1) as llm:
        inner = asyncio.get_running_loop().run_until_complete(stream(llm))
        print("tokens", inner, await stream(llm))
asyncio.run(main())
"""
"""A loop that runs inside itself, as in notebooks that call `run_until_complete`."""

TWO_LOOPS = """
llm = AsyncLLM("storyteller", topology=topology, num_threads=1)
found = []
both = threading.Barrier(2)
def run():
    async def main():
        await llm.start()
        await asyncio.to_thread(both.wait)
        found.append(await stream(llm))
        found.append(await stream(llm))
    asyncio.run(main())
threads = [threading.Thread(target=run) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("tokens", *found)
llm.shutdown()
"""

ONE_LOOP_AFTER_ANOTHER = """
llm = AsyncLLM("storyteller", topology=topology, num_threads=1)
print("tokens", *[asyncio.run(stream(llm)) for _ in range(3)])
llm.shutdown()
"""

WITHOUT_STREAMS = """
out, sys.stdout, sys.stderr, sys.stdin = sys.stdout, io.StringIO(), io.StringIO(), None
llm = LLM("storyteller", topology=topology, num_threads=1)
outputs = llm.generate(["Once", "There"], params)
sys.stdout = sys.stderr = None  # as in programs without a console
outputs += llm.generate(["Once", "There"], params)
llm.shutdown()
print("tokens", *[len(output.outputs[0].token_ids) for output in outputs], file=out)
"""
"""Streams without `fileno`, as in Colab, and none at all."""

BUILT_IN_A_THREAD = """
async def main():
    async with await asyncio.to_thread(AsyncLLM, "storyteller", topology=topology, num_threads=1) as llm:
        print("tokens", await stream(llm))
asyncio.run(main())
"""
"""So that a download holds no loop."""

BLOCKING_DOOR_ON_A_LOOP = """
async def main():
    llm = LLM("storyteller", topology=topology, num_threads=1)
    outputs = llm.generate(["Once"], params, use_tqdm=False)
    llm.shutdown()
    print("tokens", len(outputs[0].outputs[0].token_ids))
asyncio.run(main())
"""

DEBUG_MODE = """
import logging
# What the application does itself may take long on a busy machine, and is told.
logging.getLogger("asyncio").addFilter(lambda record: "coro=<main()" not in record.getMessage())
async def main():
    async with AsyncLLM("storyteller", topology=topology, num_threads=1) as llm:
        print("tokens", await stream(llm))
asyncio.run(main(), debug=True)
"""

OTHER_LIBRARIES = """
import anyio, uvloop
llm = AsyncLLM("storyteller", topology=topology, num_threads=1)
found = [uvloop.run(stream(llm)), anyio.run(stream, llm, backend="trio")]
uvloop.install()  # as programs did before uvloop had a function that runs
found.append(asyncio.run(stream(llm)))
print("tokens", *found)
llm.shutdown()
"""

PROGRAMS = {
    "a nested loop": (NESTED, 2),
    "two loops in two threads": (TWO_LOOPS, 4),
    "one loop after another": (ONE_LOOP_AFTER_ANOTHER, 3),
    "streams without fileno": (WITHOUT_STREAMS, 4),
    "an engine built in a thread": (BUILT_IN_A_THREAD, 1),
    "LLM on a running loop": (BLOCKING_DOOR_ON_A_LOOP, 1),
    "a loop in debug mode": (DEBUG_MODE, 1),
    "uvloop, trio, uvloop by its policy": (OTHER_LIBRARIES, 3),
}


@pytest.mark.parametrize("topology", ["process", "inline"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_streams_are_whole(name: str, topology: str) -> None:
    program, num_streams = PROGRAMS[name]
    host = run_host("-c", LIGHT_WORKERS + HEAD + program, topology, is_copied=True)
    assert host.output.split() == ["tokens", *["20"] * num_streams]
    assert host.errors == ""


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
@pytest.mark.parametrize(
    ("module", "name", "what"),
    [(_thread, "start_new_thread", "threads"), (queue, "SimpleQueue", "queues"), (subprocess, "Popen", "processes")],
)
def test_greenlets_in_place_of_threads_are_refused(
    library: str, module: ModuleType, name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the start would wait for ever. The libraries set these names, to functions and classes of theirs."""

    right = getattr(module, name)

    def green(*arguments: object) -> object:
        return right(*arguments)

    green.__module__ = f"{library}.thread"
    monkeypatch.setattr(module, name, green)
    with pytest.raises(EngineStartError, match=f"{library} has replaced the {what} of this process.*thread=False"):
        LLM("storyteller", topology="inline")
