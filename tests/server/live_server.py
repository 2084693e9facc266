"""`actorllm serve` in a process of its own, for tests that want real connections and real signals."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import httpx


class Server:
    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "actorllm.cli", "serve", "storyteller", "--port", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert self.process.stderr is not None
        self.log: list[str] = []
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"running on (?:(https?://[\d.:]+)|unix socket (\S+))", line)
            if found:
                self.url = found[1] or "http://unix"
                return
        self.process.communicate()
        raise AssertionError("".join(self.log))

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.rpartition("://")[2].rpartition(":")
        return host, int(port)

    def wait(self) -> tuple[int, str]:
        """As `stop`, of one that was told already."""
        _, rest = self.process.communicate(timeout=30)
        return self.process.returncode, "".join(self.log) + rest

    def stop(self) -> tuple[int, str]:
        """Its exit status, and all that it has said on standard error."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait()


def becomes_true(is_true: Callable[[], bool], timeout_s: float = 20) -> None:
    until = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.01)


def sample(client: httpx.Client, name: str) -> float:
    """One value of a scrape."""
    found = re.search(rf"^actorllm:{name}{{[^}}]*}} (.*)$", client.get("/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])
