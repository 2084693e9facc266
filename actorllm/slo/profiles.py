"""Step times from a profile: measured steps in a CSV file, fitted to a table for each kind of step.

The error of the fit is that of cross-validation. Each step is predicted by tables that were made without it, so by
interpolation between its neighbours, as a simulation does. Pure but for reading the file.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from actorllm.errors import ConfigError
from actorllm.messages import F64
from actorllm.scheduling.cost_model import FEATURES, nonnegative_least_squares, predict
from actorllm.scheduling.step_tables import KindTable, TableModel
from actorllm.slo import profile_columns as columns
from actorllm.slo.step_fit import StepError, errors_by_size

MIN_ROWS = 8
"""Of a kind of step, or it has no table of its own."""
MAX_SIZES, MAX_COLUMNS = 24, 8
"""Nodes of a table."""
NUM_FOLDS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Measured steps: features as in `cost_model.FEATURES` ([n, 6]), and their seconds."""

    features: F64
    seconds: F64
    num_skipped: int

    def __len__(self) -> int:
        return self.seconds.size


@dataclass(frozen=True, slots=True, eq=False)
class ProfileFit:
    """What `fit_profile` returns."""

    model: TableModel
    mape: float
    """Mean absolute error relative to the measurement, by cross-validation."""
    bias: float
    errors: tuple[StepError, ...]
    """By kind and size of step, by cross-validation."""
    num_steps: int


def read_profile(path: str | Path) -> Profile:
    """Raises ConfigError naming the file, and the column that is missing, or the line that cannot be read."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"profile {str(path)!r} cannot be read: {error}") from error
    if not rows:
        raise ConfigError(f"profile {str(path)!r} has no rows below its header")
    # Which column says what; the last four may be missing.
    names = [name for name in rows[0] if name is not None]
    found = {
        "p": _named(path, names, "prompt tokens", columns.PROMPT_TOKENS),
        "d": _named(path, names, "decode rows", columns.DECODE_ROWS),
        "took": _named(path, names, "the duration of a step", tuple(columns.DURATION)),
        "context": next((name for name in columns.DECODE_CONTEXT if name in names), None),
        "row context": next((name for name in columns.ROW_CONTEXT if name in names), None),
        "before": next((name for name in columns.PREFILL_CONTEXT if name in names), None),
        "pairs": next((name for name in columns.PREFILL_PAIRS if name in names), None),
    }
    # Rows of nothing are counted, and all others must be numbers.
    features, seconds = [], []
    num_skipped = 0
    for number, row in enumerate(rows, 2):
        values = _values(path, number, row, found)
        p, d, took = values["p"], values["d"], values["took"]
        if p + d <= 0 or not took > 0:
            num_skipped += 1
            continue
        # A profile that tells of each row is told of all together, and prompts without a past attend to themselves.
        context = values["context"] if found["context"] else d * values["row context"]
        before = values["before"]
        pairs = values["pairs"] if found["pairs"] else p * (p + 1) / 2 + p * before
        features.append((1.0, p, d, context if d else 0.0, before, pairs))
        seconds.append(took * columns.DURATION[str(found["took"])])
    if not seconds:
        raise ConfigError(f"profile {str(path)!r}: no row has tokens and a duration above 0")
    return Profile(np.array(features), np.array(seconds), num_skipped)


def _named(path: str | Path, names: Sequence[str], what: str, known: Sequence[str]) -> str:
    for name in known:
        if name in names:
            return name
    raise ConfigError(
        f"profile {str(path)!r} has no column for {what}: one of {', '.join(known)}; it has {', '.join(names[:20])}"
    )


def _values(
    path: str | Path, line: int, row: Mapping[str, str | None], found: Mapping[str, str | None]
) -> dict[str, float]:
    values = {}
    for what, name in found.items():
        text = "0" if name is None else row.get(name)
        try:
            values[what] = float(text or "")
        except ValueError:
            raise ConfigError(f"profile {str(path)!r}, line {line}: {name}={text!r} is no number") from None
        if not math.isfinite(values[what]) or values[what] < 0:
            raise ConfigError(f"profile {str(path)!r}, line {line}: {name}={text!r} must be 0 or more")
    return values


def fit_profile(profile: Profile, name: str = "profile", shrink: float = 0.0) -> ProfileFit:
    """Fit a `TableModel`. shrink: so many steps that say nothing are added at each node: for steps that vary by chance.

    Raises ConfigError when there are too few steps of both kinds.
    """
    features, seconds = profile.features, profile.seconds
    model = fit_tables(features, seconds, name, shrink)
    predicted = np.full(seconds.size, np.nan)
    has_prompt = features[:, 1] > 0
    for kind in (has_prompt, ~has_prompt):
        rows = np.flatnonzero(kind)
        for fold in range(NUM_FOLDS):
            held = rows[fold::NUM_FOLDS]
            others = np.setdiff1d(rows, held)
            if held.size and others.size >= MIN_ROWS:
                predicted[held] = predict(fit_tables(features[others], seconds[others], name, shrink), features[held])
    judged = np.isfinite(predicted)
    if not judged.any():
        raise ConfigError(
            f"a profile needs at least {2 * MIN_ROWS} steps of one kind to be judged; it has {len(profile)}"
        )
    features, seconds, predicted = features[judged], seconds[judged], predicted[judged]
    return ProfileFit(
        model,
        float((np.abs(predicted - seconds) / seconds).mean()),
        float(predicted.sum() / seconds.sum() - 1),
        tuple(errors_by_size(features, seconds, predicted)),
        len(profile),
    )


def fit_tables(features: F64, seconds: F64, name: str, shrink: float = 0.0) -> TableModel:
    """A table for each kind of step that has MIN_ROWS of them. Raises ConfigError if none has."""
    has_prompt = features[:, 1] > 0
    decode, prompt = (
        _table(features[rows], seconds[rows], is_decode, shrink) if int(rows.sum()) >= MIN_ROWS else None
        for rows, is_decode in ((~has_prompt, True), (has_prompt, False))
    )
    if decode is None and prompt is None:
        raise ConfigError(f"a profile needs at least {MIN_ROWS} steps of one kind; it has {seconds.size}")
    return TableModel(decode, prompt, name, floor_s=float(seconds.min()) / 2)


def _table(features: F64, seconds: F64, is_decode: bool, shrink: float) -> KindTable:
    used = features.copy()
    if is_decode:
        used[:, [FEATURES.index("p"), FEATURES.index("prefill_context"), FEATURES.index("prefill_pairs")]] = 0.0
    # Divided by what was measured, so that the relative error counts.
    coefficients = nonnegative_least_squares(used / seconds[:, None], np.ones(seconds.size))
    sums = used @ coefficients
    d = features[:, 2]
    if is_decode:
        first, second = d, features[:, 3] / np.maximum(d, 1)
    else:
        first, second = features[:, 1], d
    sizes, others = _nodes(first, MAX_SIZES), _nodes(second, MAX_COLUMNS)
    ratios = seconds / np.maximum(sums, 1e-12)
    row, column = _nearest(sizes, first), _nearest(others, second)
    factors = np.full((sizes.size, others.size), np.nan)
    for i, j in set(zip(row.tolist(), column.tolist(), strict=True)):
        mine = ratios[(row == i) & (column == j)]
        factors[i, j] = (mine.size * float(np.median(mine)) + shrink) / (mine.size + shrink)
    _fill(factors, np.log1p(sizes), np.log1p(others))
    return KindTable(
        tuple(coefficients.tolist()),
        tuple(sizes.tolist()),
        tuple(others.tolist()),
        tuple(tuple(line) for line in factors.tolist()),
    )


def _nodes(values: F64, most: int) -> F64:
    """Those that occur; of many different ones, evenly spread by how often they occur."""
    unique = np.unique(values)
    if unique.size <= most:
        return unique
    return np.unique(np.quantile(values, np.linspace(0, 1, most), method="nearest"))


def _nearest(nodes: F64, values: F64) -> NDArray[np.intp]:
    found: NDArray[np.intp] = np.abs(np.log1p(values)[:, None] - np.log1p(nodes)[None, :]).argmin(axis=1)
    return found


def _fill(factors: F64, x: F64, y: F64) -> None:
    """Nodes at which nothing was measured take what the nearest one says."""
    known = np.argwhere(np.isfinite(factors))
    for i, j in np.argwhere(~np.isfinite(factors)).tolist():
        distance = np.hypot(x[known[:, 0]] - x[i], y[known[:, 1]] - y[j])
        a, b = known[int(distance.argmin())].tolist()
        factors[i, j] = factors[a, b]
