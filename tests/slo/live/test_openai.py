"""Replay against a server with the OpenAI API: a small one that streams as servers do, and breaks as they do."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from actorllm.errors import ConfigError
from actorllm.slo.live.openai import OpenAITarget, slo_headers
from actorllm.slo.live.replay import replay
from actorllm.slo.timeline import ABORTED, FAILED, FINISHED
from actorllm.slo.workload import Workload, assign_classes, fixed_lengths, make_workload
from actorllm.types.objective import SLO, RequestClass


class Server:
    """One token per piece. What it does with a request is said by the number of its tokens (`behaviour`)."""

    def __init__(self) -> None:
        self.behaviour: dict[int, str] = {}
        self.tells_usage = True
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.release = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path != "/v1/models":
                    self.send_error(404)
                    return
                body = json.dumps({"data": [{"id": "tale", "max_model_len": 4096}, {"id": "other"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.bodies.append(body)
                server.headers.append(dict(self.headers))
                what = server.behaviour.get(body["max_tokens"], "")
                if what == "refuse":
                    self.send_response(400)
                    told = b'{"error": {"message": "too many"}}'
                    self.send_header("Content-Length", str(len(told)))
                    self.end_headers()
                    self.wfile.write(told)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                self.close_connection = True
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.stream(body["max_tokens"], what)

            def event(self, value: Any) -> None:
                self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
                self.wfile.flush()

            def stream(self, num: int, what: str) -> None:
                for i in range(num):
                    if what == "hang" and i == 1:
                        server.release.wait(20)
                    if what == "break" and i == 2:
                        return
                    if what == "nonsense" and i == 1:
                        self.wfile.write(b"data: [1, 2]\n\n")
                        server.release.wait(20)
                    if what == "error" and i == 1:
                        self.event({"error": {"message": "the engine is gone"}})
                        return
                    piece: dict[str, Any] = {"choices": [{"text": "x"}]}
                    if server.tells_usage:
                        piece["usage"] = {"completion_tokens": i + 1}
                    self.event(piece)
                self.event({"choices": [], "usage": {"completion_tokens": num + 2 * (not server.tells_usage)}})
                self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")

            def log_message(self, *arguments: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,))
        self.thread.start()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.release.set()
    server.http.shutdown()
    server.thread.join()
    server.http.server_close()


def workload_of(*num_outputs: int) -> Workload:
    prompt, _ = fixed_lengths(len(num_outputs), 7, 1)
    return make_workload(np.arange(len(num_outputs)) * 0.01, (prompt, np.array(num_outputs, np.int32)))


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_every_token_has_its_time(server: Server, suffix: str) -> None:
    kind = RequestClass("ls", SLO(ttft=0.5, tpot=0.05, ttft_per_prompt_token=0.001), priority=3)
    workload = assign_classes(workload_of(4, 5, 1), [(kind, 1.0)])
    async with OpenAITarget(server.url + suffix, api_key="secret") as target:
        run = await replay(workload, target, num_warmups=0, seed=5)
    assert run.timeline.outcome.tolist() == [FINISHED] * 3, run.errors
    assert run.timeline.num_output.tolist() == [4, 5, 1]
    assert (run.timeline.ttft > 0).all()
    assert (run.backend, run.model) == ("openai", "tale")
    body = server.bodies[0]
    assert len(body["prompt"]) == 7
    assert all(100 <= token < 4000 for token in body["prompt"])
    assert (body["model"], body["stream"], body["ignore_eos"], body["priority"]) == ("tale", True, True, 3)
    headers = server.headers[0]
    assert float(headers["x-slo-ttft-ms"]) == pytest.approx(507)
    assert headers["x-slo-tpot-ms"] == "50"
    assert headers["Authorization"] == "Bearer secret"


async def test_a_server_that_does_not_count_as_it_goes(server: Server) -> None:
    server.tells_usage = False
    async with OpenAITarget(server.url) as target:
        run = await replay(workload_of(4), target, num_warmups=0)
    assert run.timeline.num_output.tolist() == [6], "two tokens came together with others"
    assert run.timeline.last_token[0] == run.timeline.token_times(0)[3]


async def test_what_goes_wrong_is_a_row(server: Server) -> None:
    server.behaviour = {3: "refuse", 4: "break", 5: "error", 6: "hang", 7: "nonsense"}
    workload = workload_of(2, 3, 4, 5, 6, 2, 7)
    workload = assign_classes(workload, [(RequestClass("hasty", patience=0.5), 1.0)])
    async with OpenAITarget(server.url) as target:
        run = await replay(workload, target, num_warmups=0)
    assert run.timeline.outcome.tolist() == [FINISHED, FAILED, FAILED, FAILED, ABORTED, FINISHED, FAILED]
    assert run.timeline.num_output.tolist() == [2, 0, 2, 1, 1, 2, 1]
    assert "the server answers 400: " in run.errors[1]
    assert "too many" in run.errors[1]
    assert "ended the answer after 2 tokens, without [DONE]" in run.errors[2]
    assert "the engine is gone" in run.errors[3]
    assert "the server sent '[1, 2]'" in run.errors[6]


async def test_a_server_that_is_none(server: Server) -> None:
    async with OpenAITarget(server.url, "tail") as target:
        with pytest.raises(ConfigError, match=r"has no model 'tail'; it has tale, other"):
            await target.prepare()
    async with OpenAITarget(f"{server.url}/nothing") as target:
        with pytest.raises(ConfigError, match=r"/nothing/v1/models does not answer as it should: .*404"):
            await target.prepare()
    async with OpenAITarget("http://127.0.0.1:9") as target:
        with pytest.raises(ConfigError, match="ConnectError"):
            await target.prepare()
    async with OpenAITarget(server.url) as target:
        with pytest.raises(ConfigError, match="1 of 1 requests are longer than the 4096 tokens"):
            await replay(workload_of(5000), target)
    assert server.bodies == []


def test_only_what_is_promised_is_said() -> None:
    assert slo_headers(RequestClass("x"), 10) == {}
    assert slo_headers(RequestClass("x", SLO(e2e=5.0)), 10) == {}
    assert slo_headers(RequestClass("x", SLO(tpot=0.0335)), 10) == {"x-slo-tpot-ms": "33.5"}
