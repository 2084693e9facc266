"""Results for other programs: JSON as `vllm bench serve` writes it, CSV, and a Chrome trace for Perfetto."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from actorllm.messages import F64
from actorllm.scheduling.sequence import Key
from actorllm.slo.experiments.sweep import SweepResults
from actorllm.slo.journal import Journal, StepTable
from actorllm.slo.metrics import bench_setting, good, max_concurrent, max_tokens_per_second
from actorllm.slo.timeline import OUTCOMES, RunTimeline
from actorllm.slo.workload import Workload
from actorllm.types.objective import READINGS, SLO

MAX_TRACED = 5000
"""Requests in a trace: more than that no viewer shows in a way that helps."""


def bench_json(
    timeline: RunTimeline, workload: Workload, summary: dict[str, Any], *, model: str = "", warnings: Sequence[str] = ()
) -> dict[str, Any]:
    """The keys of the file that `vllm bench serve --save-result --save-detailed` writes, and ours: `actorllm_*`.

    summary: `RunMetrics.to_dict()`. model: what took the time, and warnings: of the run. Texts are empty: none was made.
    """
    num = len(timeline)
    end = np.where(np.isfinite(timeline.end), timeline.end, timeline.last_token)
    return (
        bench_setting("actorllm simulate", model, num, workload.rate)
        | summary
        | {
            "max_output_tokens_per_s": max_tokens_per_second(timeline),
            "max_concurrent_requests": max_concurrent(timeline),
            "input_lens": timeline.num_prompt.tolist(),
            "output_lens": timeline.num_output.tolist(),
            "ttfts": _plain(timeline.ttft),
            "itls": [np.diff(timeline.token_times(row)).round(9).tolist() for row in range(num)],
            "latencies": _plain(end - timeline.arrival),
            "start_times": _plain(timeline.arrival),
            "queue_times": [0.0] * num,  # of vLLM's client, before it sends: no request waits there
            "generated_texts": [""] * num,
            "errors": ["" if o == 0 else OUTCOMES[o] for o in timeline.outcome.tolist()],
            "rtfx": 0.0,  # of audio
            "actorllm_warnings": list(warnings),
            "actorllm_queue_times": _plain(timeline.scheduled - timeline.arrival),
            "actorllm_itl_p99s": _plain(timeline.pauses),
            "actorllm_classes_of": [workload.classes[i].name for i in workload.class_ids.tolist()],
        }
    )


def _plain(values: F64) -> list[float | None]:
    return [round(v, 9) if math.isfinite(v) else None for v in values.tolist()]


# CSV ---------------------------------------------------------------------------------------------------------------------


def results_csv(results: SweepResults) -> str:
    """A row for each point: what it is, what it attained, its latencies, and the findings on it and on all seeds of its rate."""
    out = io.StringIO()
    figures = sorted({key for r in results.records for key in r["summary"] if not isinstance(r["summary"][key], dict)})
    names = [
        "policy",
        "rate",
        "seed",
        "scale",
        "sent_rate",
        "worst_tpot",
        "worst_deadline",
        "overall_tpot",
        "overall_deadline",
        "verdict",
        "verdict_of_seeds",
        "scenario",
        "code",
        *figures,
    ]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    together = {
        at: results.verdict(*at)[0] for at in {(r["variant"]["label"], r["rate"], r["scale"]) for r in results.records}
    }
    for r in results.records:
        summary, label = r["summary"], r["variant"]["label"]
        row = {name: summary.get(name) for name in figures}
        for reading in ("tpot", "deadline"):
            row[f"worst_{reading}"] = summary["actorllm_worst_class"][reading]
            row[f"overall_{reading}"] = summary["actorllm_overall"]["attainment"][reading]
        writer.writerow(
            row
            | {name: r[name] for name in ("rate", "seed", "scale", "scenario", "code")}
            | {"policy": label, "verdict": r["stationarity"]["verdict"]}
            | {"sent_rate": r.get("sent_rate"), "verdict_of_seeds": together[label, r["rate"], r["scale"]]}
        )
    return out.getvalue()


def requests_csv(timeline: RunTimeline, workload: Workload, names: Sequence[str | None] = ()) -> str:
    """A row for each request of a run: what it asked for, when what happened, and whether it kept its promise. Seconds."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns: dict[str, Sequence[Any]] = {
        "request": range(len(timeline)),
        "class": [workload.classes[i].name for i in workload.class_ids.tolist()],
        "prompt_tokens": timeline.num_prompt.tolist(),
        "output_tokens": timeline.num_output.tolist(),
        "outcome": [OUTCOMES[o] for o in timeline.outcome.tolist()],
        "arrival": _plain(timeline.arrival),
        "queue": _plain(timeline.scheduled - timeline.arrival),
        "ttft": _plain(timeline.ttft),
        "tpot": _plain(timeline.tpot),
        "itl_p99": _plain(timeline.pauses),
        "e2e": _plain(timeline.e2e),
        "preemptions": timeline.num_preemptions.tolist(),
        "cached_tokens": timeline.num_cached.tolist(),
        "replica": timeline.replica.tolist(),
    }
    columns |= {f"good_{reading}": good(timeline, workload.promises, reading).tolist() for reading in READINGS}
    if workload.tenant_ids is not None:
        columns["tenant"] = [workload.tenants[i] for i in workload.tenant_ids.tolist()]
    if any(name is not None for name in names):
        columns["request_id"] = names
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return out.getvalue()


# Chrome trace ------------------------------------------------------------------------------------------------------------


def chrome_trace(
    timeline: RunTimeline, workload: Workload, journal: Journal | None = None, keys: Sequence[Key] | None = None
) -> dict[str, Any]:
    """For ui.perfetto.dev: a process with a track for each request, and one for each replica with its steps and counters.

    Of a request: queued, each prompt chunk, decoding, preempted; an instant where its first token or one after it came later
    than it was due; arrows from its queue through the steps that computed its prompt to that of its last token. Without a
    journal chunks and steps are not known. At most MAX_TRACED requests. keys: of every row in the journal; None: (0, row), of
    a simulation.
    """
    rows = None if keys is None else {key: row for row, key in enumerate(keys)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "requests"}},
        {"ph": "M", "name": "process_sort_index", "pid": 0, "args": {"sort_index": 10}},
    ]
    chunks: dict[int, list[tuple[float, float, int]]] = {}
    lost: dict[int, list[float]] = {}
    tables: list[StepTable] = []
    for replica in range(len(timeline.step_ends)):
        if journal is not None:
            tables.append(journal.table(timeline, replica))
            events += _replica_track(tables[replica], journal, replica, chunks, rows)
    for event in journal.events if journal is not None else ():
        if event.kind == "preempt" and (at := _row(event.key, rows)) is not None:
            lost.setdefault(at, []).append(event.at)
    timeline_end = timeline.last
    for row in range(min(len(timeline), MAX_TRACED)):
        events += _request_track(row, timeline, workload, chunks.get(row, []), lost.get(row, []), timeline_end)
        if journal is not None:
            events += _arrows(row, timeline, chunks.get(row, []), tables[max(0, int(timeline.replica[row]))])
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"workload": workload.name, "requests": len(timeline), "traced": min(len(timeline), MAX_TRACED)},
    }


def _row(key: Key, rows: dict[Key, int] | None) -> int | None:
    return key[1] if rows is None else rows.get(key)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _slice(name: str, pid: int, tid: int, begin: float, end: float, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": name.partition(" ")[0],
        "pid": pid,
        "tid": tid,
        "ts": _us(begin),
        "dur": _us(max(0.0, end - begin)),
        "args": args,
    }


def _replica_track(
    table: StepTable,
    journal: Journal,
    replica: int,
    chunks: dict[int, list[tuple[float, float, int]]],
    rows: dict[Key, int] | None,
) -> list[dict[str, Any]]:
    pid = replica + 1
    found: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"replica {replica}"}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": 0, "args": {"name": "steps"}},
    ]
    start, end = table.start.tolist(), table.end.tolist()
    for i in range(len(table)):
        num_prompt, num_decode = int(table.num_prompt[i]), int(table.num_decode[i])
        name = "mixed step" if num_prompt and num_decode else "prefill step" if num_prompt else "decode step"
        found.append(
            _slice(
                name,
                pid,
                0,
                start[i],
                end[i],
                step=int(table.step[i]),
                prompt_tokens=num_prompt,
                decode_rows=num_decode,
                waiting=int(table.num_waiting[i]),
            )
        )
        at = _us(start[i])
        counters = {
            "batch": {"prompt tokens": num_prompt, "decode rows": num_decode},
            "requests": {"waiting": int(table.num_waiting[i]), "running": int(table.num_running[i])},
            "KV": {"used %": round(100 * float(table.kv_usage[i]), 2)},
        }
        found += [{"ph": "C", "name": n, "pid": pid, "ts": at, "args": values} for n, values in counters.items()]
        for key, size in journal.steps[int(table.entry[i])].prefills:
            if (row := _row(key, rows)) is not None:
                chunks.setdefault(row, []).append((start[i], end[i], size))
    return found


def _request_track(
    row: int,
    timeline: RunTimeline,
    workload: Workload,
    chunks: list[tuple[float, float, int]],
    lost: list[float],
    timeline_end: float,
) -> list[dict[str, Any]]:
    kind = workload.kind(row)
    arrival, scheduled = float(timeline.arrival[row]), float(timeline.scheduled[row])
    first, last = float(timeline.first_token[row]), float(timeline.last_token[row])
    name = f"{row} {kind.name}"
    found: list[dict[str, Any]] = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}]
    end = float(timeline.end[row])
    # A request that never got a slot is queued until its end, or until that of the run.
    started = next((at for at in (scheduled, first, end) if math.isfinite(at)), timeline_end)
    found.append(_slice("queued", 0, row, arrival, started, prompt_tokens=int(timeline.num_prompt[row])))
    # Without a journal the prompt is one slice, from its slot to its first token.
    if chunks:
        found += [_slice(f"prefill {size}", 0, row, b, e, tokens=size) for b, e, size in chunks]
    elif math.isfinite(first) and math.isfinite(scheduled):
        found.append(_slice("prefill", 0, row, scheduled, first, tokens=int(timeline.num_prompt[row])))
    times = timeline.token_times(row)
    begin = first
    # Decoding is cut at every preemption. It goes on with the first token after the prompt was computed again.
    for at in [at for at in lost if at < last] if times.size else []:
        again = next((b for b, _, _ in chunks if b >= at), None)
        after = times[times > at]
        until = float(after[0]) if again is None and after.size else again if again is not None else at
        if at > first:
            found.append(_slice("decode", 0, row, begin, at))
        found.append(_slice("preempted", 0, row, at, until))
        resumed = times[times >= until]
        begin = float(resumed[0]) if resumed.size else last
    if times.size > 1 and last > begin:
        found.append(_slice("decode", 0, row, begin, last, tokens=int(timeline.num_output[row])))
    found += [
        {"ph": "i", "s": "t", "name": f"late: {what}", "cat": "late", "pid": 0, "tid": row, "ts": _us(at), "args": {}}
        for at, what in late_tokens(kind.slo, times, arrival, int(timeline.num_prompt[row]))
    ]
    return found


def _arrows(
    row: int, timeline: RunTimeline, chunks: list[tuple[float, float, int]], table: StepTable
) -> list[dict[str, Any]]:
    """From where a request waits to the steps of its replica: those of its prompt, and that of its last token."""
    if not chunks:
        return []
    pid = max(0, int(timeline.replica[row])) + 1
    arrow = {"name": "request", "cat": "request", "id": row}
    found = [arrow | {"ph": "s", "pid": 0, "tid": row, "ts": _us(float(timeline.arrival[row]))}]
    steps = [begin + (end - begin) / 2 for begin, end, _ in chunks]  # within, so that viewers find the slice
    last = float(timeline.last_token[row]) - timeline.deliver_s
    at = int(np.searchsorted(table.end, last + 1e-9, "right")) - 1 if math.isfinite(last) else -1
    if at >= 0 and table.start[at] >= chunks[-1][1] - 1e-9:
        steps.append(float(table.start[at] + table.end[at]) / 2)
    for number, at_step in enumerate(steps):
        end = {"ph": "f", "bp": "e"} if number == len(steps) - 1 else {"ph": "t"}
        found.append(arrow | end | {"pid": pid, "tid": 0, "ts": _us(at_step)})
    return found


def late_tokens(slo: SLO | None, times: F64, arrival: float, num_prompt: int) -> list[tuple[float, str]]:
    """(when it came, what it was) of the first token if it was late, and of each one that began a stretch of late ones."""
    if slo is None or not times.size:
        return []
    found = []
    if times[0] - arrival > slo.ttft_limit(num_prompt):
        found.append((float(times[0]), "first token"))
    if slo.tpot is not None:
        start = arrival + slo.ttft_limit(num_prompt)
        due = (start if math.isfinite(start) else float(times[0])) + slo.tpot * np.arange(times.size)
        late = times > due + 1e-9
        begins = np.flatnonzero(late & ~np.concatenate(([False], late[:-1])))
        found += [(float(times[i]), f"token {i}") for i in begins.tolist() if i]
    return found
