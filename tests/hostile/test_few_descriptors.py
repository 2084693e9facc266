"""A program that may open few files: its engine works, or says in one sentence what is missing, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import actorllm.client.engine_supervisor
from actorllm import ActorLLMError, AsyncLLM
from tests.actors.scripted_topology import with_workers
from tests.hostile.bystander import bystander

PROGRAM = Path(__file__).parent / "start_with.py"
NAMES_THE_FIX = (
    "files open (RLIMIT_NOFILE), and there is no room for what the engine needs; allow more (ulimit -n 1024)"
)


@pytest.mark.parametrize(
    ("topology", "limits"),
    [
        ("inline", (11, 16, 18, 30)),
        ("process", (12, 25, 28)),
        pytest.param(
            "inline",
            range(10, 31),
            marks=[pytest.mark.slow(reason="starts an engine for each of 21 limits"), pytest.mark.timeout(900)],
        ),
        pytest.param(
            "process",
            range(10, 61),
            marks=[pytest.mark.slow(reason="starts an engine for each of 51 limits"), pytest.mark.timeout(900)],
        ),
    ],
)
def test_it_starts_or_says_what_is_missing(topology: str, limits: range) -> None:
    arguments = [sys.executable, str(PROGRAM), topology, *map(str, limits)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=900, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["limit"] for one in found] == list(limits), done.stderr
    for one in found:
        outcome = one["outcome"]
        is_told = outcome.startswith("EngineStartError: the engine cannot start") and NAMES_THE_FIX in outcome
        is_of_model = outcome.startswith("CorruptModelError") and "Too many open files" in outcome
        assert outcome == "2 tokens" or is_told or is_of_model, one
        assert not one["left"], one
    assert "Traceback" not in done.stderr
    if topology == "inline":
        assert found[-1]["outcome"] == "2 tokens", "thirty are enough for an engine of one process"


@contextlib.contextmanager
def room_for(num_files: int) -> Iterator[None]:
    """This program can open so many files more, or a few more where there are gaps."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + num_files, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("topology", ["inline", "process"])
async def test_a_start_that_fails_disturbs_no_engine_that_runs(monkeypatch: pytest.MonkeyPatch, topology: Any) -> None:
    """Both are in one program, and share its limit."""
    light = with_workers("ScriptedWorkerActor", inline_too=False)
    monkeypatch.setattr(actorllm.client.engine_supervisor, "engine_topology", light)
    arguments: dict[str, Any] = {"num_threads": 1, "max_model_len": 64}
    async with AsyncLLM("storyteller", topology="inline", num_threads=1) as llm, bystander(llm) as steady:
        num_starts, until = 0, steady.num_tokens + 10
        while steady.num_tokens < until or num_starts < 3:
            other = AsyncLLM("storyteller", topology=topology, **arguments)
            with room_for((2, 6, 10)[num_starts % 3]), pytest.raises(ActorLLMError, match=r"open files|files open"):
                await other.start()
            other.shutdown()
            num_starts += 1
            assert num_starts < 30, "the stream goes on while engines fail to start"
            await anyio.sleep(0.002)
        async with AsyncLLM("storyteller", topology=topology, **arguments) as second:
            assert (await second.complete("Once")).outputs[0].token_ids, "with room it starts"
