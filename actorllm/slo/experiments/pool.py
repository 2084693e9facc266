"""`Pool`: processes that simulate points, one each at a time. They get points and give records as lines of JSON.

num_processes 0: there are none, and a point is simulated when its result is asked for; the records are the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from types import TracebackType
from typing import Any, Self

from actorllm.errors import ActorLLMError, ConfigError
from actorllm.scheduling.admission_policy import ADMISSIONS
from actorllm.scheduling.policy import POLICIES, policy_path
from actorllm.slo.experiments.point import Point
from actorllm.slo.experiments.record import record_of

BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from actorllm.slo.experiments import worker; worker.main()"


class PointError(ActorLLMError):
    """A point could not be simulated: its policy raised, say."""

    def __init__(self, point: Point, message: str) -> None:
        super().__init__(f"{point}: {message}")
        self.point = point
        self.message = message


class _Process:
    def __init__(self) -> None:
        self.point: Point | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(sys.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self.stdout = self._process.stdin, self._process.stdout

    def send(self, point: Point) -> None:
        self.point = point
        policies = {name: policy_path(name) for name in POLICIES}
        admissions = {name: ADMISSIONS.path(name) for name in ADMISSIONS.names}
        line = json.dumps({"point": point.to_dict(), "policies": policies, "admissions": admissions}) + "\n"
        try:
            self._stdin.write(line.encode())
            self._stdin.flush()
        except BrokenPipeError:
            pass  # it is dead, which its stdout tells

    def receive(self) -> dict[str, Any] | None:
        """None: it has died."""
        line = self.stdout.readline()
        if not line.endswith(b"\n"):
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> str:
        """End it now; how it ended."""
        if self._process.poll() is None:
            self._process.kill()
        self.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        code = self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


class Pool:
    """submit() points, take results by next_done() in any order. To be closed, or used with `with`."""

    def __init__(self, num_processes: int | None = None) -> None:
        num = (os.cpu_count() or 1) if num_processes is None else num_processes
        if num < 0:
            raise ConfigError(f"num_processes={num} must be at least 0")
        self.num_processes = num
        self._queue: deque[Point] = deque()
        self._selector = selectors.DefaultSelector()
        self._processes: list[_Process] = []
        self._idle: list[_Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        for process in self._processes:
            process.end()
        self._processes.clear()
        self._idle.clear()
        self._selector.close()

    def submit(self, point: Point) -> None:
        if self.num_processes and policy_path(point.variant.policy).startswith("__main__:"):
            raise ConfigError(
                f"policy {point.variant.policy!r} is a class of the program itself, which other processes cannot load: put "
                f"it into a module of its own, or use num_processes=0"
            )
        self._queue.append(point)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._queue and (self._idle or len(self._processes) < self.num_processes):
            if self._idle:
                process = self._idle.pop()
            else:
                process = _Process()
                self._processes.append(process)
                self._selector.register(process.stdout, selectors.EVENT_READ, process)
            process.send(self._queue.popleft())

    def next_done(self) -> tuple[Point, dict[str, Any] | PointError]:
        """The next point that is done, with its record or with what went wrong. Something must be under way."""
        if not self.num_processes:
            next_one = self._queue.popleft()
            try:
                return next_one, record_of(next_one, next_one.run())
            except Exception as error:  # of one point, which may have a policy of the user's own
                return next_one, PointError(next_one, told(error))
        for key, _ in self._selector.select():
            process: _Process = key.data
            point, answer = process.point, process.receive()
            if point is None:
                raise RuntimeError("a process of the pool told something without being asked")
            process.point = None
            if answer is None:
                self._selector.unregister(process.stdout)
                self._processes.remove(process)
                how = process.end()
                self._hand_out()
                return point, PointError(point, f"the process that simulated it ended with {how}")
            self._idle.append(process)
            self._hand_out()
            if "error" in answer:
                return point, PointError(point, answer["error"])
            return point, answer["record"]
        raise RuntimeError("nothing is under way")


def told(error: BaseException) -> str:
    """With its notes, which name the policy."""
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
