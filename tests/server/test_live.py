"""A server as it is started from a shell, and the client that everybody has: openai's."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.live_server import Server, becomes_true, hang_up

REFERENCE = (
    *("--tensor-parallel-size", "1", "--max-num-seqs", "500", "--trust-remote-code", "--enforce-eager"),
    *("--max-num-batched-tokens", "512", "--gpu-memory-utilization", "0.02", "--enable-chunked-prefill"),
)
"""The flags of the reference demo, as they stand there."""

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")

MESSAGES: Any = [{"role": "user", "content": "Once upon a time"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(*REFERENCE, "--api-key", "secret", "--num-threads", "1")
    yield made
    status, log = made.stop()
    assert status == 0, log
    assert "Traceback" not in log


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def test_openai_lists_and_completes(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["storyteller"]
    assert client.models.retrieve("storyteller").id == "storyteller"
    whole = client.completions.create(
        model="storyteller", prompt="Once upon a time", max_tokens=8, temperature=0, logprobs=1
    )
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    assert whole.choices[0].logprobs is not None
    stream = client.completions.create(
        model="storyteller",
        prompt="Once upon a time",
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage


def test_openai_converses(client: openai.OpenAI) -> None:
    arguments: Any = {"model": "storyteller", "messages": MESSAGES, "max_completion_tokens": 8, "seed": 1, "n": 2}
    whole = client.chat.completions.create(**arguments, logprobs=True, top_logprobs=1)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [choice.message.content for choice in whole.choices] == texts


class Animal(BaseModel):
    kind: Literal["fox", "bear"]
    age: int = Field(ge=1, le=9)


def test_openai_parses_answers_and_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="storyteller", messages=MESSAGES, response_format=Animal, max_tokens=99, seed=2
    )
    animal = answer.choices[0].message.parsed
    assert animal is not None
    assert animal.kind in ("fox", "bear")
    arguments: Any = {
        "model": "storyteller",
        "messages": MESSAGES,
        "tools": [openai.pydantic_function_tool(Animal, name="tell_of")],
        "tool_choice": {"type": "function", "function": {"name": "tell_of"}},
        "max_tokens": 99,
        "seed": 2,
    }
    (call,) = client.chat.completions.parse(**arguments).choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Animal)
    with client.chat.completions.stream(**arguments) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert streamed.function.name == "tell_of"
    assert streamed.function.arguments == call.function.arguments


def test_the_reference_demo(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="storyteller",
        messages=MESSAGES,
        temperature=0.7,
        max_tokens=100,
        extra_body={"length_penalty": 1.0, "min_tokens": 100, "is_latency_sensitive": "True", "slo": 0.05},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 100


def test_openai_understands_the_errors(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature=-1") as error:
        client.completions.create(model="storyteller", prompt="a", temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="a")
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.completions.create(model="storyteller", prompt=[5] * 3000, stream=True)
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_tokens_come_in_events(server: Server) -> None:
    """A reader that is slower than the engine gets several tokens in one."""
    body = {"prompt": "Once", "max_tokens": 50, "ignore_eos": True, "stream": True, "seed": 1, "return_token_ids": True}
    headers = {"authorization": "Bearer secret"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as response:
        chunks = list(response.iter_text())
    events = [event for event in "".join(chunks).split("\n\n") if event]
    assert events[-1] == "data: [DONE]"
    told = [json.loads(event.removeprefix("data: "))["choices"][0]["token_ids"] for event in events[:-1]]
    assert sum(map(len, told)) == 50
    assert len(told) > 1, "all at once is no stream"


def idle(server: Server) -> bool:
    return httpx.get(f"{server.url}/load").json() == {"server_load": 0}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_hangs_up_ends_its_request(server: Server, stream: bool) -> None:
    body = {"prompt": "Once", "n": 8, "min_tokens": 1000, "stream": stream, "max_tokens": 1000}
    headers = {"authorization": "Bearer secret"}
    request = httpx.Request("POST", f"{server.url}/v1/completions", json=body, headers=headers)
    lines = ["POST /v1/completions HTTP/1.1", *(f"{name}: {value}" for name, value in request.headers.items())]
    raw = "\r\n".join([*lines, "", ""])
    host, port = server.url.removeprefix("http://").split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(raw.encode() + request.content)
            if stream:
                assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            else:
                while idle(server):
                    time.sleep(0.005)
    becomes_true(lambda: idle(server))


@pytest.mark.parametrize(
    "count", [100, pytest.param(1000, marks=pytest.mark.slow(reason="a thousand clients; a hundred show the same"))]
)
def test_many_that_hang_up_leave_nothing_behind(server: Server, count: int) -> None:
    folder = Path(f"/proc/{server.process.pid}/fd")
    num_fds = len(list(folder.iterdir()))
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda number: hang_up(server, number), range(count)))
    until = time.monotonic() + 20
    while True:
        samples = httpx.get(f"{server.url}/metrics").text
        left = [re.search(rf"^actorllm:{name}{{.*}} (.*)$", samples, re.MULTILINE) for name in GAUGES]
        if idle(server) and all(found is not None and float(found[1]) == 0 for found in left):
            break
        assert time.monotonic() < until, samples
        time.sleep(0.01)
    assert len(list(folder.iterdir())) <= num_fds + 4


def test_half_a_request_disturbs_nobody(server: Server, client: openai.OpenAI) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as first, socket.create_connection((host, int(port))) as second:
        first.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\nauthorization: Bearer secret\r\n\r\n{")
        second.sendall(b"POST /v1/compl")
        assert client.completions.create(model="storyteller", prompt="a", max_tokens=1).choices
        third = socket.create_connection((host, int(port)))
        third.sendall(b"\x00\xff rubbish\r\n\r\n")
        assert third.recv(100).startswith(b"HTTP/1.1 400")
        third.close()


def test_sigterm_finishes_what_is_under_way() -> None:
    server = Server("--num-threads", "1", "--disable-uvicorn-access-log", is_light=True)
    body = {"prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.Client(base_url=server.url, timeout=30) as client:
        with client.stream(
            "POST", "/v1/completions", json={**body, "stream_options": {"include_usage": True}}
        ) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.process.send_signal(signal.SIGTERM)
            status = 200
            while status == 200:
                status = httpx.get(f"{server.url}/health").status_code
            assert status == 503
            refused = httpx.post(f"{server.url}/v1/completions", json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"completion_tokens":400' in rest[-2]
    status, log = server.wait()
    assert status == 0, log
    assert "Traceback" not in log


@pytest.mark.timeout(120)
def test_a_unix_socket_is_taken_from_nobody_and_ends_with_its_server(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))  # of a server that was killed
    server = Server("--unix-socket", str(path), "--num-threads", "1", is_light=True)
    with pytest.raises(AssertionError, match=r"cannot listen on unix socket .*in use"):
        Server("--unix-socket", str(path), "--num-threads", "1", is_light=True)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url=server.url, timeout=30) as client:
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    status, log = server.stop()
    assert status == 0, log
    assert "Traceback" not in log
    assert not path.exists()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [1, 2])
def test_sigterm_is_an_orderly_end_also_when_the_engine_has_died(number: int) -> None:
    server = Server("--num-threads", "1", "--api-processes", str(number), "--on-failure", "raise", is_light=True)
    folders = Path(f"/proc/{server.process.pid}/task").iterdir()
    children = [pid for folder in folders for pid in (folder / "children").read_text().split()]
    (worker,) = [pid for pid in children if Path(f"/proc/{pid}/comm").read_text().startswith("actor:worker")]
    os.kill(int(worker), signal.SIGKILL)
    becomes_true(lambda: httpx.get(f"{server.url}/health").status_code == 503)
    status, log = server.stop()
    assert status == 0, log
    assert "Traceback" not in log
    assert "there is nothing to finish" in log


@pytest.mark.slow(reason="the limit for headers has to pass")
@pytest.mark.timeout(120)
def test_headers_that_do_not_come_are_not_waited_for(server: Server) -> None:
    connections = [socket.create_connection(server.address) for _ in range(50)]
    for number, connection in enumerate(connections):
        connection.settimeout(60)
        connection.sendall([b"", b"POST /v1/comple", b"GET /health HTTP/1.1\r\nx-a: b"][number % 3])
    becomes_true(lambda: httpx.get(f"{server.url}/health").status_code == 200)
    for connection in connections:
        with connection, contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""
