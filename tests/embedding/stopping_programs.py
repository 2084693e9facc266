"""Host programs that end in the ways in which applications do, with streams open or left behind."""

from __future__ import annotations

from tests.embedding.host_program import PRINT_PIDS

HEAD = f"""
import asyncio, logging, os, signal, sys
import anyio
# asyncio's debug mode tells which callbacks took long; on a busy machine any may
logging.getLogger("asyncio").addFilter(lambda record: not str(record.msg).startswith("Executing"))
from actorllm import AsyncLLM, SamplingParams
{PRINT_PIDS}
topology = sys.argv[1]
endless = SamplingParams(max_tokens=None, ignore_eos=True)
several = {{"fleet": {{"data_parallel_size": 2, "ready_replicas": 2}}, "ranks": {{"tensor_parallel_size": 2}}}}
how = several.get(topology) or {{"topology": topology}}
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
