"""A start that hangs ends after `start_timeout_s`: the error has the stack of what hangs, and no process is left."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import actorllm.client.engine_supervisor
from actorllm import LLM, AsyncLLM
from actorllm.actors.topology import Topology, engine_topology
from actorllm.errors import EngineStartError
from tests.embedding.host_program import children, wait_until

pytestmark = pytest.mark.usefixtures("processes_are_execed")

HANGS = """
import threading

def wait_for_ever():
    threading.Event().wait()

wait_for_ever()
"""
WEIGHTS = "model-00001-of-00001.safetensors"
STORYTELLER = Path(actorllm.__file__).parent / "bundled" / "storyteller"


@pytest.fixture
def model_that_is_not_read(tmp_path: Path) -> Path:
    """A folder whose weights are a FIFO, as a file on a file system that does not answer: opening it does not return."""
    folder = tmp_path / "model"
    shutil.copytree(STORYTELLER, folder, ignore=shutil.ignore_patterns("*.py", "*.safetensors"))
    os.mkfifo(folder / WEIGHTS)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": WEIGHTS}}))
    return folder


def hang_at_import(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of this actor does not come to its end."""
    (folder / "module_that_hangs.py").write_text(HANGS)
    monkeypatch.syspath_prepend(str(folder))

    def topology(config: Any) -> Topology:
        right = engine_topology(config)
        actors = tuple(
            dataclasses.replace(actor, path="module_that_hangs:Actor", preload=()) if actor.name == name else actor
            for actor in right.actors
        )
        return dataclasses.replace(right, actors=actors)

    monkeypatch.setattr(actorllm.client.engine_supervisor, "engine_topology", topology)


@pytest.mark.parametrize("name", ["scheduler", "worker0"])
def test_a_process_that_hangs_while_it_imports(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang_at_import(name, tmp_path, monkeypatch)
    llm = AsyncLLM("storyteller", num_threads=1, start_timeout_s=5)

    async def ask() -> None:
        await llm.complete("Once")

    with pytest.raises(EngineStartError) as raised:  # by the request that waits for the start
        asyncio.run(ask())
    told = str(raised.value)
    assert told.startswith("the engine was not ready within 5 s; waiting for ")
    assert f"{name} (starting)" in told
    assert "start_timeout_s" in told
    assert f"\n{name} was killed because it was stuck: it was not ready; its last words:" in told
    assert "in wait_for_ever" in told, "the stack of what hangs"
    assert not children()
    llm.shutdown()


@pytest.mark.slow(reason="the limit must leave time for the import of torch on a busy machine")
def test_a_worker_that_hangs_while_it_reads_weights(model_that_is_not_read: Path) -> None:
    with pytest.raises(EngineStartError) as raised:
        LLM(str(model_that_is_not_read), num_threads=1, start_timeout_s=15)
    told = str(raised.value)
    assert "worker0 was killed because it was stuck: it was not ready" in told
    assert "weights.py" in told, told
    assert not children()


def test_a_thread_that_hangs_while_it_reads_weights(
    model_that_is_not_read: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread cannot be ended; the start ends, and the thread does when what it waits for returns."""
    monkeypatch.setattr("actorllm.supervision.supervisor.STOP_TIMEOUT_S", 0.5)
    import_module("actorllm.model.cpu.runner")  # that takes seconds on a busy machine, and is not what hangs here
    before = set(threading.enumerate())
    with pytest.raises(EngineStartError) as raised:
        LLM(str(model_that_is_not_read), topology="inline", num_threads=1, start_timeout_s=5)
    told = str(raised.value)
    assert "the engine was not ready within 5 s; waiting for " in told
    assert "worker0 (starting)" in told
    assert "\nworker0 is in:\n" in told
    assert "weights.py" in told, told
    assert "in _wait_for" in told, told
    end = os.open(model_that_is_not_read / WEIGHTS, os.O_RDWR)  # the file system answers
    os.write(end, b"not a file of weights")

    def left() -> list[str]:
        return [one.name for one in set(threading.enumerate()) - before if one.name.startswith("actorllm")]

    is_over = wait_until(lambda: not left(), 30)
    os.close(end)
    assert is_over, left()
