"""How evenly tenants are served: what each got, and how far apart they were while several of them waited.

Service is counted as VTC does (OSDI 2024): one for each prompt token when the first token comes, two for each output token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actorllm.messages import F64
from actorllm.slo.metrics import OUTPUT_WEIGHT, jain_of_tenants, service
from actorllm.slo.timeline import RunTimeline
from actorllm.slo.workload import Workload

NUM_WINDOWS = 60


@dataclass(frozen=True, slots=True)
class Fairness:
    """Of the tenants of a run."""

    tenants: tuple[str, ...]
    requests: tuple[int, ...]
    service: tuple[float, ...]
    queue_p99_s: tuple[float, ...]
    jain: float
    """Of what each got of what it asked for: demands differ."""
    gap: float
    """The most that the service of two tenants differed by in one window in which requests of both waited all the time."""
    num_windows: int
    """How many windows there were in which at least two waited."""


def fairness_of(timeline: RunTimeline, workload: Workload) -> Fairness | None:
    """None: the workload has no tenants."""
    ids = workload.tenant_ids
    if ids is None or not len(timeline):
        return None
    num = len(workload.tenants)
    served = np.bincount(ids, service(timeline), num)
    requests = np.bincount(ids, minlength=num)
    edges = np.linspace(timeline.arrival[0], timeline.arrival[-1], NUM_WINDOWS + 1)
    got = np.stack([np.interp(edges, *_service_over_time(timeline, ids == i)) for i in range(num)])
    starts = np.where(np.isfinite(timeline.scheduled), timeline.scheduled, np.inf)
    waits = np.zeros((num, NUM_WINDOWS), np.bool_)
    for i in range(num):
        arrival, started = timeline.arrival[ids == i], np.sort(starts[ids == i])
        queue = np.searchsorted(arrival, edges, "right") - np.searchsorted(started, edges, "right")
        waits[i] = (queue[1:] > 0) & (queue[:-1] > 0)
    gaps = [
        float(np.ptp((got[:, w + 1] - got[:, w])[waits[:, w]]))
        for w in range(NUM_WINDOWS)
        if int(waits[:, w].sum()) > 1
    ]
    queued = timeline.scheduled - timeline.arrival
    late = [queued[(ids == i) & np.isfinite(queued)] for i in range(num)]
    return Fairness(
        workload.tenants,
        tuple(requests.tolist()),
        tuple(served.tolist()),
        tuple(float(np.quantile(values, 0.99)) if values.size else 0.0 for values in late),
        jain_of_tenants(timeline, ids, workload.num_output),
        max(gaps, default=0.0),
        len(gaps),
    )


def _service_over_time(timeline: RunTimeline, mine: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[F64, F64]:
    """Times and the service by then; output tokens of a request come evenly from its first to its last."""
    rows = np.flatnonzero(mine & np.isfinite(timeline.first_token))
    first, last = timeline.first_token[rows], timeline.last_token[rows]
    output = OUTPUT_WEIGHT * timeline.num_output[rows]
    times = np.unique(np.concatenate((first, last, [0.0])))
    at = np.searchsorted(times, first)
    jumps = np.bincount(at, timeline.num_prompt[rows] + np.where(last > first, 0.0, output), times.size)
    rate = output / np.where(last > first, last - first, np.inf)
    slope = np.zeros(times.size)
    np.add.at(slope, at, rate)
    np.add.at(slope, np.searchsorted(times, last), -rate)
    grown = np.concatenate(([0.0], np.cumsum(np.cumsum(slope)[:-1] * np.diff(times))))
    served: F64 = np.cumsum(jumps).astype(np.float64) + grown
    return times, served
