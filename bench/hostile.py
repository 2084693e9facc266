"""What do clients that send the worst legal requests do to the streams of the others?

    python bench/hostile.py [--rounds 3] [--json FILE]

One server with the bundled storyteller in float32 and the policy vtc streams to 32 clients, in rounds: undisturbed, then
beside four attackers. Each attacker is a process of its own at nice 19, so that it gets the processor time that no other
process wants; what it used is reported. The attackers:

- blank bombs: prompts of millions of blanks and an "x", which some tokenizers never come back from;
- grammar floods: structural tags of 130 KB, each another one, cancelled before they are compiled;
- body floods: bodies just below the server's limit with a million small items;
- tenant floods: every request has a tenant that was never seen before.

Throughput, and the p99 of the gaps between the reads of a stream, are compared between the two kinds of rounds. A stream is
lost if it ends early, and differs if it has another text than in the first round.

A third kind of round has body floods alone, sent without a pause by a process of ordinary niceness. The lag of the server's
loop comes from the server's own histogram (`actorllm:api_loop_lag_seconds` of /metrics): the upper bound of the bucket that
holds the p99 of the round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import absolute, compared, finish, informative, quantile
from serving import Server, free_port
from sides import exit_on_sigterm

STREAMS = 32
LIMITS = (
    "--dtype",
    "float32",
    "--max-num-seqs",
    "64",
    "--scheduling-policy",
    "vtc",
    "--num-threads",
    "1",
    "--no-standby-worker",
)
NICE = 19
GIVE_UP_S = 0.3
"""How long a client of the grammar flood waits for its answer."""
PAUSE_S = 0.05
"""Between two requests of an attacker, which sends one at a time."""


# The streams


@dataclass
class Round:
    """What 32 clients got, and what the loop of the server did meanwhile."""

    seconds: float = 0.0
    lag_p99_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def request(body: bytes, path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def one_stream(port: int, number: int, tokens: int, found: Round) -> None:
    body = {"prompt": f"Once upon a time, number {number}", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(json.dumps(body | {"seed": number, "temperature": 0.9}).encode()))
    data, last = b"", None
    while chunk := await reader.read(1 << 16):
        data += chunk
        at = time.perf_counter()
        if b"data: " in chunk:
            if last is not None:
                found.gaps.append(at - last)
            last = at
    writer.close()
    text, count = "", 0
    for line in data.split(b"\n"):
        if line.startswith(b"data: {"):
            choice = json.loads(line[6:])["choices"][0]
            text += choice["text"]
            count += 1
    found.texts[number] = text
    found.tokens[number] = count if b"[DONE]" in data else -1


async def one_round(port: int, tokens: int) -> Round:
    found = Round(texts=[""] * STREAMS, tokens=[0] * STREAMS)
    before = await lag_counts(port)
    began = time.perf_counter()
    await asyncio.gather(*(one_stream(port, number, tokens, found) for number in range(STREAMS)))
    found.seconds = time.perf_counter() - began
    found.lag_p99_s = upper_quantile(before, await lag_counts(port), 0.99)
    return found


async def lag_counts(port: int) -> dict[float, int]:
    """The histogram of the lag of the server's loop so far: seconds -> how often it was at most that."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    text = (await reader.read(-1)).decode()
    writer.close()
    found = re.findall(r'api_loop_lag_seconds_bucket\{[^}]*le="([^"]+)"[^}]*\} (\d+)', text)
    if not found:
        raise RuntimeError("/metrics has no histogram actorllm:api_loop_lag_seconds")
    return {float(bound): int(count) for bound, count in found}


def upper_quantile(before: dict[float, int], after: dict[float, int], share: float) -> float:
    """The bound of the bucket that holds the quantile of what came between two readings of a histogram."""
    counts = {bound: after[bound] - before[bound] for bound in after}
    return min(bound for bound, count in counts.items() if count >= share * counts[math.inf])


# The attackers


def blank_bomb(draw: random.Random) -> dict[str, Any]:
    return {"prompt": " " * draw.randrange(1 << 20, 7 << 20) + "x", "max_tokens": 1}


def grammar_bomb(draw: random.Random) -> dict[str, Any]:
    names = [f"field_{draw.getrandbits(64):x}" for _ in range(1200)]
    properties = {name: {"type": "string", "minLength": 1, "maxLength": 20 + i % 40} for i, name in enumerate(names)}
    schema = {"type": "object", "properties": properties, "required": names[::3], "additionalProperties": False}
    tag = {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "</call>",
    }
    told = json.dumps({"type": "structural_tag", "format": tag})
    return {"prompt": "x", "max_tokens": 4, "structured_outputs": {"structural_tag": told}}


def body_bomb(draw: random.Random) -> dict[str, Any]:
    match draw.randrange(4):
        case 0:
            return {"prompt": ["a"] * 1_200_000, "max_tokens": 1}
        case 1:
            return {"prompt": [7] * 60_000, "max_tokens": 1, "user": "\u00e9\n" * 800_000}
        case 2:
            return {"prompt": "a", "max_tokens": 1, "logit_bias": {str(i): 1 for i in range(600_000)}}
    return {"prompt": "a", "max_tokens": 1} | {f"x{i}": 0 for i in range(600_000)}


def tenant_bomb(draw: random.Random) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 1, "tenant": f"tenant-{draw.getrandbits(64):x}"}


@dataclass(frozen=True)
class Attack:
    make: Callable[[random.Random], dict[str, Any]]
    num_bodies: int
    """Made before the attack; they are sent in turn. 0: each is made when it is sent."""
    gives_up: bool = False


ATTACKS = {
    "blank bombs": Attack(blank_bomb, 4),
    "grammar floods": Attack(grammar_bomb, 0, gives_up=True),
    "body floods": Attack(body_bomb, 6),
    "tenant floods": Attack(tenant_bomb, 0),
}


async def attack(name: str, port: int, pause_s: float) -> None:
    """Send until SIGTERM; then print the statuses of the answers and the CPU seconds of this process."""
    one, draw = ATTACKS[name], random.Random(name)
    ready = [request(json.dumps(one.make(draw)).encode()) for _ in range(one.num_bodies)]
    statuses: Counter[str] = Counter()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)

    async def send() -> str:
        data = draw.choice(ready) if ready else request(json.dumps(one.make(draw)).encode())
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            answer = await asyncio.wait_for(reader.read(16), GIVE_UP_S if one.gives_up else 60)
            return answer[9:12].decode()
        except TimeoutError:
            return "given up"
        except ConnectionError:
            return "closed"
        finally:
            writer.transport.abort()

    async def loop() -> None:
        while True:
            statuses[await send()] += 1
            await asyncio.sleep(pause_s)

    task = asyncio.ensure_future(loop())
    print("ready", flush=True)
    before = used()
    await ended.wait()
    task.cancel()
    print(json.dumps({"cpu_s": used() - before, "answers": dict(sorted(statuses.items()))}), flush=True)


def used() -> float:
    times = resource.getrusage(resource.RUSAGE_SELF)
    return times.ru_utime + times.ru_stime


@contextlib.asynccontextmanager
async def attacked(
    port: int, told: dict[str, list[Any]], names: Iterable[str], pause_s: float = PAUSE_S, niceness: int = NICE
) -> Any:
    """While the block runs, the named attackers send. told: what each says at its end."""
    command = [sys.executable, __file__, "--port", str(port), "--pause", str(pause_s), "--attack"]
    processes = {
        name: await asyncio.create_subprocess_exec(
            *command, name, stdout=subprocess.PIPE, preexec_fn=lambda: os.nice(niceness)
        )
        for name in names
    }
    try:
        for process in processes.values():
            assert process.stdout is not None
            await process.stdout.readline()
        yield
    finally:
        for name, process in processes.items():
            process.terminate()
            assert process.stdout is not None
            answer = await process.stdout.readline()
            await process.wait()
            told.setdefault(name, []).append(json.loads(answer) if answer else None)


# The comparison


async def measure(port: int, rounds: int, tokens: int) -> tuple[dict[str, list[Round]], dict[str, list[Any]]]:
    found: dict[str, list[Round]] = {"undisturbed": [], "attacked": [], "body floods": []}
    told: dict[str, list[Any]] = {}
    alone: dict[str, list[Any]] = {}
    await one_round(port, tokens // 4)
    for _ in range(rounds):
        found["undisturbed"].append(await one_round(port, tokens))
        async with attacked(port, told, ATTACKS):
            await asyncio.sleep(1.0)
            found["attacked"].append(await one_round(port, tokens))
        await asyncio.sleep(1.0)
        async with attacked(port, alone, ["body floods"], pause_s=0, niceness=0):
            await asyncio.sleep(1.0)
            found["body floods"].append(await one_round(port, tokens))
        await asyncio.sleep(1.0)
    return found, told | {"body floods alone": alone["body floods"]}


def lost(rounds: list[Round], tokens: int) -> int:
    """Streams that ended early. An event may hold several tokens, but a stream without all of them is told by its end."""
    return sum(count < 0 for one in rounds for count in one.tokens)


def answers(told: list[Any]) -> str:
    """The statuses of all rounds of an attacker."""
    counts = Counter[str]()
    for one in told:
        counts.update(one["answers"] if one else {})
    return " ".join(f"{status}: {count}" for status, count in sorted(counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--attack", choices=sorted(ATTACKS), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pause", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack is not None:
        asyncio.run(attack(arguments.attack, arguments.port, arguments.pause))
        return
    exit_on_sigterm()
    load_before = os.getloadavg()
    port = free_port()
    options = ["--port", str(port), "--disable-uvicorn-access-log", *LIMITS]
    command = [sys.executable, "-m", "actorllm.cli", "serve", "storyteller", *options]
    server = Server("actorllm", command, port, "/health")
    try:
        server.resume()
        found, told = asyncio.run(measure(port, arguments.rounds, arguments.tokens))
    finally:
        server.close()

    def speeds(kind: str) -> list[float]:
        return [STREAMS * arguments.tokens / one.seconds for one in found[kind]]

    def gaps(kind: str, share: float) -> list[float]:
        return [1e3 * quantile(one.gaps, share) for one in found[kind]]

    expected = found["undisturbed"][0].texts
    all_rounds = [one for each in found.values() for one in each]

    def lags(kind: str) -> list[float]:
        return [1e3 * one.lag_p99_s for one in found[kind]]

    differing = sum(text != right for one in all_rounds for text, right in zip(one.texts, expected, strict=True))
    rows = [
        compared("tokens/s of 32 streams", speeds("attacked"), "undisturbed", speeds("undisturbed"), at_least=0.8),
        compared("gap, p99, ms", gaps("attacked", 0.99), "undisturbed", gaps("undisturbed", 0.99), at_most=2.0),
        informative("gap, p50, ms", gaps("attacked", 0.5), "undisturbed", gaps("undisturbed", 0.5)),
        informative("gap, longest, ms", gaps("attacked", 1.0), "undisturbed", gaps("undisturbed", 1.0)),
        absolute("loop lag, p99, attacked, ms", lags("attacked"), at_most=50),
        absolute("loop lag, p99, body floods alone, ms", lags("body floods"), at_most=50),
        absolute("loop lag, p99, undisturbed, ms", lags("undisturbed"), at_most=50),
        {**informative("streams lost", [lost(all_rounds, arguments.tokens)]), "target": "0"},
        {**informative("streams with another text", [differing]), "target": "0"},
    ]
    for row in rows[-2:]:
        row["met"] = row["actorllm"] == 0
    full = [
        {
            "attacker": name,
            "CPU seconds a round": statistics.median(one["cpu_s"] for one in each if one),
            "answers": answers(each),
        }
        for name, each in told.items()
    ]
    finish(
        "hostile",
        "32 streams of the storyteller beside four attackers",
        rows,
        arguments.json,
        load_before,
        configuration={
            "rounds": arguments.rounds,
            "streams": STREAMS,
            "tokens": arguments.tokens,
            "limits": " ".join(LIMITS),
            "niceness of the attackers": NICE,
        },
        full=full,
    )
    for one in full:
        print(one)


if __name__ == "__main__":
    main()
