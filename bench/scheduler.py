"""How long do `schedule` + `update` take? Steady decode and 1 % churn, everything on (ledger, prefix cache, plan encoding).

Churn is measured once more without the prefix cache, to tell what that costs.

    python bench/scheduler.py [--json FILE] [--against PATH]

--against: bursts of steps of the tree at PATH and of this one take turns, each tree in a process of its own that lives on.
Bursts are compared by CPU time, since what else runs on the machine has no part in it. The table says how many times as long
this tree takes.

Prints milliseconds per step: the median over all steps, in rounds that are interleaved over the batch sizes, and how far
the medians of the first and the second half of the rounds lie apart (spread).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from report import NOISE_FACTOR, ROOT, code, environment, print_table, spread, versions, write_json

from actorllm.kvcache.prefix_index import HASH_BYTES, hash_blocks
from actorllm.messages import NO_I32, StepResult, Submit, pack
from actorllm.ring.codec import encode
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.scheduler import Scheduler

SIZES = (64, 256, 1024)
LOADS = (("steady", 0.0, True, 1), ("churn 1 %", 0.01, True, 2), ("churn 1 %, no prefix cache", 0.01, False, None))
"""Label, churn, whether there is a prefix cache, and the target as a multiple of TARGET_MS, if it has one."""
TARGET_MS = {64: 0.04, 256: 0.06, 1024: 0.12}
BLOCK_SIZE = 16
VOCAB = 32_000


def build(running: int, is_caching: bool) -> Scheduler:
    max_model_len = 4096
    return Scheduler(
        num_blocks=max(running * 3000 // BLOCK_SIZE, max_model_len // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_seqs=running,
        max_num_batched_tokens=16_384,
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        eos_token_ids=(2,),
        policy=load_policy("fcfs"),
        depth=2,
        enable_prefix_caching=is_caching,
    )


class Driver:
    """A scheduler at depth 2 whose worker answers at once."""

    def __init__(self, running: int, churn: float, is_caching: bool = True) -> None:
        self.running, self.churn, self.is_caching = running, churn, is_caching
        self.rng = np.random.default_rng(0)
        self.scheduler = build(running, is_caching)
        self.now = 0.0
        self.next_rid = 0
        self.pending: list[tuple[int, int]] = []
        lengths = 32 + np.arange(running) % BLOCK_SIZE
        for i in range(running):
            self.submit(int(lengths[i]), 2000 if not churn else 1 + int((i % 100 + 1) * 1))
        for _ in range(120):
            self.step()

    def submit(self, prompt: int, max_tokens: int) -> None:
        self.next_rid += 1
        tokens = np.full(prompt, 7, np.int32)
        # No prompt begins like another: all of it is published, nothing found, and in time evicted. Real hashes come from
        # the frontend, and are measured apart.
        num_hashes = prompt // BLOCK_SIZE if self.is_caching else 0
        hashes = np.frombuffer(self.rng.bytes(HASH_BYTES * num_hashes), np.uint8)
        self.scheduler.submit(
            0,
            Submit(rid=self.next_rid, arrival=self.now, prompt=tokens, max_tokens=max_tokens, block_hashes=hashes),
            self.now,
        )

    def step(self) -> float:
        """One steady step; the seconds that the scheduler took."""
        scheduler = self.scheduler
        self.now += 0.01
        began = time.perf_counter()
        while scheduler.ledger.has_room:
            plan = scheduler.schedule(self.now)
            if plan is None:
                break
            _, scalars, arrays = pack(plan)
            encode(scalars, arrays)
            self.pending.append((plan.step, 0))
        spent = time.perf_counter() - began
        record = next(iter(scheduler.ledger))
        rows = len(record.rows)
        result = StepResult(step=record.step, tokens=np.full(rows, 7, np.int32) if rows else NO_I32)
        began = time.perf_counter()
        events = scheduler.update(result, self.now)
        spent += time.perf_counter() - began
        if self.churn:
            for _ in events.ends:
                self.submit(1000, 100)
        return spent


def hashing() -> dict[str, Any]:
    """What block hashes of a prompt cost, which frontends compute on a thread of their own."""
    tokens = np.arange(1000, dtype=np.int32)
    times = []
    for _ in range(200):
        began = time.perf_counter()
        hash_blocks(tokens, BLOCK_SIZE)
        times.append((time.perf_counter() - began) * 1e3)
    return {"prompt tokens": tokens.size, "block_size": BLOCK_SIZE, "median ms": round(statistics.median(times), 4)}


class Peer:
    """The process of a tree (`scheduler_peer.py`)."""

    def __init__(self, tree: Path) -> None:
        command = [sys.executable, str(Path(__file__).with_name("scheduler_peer.py")), str(tree)]
        self._process = subprocess.Popen(command, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def burst(self, running: int, churn: float, is_caching: bool, steps: int) -> float:
        """The milliseconds of CPU that a step took on average."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([running, churn, is_caching, steps]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of the other tree ended with {self._process.wait()}")
        return float(answer) * 1e3

    def close(self) -> None:
        self._process.communicate()


def compare(other: Path, sizes: Sequence[int], rounds: int, steps: int) -> list[dict[str, Any]]:
    """This tree and another in turns; the ratio is the median over pairs of bursts."""
    peers = Peer(other), Peer(ROOT)
    pairs: dict[tuple[int, str], list[list[float]]] = {}
    for i in range(rounds):
        for running in sizes:
            for label, churn, is_caching, _ in LOADS:
                pair = [0.0, 0.0]
                for which in (0, 1) if i % 2 else (1, 0):
                    pair[which] = peers[which].burst(running, churn, is_caching, steps)
                pairs.setdefault((running, label), []).append(pair)
    for peer in peers:
        peer.close()
    return [
        {
            "running": running,
            "load": label,
            "other ms": round(statistics.median(other for other, _ in found), 4),
            "this ms": round(statistics.median(this for _, this in found), 4),
            "ratio": round(statistics.median(this / other for other, this in found), 3),
        }
        for (running, label), found in pairs.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--running", type=int, nargs="+", default=SIZES, help="sizes of the batch")
    parser.add_argument("--against", type=Path, metavar="PATH", help="another tree to compare this one with")
    parser.add_argument("--bursts", type=int, default=20, help="of each tree, for --against")
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    times: dict[tuple[int, str], list[list[float]]] = {}
    for _ in range(arguments.rounds):
        for running in arguments.running:
            for label, churn, is_caching, _ in LOADS:
                driver = Driver(running, churn, is_caching)
                steps = [driver.step() * 1e3 for _ in range(arguments.steps)]
                times.setdefault((running, label), []).append(steps)
    rows: list[dict[str, Any]] = []
    for (running, label), rounds in times.items():
        factor = next(factor for name, _, _, factor in LOADS if name == label)
        target = factor and TARGET_MS.get(running, 0.0) * factor
        every = [ms for steps in rounds for ms in steps]
        median = statistics.median(every)
        noise = spread([statistics.median(steps) for steps in rounds])
        rows.append(
            {
                "running": running,
                "load": label,
                "median ms": round(median, 4),
                "p99 ms": round(float(np.quantile(every, 0.99)), 4),
                "spread": round(noise, 4),
                "target": f"≤ {target:g}" if target else "—",
                "met": median <= max(target, NOISE_FACTOR * noise) if target else "—",
            }
        )
    print_table("schedule + update, ms per step", rows)
    hashed = hashing()
    print_table("block hashing in the frontend, ms per prompt", [hashed])
    against: dict[str, Any] = {}
    if arguments.against is not None:
        other = arguments.against.resolve()
        compared = compare(other, arguments.running, arguments.bursts, arguments.steps)
        print_table(f"schedule + update, CPU ms per step, against {other}", compared)
        against = {"against": {"bursts": arguments.bursts, **code(other), "rows": compared}}
    if arguments.json:
        configuration = {
            "rounds": arguments.rounds,
            "steps": arguments.steps,
            "block_size": BLOCK_SIZE,
            "max_num_batched_tokens": 16_384,
            "depth": 2,
            "versions": versions(),
        }
        write_json(
            arguments.json,
            {
                "bench": "scheduler",
                "environment": environment(),
                "load_before": [round(x, 2) for x in load_before],
                "configuration": configuration,
                "rows": rows,
                "hashing": hashed,
                **against,
            },
        )


if __name__ == "__main__":
    main()
