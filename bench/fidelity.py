"""How well does the simulator predict this engine: step times, latencies, and which of six policies is better?

    python bench/fidelity.py [--json FILE] [--work DIR] [--stage next|all|NAME] [--seconds S] [--repeats N] [--quick]

Every stage is a start of the live CPU engine (storyteller) of less than a minute, and leaves a file in DIR; a stage whose file
is there is not run again. So a machine that is quiet only now and then can be measured in pieces (--stage next); --json writes
the result when all are there. First the engine is calibrated: on batches of all sizes and a trace of its own. Then two live
runs of another trace at 80 % of the capacity are held against simulations of it, and for every policy live runs above the
capacity, where policies differ.

Latencies are those of the client. The simulated engine gets the requests when the client really sent them. A target counts as
met at the larger of the target and 1.5 times the difference between the two live runs; for the step times, that is the error
which a model fitted to the second live run makes on the first one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from report import NOISE_FACTOR, environment, print_table, versions, write_json

from actorllm import AsyncLLM
from actorllm.actors.record_file import build_policy
from actorllm.live.calibrate import calibrate_recording, exercise, read_steps
from actorllm.live.embedded import EmbeddedTarget
from actorllm.live.replay import replay
from actorllm.scheduling.policy import PlanPolicy
from actorllm.slo.cost_model import AnyModel, StepLog, fit, from_json, to_json
from actorllm.slo.metrics import RunMetrics
from actorllm.slo.simulator import EngineShape, simulate
from actorllm.slo.workload import (
    Workload,
    assign_classes,
    gamma_arrivals,
    lognormal_lengths,
    make_workload,
    parse_mix,
)

ENGINE: dict[str, Any] = {
    "num_threads": 1,  # one core for the worker, one for everybody else
    "max_num_seqs": 64,
    "max_num_batched_tokens": 256,
    "enable_prefix_caching": False,
}
MIX = "ls:0.5:ttft=0.15+p/2000,tpot=0.03 be:0.5:e2e=6"
POLICIES = ("fcfs", "edf", "srpf", "hrrn", "qoserve", "cohost")
BELOW, ABOVE = 0.8, 1.15
"""Of the capacity: where latencies are predicted, and where policies are compared."""
SEEDS = 5
"""Simulations whose means are taken: the residuals of steps are drawn."""
TARGETS = {"mean_tpot_ms": 0.05, "mean_e2el_ms": 0.08, "mean_ttft_ms": 0.12, "p99_ttft_ms": 0.20}
STEP_TARGET = 0.08
COMPARED: dict[str, Callable[[RunMetrics], float]] = {
    "mean TTFT": lambda m: float(m.summary["mean_ttft_ms"]),
    "mean E2E": lambda m: float(m.summary["mean_e2el_ms"]),
    "mean TTFT of ls": lambda m: next(c.latency_ms["mean_ttft_ms"] for c in m.classes if c.name == "ls"),
    "good by deadline": lambda m: m.overall.attainment["deadline"],
    "good by tpot": lambda m: m.overall.attainment["tpot"],
}


def trace(seed: int, num: int, rate: float) -> Workload:
    """Conversations that fit the model; arrivals a little burstier than Poisson ones."""
    lengths = lognormal_lengths(num, (100, 500), (40, 150), longest=600, seed=seed)
    workload = make_workload(gamma_arrivals(num, rate, 1.2, seed), lengths, f"trace-{seed}").fitting(1024)
    return assign_classes(workload, parse_mix(MIX), seed)


class Stages:
    """What was measured so far, one file for each stage."""

    def __init__(self, folder: Path, seconds: float, repeats: int) -> None:
        self.folder = folder
        self.seconds = seconds
        folder.mkdir(parents=True, exist_ok=True)
        repeated = [f"run-{i + 1}" for i in range(2)]
        # There and back again: a machine that gets slower meanwhile makes the bands wider, and no policy worse.
        policies = [f"{p}-{i + 1}" for i in range(repeats) for p in (reversed(POLICIES) if i % 2 else POLICIES)]
        self.names = ["calibrate", *repeated, *policies]

    def file(self, name: str, suffix: str = "json") -> Path:
        return self.folder / f"{name}.{suffix}"

    def missing(self) -> list[str]:
        return [name for name in self.names if not self.file(name).exists()]

    def read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.file(name).read_text())
        return found

    def write(self, name: str, **data: Any) -> None:
        data["load"] = [round(x, 2) for x in os.getloadavg()]
        part = self.file(name, "part")
        part.write_text(json.dumps(data))
        part.rename(self.file(name))

    def run(self, name: str) -> None:
        print(f"{name} ...", flush=True)
        if name == "calibrate":
            asyncio.run(self._calibrate())
        else:
            policy, _, number = name.rpartition("-")
            asyncio.run(self._live(name, "fcfs" if policy == "run" else policy, int(number)))

    async def _calibrate(self) -> None:
        record = self.file("calibrate", "bin")
        async with AsyncLLM("storyteller", record=record, **ENGINE) as llm:
            delays = await exercise(llm, self.seconds)
            # Longer than its share of the batches: this is the mixture of steps that is to be predicted.
            await replay(trace(11, int(8 * self.seconds), 8.0), EmbeddedTarget(llm))
            shape = EngineShape.of(llm.config)
        found = calibrate_recording(record, "storyteller", delays)
        record.unlink()
        self.file("model", "txt").write_text(to_json(found.fit.model))
        capacity = self._capacity(shape, found.fit.model)
        self.write(
            "calibrate",
            shape={name: getattr(shape, name) for name in EngineShape.__slots__},
            capacity=capacity,
            held_out_mape=found.fit.mape,
            repeatability=found.repeatability,
            num_steps=found.fit.num_steps,
        )

    def _capacity(self, shape: EngineShape, model: AnyModel) -> float:
        """Requests per second when there is always somebody who waits."""
        run = simulate(trace(12, 2000, 1e4), shape, model)
        return len(run.workload) / run.timeline.duration

    def model(self) -> AnyModel:
        return from_json(self.file("model", "txt").read_text())

    def shape(self) -> EngineShape:
        return EngineShape(**self.read("calibrate")["shape"])

    def workload(self, name: str) -> Workload:
        """Of a stage. All policies get the same requests in the same repetition."""
        capacity = float(self.read("calibrate")["capacity"])
        if name.startswith("run-"):
            return trace(21, int(BELOW * capacity * self.seconds), BELOW * capacity)
        return trace(30, int(ABOVE * capacity * self.seconds / 2), ABOVE * capacity)

    async def _live(self, name: str, policy: str, number: int) -> None:
        record = self.file(name, "bin")
        is_recorded = name.startswith("run-")
        arguments = {"record": record} if is_recorded else {}
        step_model = self.folder / "model.txt"
        async with AsyncLLM(
            "storyteller", scheduling_policy=policy, step_model=step_model, **ENGINE, **arguments
        ) as llm:
            run = await replay(self.workload(name), EmbeddedTarget(llm), seed=number, num_warmups=20)
        if is_recorded:
            log = read_steps(record)
            np.savez(self.file(name, "npz"), **{column: getattr(log, column) for column in StepLog.__slots__})
            record.unlink()
        self.write(
            name,
            lag=np.nan_to_num(run.lag).tolist(),
            summary=run.evaluate().summary,
            compared={label: of(run.evaluate()) for label, of in COMPARED.items()},
            warnings=run.warnings,
        )

    # What the simulator says of it

    def simulated(self, name: str) -> list[RunMetrics]:
        """Of the requests as they were sent in this stage."""
        policy = name.rpartition("-")[0]
        workload, lag = self.workload(name), np.array(self.read(name)["lag"])
        order = np.argsort(workload.arrival + lag, kind="stable")
        late = lag[order]
        sent = replace(workload.select(order), arrival=(workload.arrival + lag)[order])
        model, shape = self.model(), self.shape()

        def build() -> PlanPolicy:
            return build_policy("fcfs" if policy == "run" else policy, to_json(model))

        found = []
        for seed in range(SEEDS):
            run = simulate(sent, shape, model, policy=build, seed=seed)
            # Latencies count from the schedule, in the live run as here.
            timeline = replace(run.timeline, arrival=run.timeline.arrival - late)
            found.append(replace(run, timeline=timeline).evaluate())
        return found

    def steps(self, name: str) -> StepLog:
        with np.load(self.file(name, "npz")) as file:
            return StepLog(*(file[column] for column in StepLog.__slots__))


def latency_rows(stages: Stages) -> list[dict[str, Any]]:
    live = [stages.read(f"run-{i}")["summary"] for i in (1, 2)]
    simulated = [metrics.summary for i in (1, 2) for metrics in stages.simulated(f"run-{i}")]
    rows = []
    for key, target in TARGETS.items():
        first, second = (run[key] for run in live)
        told = float(np.mean([run[key] for run in simulated]))
        truth = (first + second) / 2
        rows.append(row(key.replace("_", " ").replace(" ms", ", ms"), first, second, told, told / truth - 1, target))
        rows[-1]["met"] = bool(abs(told / truth - 1) <= max(target, NOISE_FACTOR * abs(first - second) / truth))
    for key in ("p50_ttft_ms", "p99_e2el_ms", "p99_itl_ms", "output_throughput"):
        first, second = (run[key] for run in live)
        told = float(np.mean([run[key] for run in simulated]))
        rows.append(row(key.replace("_", " "), first, second, told, told / ((first + second) / 2) - 1, None))
    return rows


def row(measure: str, first: float, second: float, told: float, error: float, target: float | None) -> dict[str, Any]:
    return {
        "measure": measure,
        "live 1": round(first, 3),
        "live 2": round(second, 3),
        "simulated": round(told, 3),
        "error": f"{error:+.1%}",
        "between live": f"{abs(first - second) / ((first + second) / 2):.1%}",
        "target": f"≤ {target:.0%}" if target else "—",
        "met": "—",
    }


def step_row(stages: Stages) -> dict[str, Any]:
    """The calibrated model on the steps of the first live run; and what one that knows the second run makes of it."""
    model = stages.model()
    errors = [_mape(model, stages.steps(f"run-{number}")) for number in (1, 2)]
    noise = _mape(fit(stages.steps("run-2")).model, stages.steps("run-1"))
    return {
        "measure": "step time, mean absolute error",
        "live 1": "—",
        "live 2": "—",
        "simulated": "—",
        "error": f"{errors[0]:.1%}, {errors[1]:.1%}",
        "between live": f"{noise:.1%}",
        "target": f"≤ {STEP_TARGET:.0%}",
        "met": bool(max(errors) <= max(STEP_TARGET, NOISE_FACTOR * noise)),
    }


def _mape(model: AnyModel, log: StepLog) -> float:
    taken = log.ended - log.started
    told = np.array([model.seconds(*features[1:]) for features in log.features().tolist()])
    is_usable = taken > 0
    return float(np.abs(told / taken - 1)[is_usable].mean())


def ranking_rows(stages: Stages, repeats: int) -> tuple[list[dict[str, Any]], list[str]]:
    """For every figure: pairs of policies whose live bands do not overlap, and how many the simulator ranks alike."""
    live = {p: [stages.read(f"{p}-{i + 1}")["compared"] for i in range(repeats)] for p in POLICIES}
    simulated = {
        p: [{k: of(m) for k, of in COMPARED.items()} for i in range(repeats) for m in stages.simulated(f"{p}-{i + 1}")]
        for p in POLICIES
    }
    rows, wrong = [], []
    for label in COMPARED:
        bands = {p: (min(r[label] for r in live[p]), max(r[label] for r in live[p])) for p in POLICIES}
        told = {p: float(np.mean([r[label] for r in simulated[p]])) for p in POLICIES}
        apart = [(a, b) for a, b in itertools.combinations(POLICIES, 2) if not _overlap(bands[a], bands[b])]
        alike = 0
        for a, b in apart:
            if (bands[a][0] < bands[b][0]) == (told[a] < told[b]):
                alike += 1
            else:
                wrong.append(f"{label}: {a} {bands[a]} and {b} {bands[b]}, simulated {told[a]:.4g} and {told[b]:.4g}")
        rows.append(
            {
                "figure": label,
                **{p: f"{np.mean(bands[p]):.4g} / {told[p]:.4g}" for p in POLICIES},
                "pairs apart": len(apart),
                "ranked alike": alike,
                "target": "all",
                "met": alike == len(apart),
            }
        )
    return rows, wrong


def _overlap(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] <= b[1] and b[0] <= a[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--work", help="where the stages leave their files; default: all of them are measured now")
    parser.add_argument("--stage", default="all")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of a live run; those of the policies take half of it"
    )
    parser.add_argument("--repeats", type=int, default=2, help="live runs of every policy")
    parser.add_argument("--quick", action="store_true", help="whether it runs, not how good it is")
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    seconds = 4.0 if arguments.quick else arguments.seconds
    with contextlib.ExitStack() as stack:
        work = arguments.work or stack.enter_context(tempfile.TemporaryDirectory(prefix="actorllm-fidelity-"))
        measure(Stages(Path(work), seconds, arguments.repeats), arguments, load_before)


def measure(stages: Stages, arguments: argparse.Namespace, load_before: tuple[float, float, float]) -> None:
    """What is wanted and missing; then, if all is there, the result."""
    wanted = stages.missing()
    if arguments.stage == "next":
        wanted = wanted[:1]
    elif arguments.stage != "all":
        wanted = [arguments.stage]
    for name in wanted:
        stages.run(name)
    if missing := stages.missing():
        print(f"{len(missing)} stages are missing: {', '.join(missing)}")
        return
    told = stages.read("calibrate")
    rows = [step_row(stages), *latency_rows(stages)]
    print_table("predicted by the simulator and measured on the engine", rows)
    rankings, wrong = ranking_rows(stages, arguments.repeats)
    print_table("policies: mean of the live runs / simulated", rankings)
    for line in wrong:
        print(f"ranked otherwise: {line}")
    loads = {name: stages.read(name)["load"][0] for name in stages.names}
    if arguments.json:
        write_json(
            arguments.json,
            {
                "bench": "fidelity",
                "environment": environment(),
                "load_before": [round(x, 2) for x in load_before],
                "configuration": {
                    "engine": ENGINE,
                    "classes": MIX,
                    "seconds": stages.seconds,
                    "capacity requests/s": round(float(told["capacity"]), 2),
                    "of the capacity": [BELOW, ABOVE],
                    "calibration steps": told["num_steps"],
                    "error on held-out steps": round(told["held_out_mape"], 4),
                    "difference of equal steps in a row": round(told["repeatability"], 4),
                    "highest load": max(loads.values()),
                    "versions": versions(),
                },
                "rows": rows,
                "targets": rankings,
                "ranked otherwise": wrong,
            },
        )


if __name__ == "__main__":
    main()
