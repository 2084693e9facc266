"""Host programs: applications that embed an engine, run in a process of their own, and what is left of them.

A host program is source text. It prints `pids N N ...` when its engine runs (`PRINT_PIDS`), so that a test can look for
processes which outlive it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests import programs
from tests.supervision.processes import is_gone

ROOT = Path(__file__).resolve().parents[2]
PAUSE_S = 0.02

PRINT_PIDS = """
def print_pids(llm):
    print("pids", *llm._engine.pids.values(), flush=True)
"""
"""A function for the beginning of a host program."""


@dataclass
class HostProgram:
    """A running host program."""

    process: subprocess.Popen[str]
    _errors: IO[str] = field(repr=False)
    output: str = ""
    """What it has printed, as far as it was read."""
    _kept_errors: str | None = None

    def read_until(self, word: str, timeout_s: float = 40) -> str:
        """Read lines until one starts with this word; returns that line. Raises AssertionError if the program ends first."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            line = self.process.stdout.readline()
            assert line, f"the program ended before it printed {word!r}: {self.output}{self.errors}"
            self.output += line
            if line.startswith(word):
                return line
        raise AssertionError(f"the program did not print {word!r}: {self.output}{self.errors}")

    def wait(self, timeout_s: float = 40) -> int:
        """Read the rest of the output and return the exit code."""
        assert self.process.stdout is not None
        rest, _ = self.process.communicate(timeout=timeout_s)
        self.output += rest
        return self.process.returncode

    @property
    def errors(self) -> str:
        """What it has written to standard error so far."""
        if self._kept_errors is not None:
            return self._kept_errors
        self._errors.seek(0)
        return self._errors.read()

    def keep_errors(self) -> None:
        """Make `errors` readable after the end of `running_host`, whose file is closed then."""
        self._kept_errors = self.errors

    @property
    def engine_pids(self) -> list[int]:
        """The processes of its engines, as printed so far."""
        lines = [line.split() for line in self.output.splitlines()]
        return [int(pid) for words in lines if words[:1] == ["pids"] for pid in words[1:]]


@contextmanager
def running_host(
    *arguments: str, stdin: str | None = None, environment: dict[str, str] | None = None, is_copied: bool = False
) -> Iterator[HostProgram]:
    """Python with these arguments (`"-c", source`, or the path of a script), killed at the end if it still runs.

    is_copied: it may be a copy of a process that has imported our modules (`tests/programs.py`).
    """
    popen = programs.popen if is_copied else subprocess.Popen
    with tempfile.TemporaryFile("w+") as errors:
        process = popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
                **(environment or {}),
            },
        )
        try:
            if stdin is not None:
                assert process.stdin is not None
                process.stdin.write(stdin)
                process.stdin.close()
                process.stdin = None
            yield HostProgram(process, errors)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def run_host(
    *arguments: str,
    code: int = 0,
    stdin: str | None = None,
    environment: dict[str, str] | None = None,
    timeout_s: float = 40,
    is_copied: bool = False,
) -> HostProgram:
    """Run a host program to its end. Asserts its exit code, that no traceback was printed, and that nothing outlives it."""
    with running_host(*arguments, stdin=stdin, environment=environment, is_copied=is_copied) as host:
        returned = host.wait(timeout_s)
        assert returned == code, f"exit code {returned}: {host.output}{host.errors}"
        if code == 0:
            assert "Traceback" not in host.errors, host.errors
        assert_gone(host.engine_pids)
        host.keep_errors()
        return host


def assert_gone(pids: Sequence[int], within_s: float = 10) -> None:
    """Wait until none of these processes runs. Raises AssertionError, which names those that do, after that time."""
    wait_until(lambda: all(map(is_gone, pids)), within_s)
    left = [pid for pid in pids if not is_gone(pid)]
    assert not left, f"processes {left} outlive the host program"


def wait_until(condition: Callable[[], bool], within_s: float = 10) -> bool:
    """Whether the condition holds within that time.

    Counted are pauses of this process: on a busy machine each lasts longer, as what is waited for does.
    """
    for _ in range(round(within_s / PAUSE_S)):
        if condition():
            return True
        time.sleep(PAUSE_S)
    return condition()


def children() -> list[int]:
    """The processes that this one has started and that have not been waited for, but for those that are copied."""
    return programs.children_of(os.getpid())
