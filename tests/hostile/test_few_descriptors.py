"""A program that may open few files: its engine works, or says in one sentence what is missing, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "start_with.py"
NAMES_THE_FIX = (
    "files open (RLIMIT_NOFILE), and there is no room for what the engine needs; allow more (ulimit -n 1024)"
)


@pytest.mark.parametrize(
    ("topology", "limits"),
    [
        ("inline", (11, 16, 18, 30)),
        ("process", (12, 25, 28)),
        pytest.param("inline", range(10, 31), marks=pytest.mark.slow),
        pytest.param("process", range(10, 61), marks=pytest.mark.slow),
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
