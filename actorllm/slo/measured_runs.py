"""Runs that were measured elsewhere: when each request came, how long it was, and when its tokens came.

    vllm       the JSON of `vllm bench serve --save-result --save-detailed`, and ours of `--output-json`: start_times, input_lens,
               output_lens, ttfts and itls. A gap in itls may bring several tokens, so only their mean is kept
    guidellm   the JSON report of guidellm, of 0.3 and before and of later ones. One that has several benchmarks is read as
               run.json#2, counted from 0
    requests   LLMServingSim's requests.jsonl: input_toks, output_toks, queued_ts, first_token_ts and last_token_ts

Pure but for reading the file.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actorllm.errors import ConfigError
from actorllm.messages import F64
from actorllm.slo.timeline import RunTimeline, timeline_of_streams
from actorllm.slo.workload import Workload, make_workload

VLLM = ("start_times", "input_lens", "output_lens", "ttfts", "itls")
REQUESTS = ("queued_ts", "input_toks", "output_toks", "first_token_ts", "last_token_ts")


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRun:
    """A row per request, in the order in which they came."""

    workload: Workload
    timeline: RunTimeline
    num_skipped: int
    """Requests that failed, or put nothing out."""

    def check_fits(self, max_model_len: int) -> None:
        """Raises ConfigError for requests that an engine with this limit refuses: the simulation would leave them out."""
        total = self.workload.num_prompt.astype(np.int64) + self.workload.num_output
        num_longer = int((total > max_model_len).sum())
        if num_longer:
            raise ConfigError(
                f"max_model_len={max_model_len} is less than {num_longer} of {total.size} measured requests have; the longest has "
                f"{int(total.max())} tokens: give the limit of the engine that was measured"
            )


def read_run(path: str | Path) -> MeasuredRun:
    """Raises ConfigError naming the file and what it lacks."""
    file, _, number = str(path).rpartition("#")
    if not file or not number.isdecimal() or Path(path).exists():
        file, number = str(path), ""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"run {str(path)!r} cannot be read: {error}") from error
    try:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()] if _has_rows(text) else json.loads(text)
        if isinstance(rows, dict) and "benchmarks" in rows:
            columns = _of_guidellm(rows["benchmarks"], file, number)
        else:
            columns = _of_requests(rows) if isinstance(rows, list) else _of_bench(rows)
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        missing = f"has no {error}" if isinstance(error, KeyError) else f"cannot be read: {error}"
        raise ConfigError(
            f"run {str(path)!r} {missing}; it must be the JSON of `vllm bench serve --save-result --save-detailed`, with "
            f"{', '.join(VLLM)}, a report of guidellm, or JSON lines with {', '.join(REQUESTS)}"
        ) from error
    arrival, size, count, first, last = columns
    there = (size > 0) & (count > 0) & np.isfinite(first) & np.isfinite(last) & (first >= arrival) & (last >= first)
    if not there.any():
        raise ConfigError(f"run {str(path)!r} has no request with tokens and times")
    order = np.flatnonzero(there)[np.argsort(arrival[there], kind="stable")]
    arrival, size, count, first, last = (column[order] for column in columns)
    begin = float(arrival[0])
    workload = make_workload(arrival - begin, (size.astype(np.int32), count.astype(np.int32)), Path(path).name)
    # Of the tokens in between only the number is known.
    streams = [np.linspace(a, b, n) - begin for a, b, n in zip(first, last, workload.num_output.tolist(), strict=True)]
    timeline = timeline_of_streams(workload.arrival, workload.num_prompt, streams)
    return MeasuredRun(workload, timeline, int((~there).sum()))


def _has_rows(text: str) -> bool:
    """Whether the first line is an object of its own."""
    first, _, rest = text.lstrip().partition("\n")
    return first.startswith("{") and first.rstrip().endswith("}") and bool(rest.strip())


def _of_requests(rows: list[dict[str, Any]]) -> tuple[F64, ...]:
    arrival, size, count, first, last = (np.array([float(row[name]) for row in rows]) for name in REQUESTS)
    return arrival, size, count, first, last


def _of_bench(given: dict[str, Any]) -> tuple[F64, ...]:
    arrival, size, count, ttft = (np.array(given[name], float) for name in VLLM[:4])
    gaps = np.array([float(sum(row)) for row in given["itls"]])
    return arrival, size, count, arrival + ttft, arrival + ttft + gaps


def _of_guidellm(benchmarks: list[dict[str, Any]], file: str, number: str) -> tuple[F64, ...]:
    """Of one of its benchmarks. Requests that did not succeed are in other lists; those without a first token are left out."""
    if not number and len(benchmarks) != 1:
        raise ConfigError(f"run {file!r} has {len(benchmarks)} benchmarks; name one, such as {file}#0")
    at = int(number or 0)
    if at >= len(benchmarks):
        raise ConfigError(f"run {file!r} has no benchmark {at}; it has {len(benchmarks)}, from 0 on")
    columns = []
    for row in benchmarks[at]["requests"]["successful"]:
        if "info" in row:
            timings = row["info"]["timings"]
            times = timings["request_start"], timings["first_token_iteration"], timings["last_token_iteration"]
        else:
            times = row["start_time"], row["first_token_time"], row["last_token_time"]
        start, first, last = (math.nan if value is None else float(value) for value in times)
        columns.append((start, float(row["prompt_tokens"] or 0), float(row["output_tokens"] or 0), first, last))
    arrival, size, count, first_token, last_token = np.array(columns, float).reshape(-1, 5).T
    return arrival, size, count, first_token, last_token
