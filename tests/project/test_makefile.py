"""The Makefile's targets for tests take further arguments for pytest."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OF_MAKE = ("ARGS", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL")
"""What a `make` that runs this test would hand on to the one in the test."""


def commands(*arguments: str) -> list[str]:
    """What `make` would run, as if everything were installed."""
    done = ["--old-file", "venv/.installed", "--old-file", "venv/triton-3.6"]
    return subprocess.run(
        ["make", "--dry-run", "--no-print-directory", *done, "VENV=venv", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in OF_MAKE},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout.splitlines()


@pytest.mark.parametrize(("target", "kind"), [("test", '"not slow"'), ("test-slow", "slow")])
def test_arguments_reach_pytest(target: str, kind: str) -> None:
    assert commands(target, "ARGS=-k word") == [f"venv/bin/python -m pytest -m {kind} -k word"]


def test_without_arguments_everything_runs_in_two_processes() -> None:
    shared = "--numprocesses 2 --dist loadfile"
    assert [line.strip() for line in commands("test")] == [f'venv/bin/python -m pytest -m "not slow" {shared}']
    tests, *others = [line.strip() for line in commands("test-slow")]
    assert tests == "venv/bin/python -m pytest -m slow"
    assert any("tests/clients/run.py --cases 10000" in line for line in others)
    assert any("actorllm_kernels.resources" in line for line in others)
