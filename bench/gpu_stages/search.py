"""Which configuration of a kernel is the fastest: candidates on all cases, and for each class of shapes the one that loses
least against the best of every case. Where there are many, those are tried that the model of bytes and latency puts first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actorllm_kernels.configs import trying
from actorllm_kernels.cost import MACHINES, Machine, of_launch, seconds
from actorllm_kernels.launches import recording

from .clock import Bench, Call

Config = Mapping[str, int]


@dataclass(frozen=True)
class Case:
    """What is timed, and the class of shapes whose entry it decides."""

    name: str
    shape_class: str
    calls: Callable[[], Sequence[Call]]
    """Made anew for every candidate: what a launch needs may depend on it."""
    kv_tokens: int = 0
    """Whose keys and values are read."""


KEPT = 24
"""Candidates for a class of shapes that are tried, of those that are predicted."""
PREDICTED = ("skinny_gemm", "attn_decode", "lm_head_sample")


def ranked(
    kernel: str, cases: Sequence[Case], candidates: Sequence[Config], machine: Machine
) -> dict[str, list[Config]]:
    """By class of shapes, the candidates by the times that are predicted for its cases, the shortest first."""
    scores: dict[str, list[float]] = {}
    for case in cases:
        score = scores.setdefault(case.shape_class, [0.0] * len(candidates))
        for i, config in enumerate(candidates):
            with trying(kernel, **config), recording() as launches:
                case.calls()[0]()
            works = (of_launch(launch, machine, kv_tokens=case.kv_tokens) for launch in launches)
            score[i] += math.log(sum(seconds(work, machine) for work in works) or 1.0)
    return {
        shape_class: [candidates[i] for i in sorted(range(len(candidates)), key=score.__getitem__)]
        for shape_class, score in scores.items()
    }


def measure(bench: Bench, kernel: str, cases: Sequence[Case], candidates: Sequence[Config]) -> list[dict[str, Any]]:
    """A row per case and candidate that runs. Raises when the GPU is lost, or when a case has none that runs."""
    rows: list[dict[str, Any]] = []
    tried = {case.shape_class: candidates for case in cases}
    if kernel in PREDICTED and len(candidates) > KEPT:
        machine = next((one for name, one in MACHINES.items() if name in bench.chip), MACHINES["H200"])
        tried = {name: order[:KEPT] for name, order in ranked(kernel, cases, candidates, machine).items()}
    for case in cases:
        before = len(rows)
        for config in tried[case.shape_class]:
            with contextlib.ExitStack() as stack:
                stack.enter_context(trying(kernel, **config))
                try:
                    taken = bench.seconds(case.calls())
                except Exception as problem:  # does not fit: too much shared memory, or too many registers
                    bench.synchronize()
                    print(f"  {kernel} {case.name} {dict(config)}: {type(problem).__name__}", flush=True)
                    continue
            rows.append({"class": case.shape_class, "case": case.name, "us": taken * 1e6, **config})
        if len(rows) == before:
            raise RuntimeError(f"{kernel} {case.name}: no candidate runs")
        bench.empty_cache()
    return rows


def choose(rows: list[dict[str, Any]], names: Sequence[str]) -> dict[str, dict[str, int]]:
    """For every class the configuration that loses least against the best of every case, as a geometric mean.

    rows: those of `measure`; names: those of a configuration. One that does not run in every case of its class is none.
    """
    least: dict[str, float] = {}
    for row in rows:
        least[row["case"]] = min(row["us"], least.get(row["case"], math.inf))
    losses: dict[str, dict[tuple[int, ...], list[float]]] = {}
    for row in rows:
        config = tuple(row[name] for name in names)
        losses.setdefault(row["class"], {}).setdefault(config, []).append(math.log(row["us"] / least[row["case"]]))
    chosen = {}
    for shape_class, by_config in losses.items():
        most = max(map(len, by_config.values()))
        complete = {config: sum(lost) for config, lost in by_config.items() if len(lost) == most}
        chosen[shape_class] = dict(zip(names, min(complete, key=lambda config: complete[config]), strict=True))
    return chosen


def best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest row of every case."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["case"] not in found or row["us"] < found[row["case"]]["us"]:
            found[row["case"]] = row
    return list(found.values())


def result(kernel: str, rows: list[dict[str, Any]], chosen: dict[str, dict[str, int]]) -> dict[str, Any]:
    """What a stage that searches leaves: `tables.write_configs` takes `chosen`."""
    return {"kernel": kernel, "chosen": chosen, "best": best(rows), "tried": rows}
