"""How well does the simulator predict this engine: step times, latencies, and which of eight policies is better?

    python bench/fidelity.py [--json FILE] [--work DIR] [--stage next|all|NAME|recorded] [--rounds N] [--quick]
                             [--recorded RUN [--recorded-model MODEL] [--recorded-blocks N]]

The live CPU engine (storyteller) runs traces, and the simulator is given a model that was fitted to steps of other traces. So
that a machine which changes meanwhile changes for all of them, they take turns every few seconds:

    latencies     the trace to calibrate on, and two live runs of the one that is predicted, at 80 % of the capacity
    others        likewise, but what is predicted runs on an engine of another policy and other limits (OTHER), at another rate
    policies-N    eight engines, one for each policy, above the capacity, where policies differ

A stage takes about two minutes and leaves a file in DIR; what is there is not run again (--stage next: only the first that is
missing), and the result is written when all are.

Latencies count from when the client sent a request, which is when it arrives in the simulation. An error above its target is
"within noise" up to 1.5 times the difference between the two live runs, and missed beyond that. Where that is larger than a
quarter, the machine was too noisy to tell.

Step times are judged by kind, in two ways. The mean of a kind is what queues hang on; its noise is by how much the two live
runs differ beside what was in their steps. The error of single steps is that of each of them; its noise is the error of a model
that was fitted to the other live run. Equal steps in a row differ, which bounds every model.

A ranking is of the pairs of policies that lie apart, by Kendall's tau; one with few such pairs was not tested. All policies of a
round have the same requests within two minutes, so the differences of a pair are those of its rounds. They lie apart if Student's
t says so at 95 %. Times are compared by their ratio.

--recorded: a run of another engine (`slo.measured_runs`) is predicted from step times that it was not fitted to. Its second half is
predicted from its first half, too. Nothing live is measured for that: --stage recorded does it alone, and keeps what --json has of
the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from report import NOISE_FACTOR, command, environment, print_table, versions, write_json

from actorllm import AsyncLLM
from actorllm.actors.scheduler_setup import build_policy
from actorllm.clock import now
from actorllm.config import EngineConfig
from actorllm.messages import F64
from actorllm.scheduling.cost_model import (
    AnyModel,
    Fit,
    LinearModel,
    MeasuredSteps,
    Regime,
    fit,
    load_model,
    predict,
    to_json,
)
from actorllm.slo.live.calibrate import calibrate_steps, exercise, read_recorded
from actorllm.slo.live.embedded import EmbeddedTarget
from actorllm.slo.live.replay import Delays, LiveRun, replay
from actorllm.slo.measured_runs import read_run
from actorllm.slo.metrics import RunMetrics, evaluate
from actorllm.slo.prediction import predict_run
from actorllm.slo.simulator import EngineShape, simulate
from actorllm.slo.step_fit import KINDS, StepKind, errors_by_size, repeatability, told_by_size
from actorllm.slo.workload import (
    Workload,
    assign_classes,
    gamma_arrivals,
    lognormal_lengths,
    make_workload,
    parse_mix,
)

ENGINE: dict[str, Any] = {
    "num_threads": 1,  # one core for the worker, one for all else
    "max_num_seqs": 64,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 200_000_000,
    "enable_prefix_caching": False,
    "standby_worker": False,  # which would import torch meanwhile
}
OTHER: dict[str, Any] = {"scheduling_policy": "edf", "max_num_seqs": 32, "max_num_batched_tokens": 128}
"""What differs in the engine that is predicted in the stage `others`."""
MIX = "ls:0.5:ttft=0.15+p/2000,tpot=0.03 be:0.5:e2e=6"
POLICIES = ("fcfs", "edf", "srpf", "hrrn", "sarathi", "fairbatch", "qoserve", "cohost")
BELOW, OTHER_RATE, ABOVE = 0.8, 0.6, 1.5
"""Of the capacity: where latencies are predicted, likewise in the stage `others`, and where policies are compared."""
SEEDS = 5
"""Simulations whose means are taken: the residuals of steps are drawn."""
TOO_NOISY = 0.25
TARGETS = {"mean_tpot_ms": 0.08, "mean_ttft_ms": 0.08, "mean_e2el_ms": 0.08, "p99_ttft_ms": 0.15, "p99_tpot_ms": 0.15}
STEP_TARGET = 0.08
ALSO = ("p50_ttft_ms", "p99_e2el_ms")
TAU, MIN_PAIRS = 0.9, 12
"""Of a ranking: Kendall's tau over the pairs of policies that lie apart, and how many of them it takes to test it."""
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantile 0.975 of Student's t with 1, 2 ... degrees of freedom; the last one is taken for all further ones, too."""
COMPARED: dict[str, Callable[[RunMetrics], float]] = {
    "mean TTFT, ms": lambda m: float(m.summary["mean_ttft_ms"]),
    "mean E2E, ms": lambda m: float(m.summary["mean_e2el_ms"]),
    "mean TTFT of ls, ms": lambda m: next(c.latency_ms["mean_ttft_ms"] for c in m.classes if c.name == "ls"),
    "good by deadline": lambda m: m.overall.attainment["deadline"],
    "good by tpot": lambda m: m.overall.attainment["tpot"],
}
OF_DATA_SHEET = LinearModel((Regime(math.inf, (0.016, 9e-5, 0.0, 1.3e-7, 0.0, 0.0)),), "data sheet")
"""Where the fit to the first half of a run begins: 16 GB of weights and 128 KiB of KV per token at 1 TB/s, and 11,000 prompt tokens
per second."""
CALIBRATE, PREDICT, COMPARE, SATURATE = 1000, 2000, 3000, 4000
"""First seeds of the traces of a kind."""
RECORDED = ("recorded", "recorded_command")
"""Of a result that is written again: what is kept if no recorded run is given."""
PREDICTED = {"latencies": "another seed", "others": "another seed, rate, policy and limits"}
"""Stages whose runs are predicted, and how these runs differ from those that the model was fitted to."""


def trace(seed: int, seconds: float, rate: float) -> Workload:
    """Conversations that fit the model; arrivals a little burstier than Poisson ones."""
    num = max(8, int(seconds * rate))
    lengths = lognormal_lengths(num, (100, 500), (40, 150), longest=600, seed=seed)
    workload = make_workload(gamma_arrivals(num, rate, 1.2, seed), lengths, f"trace-{seed}").fitting(1024)
    return assign_classes(workload, parse_mix(MIX), seed)


class Turns:
    """What engines are asked in one stage, one trace after the other, and when."""

    def __init__(self) -> None:
        self.windows: dict[str, list[tuple[float, float]]] = {}
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self._delays: list[Delays] = []

    @property
    def delays(self) -> Delays:
        """Between client and scheduler, in the traces to calibrate on."""
        return Delays.of([d.submit_s for d in self._delays], [d.deliver_s for d in self._delays])

    async def take(self, kind: str, llm: AsyncLLM, seed: int, seconds: float, rate: float) -> LiveRun:
        """Replay a trace, and remember it as one of a kind."""
        began = now()
        run = await replay(trace(seed, seconds, rate), EmbeddedTarget(llm), num_warmups=0, seed=seed)
        self.windows.setdefault(kind, []).append((began, now()))
        if kind == "calibrate":
            self._delays.append(run.delays)
        timeline = run.timeline
        self.runs.setdefault(kind, []).append(
            {
                "seed": seed,
                "seconds": seconds,
                "rate": rate,
                "lag": np.nan_to_num(run.lag).tolist(),
                "errors": sum(map(bool, run.errors)),
                **{name: getattr(timeline, name).tolist() for name in ("first_token", "last_token", "num_output")},
                "compared": compared(from_sending(run)),
            }
        )
        return run

    async def capacity(self, llm: AsyncLLM, seconds: float) -> float:
        """Requests per second when a request is always waiting."""
        await self.take("warm", llm, SATURATE, 1.0, 8.0)
        run = await self.take("saturated", llm, SATURATE + 1, 1.0, max(8.0, 30 * seconds))
        return len(run.workload) / run.timeline.duration


def from_sending(run: LiveRun) -> RunMetrics:
    """The figures of a live run with latencies that count from when a request was sent."""
    timeline = replace(run.timeline, arrival=run.timeline.arrival + np.nan_to_num(run.lag))
    return evaluate(timeline, run.workload.classes, run.workload.class_ids)


def compared(metrics: RunMetrics) -> dict[str, float]:
    return {label: of(metrics) for label, of in COMPARED.items()}


def within(log: MeasuredSteps, windows: Sequence[tuple[float, float]]) -> MeasuredSteps:
    """The steps that ran at these times."""
    rows = np.zeros(len(log), np.bool_)
    for began, ended in windows:
        rows |= (log.launched >= began) & (log.ended <= ended)
    return MeasuredSteps(*(getattr(log, column)[rows] for column in MeasuredSteps.__slots__))


class Stages:
    """What was measured so far, one file for each stage."""

    def __init__(self, folder: Path, seconds: float, turns: int, rounds: int) -> None:
        self.folder = folder
        self.seconds = seconds
        self.turns = turns
        self.rounds = rounds
        folder.mkdir(parents=True, exist_ok=True)
        self._fitted: dict[str, Fit] = {}
        self.names = [*PREDICTED, *(f"policies-{number + 1}" for number in range(rounds))]

    def file(self, name: str, suffix: str = "json") -> Path:
        return self.folder / f"{name}.{suffix}"

    def missing(self) -> list[str]:
        return [name for name in self.names if not self.file(name).exists()]

    def read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.file(name).read_text())
        return found

    def run(self, name: str) -> None:
        print(f"{name} ...", flush=True)
        record = self.file(name, "bin")
        load = os.getloadavg()[0]
        stage = self._predicted(name, record) if name in PREDICTED else self._policies(record, int(name.split("-")[1]))
        found = asyncio.run(stage)
        for file in (record, _of_other(record)):
            file.unlink(missing_ok=True)
        part = self.file(name, "part")
        part.write_text(json.dumps(found | {"load": [round(load, 2), round(os.getloadavg()[0], 2)]}))
        part.rename(self.file(name))

    async def _predicted(self, name: str, record: Path) -> dict[str, Any]:
        """Steps to calibrate on and two live runs of what is predicted, in turns; these runs may be of another engine."""
        turns = Turns()
        async with contextlib.AsyncExitStack() as stack:
            llm = await stack.enter_async_context(AsyncLLM("storyteller", record=record, **ENGINE))
            live, rate = llm, BELOW
            if name == "others":
                arguments = ENGINE | OTHER | {"record": _of_other(record)}
                live = await stack.enter_async_context(AsyncLLM("storyteller", **arguments))
                rate = OTHER_RATE
            capacity = await turns.capacity(llm, self.seconds)
            began = now()
            await exercise(llm, 2 * self.seconds)
            turns.windows["calibrate"] = [(began, now())]
            for number in range(self.turns):
                await turns.take("calibrate", llm, CALIBRATE + number, self.seconds, BELOW * capacity)
                if live is not llm:  # its processes were idle
                    await turns.take("warm", live, SATURATE + 2, 1.0, 8.0)
                for again in (1, 2):
                    await turns.take(f"live {again}", live, PREDICT + number, self.seconds, rate * capacity)
            shape = EngineShape.of(live.config)
        log, back = read_recorded(record)
        of_live = log if live is llm else read_recorded(_of_other(record))[0]
        self.keep(name, 0, within(log, turns.windows["calibrate"]))
        for again in (1, 2):
            self.keep(name, again, within(of_live, turns.windows[f"live {again}"]))
        return {
            "shape": {name: getattr(shape, name) for name in EngineShape.__slots__},
            "delays": [[one.submit_s, one.deliver_s] for one in (turns.delays, back)],
            "capacity": capacity,
            "runs": turns.runs,
        }

    async def _policies(self, record: Path, number: int) -> dict[str, Any]:
        turns = Turns()
        step_model = self.model_file()
        with contextlib.ExitStack() as stack:
            llms = {}
            for policy in POLICIES:
                arguments = {"record": record} if policy == "fcfs" else {}
                llms[policy] = AsyncLLM(
                    "storyteller", scheduling_policy=policy, step_model=step_model, **ENGINE, **arguments
                )
                stack.callback(llms[policy].shutdown)
            await asyncio.gather(*(llm.start() for llm in llms.values()))
            fcfs = llms["fcfs"]
            capacity = await turns.capacity(fcfs, self.seconds)
            began = now()
            await exercise(fcfs, self.seconds)
            turns.windows["calibrate"] = [(began, now())]
            for policy in reversed(POLICIES) if number % 2 else POLICIES:
                await turns.take("warm", llms[policy], SATURATE + 2, 1.0, 8.0)
                await turns.take(policy, llms[policy], COMPARE + number, self.seconds, ABOVE * capacity)
                await turns.take("warm", fcfs, SATURATE + 2, 0.5, 16.0)
                await turns.take("calibrate", fcfs, CALIBRATE + number, self.seconds / 3, ABOVE * capacity)
        log, back = read_recorded(record)
        self.keep(f"policies-{number}", 0, within(log, turns.windows["calibrate"]))
        delays = [[one.submit_s, one.deliver_s] for one in (turns.delays, back)]
        return {"delays": delays, "capacity": capacity, "runs": turns.runs}

    def model_file(self) -> Path:
        """Of the first stage, for policies that plan by it."""
        path = self.file("model", "txt")
        path.write_text(to_json(self.fitted("latencies").model))
        return path

    # What the simulator says of it

    def keep(self, name: str, number: int, steps: MeasuredSteps) -> None:
        columns = {column: getattr(steps, column) for column in MeasuredSteps.__slots__}
        np.savez(self.file(f"{name}-steps-{number}", "npz"), **columns)

    def steps(self, name: str, number: int) -> MeasuredSteps:
        """Of a stage's live run 1 or 2; 0: those that its model was fitted to."""
        with np.load(self.file(f"{name}-steps-{number}", "npz")) as file:
            return MeasuredSteps(*(file[column] for column in MeasuredSteps.__slots__))

    def fitted(self, name: str) -> Fit:
        """The model of the steps that a stage calibrates on."""
        if name not in self._fitted:
            client, recorded = (Delays(*both) for both in self.read(name)["delays"])
            self._fitted[name] = calibrate_steps(self.steps(name, 0), "storyteller", client, recorded)
        return self._fitted[name]

    def simulated(self, stage: str, kind: str, policy: str) -> list[list[Any]]:
        """For every seed, the runs of this kind as they were sent."""
        told = self.read(stage)
        model = self.fitted(stage).model
        shape = EngineShape(**(told.get("shape") or self.read("latencies")["shape"]))
        # Its policy plans by what the live one planned by, a model that was fitted before, and not by the true step times.
        config = EngineConfig.from_arguments(
            "storyteller", scheduling_policy=policy, step_model=self.model_file()
        ).scheduler
        found = []
        for seed in range(SEEDS):
            runs = []
            for live in told["runs"][kind]:
                workload, lag = trace(live["seed"], live["seconds"], live["rate"]), np.array(live["lag"])
                order = np.argsort(workload.arrival + lag, kind="stable")
                sent = replace(workload.select(order), arrival=(workload.arrival + lag)[order])
                runs.append(simulate(sent, shape, model, policy=lambda: build_policy(config), seed=seed))
            found.append(runs)
        return found


def _of_other(record: Path) -> Path:
    """The recording of the other engine of a stage."""
    return record.with_suffix(".other")


def latencies(first: Any, last: Any, sent: Any, num_output: Any) -> dict[str, float]:
    several = num_output > 1
    values = {
        "ttft": first - sent,
        "tpot": (last - first)[several] / (num_output[several] - 1),
        "e2el": last - sent,
    }
    figures = {}
    for name, seconds in values.items():
        figures[f"mean_{name}_ms"] = 1e3 * float(seconds.mean())
        for percent in (50, 99):
            figures[f"p{percent}_{name}_ms"] = 1e3 * float(np.percentile(seconds, percent))
    return figures


def figures_of_live(runs: list[dict[str, Any]]) -> dict[str, float]:
    columns = {
        name: np.concatenate([run[name] for run in runs]) for name in ("first_token", "last_token", "num_output")
    }
    sent = np.concatenate(
        [trace(run["seed"], run["seconds"], run["rate"]).arrival + np.array(run["lag"]) for run in runs]
    )
    return latencies(columns["first_token"], columns["last_token"], sent, columns["num_output"])


def figures_of_simulated(runs: list[Any]) -> dict[str, float]:
    columns = [
        np.concatenate([getattr(run.timeline, name) for run in runs])
        for name in ("first_token", "last_token", "arrival", "num_output")
    ]
    return latencies(*columns)


def latency_rows(stages: Stages, name: str, policy: str) -> list[dict[str, Any]]:
    """Of a stage: figures of both live runs, and as they are simulated."""
    live = [figures_of_live(stages.read(name)["runs"][f"live {i}"]) for i in (1, 2)]
    simulated = [figures_of_simulated(r) for i in (1, 2) for r in stages.simulated(name, f"live {i}", policy)]
    rows = []
    for key in (*TARGETS, *ALSO):
        target = TARGETS.get(key)
        first, second = (run[key] for run in live)
        truth, told = (first + second) / 2, float(np.mean([run[key] for run in simulated]))
        error, noise = told / truth - 1, abs(first - second) / truth
        rows.append(
            {
                "measure": key.removesuffix("_ms").replace("_", " ").replace("e2el", "e2e") + ", ms",
                "of": PREDICTED[name],
                "live 1": round(first, 3),
                "live 2": round(second, 3),
                "simulated": round(told, 3),
                "error": f"{error:+.1%}",
                "between live": f"{noise:.1%}",
                "target": f"≤ {target:.0%}" if target else "—",
                "met": verdict(abs(error), target, noise) if target else "—",
            }
        )
    return rows


def verdict(error: float, target: float, noise: float) -> bool | str:
    """Within noise is neither met nor missed: two live runs differ by as much as the simulation is off."""
    if error <= target:
        return True
    if noise > TOO_NOISY:
        return "too noisy"
    return "within noise" if error <= NOISE_FACTOR * noise else False


def verdict_on_ranking(num_apart: int, num_alike: int, num_runs: int) -> bool | str:
    """With few pairs of policies that lie apart nothing was tested, and a single round shows no pair to lie apart."""
    return "not tested" if num_runs < 2 or num_apart < MIN_PAIRS else tau(num_apart, num_alike) >= TAU


def tau(num_apart: int, num_alike: int) -> float:
    """Kendall's, over pairs that lie apart: pairs that are ranked alike less the others, as a share of all."""
    return (2 * num_alike - num_apart) / num_apart if num_apart else math.nan


def recorded_rows(run: str, model: str, num_blocks: int) -> list[dict[str, Any]]:
    """Figures of a run of another engine, as measured and as predicted: all of it, and its second half from the first."""
    shape, measured = EngineShape(num_blocks=num_blocks), read_run(run)
    found = {
        f"all of it, from {model}": predict_run(measured, shape, load_model(model), policy="sarathi"),  # as vLLM packs
        "second half, from the first": predict_run(measured, shape, OF_DATA_SHEET, policy="sarathi", fit_share=0.5),
    }
    return [
        {
            "recorded run": Path(run).parent.name,
            "predicted": what,
            "of": f"{one.name}, ms",
            "requests": prediction.num_judged,
            "measured": round(1e3 * one.measured, 1),
            "simulated": round(1e3 * one.predicted, 1),
            "error": f"{one.error:+.1%}",
            "target": "—" if one.limit is None else f"≤ {one.limit:.0%}",
            "met": "—" if one.limit is None else one.verdict == "met",
        }
        for what, prediction in found.items()
        for one in prediction.figures
    ]


def step_rows(stages: Stages, name: str) -> list[dict[str, Any]]:
    """The calibrated model on the steps of both live runs of a stage, by kind: their mean, and each of them."""
    model = stages.fitted(name).model
    logs = [stages.steps(name, number) for number in (1, 2)]
    found = []
    for kind, label in KINDS.items():
        taken, told = zip(*(_of_kind(log, kind, model) for log in logs), strict=True)
        if not all(run.size for run in taken):
            continue
        found.append(mean_row(label, taken, [run * drawn_mean(model) for run in told]))
        errors = [float(np.abs(b / a - 1).mean()) for a, b in zip(taken, told, strict=True)]
        others = [_of_kind(log, kind, fit(other).model) for log, other in zip(logs, reversed(logs), strict=True)]
        noise = float(np.mean([np.abs(b / a - 1).mean() for a, b in others]))
        found.append(
            {
                "measure": f"single {label}, mean absolute error",
                "live 1": f"{errors[0]:.1%}",
                "live 2": f"{errors[1]:.1%}",
                "simulated": "—",
                "error": f"{float(np.mean(errors)):.1%}",
                "between live": f"{noise:.1%}",
                "target": f"≤ {STEP_TARGET:.0%}",
                "met": verdict(float(np.mean(errors)), STEP_TARGET, noise),
            }
        )
    alike = [f"{repeatability(log):.1%}" for log in logs]
    found.append(
        {
            "measure": "equal decode steps in a row differ by (median)",
            "live 1": alike[0],
            "live 2": alike[1],
            **dict.fromkeys(("simulated", "error", "between live", "target", "met"), "—"),
        }
    )
    return [{"measure": row.pop("measure"), "of": PREDICTED[name], **row} for row in found]


def mean_row(label: str, taken: Sequence[F64], told: Sequence[F64]) -> dict[str, Any]:
    """Of steps of one kind: their mean in two live runs, and what the simulator takes for them."""
    means = [1e3 * float(run.mean()) for run in taken]
    off = [float(b.sum() / a.sum()) for a, b in zip(taken, told, strict=True)]
    error = float(sum(run.sum() for run in told) / sum(run.sum() for run in taken)) - 1
    noise = abs(off[0] - off[1])
    return {
        "measure": f"mean of {label}, ms",
        "live 1": round(means[0], 3),
        "live 2": round(means[1], 3),
        "simulated": round(1e3 * float(np.concatenate(told).mean()), 3),
        "error": f"{error:+.1%}",
        "between live": f"{noise:.1%}",
        "target": f"≤ {STEP_TARGET:.0%}",
        "met": verdict(abs(error), STEP_TARGET, noise),
    }


def drawn_mean(model: AnyModel) -> float:
    """By how much simulated steps take longer than is predicted, in the mean of what is drawn for them."""
    residuals = np.array(model.residuals)
    return float((residuals[1:] + residuals[:-1]).mean() / 2) if residuals.size > 1 else 1.0


def _of_kind(log: MeasuredSteps, kind: StepKind, model: AnyModel) -> tuple[F64, F64]:
    """What steps of a kind took, and what a model says of them; seconds."""
    taken, features = log.ended - log.started, log.features()
    rows = (taken > 0) & ((features[:, 1] > 0) == (kind == "prompt"))
    return taken[rows], predict(model, features[rows])


def size_rows(stages: Stages) -> list[dict[str, Any]]:
    """The errors of the calibrated model on the steps of both live runs, by kind and size of the steps."""
    model = stages.fitted("latencies").model
    logs = [stages.steps("latencies", number) for number in (1, 2)]
    features = np.concatenate([log.features() for log in logs])
    taken = np.concatenate([log.ended - log.started for log in logs])
    usable = taken > 0
    found = errors_by_size(features[usable], taken[usable], predict(model, features[usable]))
    names = ("step time of", "steps", "mean absolute error", "bias")
    return [dict(zip(names, row, strict=True)) for row in told_by_size(found)]


def differences(label: str, first: Sequence[float], second: Sequence[float]) -> F64:
    """Of two policies, round by round: of times the logarithm of their ratio, of shares the difference."""
    a, b = np.array(first), np.array(second)
    found: F64 = np.log(a / b) if label.endswith(", ms") else a - b
    return found


def lie_apart(found: F64) -> bool:
    """Whether differences that belong together are not 0 by chance, by Student's t at 95 %; a single one says nothing."""
    num = found.size
    if num < 2:
        return False
    quantile = STUDENT[min(num - 1, len(STUDENT)) - 1]
    return bool(abs(found.mean()) > quantile * found.std(ddof=1) / math.sqrt(num))


def ranking_rows(stages: Stages) -> tuple[list[dict[str, Any]], list[str]]:
    """For every figure: pairs of policies that lie apart, and how many the simulator ranks alike."""
    names = [name for name in stages.names if name.startswith("policies")]
    live = {p: [stages.read(name)["runs"][p][0]["compared"] for name in names] for p in POLICIES}
    # By policy and round the mean over the seeds.
    simulated: dict[str, list[dict[str, float]]] = {}
    for p in POLICIES:
        simulated[p] = []
        for name in names:
            told = [compared(run.evaluate()) for runs in stages.simulated(name, p, p) for run in runs]
            simulated[p].append({label: float(np.mean([one[label] for one in told])) for label in COMPARED})
    rows, wrong = [], []
    for label in COMPARED:
        values = {p: [one[label] for one in live[p]] for p in POLICIES}
        predicted = {p: [one[label] for one in simulated[p]] for p in POLICIES}
        num_apart = alike = 0
        for a, b in itertools.combinations(POLICIES, 2):
            seen = differences(label, values[a], values[b])
            if not lie_apart(seen):
                continue
            num_apart += 1
            if seen.mean() * differences(label, predicted[a], predicted[b]).mean() > 0:
                alike += 1
            else:
                shown = [
                    f"{p} {', '.join(f'{x:.4g}' for x in values[p])}, simulated {np.mean(predicted[p]):.4g}"
                    for p in (a, b)
                ]
                wrong.append(f"{label}: {'; '.join(shown)}")
        rows.append(
            {
                "live / simulated": label,
                **{p: f"{np.mean(values[p]):.4g} / {np.mean(predicted[p]):.4g}" for p in POLICIES},
                "pairs apart": num_apart,
                "ranked alike": alike,
                "tau": "—" if not num_apart else f"{tau(num_apart, alike):.2f}",
                "target": f"≥ {TAU:g} of {MIN_PAIRS} pairs or more",
                "met": verdict_on_ranking(num_apart, alike, len(names)),
            }
        )
    return rows, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--work", help="where the stages leave their files; default: all of them are measured now")
    parser.add_argument("--stage", default="all")
    parser.add_argument("--rounds", type=int, default=4, help="live runs of every policy")
    parser.add_argument("--quick", action="store_true", help="whether it runs, not how good it is")
    parser.add_argument(
        "--recorded", help="a run of another engine: the JSON of vLLM's or guidellm's, or LLMServingSim's lines"
    )
    parser.add_argument("--recorded-model", default="rtx4090-llama-3.1-8b", help="its step times")
    parser.add_argument("--recorded-blocks", type=int, default=2588, help="its KV blocks of 16 tokens")
    arguments = parser.parse_args()
    if arguments.stage == "recorded":
        if not arguments.recorded:
            parser.error("--stage recorded needs --recorded RUN")
        predict_recorded(arguments)
        return
    with contextlib.ExitStack() as stack:
        work = arguments.work or stack.enter_context(tempfile.TemporaryDirectory(prefix="actorllm-fidelity-"))
        seconds, turns = (2.0, 1) if arguments.quick else (5.0, 4)
        measure(Stages(Path(work), seconds, turns, arguments.rounds), arguments)


def predict_recorded(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What is said of a recorded run, without anything live; it takes its place in the file."""
    rows = recorded_rows(arguments.recorded, arguments.recorded_model, arguments.recorded_blocks)
    print_table("a recorded run, predicted from step times that it was not fitted to", rows)
    if arguments.json and arguments.stage == "recorded":
        known = json.loads(Path(arguments.json).read_text()) if Path(arguments.json).exists() else {}
        write_json(arguments.json, known | {"recorded": rows, "recorded_command": command()})
    return rows


def measure(stages: Stages, arguments: argparse.Namespace) -> None:
    """What is wanted and missing; then, if all is there, the result."""
    load_before = os.getloadavg()
    wanted = stages.missing()
    if arguments.stage == "next":
        wanted = wanted[:1]
    elif arguments.stage != "all":
        wanted = [arguments.stage]
    for name in wanted:
        stages.run(name)
    if missing := stages.missing():
        print(f"still missing: {', '.join(missing)}")
        return
    policies = {"latencies": "fcfs", "others": OTHER["scheduling_policy"]}
    rows = [
        row for name in PREDICTED for row in (*step_rows(stages, name), *latency_rows(stages, name, policies[name]))
    ]
    print_table("predicted by the simulator and measured on the engine", rows)
    sizes = size_rows(stages)
    print_table("step times, by kind and size", sizes)
    rankings, wrong = ranking_rows(stages)
    print_table(f"policies at {ABOVE:g} of the capacity, live / simulated", rankings)
    for line in wrong:
        print(f"ranked otherwise: {line}")
    recorded = predict_recorded(arguments) if arguments.recorded else []
    fitted = stages.fitted("latencies")
    if arguments.json:
        known = json.loads(Path(arguments.json).read_text()) if Path(arguments.json).exists() else {}
        write_json(
            arguments.json,
            {
                "bench": "fidelity",
                "environment": environment(),
                "load_before": [round(x, 2) for x in load_before],
                "configuration": {
                    "engine": ENGINE,
                    "classes": MIX,
                    "seconds of a turn": stages.seconds,
                    "capacity requests/s": [round(stages.read(name)["capacity"], 1) for name in stages.names],
                    "of the capacity": [BELOW, OTHER_RATE, ABOVE],
                    "the other engine": OTHER,
                    "calibration steps": fitted.num_steps,
                    "error on held-out steps": round(fitted.mape, 4),
                    "loads": {name: stages.read(name)["load"] for name in stages.names},
                    "versions": versions(),
                },
                "targets": rows,
                "sizes": sizes,
                "rows": rankings,
                "ranked otherwise": wrong,
            }
            | ({"recorded": recorded} if recorded else {key: known[key] for key in RECORDED if key in known}),
        )


if __name__ == "__main__":
    main()
