"""How evenly tenants are served: what each got, and how far apart they were while several of them waited.

Service is counted as VTC does (OSDI 2024): one for each prompt token when the first token comes, two for each output token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    """From the arrival to the first step, or to the end of a request that had none; NaN: it is known of no request."""
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
    # A request that never starts waits until it ends. Of a run that was watched from outside, only first tokens are known.
    until = np.fmin(np.fmin(timeline.scheduled, timeline.first_token), timeline.end)
    until = np.where(np.isfinite(until), until, np.inf)
    waits = np.stack([_waits_throughout(timeline.arrival[ids == i], until[ids == i], edges) for i in range(num)])
    gaps = [
        float(np.ptp((got[:, w + 1] - got[:, w])[waits[:, w]]))
        for w in range(NUM_WINDOWS)
        if int(waits[:, w].sum()) > 1
    ]
    has_started = np.isfinite(timeline.first_token)
    queued = np.where(has_started, timeline.scheduled, np.fmin(timeline.scheduled, timeline.end)) - timeline.arrival
    late = [queued[(ids == i) & np.isfinite(queued)] for i in range(num)]
    return Fairness(
        workload.tenants,
        tuple(requests.tolist()),
        tuple(served.tolist()),
        tuple(float(np.quantile(values, 0.99)) if values.size else math.nan for values in late),
        jain_of_tenants(timeline, ids, workload.num_output),
        max(gaps, default=0.0),
        len(gaps),
    )


def _waits_throughout(arrival: F64, until: F64, edges: F64) -> NDArray[np.bool_]:
    """[num_windows]: whether there was a request of a tenant at every moment between two edges that waited to start."""
    times = np.concatenate((arrival, until))
    change = np.repeat((1, -1), arrival.size)
    order = np.lexsort((-change, times))  # one that comes as another starts leaves no gap
    queue = np.concatenate(([0], np.cumsum(change[order])))
    at = np.searchsorted(times[order], edges, "right")
    return np.array([queue[at[w] : at[w + 1] + 1].min() > 0 for w in range(edges.size - 1)])


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
