"""The suite of an application under pytest-xdist: each worker has an engine, and however the workers end, nothing is left."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.embedding.host_program import assert_gone, run_host, running_host, wait_until

PLUGINS = ("langsmith_plugin", "hypothesispytest", "_hypothesis_pytestplugin")
"""Of the packages of our own tests: their imports take longer than pytest does."""
OPTIONS = (
    "-q",
    "-n",
    "2",
    "-o",
    "addopts=",
    *(word for name in ("cacheprovider", *PLUGINS) for word in ("-p", f"no:{name}")),
)

CONFTEST = """
import os, pathlib, pytest
from actorllm import LLM

FOLDER = pathlib.Path(__file__).parent

@pytest.fixture(scope="session")
def llm(worker_id):
    with LLM("storyteller", num_threads=1, max_model_len=256) as llm:
        llm.generate("Once", use_tqdm=False)
        (FOLDER / f"{os.getpid()}.pids").write_text(" ".join(map(str, [os.getpid(), *llm._engine.pids.values()])))
        yield llm
"""

CRASHES = """
import os, pytest
from actorllm import SamplingParams

@pytest.mark.parametrize("count", range(6))
def test_tokens(llm, count):
    if count == 2:
        os._exit(7)  # as a library that crashes
    (output,) = llm.generate("Once", SamplingParams(max_tokens=3 + count, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3 + count
"""

NEVER_ENDS = """
import pathlib, pytest
from actorllm import SamplingParams

@pytest.mark.parametrize("name", ["a", "b"])
def test_answers(llm, name):
    prompts = ["Once"] * 3
    while True:
        llm.generate(prompts, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
        pathlib.Path(__file__).with_name(f"{name}.busy").touch()
"""


def suite(folder: Path, tests: str) -> tuple[str, ...]:
    """The arguments of Python that run it."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_application.py").write_text(tests)
    return ("-m", "pytest", *OPTIONS, "--rootdir", str(folder), str(folder))


def pids(folder: Path) -> list[int]:
    """Of the workers and their engines."""
    return [int(pid) for path in folder.glob("*.pids") for pid in path.read_text().split()]


def test_a_worker_that_crashes_takes_its_engine_along(tmp_path: Path) -> None:
    host = run_host(*suite(tmp_path, CRASHES), code=1)
    assert "1 failed, 5 passed" in host.output
    assert len(pids(tmp_path)) >= 6, (
        "of two workers, and of one that takes the place of the first if tests are left for it"
    )
    assert_gone(pids(tmp_path))


def test_ctrl_c_ends_all_workers_and_their_engines(tmp_path: Path) -> None:
    with running_host(*suite(tmp_path, NEVER_ENDS)) as host:
        assert wait_until(lambda: len([*tmp_path.glob("*.busy")]) == 2, within_s=40)
        host.process.send_signal(signal.SIGINT)
        assert host.wait() == 2, host.output
    assert len(pids(tmp_path)) == 6
    assert_gone(pids(tmp_path))
