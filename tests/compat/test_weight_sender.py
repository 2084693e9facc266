"""`WeightSender`: what it is given, and a server that it updates."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from actorllm.compat.weight_sender import HttpEngine, WeightSender, handles_of, update_info_of
from actorllm.errors import EngineError, InvalidParameterError
from tests.model.updates.weight_folders import changed
from tests.server.live_server import Server


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"backend": "mpi"}, "backend='mpi' must be 'gloo' or 'nccl'"),
        ({"world_size": 1}, "world_size=1 must be an integer from 2 to 100000"),
        ({"world_size": 10**9}, "world_size=1000000000 must be an integer from 2"),
        ({"packed_buffer_size_bytes": 0}, "packed_buffer_size_bytes=0 must be an integer from 1"),
        ({"packed_buffer_size_bytes": 1 << 70}, r"packed_buffer_size_bytes=\d+ must be an integer from 1"),
        ({"packed": "no"}, "packed='no' must be True or False"),
        ({"timeout_s": "1"}, "timeout_s='1' must be a positive number of seconds"),
        ({"timeout_s": float("nan")}, "timeout_s=nan must be a positive number of seconds"),
        ({"timeout_s": float("inf")}, "timeout_s=inf must be a positive number of seconds, of 86400 at most"),
        ({"master_port": 70_000}, "master_port=70000 must be an integer from 0 to 65535"),
        ({"master_port": "29600"}, "master_port='29600' must be an integer"),
        ({"master_address": 5}, "master_address=5 must be the address"),
        ({"engine": 3}, "engine=3 must be an LLM, the URL of a server, or None"),
        ({"engine": "localhost:8000"}, "engine='localhost:8000' must be the URL of a server"),
        ({"backend": "nccl"}, "backend='nccl' is between GPUs"),
    ],
)
def test_what_is_no_sender_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameterError, match=said):
        WeightSender(**({"world_size": 2, "timeout_s": 1} | given))


def test_what_is_sent_is_described() -> None:
    told = update_info_of({"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.tensor(1.0)})
    assert told == {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], []]}
    with pytest.raises(InvalidParameterError, match="'a' is on cpu"):
        handles_of({"a": torch.zeros(2)})


class Refusing(http.server.BaseHTTPRequestHandler):
    """Notes what comes."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.seen.append((self.path, self.headers["authorization"], body))  # type: ignore[attr-defined]
        self.send_error(400, "no")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[Any]:
    server: Any = http.server.HTTPServer(("127.0.0.1", 0), Refusing)
    server.seen = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_what_a_server_refuses_is_told(refusing: Any) -> None:
    """At once: nobody is waited for."""
    engine = HttpEngine(f"http://127.0.0.1:{refusing.server_port}/", api_key="k")
    with pytest.raises(EngineError, match="init_weight_transfer_engine: 400"):
        WeightSender(engine, world_size=2, timeout_s=600)
    ((path, key, body),) = refusing.seen
    assert (path, key) == ("/init_weight_transfer_engine", "Bearer k")
    assert b'"backend": "gloo"' in body
    with pytest.raises(EngineError, match="finish_weight_update: 400"):
        engine.finish_weight_update("v")
    assert refusing.seen[-1][2] == b'{"weight_version": "v"}'


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineError, match=r"start_weight_update: http://127.0.0.1:9 cannot be reached"):
        HttpEngine("http://127.0.0.1:9").start_weight_update()


def test_what_is_no_server_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"+OK ready\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(EngineError, match=r"start_weight_update: .* cannot be reached: \+OK ready"):
            HttpEngine(f"http://127.0.0.1:{listening.getsockname()[1]}").start_weight_update()
        thread.join()


def test_without_an_engine_nothing_is_updated() -> None:
    sender = WeightSender.__new__(WeightSender)
    sender._engine = None
    with pytest.raises(InvalidParameterError, match="give WeightSender an engine"):
        sender.update({"a": torch.zeros(2)})


@pytest.mark.slow(reason="a server in a process of its own")
def test_a_server_is_updated() -> None:
    server = Server("--dtype", "float32", "--num-threads", "1", "--enable-dev-endpoints")
    try:
        body = {"prompt": "dog", "max_tokens": 8, "temperature": 0, "ignore_eos": True}

        def text() -> str:
            told: str = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).json()["choices"][0]["text"]
            return told

        first = text()
        sender = WeightSender(server.url, world_size=2, timeout_s=60)
        sender.update(changed(1), version="one")
        assert text() != first
        assert httpx.get(f"{server.url}/get_weight_version").json() == {"weight_version": "one"}
        sender.update(changed(0), version="zero")
        assert text() == first
        with pytest.raises(EngineError, match=r"finish_weight_update: .*has shape"):
            sender.update({"model.norm.weight": torch.ones(3)})
        sender.close()
    finally:
        server.stop()
