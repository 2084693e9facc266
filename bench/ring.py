"""Do the rings carry messages faster, and for less CPU, than ZeroMQ inside an event loop?

    python bench/ring.py [--peer-python PATH] [--rounds N] [--json FILE]

PATH is the interpreter of an environment with pyzmq, msgspec, uvloop and numpy; without it the other columns say "not
measured". Both sides are kept alive and asleep all the time, and take turns within every round; a number is the median
over the rounds, a ratio that of two such medians.

`ring`: frames on a ring, read by the persistent doorbell callback under uvloop. `zmq asyncio`: zmq.asyncio under uvloop.
`zmq blocking`: blocking sockets, no event loop (what a loop cannot use; it is there for scale). All over one machine:
shared memory, and ipc sockets.

A stream is messages that are there already. ZeroMQ takes them one by one and its I/O thread puts them into batches; the
ring's writer, which has no other thread, is given them in batches (`write_many`, what a channel does with its outbox).
"stream 200 B one by one" is the ring with a commit per message, for scale.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from report import environment, print_table, ratio, write_json

from actorllm.ring.channel import create_link

NUM_READERS = 4
CAPACITY = 4 << 20
HIGH_WATER_MARK = 1000
RING, ZMQ, BLOCKING = "ring", "zmq asyncio", "zmq blocking"
GAP_S = 0.0012
REPEATS = {"hot": 600, "asleep": 200, "large": 100, "stream": 20_000, "broadcast": 4000, "message": 100}
IDLE_S = 1.5
RATE = 50
BATCH = 32

Result = dict[str, Any]


class Side:
    """The processes of one transport: a hub and four spokes, told what to do over their standard input."""

    def __init__(self, name: str, python: str, configurations: list[Result], fds: list[tuple[int, ...]]) -> None:
        script = Path(__file__).with_name("ring_peer.py")
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        variables = {**os.environ, "PYTHONPATH": path if name == "ring" else "", "OPENBLAS_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [python, str(script), name, str(index), json.dumps(configuration)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=passed,
                env=variables,
            )
            for index, (configuration, passed) in enumerate(zip(configurations, fds, strict=True))
        ]
        greetings = [self._read(index) for index in range(len(self.processes))]
        self.versions = greetings[0]["versions"]

    def _read(self, index: int) -> Result:
        stdout = self.processes[index].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise SystemExit(f"process {index} of the benchmark failed")
        answer: Result = json.loads(line)
        return answer

    def _write(self, index: int, command: Result) -> None:
        stdin = self.processes[index].stdin
        assert stdin is not None
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()

    def run(self, num_spokes: int, **command: Any) -> list[Result]:
        """Spokes first, the hub when all of them listen. Results in the order hub, spoke 1 ..."""
        spokes = range(1, num_spokes + 1)
        for index in spokes:
            self._write(index, command)
        for index in spokes:
            self._read(index)
        self._write(0, command)
        self._read(0)
        return [self._read(index) for index in [0, *spokes]]

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()
            process.wait()


@contextlib.contextmanager
def ring_side() -> Iterator[Side]:
    links = [
        create_link(CAPACITY, CAPACITY, NUM_READERS),
        *(create_link(CAPACITY, CAPACITY) for _ in range(NUM_READERS)),
    ]
    broadcast, *singles = links
    ends = [[broadcast.hub, *(link.hub for link in singles)]]
    ends += [[spoke, link.spokes[0]] for spoke, link in zip(broadcast.spokes, singles, strict=True)]
    configurations = [{"ends": [asdict(end) for end in mine]} for mine in ends]
    side = Side("ring", sys.executable, configurations, [tuple(fd for end in mine for fd in end.fds) for mine in ends])
    for link in links:
        link.close()
    yield side
    side.close()


@contextlib.contextmanager
def zmq_side(python: str | None) -> Iterator[Side | None]:
    if python is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        configurations: list[Result] = [
            {"folder": folder, "high_water_mark": HIGH_WATER_MARK} for _ in range(NUM_READERS + 1)
        ]
        side = Side("zmq", python, configurations, [()] * len(configurations))
        time.sleep(0.5)  # subscriptions have to arrive before the first message is published
        yield side
        side.close()


def rate(results: list[Result], count: int) -> float:
    """Messages per second until the last reader had them all."""
    return count / (max(result["end_ns"] for result in results[1:]) - results[0]["start_ns"]) * 1e9


def measure(side: Side, transports: list[str], repeats: dict[str, int]) -> dict[str, dict[str, float]]:
    """One round of one side: quantity -> transport -> value."""
    values: dict[str, dict[str, float]] = {}

    def note(quantity: str, transport: str, value: float) -> None:
        values.setdefault(quantity, {})[transport] = value

    for transport in transports:
        for quantity, size, gap_s, kind in (
            ("one-way hot 64 B", 64, 0, "hot"),
            ("one-way asleep 64 B", 64, GAP_S, "asleep"),
            ("one-way asleep 64 KiB", 65536, GAP_S, "asleep"),
            ("one-way asleep 1 MiB", 1 << 20, GAP_S, "large"),
        ):
            result = side.run(1, verb="one_way", transport=transport, size=size, gap_s=gap_s, count=repeats[kind])[1]
            note(f"{quantity}, µs p50", transport, result["p50"])
            note(f"{quantity}, µs p99", transport, result["p99"])
        count = repeats["stream"]
        results = side.run(1, verb="stream", transport=transport, size=200, count=count, batch=BATCH)
        note("stream 200 B, messages/s", transport, rate(results, count))
        note("stream 200 B, CPU µs/message", transport, sum(r["cpu_s"] for r in results) / count * 1e6)
        if transport == RING:
            results = side.run(1, verb="stream", transport=transport, size=200, count=count)
            note("stream 200 B one by one, messages/s", transport, rate(results, count))
        for message in ("step output", "schedule", "100k prompt", "100k prompt as bytes"):
            results = side.run(
                1, verb="end_to_end", transport=transport, message=message, count=repeats["message"], gap_s=GAP_S
            )
            note(f"{message} end to end, µs p50", transport, results[1]["p50"])
        count = repeats["broadcast"]
        verb = "broadcast_ring" if transport == RING else "broadcast_pubsub"
        results = side.run(NUM_READERS, verb=verb, transport=transport, size=4096, count=count)
        note("4 readers 4 KiB, messages/s", transport, rate(results, count))
        if transport != BLOCKING:
            for quantity, messages in (("idle", 0), (f"at {RATE} messages/s", RATE)):
                results = side.run(1, verb="paced", transport=transport, seconds=IDLE_S, rate=messages)
                used = max(result["cpu_s"] for result in results) / IDLE_S * 100
                note(f"{quantity}, % of a core per process", transport, used)
    if RING in transports:
        count = repeats["stream"] // 2
        results = side.run(1, verb="stream", transport=RING, through="channel", size=200, count=count)
        note("stream 200 B through codec and channel, messages/s", RING, rate(results, count))
        count = repeats["broadcast"]
        results = side.run(NUM_READERS, verb="broadcast_singles", transport=RING, size=4096, count=count)
        note("4 readers 4 KiB over 4 rings, messages/s", RING, rate(results, count))
    return values


TARGETS = [
    # quantity, compared with, relation, bound
    ("one-way hot 64 B, µs p50", ZMQ, "<=", 0.35),
    ("one-way asleep 64 B, µs p50", ZMQ, "<=", 0.5),
    ("one-way asleep 64 KiB, µs p50", ZMQ, "<=", 0.5),
    ("one-way asleep 1 MiB, µs p50", ZMQ, "<=", 0.5),
    ("one-way asleep 1 MiB, µs p50", BLOCKING, "<=", 0.6),
    ("stream 200 B, messages/s", ZMQ, ">=", 5.0),
    ("stream 200 B, messages/s", BLOCKING, ">=", 0.5),
    ("stream 200 B, CPU µs/message", ZMQ, "<=", 0.25),
    ("step output end to end, µs p50", ZMQ, "<=", 0.5),
    ("schedule end to end, µs p50", ZMQ, "<=", 0.5),
    ("100k prompt end to end, µs p50", ZMQ, "<=", 0.1),
    ("4 readers 4 KiB, messages/s", ZMQ, ">=", 2.0),
    (f"at {RATE} messages/s, % of a core per process", ZMQ, "<=", 1.0),
]


def compare(rounds: list[dict[str, dict[str, float]]]) -> list[Result]:
    """Every target as a row."""

    def values(quantity: str, transport: str) -> list[float]:
        return [r[quantity][transport] for r in rounds if transport in r[quantity]]

    rows = []
    for quantity, other, relation, bound in TARGETS:
        found = ratio(values(quantity, RING), values(quantity, other))
        rows.append(verdict(f"{quantity} / {other}", found, relation, bound))
    one = values("4 readers 4 KiB, messages/s", RING)
    several = values("4 readers 4 KiB over 4 rings, messages/s", RING)
    rows.append(verdict("4 readers 4 KiB, messages/s / 4 single rings", ratio(one, several), ">=", 1.8))
    idle = statistics.median(values("idle, % of a core per process", RING))
    rows.append(verdict("idle, % of a core per process (not a ratio)", idle, "<=", 0.2))
    return rows


def verdict(quantity: str, value: float | None, relation: str, bound: float) -> Result:
    is_met = None if value is None else value <= bound if relation == "<=" else value >= bound
    return {"ring against": quantity, "ratio": value, "target": f"{relation} {bound:g}", "met": is_met}


def main() -> None:
    parser = argparse.ArgumentParser(description="rings against ZeroMQ")
    parser.add_argument("--peer-python", help="interpreter with pyzmq, msgspec, uvloop and numpy")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the result there")
    arguments = parser.parse_args()

    load_before = os.getloadavg()
    rounds = []
    with ring_side() as ring, zmq_side(arguments.peer_python) as zmq:
        for number in range(arguments.rounds):
            sides: list[tuple[Side, list[str]]] = [(ring, [RING])]
            if zmq is not None:
                sides.append((zmq, [ZMQ, BLOCKING]))
            if number % 2:
                sides.reverse()
            merged: dict[str, dict[str, float]] = {}
            for side, transports in sides:
                for quantity, values in measure(side, transports, REPEATS).items():
                    merged.setdefault(quantity, {}).update(values)
            rounds.append(merged)
        versions = {"ring": ring.versions, "zmq": None if zmq is None else zmq.versions}

    rows = []
    for quantity in sorted(rounds[0]):
        row: Result = {"quantity": quantity}
        for transport in (RING, ZMQ, BLOCKING):
            seen = [r[quantity][transport] for r in rounds if transport in r[quantity]]
            row[transport] = statistics.median(seen) if seen else None
        rows.append(row)
    targets = compare(rounds)
    print_table("Rings and ZeroMQ, medians over rounds", rows)
    print_table("Against the targets", targets)
    if arguments.json:
        write_json(
            arguments.json,
            {
                "benchmark": "ring",
                "environment": {**environment(), "load_average_before": [round(x, 2) for x in load_before]},
                "configuration": {
                    "rounds": arguments.rounds,
                    "order": "sides alternate within a round",
                    "repeats": REPEATS,
                    "gap_s": GAP_S,
                    "readers": NUM_READERS,
                    "ring": {
                        "versions": versions["ring"],
                        "capacity_bytes": CAPACITY,
                        "checksum": False,
                        "loop": "uvloop, persistent add_reader on an eventfd",
                        "messages": "orjson scalars, int32 segments",
                        "recheck_s": 0.25,
                        "stream_batch": BATCH,
                    },
                    "zmq": {
                        "versions": versions["zmq"],
                        "sockets": "PAIR, PUB/SUB for the broadcast, over ipc",
                        "high_water_mark": HIGH_WATER_MARK,
                        "high_water_mark_pubsub": 0,
                        "io_threads": 1,
                        "copy": "below 64 KiB; multipart messages without copy",
                        "loop": "zmq.asyncio under uvloop, and blocking sockets",
                        "messages": "msgspec.msgpack, structs as arrays",
                    },
                },
                "rows": rows,
                "targets": targets,
                "rounds": rounds,
            },
        )


if __name__ == "__main__":
    main()
