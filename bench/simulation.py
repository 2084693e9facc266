"""How many requests per second does the simulator get through, and what does a step of it cost policy and scheduler?

    python bench/simulation.py [--json FILE] [--requests N] [--trace FILE] [--full | --against TREE]

Conversations: lengths and burstiness like those of the Azure trace of 2023, which --trace replaces by a file (it is repeated
as often as need be). One core, the published step times of an A100 with Llama-3-8B. The share of the policy is measured in a
run of its own, in which every one of its calls is timed. Targets: a million requests on one replica in 6 minutes, over 64 replicas
in 20 minutes, and both in 1 GB.

--full runs these two as they stand, to their figures, each in a process of its own, and adds them to the file. It takes a
quarter of an hour. What counts is the time of the one core that they use; the time on the clock has in it what else ran.

--against: runs of that tree and of this one take turns, each tree in a process of its own, and are compared by CPU time. Sessions
are compared with single requests of this tree. The table is added to the file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import ROOT, code, command, environment, print_table, versions, write_json

from actorllm.scheduling.cost_model import preset
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policy import PlanPolicy
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.traces import load_trace
from actorllm.slo.workload import Workload, assign_classes, parse_mix, synthetic

MIX = "ls:0.5:ttft=0.5+p/4000,tpot=0.05 be:0.5:e2e=120"
RATE = 3.0
ONE_REPLICA, MANY_REPLICAS = 1e6 / 360, 1e6 / 1200
CASES = (
    ("fcfs", 512, 1, "round-robin", ONE_REPLICA),
    ("priority", 512, 1, "round-robin", None),
    ("edf", 512, 1, "round-robin", None),
    ("cohost", 2048, 1, "round-robin", None),
    ("qoserve", 2048, 1, "round-robin", None),
    ("fcfs", 512, 64, "round-robin", MANY_REPLICAS),
    ("fcfs", 512, 64, "least-load", MANY_REPLICAS),
)
"""Policy, tokens per step, replicas, router, and requests per second that are wanted."""
NUM_FULL = 1_000_000
FULL = (("fcfs", 512, 1, "round-robin", 360), ("fcfs", 512, 64, "least-load", 1200))
"""Policy, tokens per step, replicas, router, and seconds that they may take."""
MAX_FULL_MIB = 1000
AGAINST = {"one": ("one replica", 0.75), "many": ("64 replicas, least-load", 0.75)}
"""Kinds of `simulation_peer`: what they are, and what share of the other tree's CPU time they may take."""
MAX_SESSIONS = 2.0
"""What a request of a session may take, as a multiple of a single one of the other tree, which may know no sessions."""


class Timed:
    """A policy whose every call is timed."""

    def __init__(self, policy: PlanPolicy) -> None:
        self._policy = policy
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._policy, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            value = found(*arguments)
            self.seconds += time.perf_counter() - began
            return value

        return call


def timed_run(run: Callable[..., SimulatedRun], **arguments: Any) -> tuple[SimulatedRun, float]:
    began = time.process_time()
    return run(**arguments), time.process_time() - began


def measure(case: tuple[str, int, int, str, float | None], workload: Workload) -> dict[str, Any]:
    policy, tokens, num_replicas, router, wanted = case
    shape = EngineShape(num_blocks=25_000, max_num_batched_tokens=tokens)
    arguments: dict[str, Any] = {
        "workload": workload.at_rate(RATE * num_replicas),
        "shape": shape,
        "model": preset("a100-llama-3-8b"),
        "num_replicas": num_replicas,
        "router": router,
        "view_interval_s": 0.0,
    }
    run, seconds = timed_run(simulate, policy=policy, **arguments)
    watched: list[Timed] = []

    def build() -> PlanPolicy:
        watched.append(Timed(load_policy(policy)))
        return watched[-1]  # type: ignore[return-value]

    _, slower = timed_run(simulate, policy=build, **arguments)
    num_planned = run.num_steps - run.num_steps_skipped
    of_policy = sum(timed.seconds for timed in watched)
    per_second = len(workload) / seconds
    return {
        "policy": policy,
        "replicas": num_replicas,
        "router": router if num_replicas > 1 else "—",
        "requests/s": round(per_second),
        "steps planned": num_planned,
        "steps skipped": run.num_steps_skipped,
        "µs per planned step": round(1e6 * seconds / num_planned, 1),
        "of it policy": round(1e6 * of_policy / num_planned * min(1.0, seconds / slower), 1),
        "target": f"≥ {wanted:.0f}" if wanted else "—",
        "met": per_second >= wanted if wanted else "—",
    }


def measure_full(number: int, trace: str | None) -> dict[str, Any]:
    """One of FULL, in this process: its peak memory is that of the run."""
    policy, tokens, num_replicas, router, _ = FULL[number]
    load_before = os.getloadavg()
    began, cpu_began = time.perf_counter(), time.process_time()
    run = simulate(
        conversations(NUM_FULL, trace).at_rate(RATE * num_replicas),
        EngineShape(num_blocks=25_000, max_num_batched_tokens=tokens),
        preset("a100-llama-3-8b"),
        policy=policy,
        num_replicas=num_replicas,
        router=router,
        view_interval_s=0.0,  # as in the versions that it is compared with
    )
    metrics = run.evaluate()
    return {
        "requests": len(run.workload),
        "replicas": num_replicas,
        "router": router if num_replicas > 1 else "—",
        "CPU s": round(time.process_time() - cpu_began),
        "clock s": round(time.perf_counter() - began),
        "peak MiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "steps": run.num_steps,
        "finished": metrics.overall.num_finished,
        "load before": round(load_before[0], 1),
        "load at the end": round(os.getloadavg()[0], 1),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def in_its_own_process(number: int, trace: str | None) -> dict[str, Any]:
    words = [sys.executable, __file__, "--full-case", str(number), *(["--trace", trace] if trace else [])]
    told = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    row: dict[str, Any] = json.loads(told.splitlines()[-1])
    seconds = FULL[number][-1]
    met = row["CPU s"] <= seconds and row["peak MiB"] <= MAX_FULL_MIB
    return row | {"target": f"≤ {seconds} CPU s, {MAX_FULL_MIB} MiB", "met": met}


class Peer:
    """The process of a tree (`simulation_peer.py`)."""

    def __init__(self, tree: Path) -> None:
        words = [sys.executable, str(Path(__file__).with_name("simulation_peer.py")), str(tree)]
        self._process = subprocess.Popen(words, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, kind: str, num: int, trace: str | None) -> tuple[float, int, int, float]:
        """Seconds of CPU, steps planned, steps skipped, and peak MiB of the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([kind, num, trace]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            self.close()
            raise RuntimeError(f"the process of a tree ended with {self._process.returncode}")
        seconds, planned, skipped, peak = json.loads(answer)
        return seconds, planned, skipped, peak

    def close(self) -> None:
        self._process.communicate()


def compare(other: Path, num: int, rounds: int, trace: str | None) -> list[dict[str, Any]]:
    """This tree and another in turns; a ratio is the median over pairs of runs."""
    there, here = Peer(other), Peer(ROOT)
    pairs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in AGAINST}
    sessions: list[float] = []
    for number in range(rounds):
        for kind in AGAINST:
            took = {}
            for peer in (there, here) if number % 2 else (here, there):
                took[peer] = peer.run(kind, num, trace)[0]
            pairs[kind].append((took[there], took[here]))
        sessions.append(here.run("sessions", num, None)[0])
    there.close()
    here.close()

    def row(what: str, compared: str, found: list[tuple[float, float]], most: float | None) -> dict[str, Any]:
        ratio = statistics.median(this / base for base, this in found)
        return {
            "requests": what,
            "compared with": compared,
            "µs a request": round(1e6 * statistics.median(this for _, this in found) / num),
            "µs of those": round(1e6 * statistics.median(base for base, _ in found) / num),
            "ratio": round(ratio, 3),
            "target": "—" if most is None else f"≤ {most:g}x",
            "met": "—" if most is None else ratio <= most,
        }

    rows = [row(what, "the other tree", pairs[kind], most) for kind, (what, most) in AGAINST.items()]
    single = [list(zip(side, sessions, strict=True)) for side in zip(*pairs["one"], strict=True)]
    rows.append(row("sessions, one replica", "single requests of the other tree", single[0], MAX_SESSIONS))
    rows.append(row("sessions, one replica", "single requests of this tree", single[1], None))
    return rows


def measured_of(other: Path) -> dict[str, Any]:
    """When this was, and of which commits."""
    told = [code(tree) for tree in (ROOT, other)]
    commits = [f"{one.get('commit', 'unknown')}{' with changes' if one.get('dirty') else ''}" for one in told]
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return {"this tree": commits[0], "the other tree": commits[1], "date": date}


def conversations(num: int, trace: str | None) -> Workload:
    workload = load_trace(trace).workload.repeated(num) if trace else synthetic(num, RATE, seed=1)
    return assign_classes(workload, parse_mix(MIX), seed=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--trace")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--against", type=Path, metavar="TREE", help="another tree to compare this one with")
    parser.add_argument("--rounds", type=int, default=5, help="of each tree, for --against")
    parser.add_argument("--full-case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.full_case is not None:
        print(json.dumps(measure_full(arguments.full_case, arguments.trace)))
        return
    known = json.loads(Path(arguments.json).read_text()) if arguments.json and Path(arguments.json).exists() else {}
    if arguments.full:
        rows = [in_its_own_process(number, arguments.trace) for number in range(len(FULL))]
        print_table("a million requests on one core", rows)
        if arguments.json:
            write_json(arguments.json, known | {"full": rows, "full_command": command()})
        return
    if arguments.against is not None:
        other = arguments.against.resolve()
        trace = arguments.trace and str(Path(arguments.trace).resolve())
        rows = [row | measured_of(other) for row in compare(other, arguments.requests, arguments.rounds, trace)]
        print_table(f"CPU time of simulated requests, against {other}", rows)
        if arguments.json:
            write_json(arguments.json, known | {"turns": rows, "turns_command": command()})
        return
    load_before = os.getloadavg()
    num = arguments.requests
    workload = conversations(num, arguments.trace)
    rows = [measure(case, workload) for case in CASES]
    print_table("simulated requests per second of one core", rows)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\npeak memory {peak:.0f} MiB")
    if arguments.json:
        write_json(
            arguments.json,
            {
                "bench": "simulation",
                "environment": environment(),
                "load_before": [round(x, 2) for x in load_before],
                "configuration": {
                    "requests": num,
                    "rate per replica": RATE,
                    "classes": MIX,
                    "step times": "a100-llama-3-8b",
                    "peak MiB": round(peak),
                    "versions": versions(),
                },
                "rows": rows,
            }
            | {key: known[key] for key in ("full", "full_command", "turns", "turns_command") if key in known},
        )


if __name__ == "__main__":
    main()
