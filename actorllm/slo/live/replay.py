"""Replay: the requests of a workload at their times, whatever becomes of those before, against a live engine (open loop).

    run = await replay(workload, EmbeddedTarget(llm))
    print(run.evaluate().worst("deadline"), run.warnings)

The schedule says when a request arrives, not the client. A request that cannot be sent in time waits in the client's queue, and
latencies count from the schedule. So an overloaded client makes nothing look better (no coordinated omission). How late requests
were sent is told apart (`LiveRun.lag`). A request that fails is a row with its error; the others go on.

Where a workload has turns, or requests under way are bounded, some requests are due when others have ended (`ClosedLoop`).
The prompt of a turn then begins with the ids that the model has put out before. Their rows are in the order in which they were due.

The result is a `RunTimeline` like that of a simulation, so `metrics.evaluate` gives the same report.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import anyio
import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray

from actorllm.clock import now
from actorllm.errors import ConfigError
from actorllm.messages import F64
from actorllm.slo.closed_loop import ClosedLoop
from actorllm.slo.live.prompts import Prompts
from actorllm.slo.metrics import (
    RunMetrics,
    bench_setting,
    evaluate,
    latency_figures,
    max_concurrent,
    max_tokens_per_second,
    told_of_cut,
)
from actorllm.slo.timeline import ABORTED, FAILED, FINISHED, UNFINISHED, RunTimeline, timeline_of_streams
from actorllm.slo.workload import Workload
from actorllm.types.objective import RequestClass

LEAD_S = 0.2
"""From the call to the first arrival: what is to be made before it must not make it late."""

LATE_S = 0.01
"""A client whose 99th percentile of lag is larger is told of."""


@dataclass(frozen=True, slots=True)
class ReplayCall:
    """One request to be sent."""

    row: int
    """Of the run; -1: it is none of the run."""
    prompt: list[int]
    max_tokens: int
    kind: RequestClass
    tenant: str | None
    due: float
    """When it should be sent, in monotonic seconds."""
    is_continued: bool = False
    """A later prompt begins with what it puts out: the target tells the ids, if it can."""


@dataclass(frozen=True, slots=True)
class Delays:
    """What lies between a client and the scheduler; medians, in seconds."""

    submit_s: float = 0.0
    deliver_s: float = 0.0

    @staticmethod
    def of(there: Sequence[float], back: Sequence[float]) -> Delays:
        """Of single ones; 0 of none."""
        return Delays(*(max(0.0, float(np.median(values))) if len(values) else 0.0 for values in (there, back)))


@dataclass(slots=True)
class ReplayRecord:
    """What the client saw of one request. Times in monotonic seconds."""

    sent: float = math.nan
    times: list[float] = field(default_factory=list)
    """Of every token."""
    token_ids: list[int] = field(default_factory=list)
    """As far as the target tells them."""
    end: float = math.nan
    outcome: int = UNFINISHED
    error: str | None = None
    scheduled: float = math.nan
    num_preemptions: int = 0
    num_cached: int = 0
    num_wasted: int = 0
    submitted: float = math.nan
    """When the scheduler had it, and when it had its last token: where the engine tells."""
    reported: float = math.nan

    def got(self, num_tokens: int, token_ids: Sequence[int] = ()) -> None:
        """So many tokens have come just now. token_ids: theirs, if they are known."""
        self.times += [now()] * num_tokens
        self.token_ids += token_ids


class Target(Protocol):
    """What requests are sent to."""

    backend: str
    """As `vllm bench serve` calls it."""
    model: str

    async def prepare(self) -> None:
        """Be ready to take requests. Raises what makes that impossible."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int | None:
        """Tokens of a prompt and its output; None: not known. After `prepare`."""
        ...

    async def send(self, call: ReplayCall, record: ReplayRecord) -> None:
        """Send it and take its tokens to the end; cancelled: it is given up. Raises what it failed of."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LiveRun:
    """What `replay` returns."""

    workload: Workload
    timeline: RunTimeline
    lag: F64
    """Seconds from when a request was due until it was sent; NaN: it never was."""
    errors: tuple[str, ...]
    """Of every request; empty for those that did not fail."""
    backend: str
    model: str
    delays: Delays = Delays()
    """Of requests that the engine told of; 0 otherwise."""
    start: float = 0.0
    """Zero of the timeline, in monotonic seconds."""
    until: float = math.inf
    """When it was cut off, on the clock of the timeline."""
    num_left_out: int = 0
    """Requests that were not due by then; they are in no row."""
    due: F64 | None = None
    """With `max_concurrency`: when each request would have been sent without that bound, by row."""

    def evaluate(self, **arguments: Any) -> RunMetrics:
        """The figures of the run; arguments as in `metrics.evaluate`."""
        workload = self.workload
        arguments |= {"promises": workload.own_promises, "tenants": workload.tenant_ids, "wanted": workload.num_output}
        return evaluate(self.timeline, workload.classes, workload.class_ids, **arguments)

    @property
    def warnings(self) -> list[str]:
        """What one has to know before one believes the figures."""
        timeline, found = self.timeline, list(self.workload.warnings())
        found += told_of_cut(timeline, self.workload.promises, self.num_left_out, self.until)
        failed = [error for error in self.errors if error]
        if failed:
            found.append(f"{len(failed)} of {len(timeline)} requests failed, the first with: {failed[0]}")
        late = float(np.nanpercentile(self.lag, 99)) if np.isfinite(self.lag).any() else 0.0
        if late > LATE_S:
            found.append(
                f"the client was late: 1 % of the requests were sent {late * 1e3:.0f} ms or more after they were due; the "
                f"latencies count from then, and are the client's as much as the engine's"
            )
        short = (timeline.outcome == FINISHED) & (timeline.num_output < self.workload.num_output)
        if short.any():
            found.append(f"{int(short.sum())} requests ended with fewer tokens than they were to have")
        return found

    def as_sent(self) -> Workload:
        """The workload that the engine saw: requests arrive when they were sent. To be simulated in its place."""
        order = np.argsort(self.workload.arrival + np.nan_to_num(self.lag), kind="stable")
        arrival = (self.workload.arrival + np.nan_to_num(self.lag))[order]
        return replace(self.workload.select(order), arrival=arrival)

    def to_dict(self, *, is_detailed: bool = False) -> dict[str, Any]:
        """With the keys of `vllm bench serve --save-result`, and ours; is_detailed: with those of every request, too.

        Latencies count from the schedule, so `e2el` and `e2el_including_client_queue` are the same here.
        """
        timeline, workload = self.timeline, self.workload
        metrics = self.evaluate(with_fluidity=True, with_gaps=True).to_dict()
        result: dict[str, Any] = {
            **bench_setting(self.backend, self.model, len(workload), workload.rate),
            **metrics,
            "rtfx": 0.0,  # of audio
            "max_output_tokens_per_s": max_tokens_per_second(timeline),
            "max_concurrent_requests": max_concurrent(timeline),
            **_finite(latency_figures("client_queue_time", self.lag[np.isfinite(self.lag)])),
            **{
                key.replace("_e2el_", "_e2el_including_client_queue_"): value
                for key, value in metrics.items()
                if "_e2el_ms" in key
            },
            "actorllm_warnings": self.warnings,
        }
        if is_detailed:
            streams = [timeline.token_times(row) for row in range(len(timeline))]
            result |= {
                "input_lens": timeline.num_prompt.tolist(),
                "output_lens": timeline.num_output.tolist(),
                "ttfts": _zeros(timeline.ttft),
                "itls": [np.diff(stream).tolist() for stream in streams],
                "latencies": _zeros(timeline.e2e),
                "start_times": _zeros(timeline.arrival + self.lag),
                "queue_times": _zeros(self.lag),
                "generated_texts": [""] * len(timeline),  # random tokens, of which no text was made
                "errors": list(self.errors),
                "actorllm_itl_p99s": _nulls(timeline.pauses),
            }
        return result


def _zeros(values: F64) -> list[float]:
    """Without NaN, as vLLM writes what did not happen."""
    found: list[float] = np.nan_to_num(values).tolist()
    return found


def _nulls(values: F64) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _finite(figures: dict[str, float]) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in figures.items()}


async def replay(
    workload: Workload,
    target: Target,
    *,
    seed: int = 0,
    until: float = math.inf,
    num_warmups: int = 1,
    on_end: Callable[[int], object] | None = None,
    max_concurrency: int | None = None,
) -> LiveRun:
    """Send every request when it is due, and wait for all of them.

    until: seconds after the first arrival at which the run is cut off; a request that is still there then is unfinished, and one
    that was not due by then is left out. num_warmups: requests before that, one after the other, not part of it. on_end(row)
    hears of every request that ends. max_concurrency: requests under way at a time; others are due when one has ended.
    Raises what makes the target as a whole impossible, ConfigError for a workload that does not fit.
    """
    if not len(workload):
        raise ConfigError("there are no requests to replay")
    await target.prepare()
    _check(workload, target.max_model_len)
    prompts = Prompts(workload, target.vocab_size, seed)
    for number in range(min(num_warmups, len(workload))):
        # ids of their own: what is measured must not find the KV of what was not
        warm = Prompts(workload.head(number + 1), target.vocab_size, seed + 1).ids(number).tolist()
        kind = RequestClass("warm-up")
        await target.send(
            ReplayCall(-1, warm, min(8, int(workload.num_output[number])), kind, None, now()), ReplayRecord()
        )
    records = [ReplayRecord() for _ in range(len(workload))]
    first = float(workload.arrival[0])
    start = now() + LEAD_S - first
    patience = [math.inf if kind.patience is None else kind.patience for kind in workload.classes]

    client = ClosedLoop(workload, max_concurrency)
    is_closed = workload.turns is not None or max_concurrency is not None
    histories = SaidBefore(workload)
    sent: list[int] = []
    arrival: list[float] = []
    wanted: list[float] = []
    has_ended = anyio.Event()

    async def run_one(call: ReplayCall, record: ReplayRecord, row: int) -> None:
        limit = patience[workload.class_ids[row]]
        with anyio.CancelScope() as scope:
            if limit < math.inf:
                scope.deadline = anyio.current_time() + max(0.0, call.due + limit - now())
            try:
                record.sent = now()
                await target.send(call, record)
                if record.outcome == UNFINISHED:
                    record.outcome = FINISHED
            except Exception as error:  # of one request, by whatever client: it is its outcome
                record.outcome = FAILED
                record.error = f"{type(error).__name__}: {error}"
        if scope.cancelled_caught:
            record.outcome = ABORTED
        record.end = now()
        histories.on_end(row, call.prompt, record.token_ids)
        client.on_end(row, record.end - start, is_finished=record.outcome == FINISHED)
        has_ended.set()
        if on_end is not None:
            on_end(call.row)

    async def next_due() -> float | None:
        """Waits until a request is due, and says since when. None: all were sent."""
        nonlocal has_ended
        while True:
            has_ended = anyio.Event()
            at = client.next_at
            if at == math.inf and not client.num_under_way:
                return None
            left = start + at - now()
            if left <= 0:
                await anyio.lowlevel.checkpoint()
                return at
            with anyio.move_on_after(None if left == math.inf else left):
                await has_ended.wait()

    with anyio.CancelScope() as cut:
        if until < math.inf:
            cut.deadline = anyio.current_time() + LEAD_S + until
        async with anyio.create_task_group() as group:
            while (at := await next_due()) is not None:
                row, since = client.pop()
                call = ReplayCall(
                    len(sent),
                    prompts.ids(row, histories.before(row)).tolist(),
                    int(workload.num_output[row]),
                    workload.kind(row),
                    None if workload.tenant_ids is None else workload.tenants[workload.tenant_ids[row]],
                    start + at,
                    histories.is_continued(row),
                )
                sent.append(row)
                arrival.append(at)
                wanted.append(since)
                group.start_soon(run_one, call, records[len(sent) - 1], row)
    num_left_out = 0
    if is_closed:
        num_left_out = len(workload) - len(sent)
        workload = workload.sent_at(np.array(sent, np.intp), np.array(arrival, np.float64))
    run = _collect(workload, records, start, target, first + until)
    due = None if max_concurrency is None else np.array(wanted[: len(run.workload)], np.float64)
    return replace(run, num_left_out=run.num_left_out + num_left_out, due=due)


class SaidBefore:
    """What was said before a turn: the ids of the prompt and the output that it continues."""

    def __init__(self, workload: Workload) -> None:
        turns = self._turns = workload.turns
        self._num_continued: dict[int, int] = {}
        self._ids: dict[int, list[int]] = {}
        if turns is not None:
            rows = np.flatnonzero(~turns.begins).tolist()
            self._num_continued = Counter(turns.parents_of(row)[0] for row in rows)

    def before(self, row: int) -> list[int]:
        """Of a request that is sent now."""
        parents = [] if self._turns is None else self._turns.parents_of(row)
        if not parents:
            return []
        found = self._ids[parents[0]]
        self._num_continued[parents[0]] -= 1
        if not self._num_continued[parents[0]]:
            del self._ids[parents[0]]
        return found

    def is_continued(self, row: int) -> bool:
        return self._num_continued.get(row, 0) > 0

    def on_end(self, row: int, prompt: list[int], output: list[int]) -> None:
        if self.is_continued(row):
            self._ids[row] = prompt + output


def _check(workload: Workload, longest: int | None) -> None:
    total = workload.num_prompt.astype(np.int64) + workload.num_output
    if longest is not None and int(total.max()) > longest:
        raise ConfigError(
            f"{int((total > longest).sum())} of {len(workload)} requests are longer than the {longest} tokens that the model "
            f"takes (the longest has {int(total.max())}); leave them out (`Workload.fitting`), or scale the lengths"
        )


def _collect(workload: Workload, records: list[ReplayRecord], start: float, target: Target, until: float) -> LiveRun:
    num = len(workload)
    workload = workload.before(until)
    records = records[: len(workload)]

    def column(name: str, dtype: Any = np.float64) -> NDArray[Any]:
        return np.array([getattr(record, name) for record in records], dtype)

    timeline = timeline_of_streams(
        workload.arrival,
        workload.num_prompt,
        [np.array(record.times) - start for record in records],
        scheduled=column("scheduled") - start,
        end=column("end") - start,
        outcome=column("outcome", np.int8),
        num_preemptions=column("num_preemptions", np.int32),
        num_cached=column("num_cached", np.int32),
        num_wasted=column("num_wasted", np.int32),
    )
    return LiveRun(
        workload,
        timeline,
        column("sent") - start - workload.arrival,
        tuple(record.error or "" for record in records),
        target.backend,
        target.model,
        Delays.of(
            [record.submitted - record.sent for record in records if math.isfinite(record.submitted)],
            [
                record.times[-1] - record.reported
                for record in records
                if math.isfinite(record.reported) and record.times
            ],
        ),
        start,
        until,
        num - len(workload),
    )
