"""Engines in processes of multiprocessing, and below a forked server."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from actorllm import LLM, SamplingParams
from actorllm.errors import EngineStartError, RequestFailedError
from actorllm.testing import ScriptedAsyncLLM, ScriptedLLM
from tests.actors.scripted_topology import LIGHT_WORKERS
from tests.embedding.host_program import run_host, running_host, wait_until


def light(topology: str) -> str:
    """Before a program that is about the host: workers in processes of their own import no torch."""
    return LIGHT_WORKERS if topology == "process" else ""


CHILDREN = """
import multiprocessing, sys
from actorllm import LLM, SamplingParams

def work(number, told):
    llm = LLM("storyteller", topology=TOPOLOGY, num_threads=1)
    (output,) = llm.generate("Once upon a time", SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    llm.shutdown()
    told.put((number, len(output.outputs[0].token_ids)))

if __name__ == "__main__":
    context = multiprocessing.get_context(METHOD)
    told = context.Queue()
    children = [context.Process(target=work, args=(number, told), daemon=IS_DAEMON) for number in range(2)]
    for child in children:
        child.start()
    found = sorted(told.get(timeout=30) for _ in children)
    for child in children:
        child.join()
    assert found == [(0, 5), (1, 5)], found
    assert [child.exitcode for child in children] == [0, 0]
"""
"""A daemon of multiprocessing may have no children of multiprocessing. The engine's processes are none."""


@pytest.mark.parametrize(
    ("method", "topology", "is_daemon"),
    [
        ("spawn", "process", True),
        ("fork", "process", False),
        ("forkserver", "inline", True),
        ("fork", "inline", False),
        pytest.param("spawn", "inline", True, marks=pytest.mark.slow(reason="as forkserver: a new interpreter")),
        pytest.param("forkserver", "process", True, marks=pytest.mark.slow(reason="as spawn: a new interpreter")),
    ],
)
def test_each_child_has_an_engine_of_its_own(method: str, topology: str, is_daemon: bool, tmp_path: Path) -> None:
    script = tmp_path / "children.py"
    head = f"METHOD, TOPOLOGY, IS_DAEMON = {method!r}, {topology!r}, {is_daemon}\n"
    script.write_text(head + light(topology) + CHILDREN)
    host = run_host(str(script))
    assert host.errors == ""


PRELOADED = """
import os, socket, sys
from actorllm import LLM, SamplingParams
from actorllm.errors import ForkedProcessError

llm = LLM("storyteller", num_threads=1)  # at import, as an application under `gunicorn --preload` does
params = SamplingParams(max_tokens=3, ignore_eos=True)
workers = []
for _ in range(2):
    pid = os.fork()
    if not pid:
        try:
            llm.generate("Once", params, use_tqdm=False)
        except ForkedProcessError:
            own = LLM("storyteller", topology="inline", num_threads=1)  # what the message says: one of its own
            code = 0 if own.generate("Once", params, use_tqdm=False) else 1
            own.shutdown()
            os._exit(code)
        os._exit(2)
    workers.append(pid)
print("codes", *[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers])
print("tokens", len(llm.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids))
"""


def test_an_engine_from_before_a_fork_is_refused_in_the_workers_of_a_server() -> None:
    host = run_host("-W", "ignore::DeprecationWarning", "-c", LIGHT_WORKERS + PRELOADED)
    assert host.output.splitlines() == ["codes 0 0", "tokens 3"]


FORKED_AROUND_A_START = """
import asyncio, multiprocessing, os
from actorllm import AsyncLLM, SamplingParams
from actorllm.errors import ForkedProcessError

llm = AsyncLLM("storyteller", topology=TOPOLOGY, num_threads=1)

async def ask():
    output = await llm.complete("Once", SamplingParams(max_tokens=3, ignore_eos=True))
    return len(output.outputs[0].token_ids)

def be_refused():
    try:
        asyncio.run(ask())
    except ForkedProcessError as error:
        assert "build one in this process" in str(error)
    else:
        raise AssertionError("it was not refused")

def fork():
    pid = os.fork()
    if not pid:
        code = 1
        try:
            be_refused()
            code = 0
        finally:
            os._exit(code)
    print("code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

fork()  # the engine has not started
print("tokens", asyncio.run(ask()))
fork()
child = multiprocessing.get_context("fork").Process(target=be_refused)
child.start()
child.join()
print("code", child.exitcode)
print("tokens", asyncio.run(ask()))
llm.shutdown()
"""


@pytest.mark.parametrize("topology", ["process", "inline"])
def test_an_engine_from_before_a_fork_is_refused_and_goes_on_where_it_was_made(topology: str) -> None:
    source = f"TOPOLOGY = {topology!r}\n{light(topology)}{FORKED_AROUND_A_START}"
    host = run_host("-W", "ignore::DeprecationWarning", "-c", source)
    assert host.output.splitlines() == ["code 0", "tokens 3", "code 0", "code 0", "tokens 3"]


GUNICORN = """
from contextlib import asynccontextmanager
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from actorllm import AsyncLLM, SamplingParams
from actorllm.errors import ForkedProcessError

preloaded = AsyncLLM("storyteller", num_threads=1)  # before the fork: gunicorn imports this once, in the arbiter

@asynccontextmanager
async def lifespan(app):
    async with AsyncLLM("storyteller", num_threads=1) as app.state.llm:
        yield

app = FastAPI(lifespan=lifespan)
params = SamplingParams(max_tokens=3, ignore_eos=True)

@app.get("/preloaded", response_class=PlainTextResponse)
async def ask_preloaded():
    try:
        return str(len((await preloaded.complete("Once", params)).outputs[0].token_ids))
    except ForkedProcessError as error:
        return f"refused: {error}"

@app.get("/own", response_class=PlainTextResponse)
async def ask_own():
    return str(len((await app.state.llm.complete("Once", params)).outputs[0].token_ids))
"""


def test_gunicorn_with_preload(tmp_path: Path) -> None:
    """An engine that was made before the fork is refused at once; one that the lifespan makes belongs to the worker."""
    (tmp_path / "served.py").write_text(LIGHT_WORKERS + GUNICORN)
    path = tmp_path / "socket"
    options = ("--preload", "--workers", "2", "--worker-class", "uvicorn_worker.UvicornWorker", "--timeout", "60")
    where = ("--bind", f"unix:{path}", "--chdir", str(tmp_path), "--no-control-socket")
    with (
        running_host("-m", "gunicorn", *options, *where, "served:app") as host,
        httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://served", timeout=40) as client,
    ):
        assert wait_until(lambda: "startup complete" in host.errors, 40), host.errors
        for _ in range(4):
            assert client.get("/preloaded").text.startswith("refused: "), host.errors
            assert client.get("/own").text == "3"
        host.process.terminate()
        assert host.wait() == 0, host.errors
        assert "Traceback" not in host.errors, host.errors


HAS_USED_CUDA = """
import torch
torch.cuda.is_initialized = lambda: True  # a child that was forked from this process could not use the device
import os
fork, os.fork = os.fork, None
from actorllm import LLM, SamplingParams
with LLM("storyteller", num_threads=1) as llm:
    print("tokens", len(llm.generate("Once", SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids))
"""


def test_no_process_of_an_engine_is_forked_from_its_host() -> None:
    assert run_host("-c", LIGHT_WORKERS + HAS_USED_CUDA).output == "tokens 3\n"


REAPS = """
import os, signal
from actorllm import LLM, SamplingParams

def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

signal.signal(signal.SIGCHLD, {handler})
params = SamplingParams(max_tokens=5, ignore_eos=True)
llm = LLM("storyteller", num_threads=1)
def num_tokens():
    (output,) = llm.generate("Once", params, use_tqdm=False)
    return len(output.outputs[0].token_ids)
found = [num_tokens()]
for name in ("worker0", "scheduler"):
    os.kill(llm._engine.pids[name], signal.SIGKILL)
    found.append(num_tokens())
llm.shutdown()
print("tokens", *found)
"""


@pytest.mark.parametrize("handler", ["reap", "signal.SIG_IGN"])
def test_a_host_that_waits_for_every_child(handler: str) -> None:
    """As the first process of a container does, or the arbiter of gunicorn: how a process ended is not known then."""
    host = run_host("-c", LIGHT_WORKERS + REAPS.format(handler=handler))
    assert host.output == "tokens 5 5 5\n"


def test_a_frozen_program_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of PyInstaller and others: sys.executable is the application, which would build an engine again, and so on."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(EngineStartError, match=r"this program is frozen.*use topology='inline'"):
        LLM("storyteller", num_threads=1)
    short = SamplingParams(max_tokens=9)
    few = {"truncate_prompt_tokens": 10}
    with ScriptedLLM(lambda prompt: "Fine.") as llm:
        with pytest.raises(RequestFailedError, match=r"no process can be started that reads this prompt: .*frozen"):
            llm.generate(["once upon a time " * 20_000], short, use_tqdm=False, tokenization_kwargs=few)
        assert llm.generate("Once", short, use_tqdm=False)[0].outputs[0].text == "Fine."


@pytest.mark.parametrize("door", [ScriptedLLM, ScriptedAsyncLLM])
def test_what_copies_an_engine_is_told_what_to_do(door: Any) -> None:
    """A process pool pickles what it is given, with everything that it holds."""
    llm = door(lambda prompt: "Fine.")
    try:
        for what in (llm, llm.generate, {"llm": llm}):
            for copied in (pickle.dumps, copy.deepcopy):
                with pytest.raises(TypeError, match=r"belongs to the process that built it.*attach\(name\)"):
                    copied(what)
    finally:
        llm.shutdown()
