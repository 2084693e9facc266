"""Reading workloads from published traces. Nothing is downloaded here; the caller names a file.

    azure     TIMESTAMP,ContextTokens,GeneratedTokens            Azure/AzurePublicDataset, LLM inference 2023 and 2024
    vidur     arrived_at,num_prefill_tokens,num_decode_tokens     microsoft/vidur, processed traces (seconds)
    burstgpt  Timestamp,...,Request tokens,Response tokens,...    HPMLL/BurstGPT (seconds)
    mooncake  {"timestamp": ms, "input_length", "output_length", "hash_ids"}      kvcache-ai/Mooncake, blocks of 512 tokens
    timed     the same keys with seconds and blocks of 16 tokens, as `vllm bench serve --dataset-name timed_trace` reads
    tracelab  rounds of coding agents: session_id, input_tokens_total, output_tokens, timing_events      uw-syfi/TraceLab
    servegen  a folder of chunk-N-trace.csv and chunk-N-dataset.json               alibaba/ServeGen; drawn from, not replayed

A file that ends in .gz is unpacked while it is read. Qwen-Bailian's traces are `timed`.

Rows of the JSON formats with the same session_id are turns of a session, in the order of the file. The first one has a timestamp.
Each later one has delay, the time from the end of the turn before it, in the unit of timestamps. Its input_length is what is new,
since its prompt begins with all that was said (NVIDIA's AIPerf reads the same).

Rounds of `tracelab` are turns, too. A round waits for its tools, or for its user, since the last event of the round before it. Its
prompt is told whole. Where that is shorter than the one before, the context was compacted, and a session of its own begins.

Rows of the JSON formats may also carry slo: seconds per token, or an object with the fields of SLO. They may carry type_info,
tenant, priority, is_latency_sensitive and patience (seconds), too. block_tokens is needed where a hash id does not stand for as
many tokens as is usual in the format. `write_trace` writes all of these. Rows that share all of them but the objective and the
tenant are a class (`workload.classes_of`). A row that cannot be used is left out and reported with its line number and what is
wrong. A file without any usable row is an error.
"""

from __future__ import annotations

import ast
import csv
import gzip
import itertools
import json
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from actorllm.errors import ConfigError, InvalidParameterError, nearest_name
from actorllm.messages import F64
from actorllm.slo.turns import Turns
from actorllm.slo.workload import Prefixes, Workload, classes_of, make_workload, seed_stream
from actorllm.types.objective import SLO, RequestClass

MAX_PROBLEMS = 20
"""Malformed rows that are told in full; the others are counted."""

MAX_PROBLEM = 200
"""Characters of one problem that are told."""

MAX_TIME = 1e18
"""Of a timestamp, whatever its unit."""

MAX_SHOWN = 40
"""Characters of a value that a message shows."""

MAX_LINE = 1 << 24
"""Characters of a line: a packed file may unpack to one without an end."""

FORMATS = ("azure", "vidur", "burstgpt", "mooncake", "timed", "tracelab", "servegen")
MOONCAKE_BLOCK_TOKENS = 512
TIMED_BLOCK_TOKENS = 16
ROUND_INPUTS = ("user_message", "tool_result")
"""Events of TraceLab that say what a round was asked; all others are of its answer."""

SAMPLE = Path(__file__).with_name("sample.jsonl")
"""200 synthetic requests with shared prefixes and two classes, made by `workload.synthetic`: to try things on."""


@dataclass(slots=True)
class TraceReport:
    """What was read, and what was left out."""

    path: str
    format: str
    num_rows: int = 0
    num_skipped: int = 0
    problems: list[tuple[int, str]] = field(default_factory=list)
    """(line number from 1, what is wrong) of the first of them."""

    def skip(self, line: int, problem: str) -> None:
        self.num_skipped += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append((line, problem if len(problem) <= MAX_PROBLEM else f"{problem[:MAX_PROBLEM]}..."))

    def __str__(self) -> str:
        told = f"{self.path}: {self.num_rows} rows of {self.format}, {self.num_skipped} skipped"
        lines = [f"  line {line}: {problem}" for line, problem in self.problems]
        if self.num_skipped > len(self.problems):
            lines.append(f"  and {self.num_skipped - len(self.problems)} more")
        return "\n".join([told, *lines])


@dataclass(frozen=True, slots=True)
class Trace:
    workload: Workload
    report: TraceReport


Kind = tuple[str | None, SLO | None, bool, int, float | None]
"""type_info, slo, is_latency_sensitive, priority and patience of a request."""


@dataclass(slots=True)
class _Row:
    """One request, as a row told it."""

    arrival: float
    num_prompt: int
    num_output: int
    hash_ids: list[int] | None = None
    kind: Kind = (None, None, False, 0, None)
    tenant: str | None = None
    block_tokens: int | None = None
    session: str | None = None
    delay: float | None = None
    """Since the turn before it ended; None: it has a timestamp."""
    is_whole: bool = False
    """num_prompt of a later turn counts what was said before, too."""


def load_trace(
    path: str | Path,
    format: str | None = None,
    *,
    block_tokens: int | None = None,
    seconds_per_unit: float | None = None,
    **drawn: Any,
) -> Trace:
    """The requests of a trace, the first of them at 0 seconds. format: one of FORMATS; None: seen from the file.

    JSON lines are `timed` when a prompt has more hash ids than blocks of 512 tokens; without any, and with block_tokens, they are
    `mooncake`.

    block_tokens: tokens per hash id; None: what the rows say, else what is usual in the format. seconds_per_unit: of the
    timestamps, likewise. drawn: of `draw_servegen`, for its folders. Raises ConfigError naming what is wrong.
    """
    if block_tokens is not None and not 1 <= block_tokens < 2**31:
        raise ConfigError(f"block_tokens={block_tokens} must be a number of tokens, at least 1")
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise ConfigError(f"trace format {format!r} is not known{nearest_name(format, FORMATS)}; {', '.join(FORMATS)}")
    if path.is_dir() or format == "servegen":
        return draw_servegen(path, **drawn)
    if drawn:
        raise ConfigError(f"{path} is replayed as it is; {', '.join(drawn)} are for ServeGen folders")
    lines = _lines_of(path)
    if format is None:  # the first line shows it, and is read again below
        lines, again = itertools.tee(lines)
        format = _seen_format(lines, path)
        lines = again
    report = TraceReport(str(path), "mooncake" if format == "json" else format)
    # Times of the JSON formats differ by their unit, which is known when their hash ids have told them apart.
    if format in ("json", "mooncake", "timed"):
        found = list(_json_rows(lines, report, _turn_reader()))
        if format == "json" and block_tokens is None:
            report.format = _json_format(found, path)
        is_timed = report.format == "timed"
        unit = seconds_per_unit or (1.0 if is_timed else 1e-3)
        for row in found:
            row.arrival *= unit
            if row.delay is not None:
                row.delay *= unit
        usual = TIMED_BLOCK_TOKENS if is_timed else MOONCAKE_BLOCK_TOKENS
        block_tokens = _block_tokens(found, block_tokens, usual, path)
    elif format == "tracelab":
        found = list(_json_rows(lines, report, _round_reader()))
    else:
        found = list(_csv_rows(lines, format, seconds_per_unit or 1.0, report))
    return Trace(_workload_of(found, block_tokens or 1, path, report), report)


def _lines_of(path: Path) -> Iterator[str]:
    """Without their ends. Raises ConfigError where the file cannot be read."""
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8-sig") as file
        ):
            while line := file.readline(MAX_LINE):  # which splits at no other ends of line that JSON may have
                if len(line) == MAX_LINE:
                    raise ConfigError(f"trace {str(path)!r} cannot be read: a line has {MAX_LINE} characters or more")
                yield line.removesuffix("\n")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"trace {str(path)!r} cannot be read: {error}") from error


def _block_tokens(rows: list[_Row], wanted: int | None, usual: int, path: Path) -> int:
    """Tokens per hash id: of all rows that have any the same."""
    told = sorted({row.block_tokens or usual for row in rows if row.hash_ids})
    if len(told) > 1:
        raise ConfigError(f"trace {str(path)!r}: block_tokens is {told[0]} in some rows and {told[1]} in others")
    is_told = any(row.block_tokens for row in rows)
    if wanted is not None and is_told and told and told[0] != wanted:
        raise ConfigError(
            f"block_tokens={wanted} contradicts the trace {str(path)!r}, whose rows say {told[0]}; leave it out"
        )
    return wanted or (told[0] if told else usual)


def _json_format(rows: list[_Row], path: Path) -> str:
    """Both formats have the same keys. No prompt has more hash ids than blocks, so many ids are of small blocks."""
    told = [row for row in rows if row.hash_ids and row.block_tokens is None]

    def too_many(block_tokens: int) -> _Row | None:
        return next((r for r in told if len(r.hash_ids or ()) > -(-r.num_prompt // block_tokens)), None)

    if too_many(MOONCAKE_BLOCK_TOKENS) is None:
        return "mooncake"
    row = too_many(TIMED_BLOCK_TOKENS)
    if row is None:
        return "timed"
    raise ConfigError(
        f"trace {str(path)!r}: {len(row.hash_ids or ())} hash ids for a prompt of {row.num_prompt} tokens are more than one for "
        f"every {TIMED_BLOCK_TOKENS}; say for how many tokens one stands (block_tokens), and the format: mooncake or timed"
    )


def _seen_format(lines: Iterable[str], path: Path) -> str:
    first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("{"):
        return "tracelab" if '"input_tokens_total"' in first and '"timing_events"' in first else "json"
    header = [name.strip() for name in first.split(",")]
    for name, columns in _CSV_COLUMNS.items():
        if set(columns) <= set(header):
            return name
    raise ConfigError(
        f"trace {str(path)!r}: {first[:80]!r} is the first line of no known format; name one of {', '.join(FORMATS)}"
    )


# Comma separated values --------------------------------------------------------------------------------------------------


def _time_of(text: str) -> float:
    when = datetime.fromisoformat(text)
    return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()


_CSV_COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "vidur": ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
}
"""Columns of arrival, prompt tokens and output tokens."""


def _csv_rows(lines: Iterable[str], format: str, unit: float, report: TraceReport) -> Iterator[_Row]:
    names = _CSV_COLUMNS[format]
    reader = csv.reader(lines)
    try:
        header = [name.strip() for name in next(reader, [])]
    except csv.Error as error:
        raise ConfigError(f"trace {report.path!r}: its first line has no names of columns: {error}") from error
    if missing := [name for name in names if name not in header]:
        raise ConfigError(f"trace {report.path!r} has no column {missing[0]!r}{nearest_name(missing[0], header)}")
    when, prompt, output = (header.index(name) for name in names)
    label = header.index("Log Type") if "Log Type" in header else -1
    read_time: Callable[[str], float] = _time_of if format == "azure" else lambda text: float(text) * unit
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            report.num_rows += 1
            report.skip(reader.line_num, str(error))
            continue
        if not cells:
            continue
        report.num_rows += 1
        if len(cells) < len(header):
            report.skip(reader.line_num, f"{len(cells)} columns instead of {len(header)}")
            continue
        try:
            row = _Row(
                _finite(read_time(cells[when]), names[0]),
                _count(cells[prompt], names[1]),
                _count(cells[output], names[2]),
            )
        except (ValueError, OverflowError) as error:
            report.skip(reader.line_num, str(error))
            continue
        if label >= 0:
            row.kind = (cells[label], None, False, 0, None)
        yield row


def _finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}")
    return value


def _count(value: Any, name: str) -> int:
    """A number of tokens: at least one. BurstGPT has failed requests with 0 response tokens."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={_shown(value)} is not a number") from None
    except OverflowError:
        number = math.inf
    if isinstance(value, bool) or not math.isfinite(number) or number != int(number) or not 1 <= number < 2**31:
        raise ValueError(f"{name}={_shown(value)} must be a whole number of tokens, at least 1")
    return int(number)


def _shown(value: Any) -> str:
    """As it stands in a message: its beginning."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits than Python writes, or lists deep in lists
        return f"that {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


# JSON lines --------------------------------------------------------------------------------------------------------------


def _json_rows(lines: Iterable[str], report: TraceReport, read: Callable[[Any], _Row]) -> Iterator[_Row]:
    """With arrivals in the unit of the file. read: makes a row of an object of JSON."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        report.num_rows += 1
        try:
            row = read(json.loads(line))
        except json.JSONDecodeError as error:
            report.skip(number, f"not JSON: {error.msg} at column {error.colno}")
        except RecursionError:
            report.skip(number, "not JSON: lists or objects too deep in each other")
        except (ValueError, KeyError, TypeError) as error:
            report.skip(number, f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error))
        else:
            yield row


def _turn_reader() -> Callable[[Any], _Row]:
    sessions: set[str] = set()

    def read(given: Any) -> _Row:
        row = _json_row(given, sessions)
        if row.session is not None:
            sessions.add(row.session)
        return row

    return read


def _json_row(given: Any, sessions: Collection[str]) -> _Row:
    """sessions: that have begun in the rows before."""
    if not isinstance(given, dict):
        raise ValueError(f"an object expected, got {type(given).__name__}")
    # A later turn of a session has a delay instead of a time.
    session = given.get("session_id")
    if session is not None and not isinstance(session, str):
        raise ValueError(f"session_id={_shown(session)} must be a string")
    is_later = session in sessions
    name = "delay" if is_later else "timestamp"
    when = given[name]
    if isinstance(when, bool) or not isinstance(when, int | float):
        raise ValueError(f"{name}={_shown(when)} is not a number")
    if abs(when) > MAX_TIME or (is_later and when < 0):
        raise ValueError(f"{name}={_shown(when)} is no time")
    # What it shares with other prompts; a later turn shares what was said before, which needs no ids.
    ids = given.get("hash_ids")
    if is_later and ids is not None:
        raise ValueError("hash_ids of a later turn of a session: it begins with what was said before, and needs none")
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int and 0 <= i < 2**62 for i in ids)):
        raise ValueError(f"hash_ids={_shown(ids)} must be a list of whole numbers")
    tenant = given.get("tenant")
    if tenant is not None and not isinstance(tenant, str):
        raise ValueError(f"tenant={_shown(tenant)} must be a string")
    return _Row(
        0.0 if is_later else _finite(float(when), name),
        _count(given["input_length"], "input_length"),
        _count(given["output_length"], "output_length"),
        ids,
        _kind_of(given),
        tenant,
        None if given.get("block_tokens") is None else _count(given["block_tokens"], "block_tokens"),
        session,
        _finite(float(when), name) if is_later else None,
    )


def _round_reader() -> Callable[[Any], _Row]:
    newest: dict[str, tuple[float, int]] = {}  # by session, when its newest round ended, and the prompt of that

    def read(given: Any) -> _Row:
        if not isinstance(given, dict):
            raise ValueError(f"an object expected, got {type(given).__name__}")
        session, provider, user = (given.get(name) for name in ("session_id", "provider", "user"))
        if not isinstance(session, str):
            raise ValueError(f"session_id={_shown(session)} must be a string")
        size, num_output = (_count(given[name], name) for name in ("input_tokens_total", "output_tokens"))
        asked, ended = _times_of_round(given["timing_events"])
        free_at, before = newest.get(session, (math.nan, size + 1))
        is_later = size >= before
        newest[session] = (ended, size)
        return _Row(
            0.0 if is_later else asked,
            size,
            num_output,
            kind=(provider if isinstance(provider, str) else None, None, False, 0, None),
            tenant=user if isinstance(user, str) else None,
            session=session,
            delay=max(0.0, asked - free_at) if is_later else None,
            is_whole=True,
        )

    return read


def _times_of_round(events: Any) -> tuple[float, float]:
    """Seconds: when all was there that the round was asked, and when the last part of its answer came."""
    if not isinstance(events, list) or not events:
        raise ValueError(f"timing_events={_shown(events)} must be a list of events, at least one")
    asked = ended = math.nan
    for event in events:
        if not isinstance(event, dict):
            raise ValueError(f"timing_events has {_shown(event)}, which must be an object")
        at = _finite(_time_of(event["timestamp"]), "timestamp")
        if event["event_type"] not in ROUND_INPUTS:
            ended = at if math.isnan(ended) else max(ended, at)
        elif math.isnan(ended):
            asked = at if math.isnan(asked) else max(asked, at)
    asked = ended if math.isnan(asked) else asked
    return asked, asked if math.isnan(ended) else max(asked, ended)


def _kind_of(given: dict[str, Any]) -> Kind:
    slo, name = given.get("slo"), given.get("type_info")
    priority, is_sensitive = given.get("priority", 0), given.get("is_latency_sensitive", False)
    if name is not None and not isinstance(name, str):
        raise ValueError(f"type_info={_shown(name)} must be a string")
    if type(priority) is not int or abs(priority) >= 2**31:
        raise ValueError(f"priority={_shown(priority)} must be a whole number of 32 bits")
    if type(is_sensitive) is not bool:
        raise ValueError(f"is_latency_sensitive={_shown(is_sensitive)} must be true or false")
    patience = given.get("patience")
    if patience is not None:
        RequestClass(name or "", patience=patience)  # checks it
    promise = SLO.from_mapping(slo) if isinstance(slo, dict) else SLO.from_value(slo)
    return name or None, promise, is_sensitive, priority, patience


# Columns of rows ---------------------------------------------------------------------------------------------------------


def _workload_of(rows: list[_Row], block_tokens: int, path: Path, report: TraceReport) -> Workload:
    if not rows:
        raise ConfigError(f"trace has no usable row; {report}")
    turns = _turns_of(rows)
    if turns is None:
        rows.sort(key=lambda row: row.arrival)
    else:
        nominal = turns.nominal(np.array([row.arrival for row in rows]))
        order = np.argsort(nominal, kind="stable")
        turns = turns.select(order)
        rows = [replace(rows[at], arrival=float(nominal[at])) for at in order.tolist()]
    first = rows[0].arrival
    classes, class_ids, own_promises = classes_of([row.kind for row in rows])
    tenants = sorted({row.tenant for row in rows if row.tenant is not None})
    numbers = {name: i for i, name in enumerate(["", *tenants] if any(row.tenant is None for row in rows) else tenants)}
    prefixes = None
    if any(row.hash_ids for row in rows):
        # A prompt without ids shares nothing: no ids is what says so.
        ids = [row.hash_ids or [] for row in rows]
        starts = np.concatenate(([0], np.cumsum([len(i) for i in ids]))).astype(np.int64)
        prefixes = Prefixes(np.array([i for some in ids for i in some], np.int64), starts, block_tokens)
    return Workload(
        arrival=np.array([row.arrival - first for row in rows]),
        num_prompt=np.array([row.num_prompt for row in rows], np.int32),
        num_output=np.array([row.num_output for row in rows], np.int32),
        class_ids=class_ids,
        classes=classes,
        tenant_ids=np.array([numbers[row.tenant or ""] for row in rows], np.int32) if tenants else None,
        tenants=tuple(numbers) if tenants else (),
        prefixes=prefixes,
        name=path.stem,
        own_promises=own_promises,
        turns=turns,
    )


def _turns_of(rows: list[_Row]) -> Turns | None:
    """Of rows in the order of the file; their prompts become those of all that was said. None: nothing is a later turn."""
    if all(row.delay is None for row in rows):
        return None
    newest: dict[str, int] = {}
    parents: list[list[int]] = []
    for number, row in enumerate(rows):
        parents.append([])
        if row.delay is not None and row.session is not None:
            before = rows[newest[row.session]]
            parents[-1].append(newest[row.session])
            row.num_prompt += 0 if row.is_whole else before.num_prompt + before.num_output
        if row.session is not None:
            newest[row.session] = number
    return Turns.of(parents, [row.delay or 0.0 for row in rows])


def write_trace(workload: Workload, path: str | Path, *, block_tokens: int | None = None) -> None:
    """As JSON lines that `load_trace` reads again: Mooncake's keys, and those of ours that a class sets.

    block_tokens: regroup the hash ids to stand for so many tokens each (`Prefixes.regrouped`); None: as they are. Rows say
    how many unless it is Mooncake's 512. Raises InvalidParameterError for turns that branch, or leave out what was said before:
    rows can tell only of turns one after the other.
    """
    prefixes = workload.prefixes
    if prefixes is not None and block_tokens is not None:
        prefixes = prefixes.regrouped(block_tokens, workload.num_prompt)
    rows = _json_of(replace(workload, prefixes=prefixes))
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _json_of(workload: Workload) -> Iterable[dict[str, Any]]:
    prefixes = workload.prefixes
    has_labels = len(workload.classes) > 1
    before = _turns_before(workload)
    sessions: dict[int, str] = {}
    for i in range(len(workload)):
        kind = workload.kind(i)
        row: dict[str, Any] = {
            "timestamp": round(float(workload.arrival[i]) * 1e3, 3),
            "input_length": int(workload.num_prompt[i]),
            "output_length": int(workload.num_output[i]),
        }
        # A later turn is told by what is new of it, since its prompt begins with all that was said.
        if workload.turns is not None:
            row["session_id"] = sessions[i] = sessions[before[i]] if i in before else f"session-{i}"
        if workload.turns is not None and i in before:
            del row["timestamp"]
            row["delay"] = round(float(workload.turns.think_s[i]) * 1e3, 3)
            row["input_length"] -= int(workload.num_prompt[before[i]]) + int(workload.num_output[before[i]])
        elif prefixes is not None:
            row["hash_ids"] = prefixes.of(i).tolist()
            if prefixes.block_tokens != MOONCAKE_BLOCK_TOKENS:
                row["block_tokens"] = prefixes.block_tokens
        if kind.label and (has_labels or kind.label != "all"):
            row["type_info"] = kind.label
        if kind.slo is not None:
            promise = zip(SLO.__slots__, kind.slo.to_fields(), strict=True)
            row["slo"] = {name: value for name, value in promise if value}
        if kind.is_latency_sensitive:
            row["is_latency_sensitive"] = True
        if kind.priority:
            row["priority"] = kind.priority
        if kind.patience is not None:
            row["patience"] = kind.patience
        if workload.tenant_ids is not None:
            row["tenant"] = workload.tenants[workload.tenant_ids[i]]
        yield row


def _turns_before(workload: Workload) -> dict[int, int]:
    """By row, the turn before it. Raises InvalidParameterError where rows cannot tell of the turns."""
    turns = workload.turns
    if turns is None:
        return {}
    found: dict[int, int] = {}
    continued: set[int] = set()
    for row in np.flatnonzero(~turns.begins).tolist():
        parents = turns.parents_of(row)
        if len(parents) > 1 or parents[0] in continued:
            raise InvalidParameterError(
                f"workload {workload.name!r}: request {row} is part of a branch, which no trace can tell"
            )
        said = int(workload.num_prompt[parents[0]]) + int(workload.num_output[parents[0]])
        if workload.num_prompt[row] <= said:
            raise InvalidParameterError(
                f"workload {workload.name!r}: the prompt of request {row} leaves out what was said before, which no trace can tell"
            )
        found[row] = parents[0]
        continued.add(parents[0])
    return found


# ServeGen ----------------------------------------------------------------------------------------------------------------


def draw_servegen(
    folder: str | Path, *, start: float = 0.0, stop: float = 3600.0, rate: float | None = None, seed: int = 0
) -> Trace:
    """Draw requests from the clients of a ServeGen folder, between two times of its week in seconds.

    Every client has windows with a rate, a distribution of gaps (Gamma or Weibull) and distributions of lengths. rate:
    of all clients together; None: theirs. Each client is a tenant.
    """
    folder = Path(folder)
    report = TraceReport(str(folder), "servegen")
    files = sorted(folder.glob("chunk-*-trace.csv"), key=lambda file: file.name) if folder.is_dir() else []
    if not files:
        raise ConfigError(f"{str(folder)!r} has no chunk-N-trace.csv, as a ServeGen folder has")
    if not 0 <= start < stop:
        raise ConfigError(f"start={start} must be before stop={stop}, both in seconds and not negative")
    parts: list[tuple[F64, Any, Any, str]] = []
    for file in files:
        client = file.name.split("-")[1]
        lengths = _servegen_lengths(file.with_name(f"chunk-{client}-dataset.json"), report)
        # A stream for each client: the others change none of its requests.
        rng = seed_stream(seed, f"client {client}")
        for begin, end, gaps in _servegen_windows(file, start, stop, report):
            # Lengths change less often than rates: the last ones before the window hold.
            of_window = [lengths[at] for at in sorted(lengths) if at <= begin] or list(lengths.values())[:1]
            if not of_window:
                continue
            times = _renewals(begin, end, gaps, rng)
            (inputs, input_shares), (outputs, output_shares) = of_window[-1]
            prompt = rng.choice(inputs, times.size, p=input_shares)
            parts.append((times, prompt, rng.choice(outputs, times.size, p=output_shares), client))
    if not sum(times.size for times, *_ in parts):
        raise ConfigError(f"no request of {str(folder)!r} comes between {start} and {stop} s; {report}")
    arrival = np.concatenate([times for times, *_ in parts]) - start
    # All clients in one order of arrival, each a tenant.
    order = np.argsort(arrival, kind="stable")
    tenants = sorted({client for *_, client in parts})
    prompt = np.maximum(np.concatenate([p for _, p, _, _ in parts]), 1).astype(np.int32)[order]
    output = np.maximum(np.concatenate([o for _, _, o, _ in parts]), 1).astype(np.int32)[order]
    ids = np.concatenate([np.full(t.size, tenants.index(c), np.int32) for t, _, _, c in parts])[order]
    workload = make_workload(arrival[order], (prompt, output), folder.name)
    workload = Workload(
        workload.arrival,
        prompt,
        output,
        workload.class_ids,
        tenant_ids=ids,
        tenants=tuple(f"client-{c}" for c in tenants),
        name=folder.name,
    )
    return Trace(workload if rate is None else workload.at_rate(rate), report)


def _renewals(begin: float, end: float, gaps: tuple[str, float, float], rng: np.random.Generator) -> F64:
    """Arrivals from begin to end whose gaps are drawn as (pattern, shape, scale) says."""
    pattern, shape, scale = gaps
    found: list[F64] = []
    at = begin
    while at < end:
        drawn = rng.gamma(shape, scale, 256) if pattern == "Gamma" else scale * rng.weibull(shape, 256)
        times = at + np.cumsum(drawn)
        found.append(times[times < end])
        at = float(times[-1])
    return np.concatenate(found) if found else np.zeros(0)


def _servegen_windows(
    file: Path, start: float, stop: float, report: TraceReport
) -> Iterator[tuple[float, float, tuple[str, float, float]]]:
    """(begin, end, gaps) of every window with arrivals, cut to start and stop."""
    rows: list[tuple[float, list[str]]] = []
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        report.skip(1, f"{file.name}: {error}")
        return
    for number, line in enumerate(lines, 1):
        report.num_rows += 1
        cells = line.split(",")
        try:
            if len(cells) != 6:
                raise ValueError(f"{len(cells)} columns instead of 6")
            rows.append((_finite(float(cells[0]), "t"), cells))
            if cells[3] and (cells[3] not in ("Gamma", "Weibull") or not min(float(cells[4]), float(cells[5])) > 0):
                raise ValueError(f"{cells[3]!r} with {cells[4]}, {cells[5]} is no Gamma or Weibull distribution")
        except ValueError as error:
            report.skip(number, f"{file.name}: {error}")
            if rows and rows[-1][1] is cells:
                rows[-1] = (rows[-1][0], [])
    for i, (begin, cells) in enumerate(rows):
        if not cells or not cells[3]:
            continue
        end = rows[i + 1][0] if i + 1 < len(rows) else begin + 600
        if begin < stop and end > start:
            yield max(begin, start), min(end, stop), (cells[3], float(cells[4]), float(cells[5]))


def _servegen_lengths(file: Path, report: TraceReport) -> dict[float, tuple[tuple[Any, Any], tuple[Any, Any]]]:
    """By the time from which they hold: (values, shares) of prompt and of output tokens."""
    found: dict[float, tuple[tuple[Any, Any], tuple[Any, Any]]] = {}
    try:
        given = json.loads(file.read_text())
        if not isinstance(given, dict):
            raise ValueError(f"an object expected, got {type(given).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        report.skip(1, f"{file.name}: {error}")
        return found
    for at, columns in given.items():
        try:
            pair = []
            for name in ("input_tokens", "output_tokens"):
                shares = ast.literal_eval(columns[name])
                values = np.array(list(shares), float)
                weights = np.array(list(shares.values()), float)
                has_counts = values.size and np.isfinite(values).all() and np.abs(values).max() < 2**31
                if not has_counts or not weights.min() >= 0 or not 0 < weights.sum() < math.inf:
                    raise ValueError(f"{name} at {at} is no distribution")
                pair.append((values, weights / weights.sum()))
            found[float(at)] = (pair[0], pair[1])
        except (KeyError, ValueError, TypeError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
            report.skip(1, f"{file.name}: lengths at {at}: {error}")
    return found
