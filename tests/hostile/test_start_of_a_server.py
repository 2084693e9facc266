"""Two servers on one place, and clients who cannot wait: one server starts, and clients are answered or refused at once."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.certificates import certified
from tests.server.live_server import serve_command


@contextlib.contextmanager
def serving(*options: str) -> Iterator[subprocess.Popen[str]]:
    command = serve_command("--num-threads", "1", *options, is_light=True)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines_until(process: subprocess.Popen[str], words: str) -> list[str]:
    """What it says until a line has these words, or until its end."""
    assert process.stderr is not None
    found: list[str] = []
    for line in process.stderr:
        found.append(line)
        if re.search(words, line):
            break
    return found


class Impatient(threading.Thread):
    """Clients who connect again and again, from before the server is there. A connection must be answered, if it is made."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._is_over = threading.Event()
        self.outcomes: Counter[str] = Counter()

    def run(self) -> None:
        while not self._is_over.wait(0.005):
            self.outcomes[self._outcome()] += 1

    def _outcome(self) -> str:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=60) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                return connection.recv(100).decode().partition("\r\n")[0]
        except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
            return "refused"

    def stop(self) -> None:
        self._is_over.set()
        self.join()


@pytest.mark.timeout(180)
def test_two_servers_that_begin_at_once_beside_clients_who_cannot_wait() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    clients = [Impatient(port) for _ in range(4)]
    for client in clients:
        client.start()
    said: dict[int, list[str]] = {}
    with serving("--port", str(port)) as first, serving("--port", str(port)) as second:
        both = (first, second)

        def listen(process: subprocess.Popen[str]) -> None:
            said[process.pid] = lines_until(process, "running on|ConfigError")

        listeners = [threading.Thread(target=listen, args=(process,)) for process in both]
        for listener in listeners:
            listener.start()
        for listener in listeners:
            listener.join()
        (loser,) = [process for process in both if "ConfigError" in said[process.pid][-1]]
        (winner,) = [process for process in both if process is not loser]
        assert "Address already in use" in said[loser.pid][-1]
        assert not any("loading" in line for line in said[loser.pid]), "it has loaded the model in vain"
        assert loser.wait(60) == 2
        names = [re.search(r"the engine starts|loading|loaded|running on", line) for line in said[winner.pid]]
        assert [name[0] for name in names if name] == ["the engine starts", "loading", "loaded", "running on"]
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 2}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        for client in clients:
            client.stop()
        outcomes = sum((client.outcomes for client in clients), Counter())
        assert set(outcomes) == {"refused", "HTTP/1.1 200 OK"}, "a connection that is taken is answered, and with 200"
        winner.send_signal(signal.SIGTERM)
        winner.communicate(timeout=60)
        assert winner.returncode == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [1, 2])
def test_a_signal_while_the_engine_starts_ends_the_start(number: int, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with serving("--unix-socket", str(path), "--api-processes", str(number)) as process:
        assert "loading" in lines_until(process, "loading")[-1]
        assert path.is_socket()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0, log
        assert "running on" not in log
        assert "Traceback" not in log
    assert not path.exists()


@pytest.mark.timeout(120)
def test_handshakes_that_do_not_go_on_keep_nobody_waiting(tmp_path: Path) -> None:
    key, certificate = certified(tmp_path)
    with serving("--port", "0", "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)) as process:
        place = re.search(r"running on https://127.0.0.1:(\d+)", lines_until(process, "running on")[-1])
        assert place
        port = int(place[1])
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        for number, connection in enumerate(silent):
            connection.sendall([b"", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"][number % 3])
        with httpx.Client(verify=False, timeout=60) as client:
            for _ in range(3):
                body = {"prompt": "Once", "max_tokens": 2}
                assert client.post(f"https://127.0.0.1:{port}/v1/completions", json=body).status_code == 200
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
        for connection in silent:
            connection.close()
