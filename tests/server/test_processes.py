"""Several API processes on one engine: what one of them knows, all know; what one of them loses, the others keep."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.model.adapters.lora_folders import write_adapter
from tests.server.certificates import certified
from tests.server.live_server import Server, becomes_true, hang_up, sample, serve_command
from tests.supervision.processes import is_gone

TEXT = re.compile(rb'"text":"([^"]*)"')
LONG: dict[str, Any] = {"prompt": "Once", "max_tokens": 1000, "min_tokens": 1000, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server("--api-processes", "2", "--num-threads", "1", "--max-concurrent-requests", "24")
    yield made
    status, log = made.stop()
    assert status == 0, log
    assert "Traceback" not in log
    assert not any(name.startswith("actorllm") for name in os.listdir("/dev/shm"))


@pytest.mark.slow(reason="it starts a server of several processes")
def test_every_process_knows_the_adapters_of_the_command_line(tmp_path: Path) -> None:
    write_adapter(tmp_path / "sql", {"model.layers.0.self_attn.o_proj": (256, 256)}, size=3.0)
    made = Server(
        "--api-processes", "2", "--num-threads", "1", "--enable-lora", "--lora-modules", f"sql={tmp_path / 'sql'}"
    )
    try:
        streams = [Stream(made, model=model, temperature=0) for model in ("sql", "storyteller") for _ in range(8)]
        assert {stream.served_by(api_pids(made)) for stream in streams} == set(api_pids(made))
        texts = [b"".join(TEXT.findall(stream.read()))[:200] for stream in streams]
        print(*texts, sep="\n")
        assert texts[0] != texts[8]
        assert texts == [texts[0]] * 8 + [texts[8]] * 8
    finally:
        status, log = made.stop()
    assert status == 0, log


@pytest.mark.slow(reason="it starts a server of several processes and two replicas")
@pytest.mark.timeout(180)
def test_streams_of_every_process_outlive_a_replica() -> None:
    """Each process routes for itself, so both have streams on the replica that dies. Their texts are those of before."""
    fleet = ("--data-parallel-size", "2", "--ready-replicas", "2", "--router", "round-robin", "--dtype", "float32")
    made = Server("--api-processes", "2", "--num-threads", "1", *fleet)

    def ask() -> list[Stream]:
        streams: list[Stream] = []
        serving: list[int | None] = []
        while len(streams) < 12 or min(map(serving.count, pids)) < 2:
            assert len(streams) < 24, "one process takes all connections"
            streams.append(Stream(made, seed=len(streams), max_tokens=300, min_tokens=300))
            serving.append(streams[-1].served_by(pids))
        return streams

    def texts_of(streams: list[Stream]) -> list[bytes]:
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(Stream.read, streams))
        assert all(b"[DONE]" in answer for answer in answers)
        return [b"".join(TEXT.findall(answer)) for answer in answers]

    try:
        pids = api_pids(made)
        undisturbed = texts_of(ask())
        text = httpx.get(f"{made.url}/metrics", timeout=30).text
        counts = re.findall(r'^vllm:generation_tokens_total\{.*engine="(\d)".*\} (\S+)$', text, re.MULTILINE)
        assert {engine for engine, count in counts if float(count)} == {"0", "1"}
        streams = ask()
        schedulers = [pid for pid in descendants(made.process.pid) if comm_of(pid) == "actor:scheduler"]
        assert len(schedulers) == 2
        os.kill(schedulers[0], signal.SIGKILL)
        found = texts_of(streams)
        assert all(theirs == mine for mine, theirs in zip(found, undisturbed, strict=False))
        assert api_pids(made) == pids
    finally:
        status, log = made.stop()
    assert status == 0, log


def api_pids(server: Server) -> list[int]:
    task = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    return [pid for pid in map(int, task.split()) if comm_of(pid) == "actorllm:api"]


def comm_of(pid: int) -> str:
    """What a process calls itself."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


class Stream:
    """A connection of its own with a long answer on it."""

    def __init__(self, server: Server, **fields: Any) -> None:
        body = orjson.dumps({**LONG, **fields})
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        self.connection = socket.create_connection(server.address)
        self.connection.sendall(head + body)
        self.data = self.connection.recv(1 << 16)
        assert self.data.startswith(b"HTTP/1.1 200")

    def served_by(self, pids: list[int]) -> int | None:
        """Which of the processes has the other end."""
        port = self.connection.getsockname()[1]
        inodes = [
            fields[9]
            for fields in map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:])
            if int(fields[2].rpartition(":")[2], 16) == port
        ]
        for pid in pids:
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(link) in [f"socket:[{inode}]" for inode in inodes]:
                        return pid
        return None

    def read(self) -> bytes:
        with self.connection, contextlib.suppress(ConnectionResetError):
            while data := self.connection.recv(1 << 16):
                self.data += data
        return self.data


def test_a_killed_process_loses_only_its_own_connections(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        pids = api_pids(server)
        assert len(pids) == 2
        streams: dict[int, list[Stream]] = {pid: [] for pid in pids}
        others: list[Stream] = []
        while not all(streams.values()):
            assert len(others) + sum(map(len, streams.values())) < 20, "one process takes all connections"
            stream = Stream(server)
            pid = stream.served_by(pids)
            (others if pid is None else streams[pid]).append(stream)
        victim, survivor = sorted(pids, key=lambda pid: len(streams[pid]))
        os.kill(victim, signal.SIGKILL)
        with ThreadPoolExecutor(20) as pool:
            lost = list(pool.map(Stream.read, streams[victim]))
            kept = list(pool.map(Stream.read, streams[survivor]))
        assert not any(b"[DONE]" in data for data in lost)
        assert all(data.rstrip().endswith(b"0") and b"[DONE]" in data for data in kept)
        becomes_true(lambda: sample(client, "num_requests_running") == sample(client, "kv_cache_usage_perc") == 0)
        becomes_true(lambda: client.get("/load").json() == {"server_load": 0})
        becomes_true(lambda: len(api_pids(server)) == 2, 40)
        assert survivor in api_pids(server)
        assert victim not in api_pids(server)


def test_what_one_knows_all_know(server: Server) -> None:
    pids = api_pids(server)
    streams: list[Stream] = []
    serving: set[int | None] = set()
    while len(streams) < 12 or len(serving - {None}) < 2:  # on a busy machine one of them may take many in a row
        assert len(streams) < 22, "one process takes all connections"
        streams.append(Stream(server, request_id=f"s{len(streams)}"))
        serving.add(streams[-1].served_by(pids))
    scrapes = set()
    for _ in range(8):
        with httpx.Client(base_url=server.url, timeout=30) as client:
            assert client.get("/load").json() == {"server_load": len(streams)}
            scrapes.add(sample(client, "num_requests_running"))
            assert "recoveries_total" in client.get("/metrics").text
    assert scrapes == {len(streams)}
    with httpx.Client(base_url=server.url, timeout=30) as client:
        told = client.post("/abort_requests", json={"request_ids": ["cmpl-s0", "cmpl-s1", "cmpl-nobody"]})
        assert told.json() == {"num_aborted": 2}
        more = [Stream(server) for _ in range(26 - len(streams))]  # up to the limit, wherever they land
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert client.post("/abort_requests", json={"abort_all": True}).json() == {"num_aborted": 24}
    for stream in (*streams, *more):
        assert b'"finish_reason":"abort"' in stream.read()


def test_a_stream_is_read_on_and_a_response_gone_on_from_in_any_process(server: Server) -> None:
    body = {"input": "Once", "max_output_tokens": 30, "ignore_eos": True, "stream": True, "resume_for": 60}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body, timeout=30) as stream:
        name = stream.headers["x-request-id"]
        next(stream.iter_lines())
    found: set[str] = set()
    usages: set[int] = set()
    for _ in range(8):  # connections of their own, which go to either process
        found.add(httpx.get(f"{server.url}/v1/responses/{name}?stream=true&starting_after=3", timeout=30).text)
        more = {"input": "a", "max_output_tokens": 1, "previous_response_id": name}
        usages.add(httpx.post(f"{server.url}/v1/responses", json=more, timeout=30).json()["usage"]["input_tokens"])
    (text,) = found
    assert text.startswith("id: 4\n")
    assert "response.incomplete" in text
    assert len(usages) == 1


def test_a_client_that_leaves_frees_its_blocks(server: Server) -> None:
    streams = [Stream(server, n=2) for _ in range(6)]
    for stream in streams:
        stream.connection.close()
    with httpx.Client(base_url=server.url, timeout=30) as client:
        becomes_true(lambda: sample(client, "num_requests_running") == sample(client, "kv_cache_usage_perc") == 0)


@pytest.mark.slow(reason="a thousand clients of two processes")
@pytest.mark.timeout(180)
def test_a_thousand_that_hang_up_leave_nothing_behind() -> None:
    server = Server("--api-processes", "2", "--num-threads", "1", "--disable-uvicorn-access-log")
    pids = api_pids(server)
    num_fds = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda number: hang_up(server, number, key=None), range(1000)))
    with httpx.Client(base_url=server.url, timeout=30) as client:
        becomes_true(lambda: client.get("/load").json() == {"server_load": 0}, 60)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            becomes_true(lambda name=name: sample(client, name) == 0)  # type: ignore[misc]
    assert api_pids(server) == pids
    for pid, before in zip(pids, num_fds, strict=True):
        assert len(list(Path(f"/proc/{pid}/fd").iterdir())) <= before + 4
    status, log = server.stop()
    assert status == 0, log
    assert "Traceback" not in log


@pytest.mark.timeout(120)
def test_what_keeps_the_next_one_from_serving_is_told_too(tmp_path: Path) -> None:
    key, certificate = certified(tmp_path)
    tls = ("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate))
    server = Server(*tls, "--api-processes", "2", "--num-threads", "1", is_light=True)
    key.write_text("no key any more")
    os.kill(api_pids(server)[0], signal.SIGKILL)
    assert server.process.stderr is not None
    told: list[str] = []
    for line in server.process.stderr:
        server.log.append(line)
        told += [line] if re.search(r"again in [\d.]+ s", line) else []
        if len(told) == 2:
            break
    assert "ended with status -9" in told[0]
    assert "TLS cannot be set up" in told[1]
    status, log = server.stop()
    assert status == 0, log


def test_unix_socket_tls_and_an_orderly_end(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    key, certificate = certified(tmp_path)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))  # of a server that was killed
    tls = ("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate))
    server = Server("--unix-socket", str(path), *tls, "--api-processes", "2", "--num-threads", "1", is_light=True)
    context = ssl.create_default_context(cafile=str(certificate))
    transport = httpx.HTTPTransport(uds=str(path), verify=context)
    with httpx.Client(transport=transport, base_url="https://unix", timeout=30) as client:
        for _ in range(4):
            assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        with client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 400, "min_tokens": 400}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
    status, log = server.wait()
    assert status == 0, log
    assert "Traceback" not in log
    assert not path.exists()


def test_a_server_that_is_killed_leaves_no_process() -> None:
    made = Server("--api-processes", "2", "--num-threads", "1", is_light=True)
    left = descendants(made.process.pid)
    try:
        assert set(api_pids(made)) < set(left), "those of the engine are others"
    finally:
        made.process.kill()
        made.process.communicate()
    becomes_true(lambda: all(map(is_gone, left)))


def descendants(pid: int) -> list[int]:
    pids = [pid]
    for parent in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for task in Path(f"/proc/{parent}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    return pids[1:]


def test_a_signal_before_they_serve_ends_everything() -> None:
    command = serve_command("--port", "0", "--api-processes", "2", "--num-threads", "1", is_light=True)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def starts() -> bool:
        """There is one of them; it does not listen before it has imported everything and joined the engine."""
        assert process.poll() is None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        with contextlib.suppress(OSError):  # one of them has just ended
            return any(b"server.api_process" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children)
        return False

    try:
        becomes_true(starts, 60)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, log
    assert "Traceback" not in log
    assert "API processes running on" not in log


def test_what_keeps_them_from_serving_is_told(tmp_path: Path) -> None:
    missing = ("--ssl-keyfile", str(tmp_path / "no"), "--ssl-certfile", str(tmp_path / "no"))
    with pytest.raises(AssertionError, match="TLS cannot be set up"):
        Server("--api-processes", "2", *missing, is_light=True)
    (tmp_path / "file").touch()
    with pytest.raises(AssertionError, match=r"cannot listen on unix socket .*in use"):
        Server("--api-processes", "2", "--unix-socket", str(tmp_path / "file"), is_light=True)
    with pytest.raises(AssertionError, match=re.escape("--api-processes 0 must be at least 1")):
        Server("--api-processes", "0")
