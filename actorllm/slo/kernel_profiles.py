"""Step times from a profile of kernels: measured kernels in CSV files, added up to a `KernelModel`.

A step is its layers, each of which has the kernels that were measured, and what is computed once. The error that is told is
that of interpolation: each node is predicted from its neighbours. What is between kernels was not measured, so the error on
steps is unknown until `actorllm predict` holds the model against a run. Pure but for reading the files.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from actorllm.errors import ConfigError
from actorllm.scheduling.cost_model import nonnegative_least_squares
from actorllm.scheduling.kernel_model import Curve, KernelModel, Surface
from actorllm.slo import profile_columns as columns

Times = dict[str, dict[float, list[float]]]
"""Seconds by kernel and size."""


@dataclass(frozen=True, slots=True)
class Attention:
    """One measurement of attention in one layer."""

    chunk: float
    before: float
    rows: float
    context: float
    seconds: float


@dataclass(slots=True)
class KernelProfile:
    """What was measured of one layer, and once in a step."""

    tokens: Times = field(default_factory=dict)
    rows: Times = field(default_factory=dict)
    attention: list[Attention] = field(default_factory=list)
    shards: set[int] = field(default_factory=set)
    """GPUs that share the kernels, as far as the files say."""
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class KernelFit:
    """What `fit_kernels` returns."""

    model: KernelModel
    errors: tuple[tuple[str, int, float], ...]
    """Of each part of the model: its name, how many nodes or measurements, and the mean error of interpolation."""
    missing: tuple[str, ...]
    """Parts that no file has, so that they cost nothing."""


def is_kernel_profile(path: str | Path) -> bool:
    """A folder, or a file whose header names kernels; any other file is one of steps."""
    if Path(path).is_dir():
        return True
    try:
        with open(path, newline="", encoding="utf-8") as file:
            header = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return False  # the reader says why
    return _has(header, columns.KERNEL) is not None or any(columns.WIDE.fullmatch(name) for name in header)


def read_kernels(path: str | Path, *, tp: int | None = None) -> KernelProfile:
    """path: a CSV file, or a folder of them. tp: GPUs that share a kernel, where a file has several numbers of them.

    Raises ConfigError naming the file, and the column that is missing, or the line that cannot be read.
    """
    files = sorted(Path(path).glob("*.csv")) if Path(path).is_dir() else [Path(path)]
    if not files:
        raise ConfigError(f"profile {str(path)!r} has no .csv file")
    found = KernelProfile()
    for file in files:
        _read_file(file, found, tp)
    if len(found.shards) > 1:
        raise ConfigError(
            f"profile {str(path)!r} has kernels shared by {', '.join(map(str, sorted(found.shards)))} GPUs; "
            "choose one with --profile-tp"
        )
    if not found.tokens:
        raise ConfigError(f"profile {str(path)!r} has no kernel by tokens, such as a projection")
    return found


def _read_file(file: Path, found: KernelProfile, tp: int | None) -> None:
    try:
        with open(file, newline="", encoding="utf-8") as opened:
            rows = list(csv.DictReader(opened))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"profile {str(file)!r} cannot be read: {error}") from error
    if not rows:
        raise ConfigError(f"profile {str(file)!r} has no rows below its header")
    names = [name for name in rows[0] if name is not None]
    shards = _has(names, columns.SHARDS)
    wide = {match["kernel"]: name for name in names if (match := columns.WIDE.fullmatch(name))}
    kernel, duration = _has(names, columns.KERNEL), _has(names, tuple(columns.KERNEL_DURATION))
    if not wide and duration is None:
        raise ConfigError(
            f"profile {str(file)!r} has no column for the duration of a kernel: one of "
            f"{', '.join(columns.KERNEL_DURATION)}; it has {', '.join(names[:20])}"
        )
    for line, row in enumerate(rows, 2):
        reader = _ProfileRow(file, line, row)
        if shards is not None:
            shared_by = int(reader.number(shards))
            if tp is not None and shared_by != tp:
                continue
            found.shards.add(shared_by)
        found.num_rows += 1
        if wide:
            for name, column in wide.items():
                if (row.get(column) or "").strip():  # a kernel that was not run at this size
                    _keep(reader, found, name, reader.number(column) * columns.WIDE_UNIT, names)
        else:
            took = reader.number(str(duration)) * columns.KERNEL_DURATION[str(duration)]
            _keep(reader, found, "" if kernel is None else str(row[kernel]).strip(), took, names)


@dataclass(frozen=True, slots=True)
class _ProfileRow:
    file: Path
    line: int
    values: Mapping[str, str | None]

    def number(self, column: str) -> float:
        text = self.values.get(column)
        try:
            value = float(text or "")
        except ValueError:
            raise ConfigError(f"profile {str(self.file)!r}, line {self.line}: {column}={text!r} is no number") from None
        if not math.isfinite(value) or value < 0:
            raise ConfigError(f"profile {str(self.file)!r}, line {self.line}: {column}={text!r} must be 0 or more")
        return value


def _has(names: Sequence[str], known: Sequence[str]) -> str | None:
    return next((name for name in known if name in names), None)


def _keep(row: _ProfileRow, found: KernelProfile, kernel: str, took: float, names: Sequence[str]) -> None:
    """Put one measurement where it belongs, by the name of its kernel."""
    if not took:
        return  # nothing was measured
    is_attention = not kernel or kernel in (
        *columns.PREFILL_KERNELS,
        *columns.DECODE_KERNELS,
        *columns.ATTENTION_KERNELS,
    )
    if is_attention:
        found.attention.append(_attention(row, kernel, took, names))
        return
    by_rows, by_tokens = _has(names, columns.KERNEL_ROWS), _has(names, columns.KERNEL_TOKENS)
    size = by_rows or by_tokens
    if size is None:
        if kernel.startswith("attn_"):  # Vidur's copies beside attention, which have no column of tokens
            return
        raise ConfigError(
            f"profile {str(row.file)!r} has no column for the size of {kernel!r}: one of "
            f"{', '.join((*columns.KERNEL_TOKENS, *columns.KERNEL_ROWS))}"
        )
    times = found.rows if by_rows is not None or kernel in columns.LOGITS else found.tokens
    times.setdefault(kernel, {}).setdefault(row.number(size), []).append(took)


def _attention(row: _ProfileRow, kernel: str, took: float, names: Sequence[str]) -> Attention:
    chunk, before, rows, context = (
        _has(names, known)
        for known in (
            columns.KERNEL_TOKENS if kernel in columns.ATTENTION_KERNELS else columns.ATTENTION_CHUNK,
            columns.ATTENTION_BEFORE,
            columns.ATTENTION_ROWS,
            columns.ATTENTION_CONTEXT,
        )
    )
    # A kernel that is called attention alone has no rows: one token after a context is a decode row.
    if kernel in columns.ATTENTION_KERNELS:
        size, past = row.number(chunk or "tokens"), row.number(before) if before else 0.0
        return Attention(0.0, 0.0, 1.0, past + 1, took) if size == 1 else Attention(size, past, 0.0, 0.0, took)
    if chunk is None or before is None or rows is None or context is None:
        known = (*columns.ATTENTION_CHUNK, *columns.ATTENTION_ROWS, *columns.ATTENTION_BEFORE)
        raise ConfigError(
            f"profile {str(row.file)!r} has attention without its sizes: columns such as {', '.join(known)}"
        )
    if kernel in columns.PREFILL_KERNELS:
        return Attention(row.number(chunk), row.number(before), 0.0, 0.0, took)
    if kernel in columns.DECODE_KERNELS:
        return Attention(0.0, 0.0, row.number(rows), row.number(context), took)
    return Attention(row.number(chunk), row.number(before), row.number(rows), row.number(context), took)


# Adding up ---------------------------------------------------------------------------------------------------------------


def fit_kernels(profile: KernelProfile, layers: int, name: str = "kernels", *, fixed_s: float = 0.0) -> KernelFit:
    """Add the kernels of a step up.

    layers: of the model, each with all kernels but those of `profile_columns.ONCE` and LOGITS. fixed_s: seconds of a step that
    are in no kernel. Raises ConfigError when a number is wrong.
    """
    if layers < 1 or not (math.isfinite(fixed_s) and fixed_s >= 0):
        raise ConfigError(f"layers={layers} must be 1 or more, and fixed_s={fixed_s} 0 or more")
    # The parts of a step, each summed over its layers.
    tokens = _curve(profile.tokens, layers)
    logits = _curve(profile.rows, layers) if profile.rows else None
    prompts = [one for one in profile.attention if one.chunk and not one.rows]
    prompt, prompt_error = _of_prompts(prompts, layers)
    decode = _surface([(a.rows, a.context, layers * a.seconds) for a in profile.attention if a.rows and not a.chunk])
    mixed = _surface(_beside_prompts(profile.attention, prompts, layers))
    # How well each part is interpolated, and which ones no file has. Without `mixed` decode rows cost the same beside prompts.
    parts = (("decode", decode), ("mixed", mixed))
    errors = [("tokens", len(tokens.sizes), _error_of_curve(tokens))]
    if logits is not None:
        errors.append(("logits", len(logits.sizes), _error_of_curve(logits)))
    errors += [(part, len(s.rows) * len(s.contexts), _error_of_surface(s)) for part, s in parts if s is not None]
    if prompts:
        errors.append(("prompt", len(prompts), prompt_error))
    there = {part for part, _, _ in errors} | ({"mixed"} if decode is not None else set())
    missing = [part for part in ("logits", "decode", "prompt") if part not in there]
    model = KernelModel(tokens, logits, decode, mixed, prompt, name, fixed_s=fixed_s)
    return KernelFit(model, tuple(errors), tuple(missing))


def _curve(times: Times, layers: int) -> Curve:
    """The sum of kernels at every size at which one of them was measured."""
    sizes = np.array(sorted({size for by_size in times.values() for size in by_size}))
    total = np.zeros(sizes.size)
    for kernel, by_size in times.items():
        at = sorted(by_size)
        seconds = [median(by_size[size]) for size in at]
        is_once = kernel in columns.ONCE or kernel in columns.LOGITS
        total += np.interp(sizes, at, seconds) * (1 if is_once else layers * columns.TIMES_IN_A_LAYER.get(kernel, 1))
    return Curve(tuple(sizes.tolist()), tuple(total.tolist()))


def _of_prompts(prompts: Sequence[Attention], layers: int) -> tuple[tuple[float, ...], float]:
    """Coefficients of a chunk, a pair and a token before, with the least relative error, and that error."""
    if not prompts:
        return (0.0, 0.0, 0.0), math.nan
    seconds = layers * np.array([one.seconds for one in prompts])
    used = np.array([(1.0, _pairs(one), one.before) for one in prompts]) / seconds[:, None]
    found = nonnegative_least_squares(used, np.ones(seconds.size))
    return tuple(found.tolist()), float(np.abs(used @ found - 1).mean())


def _pairs(one: Attention) -> float:
    return one.chunk * one.before + one.chunk * (one.chunk + 1) / 2


def _beside_prompts(
    attention: Sequence[Attention], prompts: Sequence[Attention], layers: int
) -> list[tuple[float, float, float]]:
    """What decode rows add to the attention of a chunk that was also measured alone."""
    alone = {(one.chunk, one.before): one.seconds for one in prompts}
    return [
        (one.rows, one.context, layers * max(0.0, one.seconds - alone[one.chunk, one.before]))
        for one in attention
        if one.rows and one.chunk and (one.chunk, one.before) in alone
    ]


def _surface(measured: Sequence[tuple[float, float, float]]) -> Surface | None:
    """Medians at the nodes; nodes at which nothing was measured lie between those of their line, else take the nearest line."""
    if not measured:
        return None
    rows, contexts = (sorted({one[axis] for one in measured}) for axis in (0, 1))
    lines = []
    for row in rows:
        by_context: dict[float, list[float]] = {}
        for _, context, seconds in (one for one in measured if one[0] == row):
            by_context.setdefault(context, []).append(seconds)
        at = sorted(by_context)
        lines.append(tuple(np.interp(contexts, at, [median(by_context[each]) for each in at]).tolist()))
    return Surface(tuple(rows), tuple(contexts), tuple(lines))


def _error_of_curve(curve: Curve) -> float:
    """Mean relative error of each inner node when it is predicted from its neighbours."""
    x, y = np.array(curve.sizes), np.array(curve.seconds)
    if x.size < 3:
        return math.nan
    told = y[:-2] + (y[2:] - y[:-2]) * (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
    return float(np.abs(told / np.maximum(y[1:-1], 1e-12) - 1).mean())


def _error_of_surface(surface: Surface) -> float:
    lines = [Curve(surface.contexts, line) for line in surface.seconds]
    lines += [Curve(surface.rows, column) for column in zip(*surface.seconds, strict=True)]
    errors = [error for line in lines if math.isfinite(error := _error_of_curve(line))]
    return float(np.mean(errors)) if errors else math.nan
