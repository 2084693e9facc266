"""Figures of a finished run: latencies, attainment and goodput, for all requests and for each class.

Latencies have the keys of `vllm bench serve`, in milliseconds, so that scripts for its JSON read ours. They are ttft (arrival to
first token, queueing included), tpot (mean gap of a request), itl (every gap) and e2el. They count requests that ran to
their end. A request is *good* when it did and kept its whole objective. Goodput is good requests per second: with the drain, or of
the requests that arrived in a window (`arrival_window`). Both readings of TPOT
(`objective`) are computed, and neither is the default in what is printed. A request without an objective is good when it
ran to its end. Aborted, failed and unfinished requests are never good, however early their tokens came.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import F64, I64
from actorllm.slo.objectives import Promises
from actorllm.slo.timeline import ABORTED, FAILED, FINISHED, UNFINISHED, RunTimeline
from actorllm.types.objective import READINGS, SLO, Reading, RequestClass

PERCENTILES = (50, 90, 95, 99)
WARM_UP = 0.2
"""Share of the time of arrivals that is left out where it is asked what a rate gives: the engine begins empty."""
OUTPUT_WEIGHT = 2.0
"""Of an output token in the service of a tenant, where a prompt token counts one, as in VTC (OSDI 2024)."""


def percentiles(values: F64, counts: I64, percents: Iterable[float]) -> list[float]:
    """As `np.percentile(np.repeat(values, counts), percents)`, without repeating anything. NaN of nothing."""
    percents = list(percents)
    total = int(counts.sum())
    if not total:
        return [math.nan] * len(percents)
    order = np.argsort(values, kind="stable")
    ordered, ends = values[order], np.cumsum(counts[order])
    found = []
    for percent in percents:
        at = (total - 1) * percent / 100
        low = math.floor(at)
        a = ordered[np.searchsorted(ends, low, side="right")]
        b = ordered[np.searchsorted(ends, min(low + 1, total - 1), side="right")]
        found.append(float(a + (b - a) * (at - low)))
    return found


def good(timeline: RunTimeline, promises: Promises, reading: Reading) -> NDArray[np.bool_]:
    """Which requests kept what they were promised: `SLO.is_met` by column."""
    is_good: NDArray[np.bool_] = timeline.outcome == FINISHED
    ttft_limit = promises.ttft_limit(timeline.num_prompt)
    is_good &= np.isinf(ttft_limit) | (timeline.ttft <= ttft_limit)
    is_good &= np.isinf(promises.e2e) | (timeline.e2e <= promises.e2e)
    if reading == "tpot":
        return is_good & (np.isinf(promises.tpot) | (timeline.tpot <= promises.tpot))
    start = np.where(np.isinf(ttft_limit), timeline.first_token, timeline.arrival + ttft_limit)
    has_more = (timeline.num_output > 1) & np.isfinite(promises.tpot)
    due = start + np.where(has_more, promises.tpot, 0.0) * (timeline.num_output - 1)
    return is_good & (~has_more | (timeline.last_token <= due))


def fluidity(times: F64, slo: SLO, arrival: float, num_prompt: int) -> float:
    """Share of a request's tokens that met a deadline which carries slack (the fluidity index of Etalon).

    Token i is due tpot after the time at which token i - 1 was due; a token that is late starts the deadlines anew from
    when it came. 1 without a promise per token.
    """
    if slo.tpot is None or not times.size:
        return 1.0
    due = arrival + slo.ttft_limit(num_prompt)
    if due == math.inf:
        due = float(times[0])
    num_late = at = 0
    steps = slo.tpot * np.arange(times.size)
    while at < times.size:
        late = np.flatnonzero(times[at:] > due + steps[: times.size - at])
        if not late.size:
            break
        num_late += 1
        at += int(late[0]) + 1
        due = float(times[at - 1]) + slo.tpot
    return 1 - num_late / times.size


def experience(times: F64, slo: SLO, arrival: float, num_prompt: int) -> float:
    """Quality of experience of a request's reader (QoE, as in Andes, arXiv 2404.16283): 1 is never behind, 0 is nothing to read.

    The reader takes a token every tpot, from the time at which the first one was due, as far as there are any. The area
    between what is read and what should have been, up to the end, is the share that is lost. 1 without a promise per token.
    """
    if not times.size:
        return 0.0
    if slo.tpot is None:
        return 1.0
    due = arrival + slo.ttft_limit(num_prompt)
    if due == math.inf:
        due = float(times[0])
    steps = slo.tpot * np.arange(times.size)
    wanted = due + steps
    read = np.maximum.accumulate(np.maximum(times, due) - steps) + steps
    end = float(read[-1]) + slo.tpot
    return float((end - read).sum() / (end - wanted).sum())


def overrun(timeline: RunTimeline, promises: Promises) -> F64:
    """How many times as long as promised each request took, in what it overran most; 0 without a promise.

    For a first token, or an end, that never came: as long as it waited for it, until it was given up or the run ended.
    """
    waited = np.where(np.isfinite(timeline.end), timeline.end, timeline.last) - timeline.arrival
    ttft = np.where(np.isfinite(timeline.first_token), timeline.ttft, waited)
    e2e = np.where(timeline.outcome == FINISHED, timeline.e2e, waited)
    worst = np.zeros(len(timeline))
    limits = (promises.ttft_limit(timeline.num_prompt), promises.tpot, promises.e2e)
    for took, limit in zip((ttft, timeline.tpot, e2e), limits, strict=True):
        worst = np.fmax(worst, took / limit)
    return worst


def told_of_cut(timeline: RunTimeline, promises: Promises, num_left_out: int, until: float) -> list[str]:
    """What one has to know of a run that was cut off at this time: what is not in it, and what is judged too early."""
    found = []
    if num_left_out:
        found.append(
            f"{num_left_out} requests were not due before the run was cut off at {until:g} s, and are left out"
        )
    is_there = timeline.outcome == UNFINISHED
    if is_there.any() and until < math.inf:
        num_open = int((is_there & (overrun(timeline, promises) <= 1)).sum())
        found.append(
            f"{int(is_there.sum())} requests were under way when the run was cut off at {until:g} s and count as missed; "
            f"{num_open} of them had broken no promise by then"
        )
    return found


def jain(shares: Iterable[float]) -> float:
    """Jain's fairness index of what each got: 1 when all got the same, 1/n when one got everything."""
    values = np.array(list(shares), float)
    squares = float((values**2).sum())
    return 1.0 if not squares else float(values.sum()) ** 2 / (values.size * squares)


def service(timeline: RunTimeline) -> F64:
    """Of each request: its prompt once it has a token, and its output."""
    got: F64 = timeline.num_prompt * np.isfinite(timeline.first_token) + OUTPUT_WEIGHT * timeline.num_output
    return got


def jain_of_tenants(
    timeline: RunTimeline, tenants: NDArray[np.integer[Any]], wanted: NDArray[np.integer[Any]]
) -> float:
    """Of what each tenant got of what it asked for: demands differ. wanted: output tokens of each request."""
    got = np.bincount(tenants, service(timeline))
    asked = np.bincount(tenants, timeline.num_prompt + OUTPUT_WEIGHT * wanted)
    return jain((got / np.maximum(asked, 1))[np.bincount(tenants) > 0])


def arrival_window(timeline: RunTimeline) -> tuple[float, float]:
    """From when to when arrivals are counted that show what a rate gives: all but the first fifth of their time, in which the
    engine fills. It ends with the last arrival, and not with the last end: a backlog that is drained without new arrivals
    says how long the run was."""
    if not len(timeline):
        return 0.0, 0.0
    first, last = float(timeline.arrival.min()), float(timeline.arrival.max())
    return first + WARM_UP * (last - first), last


@dataclass(frozen=True, slots=True)
class Attainment:
    """How many of the requests of a class kept their objective."""

    name: str
    num_requests: int
    num_finished: int
    attainment: dict[Reading, float]
    """Share of its requests that are good."""
    goodput: dict[Reading, float]
    """Good ones per second, with the drain: from the first arrival to the last end, as `vllm bench serve` counts."""
    window_goodput: dict[Reading, float]
    """Good ones per second of those that arrived in the window (`arrival_window`); what is left to drain does not count."""
    fluidity: float
    """Mean share of tokens that met their deadline, none for a request that got none; NaN when it was not asked for."""
    latency_ms: dict[str, float]
    """{mean, median, std, p50, p90, p95, p99}_{ttft, tpot, e2el}_ms of those that finished."""
    worst_miss: float
    """By how many times the worst of its requests overran a promise (`overrun`); 1 or less: none did."""
    gaps_ms: dict[str, float]
    """The same figures of itl (every gap), and of itl_p99 (the 99th percentile of the gaps of each request); empty when
    they were not asked for."""


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """What `evaluate` returns."""

    summary: dict[str, Any]
    """The keys of `vllm bench serve`'s JSON; what it does not have begins with actorllm_."""
    classes: tuple[Attainment, ...]
    """One for each class that has requests, in the order of the classes."""
    overall: Attainment

    def worst(self, reading: Reading) -> float:
        """Attainment of the class that is worst off."""
        return min((c.attainment[reading] for c in self.classes), default=math.nan)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: no NaN in it."""
        plain: dict[str, Any] = _without_nan(
            self.summary
            | {
                "actorllm_overall": _plain(self.overall),
                "actorllm_classes": {c.name: _plain(c) for c in self.classes},
                "actorllm_worst_class": {reading: self.worst(reading) for reading in READINGS},
            }
        )
        return plain


def evaluate(
    timeline: RunTimeline,
    classes: tuple[RequestClass, ...] = (RequestClass("all"),),
    class_ids: NDArray[np.integer[Any]] | None = None,
    *,
    duration: float | None = None,
    with_fluidity: bool = False,
    with_gaps: bool = False,
    tenants: NDArray[np.integer[Any]] | None = None,
    wanted: NDArray[np.integer[Any]] | None = None,
    promises: Promises | None = None,
) -> RunMetrics:
    """All figures of a run. classes, class_ids, tenants: as in the workload (None: all of class 0); promises: its own ones.

    wanted: output tokens that each request asked for, for the fairness among tenants; None: those that it got. duration:
    seconds to divide by; None: from the first arrival to the last end. with_fluidity looks at every token, and so does
    with_gaps, for the gaps of each class and each request.
    """
    if class_ids is None:
        class_ids = np.zeros(len(timeline), np.int32)
    if promises is None:
        promises = Promises.of_classes(classes, class_ids)
    seconds = timeline.duration if duration is None else duration
    is_good = {reading: good(timeline, promises, reading) for reading in READINGS}
    smooth = _fluidity_by_request(timeline, promises) if with_fluidity else np.full(len(timeline), np.nan)
    everything = np.ones(len(timeline), np.bool_)
    pauses = timeline.pauses if with_gaps else None
    overruns = overrun(timeline, promises)

    def attainment(name: str, mine: NDArray[np.bool_]) -> Attainment:
        return _attainment(name, timeline, mine, is_good, smooth, pauses, overruns, seconds)

    overall = attainment("all", everything)
    by_class = [
        attainment(kind.name, mine) for number, kind in enumerate(classes) if (mine := class_ids == number).any()
    ]
    summary = _summary(timeline, overall, seconds)
    if tenants is not None:
        summary["actorllm_jain_of_tenants"] = jain_of_tenants(
            timeline, tenants, timeline.num_output if wanted is None else wanted
        )
    return RunMetrics(summary, tuple(by_class), overall)


def _attainment(
    name: str,
    timeline: RunTimeline,
    mine: NDArray[np.bool_],
    is_good: dict[Reading, NDArray[np.bool_]],
    smooth: F64,
    pauses: F64 | None,
    overruns: F64,
    seconds: float,
) -> Attainment:
    finished = mine & (timeline.outcome == FINISHED)
    begin, end = arrival_window(timeline)
    is_within, window = timeline.arrival >= begin, end - begin
    num_good = {reading: int((is_good[reading] & mine).sum()) for reading in READINGS}
    num = int(mine.sum())
    latency: dict[str, float] = {}
    several = finished & (timeline.num_output > 1)  # a single token has no gap, so it is in no mean of gaps
    for label, values, rows in (
        ("ttft", timeline.ttft, finished),
        ("tpot", timeline.tpot, several),
        ("e2el", timeline.e2e, finished),
    ):
        latency |= latency_figures(label, values[rows])
    judged = smooth[mine & np.isfinite(smooth)]
    gaps: dict[str, float] = {}
    if pauses is not None:
        gaps = latency_figures("itl", *timeline.gaps(finished)) | latency_figures("itl_p99", pauses[several])
    return Attainment(
        name,
        num,
        int(finished.sum()),
        {reading: num_good[reading] / num if num else math.nan for reading in READINGS},
        {reading: _per_second(num_good[reading], seconds) for reading in READINGS},
        {reading: _per_second(int((is_good[reading] & mine & is_within).sum()), window) for reading in READINGS},
        float(judged.mean()) if judged.size else math.nan,
        latency,
        float(overruns[mine].max(initial=0.0)),
        gaps,
    )


def latency_figures(label: str, seconds: F64, counts: I64 | None = None) -> dict[str, float]:
    """mean, median, std and percentiles in milliseconds, with the keys of `vllm bench serve`."""
    if counts is None:
        counts = np.ones(seconds.size, np.int64)
    total = int(counts.sum())
    mean = float((seconds * counts).sum() / total) if total else math.nan
    variance = float((counts * (seconds - mean) ** 2).sum() / total) if total else math.nan
    median, *tail = percentiles(seconds, counts, (50, *PERCENTILES))
    figures = {f"mean_{label}_ms": mean, f"median_{label}_ms": median, f"std_{label}_ms": math.sqrt(variance)}
    figures |= {f"p{p}_{label}_ms": value for p, value in zip(PERCENTILES, tail, strict=True)}
    return {key: value * 1e3 for key, value in figures.items()}


def bench_setting(backend: str, model: str, num_prompts: int, request_rate: float) -> dict[str, Any]:
    """What `vllm bench serve` writes of how a run was made. Rate: requests per second; arrivals are those of the workload."""
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": None,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": num_prompts,
        "request_rate": request_rate if math.isfinite(request_rate) else "inf",
        "burstiness": 1.0,
        "max_concurrency": None,
    }


def max_tokens_per_second(timeline: RunTimeline) -> float:
    """The most tokens that came within one second, counted from the first arrival."""
    begin = float(timeline.arrival.min(initial=math.inf))
    counts: dict[int, int] = {}
    spans = timeline.spans
    for replica, ends in enumerate(timeline.step_ends):
        mine = spans.replica == replica
        covering = np.zeros(ends.size + 1, np.int64)
        np.add.at(covering, spans.first_step[mine], 1)
        np.add.at(covering, spans.first_step[mine] + spans.count[mine], -1)
        tokens = np.cumsum(covering)[:-1]
        for second, count in zip(np.floor(ends - begin).astype(np.int64).tolist(), tokens.tolist(), strict=True):
            counts[second] = counts.get(second, 0) + count
    return float(max(counts.values(), default=0))


def max_concurrent(timeline: RunTimeline) -> int:
    """The most requests that were there within one second, counted as `vllm bench serve` does: from the first arrival, a
    request in every second from the one in which it arrives to that of its last token."""
    if not len(timeline):
        return 0
    begin = float(timeline.arrival.min())
    ends = np.where(np.isfinite(timeline.last_token), timeline.last_token, timeline.arrival)
    first, last = (np.floor(times - begin).astype(np.int64) for times in (timeline.arrival, ends))
    change = np.concatenate((np.ones(first.size, np.int64), np.full(last.size, -1, np.int64)))
    at = np.concatenate((first, last + 1))
    order = np.lexsort((change, at))
    return int(np.cumsum(change[order]).max())


def _summary(timeline: RunTimeline, overall: Attainment, seconds: float) -> dict[str, Any]:
    finished = timeline.outcome == FINISHED
    num_input, num_output = int(timeline.num_prompt[finished].sum()), int(timeline.num_output[finished].sum())

    return (
        {
            "duration": seconds,
            "completed": overall.num_finished,
            "failed": len(timeline) - overall.num_finished,
            "total_input_tokens": num_input,
            "total_output_tokens": num_output,
            "request_throughput": _per_second(overall.num_finished, seconds),
            "request_goodput": overall.goodput["tpot"],
            "output_throughput": _per_second(num_output, seconds),
            "total_token_throughput": _per_second(num_input + num_output, seconds),
        }
        | overall.latency_ms
        | latency_figures("itl", *timeline.gaps(finished))
        | {
            "actorllm_goodput_deadline": overall.goodput["deadline"],
            **{f"actorllm_goodput_window_{reading}": overall.window_goodput[reading] for reading in READINGS},
            **{f"actorllm_{key}": value for key, value in overall.gaps_ms.items() if "itl_p99" in key},
            "actorllm_num_aborted": int((timeline.outcome == ABORTED).sum()),
            "actorllm_num_failed": int((timeline.outcome == FAILED).sum()),
            "actorllm_num_unfinished": int((timeline.outcome == UNFINISHED).sum()),
            "actorllm_num_preemptions": int(timeline.num_preemptions.sum()),
            "actorllm_num_cached_tokens": int(timeline.num_cached.sum()),
            "actorllm_num_wasted_tokens": int(timeline.num_wasted.sum()),
        }
    )


def _per_second(num: float, seconds: float) -> float:
    """Nothing of a run that took no time (no request ever ended) is nothing per second."""
    if seconds:
        return num / seconds
    return math.nan if num else 0.0


def _fluidity_by_request(timeline: RunTimeline, promises: Promises) -> F64:
    """0 for requests without a token, NaN without an objective per token."""
    found = np.where(np.isfinite(promises.tpot), 0.0, np.nan)
    for row in np.flatnonzero(np.isfinite(promises.tpot) & (timeline.num_output > 0)).tolist():
        slo = promises.slo(row)
        assert slo is not None
        times = timeline.token_times(row)
        found[row] = fluidity(times, slo, float(timeline.arrival[row]), int(timeline.num_prompt[row]))
    return found


def _plain(attainment: Attainment) -> dict[str, Any]:
    return {
        "requests": attainment.num_requests,
        "finished": attainment.num_finished,
        "attainment": dict(attainment.attainment),
        "goodput": dict(attainment.goodput),
        "window_goodput": dict(attainment.window_goodput),
        "fluidity": attainment.fluidity,
        "worst_miss": attainment.worst_miss,
        **attainment.latency_ms,
        **attainment.gaps_ms,
    }


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
