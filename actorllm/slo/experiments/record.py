"""What is kept of a point: its figures, the counts that bands are made of, where good and bad requests are, a finding."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import F64
from actorllm.slo.experiments.point import Point, code_digest
from actorllm.slo.experiments.stationarity import judge
from actorllm.slo.metrics import evaluate, good
from actorllm.slo.simulator import SimulatedRun
from actorllm.slo.timeline import RunTimeline
from actorllm.slo.workload import Workload
from actorllm.types.objective import READINGS

NUM_BLOCKS = 20
"""Of consecutive requests, in which good ones are counted."""

PROMPT_EDGES = (0, 256, 512, 1024, 2048, 4096, 8192)
OUTPUT_EDGES = (0, 16, 32, 64, 128, 256, 512, 1024)
"""Of the table of attainment by lengths; the last range is open."""


def record_of(point: Point, run: SimulatedRun) -> dict[str, Any]:
    """As it stands in the results file. Of the same point always the same."""
    record = {
        "key": point.key,
        "scenario": point.scenario.digest,
        "variant": point.variant.to_dict(),
        "version": point.variant.digest,
        "rate": point.rate,
        "seed": point.seed,
        "scale": point.scale,
        "code": code_digest(),
        "window": point.window,
        **figures_of(run.timeline, run.workload, due=run.due),
        "sent_rate": _sent_rate(run.timeline),
        "num_steps": run.num_steps,
        "warnings": list(run.warnings),
    }
    plain: dict[str, Any] = json.loads(
        json.dumps(record)
    )  # equal whether it comes from another process or from this one
    return plain


def _sent_rate(timeline: RunTimeline) -> float | None:
    """Requests per second over the time in which they were sent; None: all at once."""
    span = float(timeline.arrival[-1] - timeline.arrival[0]) if len(timeline) else 0.0
    return (len(timeline) - 1) / span if span else None


def figures_of(
    timeline: RunTimeline, workload: Workload, *, with_gaps: bool = False, due: F64 | None = None
) -> dict[str, Any]:
    """Of any run, simulated or live. with_gaps: also of the gaps of each class and each request (`metrics.evaluate`). due: of a
    run with a bound on the requests under way, as `stationarity.judge` has it."""
    metrics = evaluate(
        timeline,
        workload.classes,
        workload.class_ids,
        tenants=workload.tenant_ids,
        wanted=workload.num_output,
        promises=workload.own_promises,
        with_fluidity=len(timeline) <= 20_000,
        with_gaps=with_gaps,
    )
    promises = workload.promises
    is_good = {reading: good(timeline, promises, reading) for reading in READINGS}
    return {
        "classes": [kind.name for kind in workload.classes],
        "summary": metrics.to_dict(),
        "blocks": _blocks(workload, is_good),
        "lengths": _lengths(workload, is_good),
        "stationarity": judge(timeline, workload.classes, workload.own_promises, due).to_dict(),
    }


def _blocks(workload: Workload, good: dict[Any, NDArray[np.bool_]]) -> dict[str, Any]:
    num, num_classes = len(workload), len(workload.classes)
    block = np.arange(num) * NUM_BLOCKS // max(num, 1)
    cell = block * num_classes + workload.class_ids

    def count(rows: NDArray[np.bool_]) -> list[list[int]]:
        counts = np.bincount(cell[rows], minlength=NUM_BLOCKS * num_classes)
        table: list[list[int]] = counts.reshape(NUM_BLOCKS, num_classes).tolist()
        return table

    return {"n": count(np.ones(num, np.bool_))} | {reading: count(rows) for reading, rows in good.items()}


def _lengths(workload: Workload, good: dict[Any, NDArray[np.bool_]]) -> dict[str, Any]:
    prompt = np.searchsorted(PROMPT_EDGES, workload.num_prompt, side="right") - 1
    output = np.searchsorted(OUTPUT_EDGES, workload.num_output, side="right") - 1
    cell = prompt * len(OUTPUT_EDGES) + output

    def count(rows: NDArray[np.bool_]) -> list[list[int]]:
        counts = np.bincount(cell[rows], minlength=len(PROMPT_EDGES) * len(OUTPUT_EDGES))
        table: list[list[int]] = counts.reshape(len(PROMPT_EDGES), len(OUTPUT_EDGES)).tolist()
        return table

    return {"n": count(np.ones(len(workload), np.bool_))} | {reading: count(rows) for reading, rows in good.items()}
