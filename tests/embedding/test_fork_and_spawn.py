"""Engines in processes of multiprocessing, below a forked server, and in the workers of pytest-xdist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.embedding.host_program import run_host

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
    [("spawn", "process", True), ("fork", "process", False), ("forkserver", "inline", True)],
)
def test_each_child_has_an_engine_of_its_own(method: str, topology: str, is_daemon: bool, tmp_path: Path) -> None:
    script = tmp_path / "children.py"
    script.write_text(f"METHOD, TOPOLOGY, IS_DAEMON = {method!r}, {topology!r}, {is_daemon}\n{CHILDREN}")
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
    host = run_host("-W", "ignore::DeprecationWarning", "-c", PRELOADED)
    assert host.output.splitlines() == ["codes 0 0", "tokens 3"]


SUITE = """
import pytest
from actorllm import LLM, SamplingParams

@pytest.fixture(scope="module")
def llm():
    with LLM("storyteller", num_threads=1) as llm:
        yield llm

@pytest.mark.parametrize("count", [3, 4])
def test_tokens(llm, count):
    (output,) = llm.generate("Once", SamplingParams(max_tokens=count, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == count
"""


def test_the_workers_of_pytest_xdist_have_engines(tmp_path: Path) -> None:
    (tmp_path / "test_application.py").write_text(SUITE)
    options = ("-q", "-n", "2", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-o", "addopts=")
    host = run_host("-m", "pytest", *options, str(tmp_path))
    assert "2 passed" in host.output


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
    assert run_host("-c", HAS_USED_CUDA).output == "tokens 3\n"
