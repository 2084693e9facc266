"""`actorllm serve` in a process of its own, for tests that want real connections and real signals."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable

import httpx
import orjson

from tests import programs
from tests.actors.scripted_topology import LIGHT_WORKERS

LIGHT_SERVER = f"""
import sys
from actorllm.cli import main
{LIGHT_WORKERS}
sys.exit(main())
"""
"""The command, with workers that import no torch."""


def serve_command(*options: str, is_light: bool = False) -> list[str]:
    """`actorllm serve`; is_light: with workers that import no torch, where a test does not look at what they compute."""
    program = ["-c", LIGHT_SERVER] if is_light else ["-m", "actorllm.cli"]
    return [sys.executable, *program, "serve", "storyteller", *options]


class Server:
    def __init__(self, *options: str, is_light: bool = False) -> None:
        command = serve_command("--port", "0", *options, is_light=is_light)
        self.process = programs.popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
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


def hang_up(server: Server, number: int, key: str | None = "secret") -> None:
    """Send a request, perhaps not all of it, read a little, perhaps nothing, and go."""
    dice = random.Random(number)
    body = orjson.dumps(
        {
            "prompt": "Once upon a time " * dice.randint(1, 30),
            "n": dice.choice([1, 1, 2, 4]),
            "max_tokens": dice.choice([20, 500]),
            "ignore_eos": True,
            "stream": dice.random() < 0.7,
            "temperature": 1.0,
        }
    )
    allowed = "" if key is None else f"authorization: Bearer {key}\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\n{allowed}content-length: {len(body)}\r\n\r\n"
    message = head.encode() + body
    with socket.create_connection(server.address) as connection:
        connection.sendall(message[: dice.choice([len(message), dice.randrange(len(message))])])
        connection.settimeout(dice.choice([0.001, 0.05, 0.2]))
        with contextlib.suppress(TimeoutError):
            connection.recv(dice.choice([1, 1000]))
        if dice.random() < 0.5:  # a reset instead of an end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
