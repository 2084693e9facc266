"""Agents of tests: programs of this machine that listen on its loopback interface."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tests import programs

KEY = b"the key of the tests, which is no secret"


def key_file(folder: Path, content: bytes = KEY) -> str:
    path = folder / f"key-{len(list(folder.iterdir()))}"
    path.touch(mode=0o600)
    path.write_bytes(content)
    return str(path)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Agent:
    """One `actorllm node`, at the same address in all its lives."""

    def __init__(
        self, key: str, options: Sequence[str] = (), prefix: Sequence[str] = (), host: str = "127.0.0.1"
    ) -> None:
        """host: or the path of a unix socket."""
        self.address = host if host.startswith("/") else f"{host}:{free_port()}"
        self._command = [
            *prefix,
            sys.executable,
            "-m",
            "actorllm",
            "node",
            "--listen",
            self.address,
            "--key-file",
            key,
            *options,
        ]
        self.lines: list[str] = []
        self.start()

    def start(self) -> None:
        """Returns when it listens."""
        popen = programs.popen if self._command[0] == sys.executable else subprocess.Popen
        self.process = popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == f"listening on {self.address}\n", (line, self.lines)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.lines.append(line)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    @property
    def children(self) -> list[int]:
        """The processes of its replicas."""
        return programs.children_of(self.process.pid)

    def close(self) -> None:
        """Also of one that is stopped. Idempotent."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
