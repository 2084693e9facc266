"""Two sides of a comparison as two process trees that take turns.

A `Side` is a script run by its own interpreter. It starts once, answers one JSON line per command, and is stopped
(SIGSTOP, all its processes) whenever it is not its turn: an engine that polls while idle does not disturb the other.
The script calls `serve` or `serve_async`. Standard library only: the peers' interpreters import this file.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

SETTLE_S = 2.0
"""How long an engine may calm down before its idleness is measured: some poll for a while after their last request."""

PR_SET_PDEATHSIG = 1


class SideError(RuntimeError):
    """A side did not start, died, or answered with an error."""


def cores() -> list[int]:
    """The cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def exit_on_sigterm() -> None:
    """So that `finally` runs, and the sides go, when the benchmark is ended from outside."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


# The processes of a side


def process_tree(pid: int) -> list[int]:
    """A process and all its descendants, parents first."""
    pids = [pid]
    for parent in pids:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                pids += [int(child) for child in task.read_text().split()]
    return pids


def cpu_seconds(pids: Sequence[int]) -> tuple[float, float]:
    """What the processes have used: user and system time by the kernel's ticks, and by its exact run times."""
    ticks, exact = 0, 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
            for task in Path(f"/proc/{pid}/task").iterdir():
                exact += int((task / "schedstat").read_text().split()[0])
    return ticks / os.sysconf("SC_CLK_TCK"), exact / 1e9


def idle_share(pid: int, seconds: float) -> float:
    """Share of one core that a process and its descendants use meanwhile, the larger of both clocks."""
    pids = process_tree(pid)
    began, before = time.monotonic(), cpu_seconds(pids)
    time.sleep(seconds)
    after, spent = cpu_seconds(pids), time.monotonic() - began
    return max(b - a for a, b in zip(before, after, strict=True)) / spent


class Side:
    """One side. `start` waits until it is ready; then it runs only within `call`."""

    def __init__(
        self,
        name: str,
        python: str,
        script: str,
        options: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.hello: dict[str, Any] = {}
        """What the side says about itself: its versions and its whole configuration."""
        self._command = [python, str(HERE / script), "--side", name, "--options", json.dumps(options)]
        self._environment = dict(environment or {})
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Side:
        """Start it, or raise SideError with the last lines it wrote."""
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": path, **self._environment},
            start_new_session=True,
        )
        self.hello = self._answer()
        self.stop()
        return self

    def call(self, do: str, **arguments: Any) -> Any:
        """Let it run, do one thing, and stop it again."""
        assert self._process is not None
        assert self._process.stdin is not None
        self.resume()
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.stop()
        return answer

    def idle_share(self, seconds: float) -> float:
        """Share of one core that it uses with nothing to do."""
        assert self._process is not None
        self.resume()
        time.sleep(SETTLE_S)
        share = idle_share(self._process.pid, seconds)
        self.stop()
        return share

    def _answer(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideError(f"{self.name} ended: {self.last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise SideError(f"{self.name}: {answer['error']}")
        return answer["value"]

    def last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-12:])

    def stop(self) -> None:
        """Stop all its processes where they are."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is None:
            return
        for pid in process_tree(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """End it: politely, then not."""
        process, self._process = self._process, None
        if process is None:
            return
        pids = process_tree(process.pid)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        for pid in process_tree(process.pid) if process.poll() is None else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids[1:]:
            if _session(pid) == process.pid:  # not one that was born with the same number
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()
        self._log.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _session(pid: int) -> int | None:
    with suppress(OSError):
        return os.getsid(pid)
    return None


# Within a side


def options_of_side() -> tuple[str, dict[str, Any]] | None:
    """Name and options if this process is a side; None if it is the benchmark itself."""
    arguments = sys.argv[1:]
    if len(arguments) == 4 and arguments[0] == "--side":
        return arguments[1], json.loads(arguments[3])
    return None


def _open_answers() -> IO[str]:
    """The pipe for answers; whatever libraries print goes to standard error from now on. Also binds life to the parent's."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def _say(answers: IO[str], value: Any) -> None:
    answers.write(json.dumps({"value": value}) + "\n")


def _complain(answers: IO[str], error: BaseException) -> None:
    traceback.print_exc()
    answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")


def serve(start: Callable[[], tuple[Any, Callable[[dict[str, Any]], Any]]]) -> None:
    """start: returns what to say about itself, and the function that does a command."""
    answers = _open_answers()
    try:
        hello, do = start()
    except Exception as error:
        _complain(answers, error)
        return
    _say(answers, hello)
    for line in sys.stdin:
        try:
            _say(answers, do(json.loads(line)))
        except Exception as error:
            _complain(answers, error)


def serve_async(start: Callable[[], Awaitable[tuple[Any, Callable[[dict[str, Any]], Awaitable[Any]]]]]) -> None:
    """As `serve`, on one asyncio loop."""
    answers = _open_answers()

    async def main() -> None:
        try:
            hello, do = await start()
        except Exception as error:
            _complain(answers, error)
            return
        _say(answers, hello)
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                _say(answers, await do(json.loads(line)))
            except Exception as error:
                _complain(answers, error)

    asyncio.run(main())
