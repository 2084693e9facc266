"""How far a step-time model can be believed, by kind of step; and one fitted to the steps of a recording.

A mean over all steps tells little: of a thousand steps, few have prompts, and the model is mostly asked about these. So errors
are told by kind: decode steps by how many rows they have, steps with prompts by their tokens.

A recording may hold few steps, so `fit_recording` fits to all of them but the cold ones. The error is that of cross-validation:
each step is predicted by a model that was fitted without it. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from actorllm.errors import ConfigError
from actorllm.messages import F64
from actorllm.scheduling.cost_model import LinearModel, MeasuredSteps, fit, fit_coefficients, predict

StepKind = Literal["decode", "prompt"]
KINDS: dict[StepKind, str] = {"decode": "decode steps", "prompt": "steps with prompts"}
NUM_FOLDS = 10
MAX_JUDGED = 2000
"""Steps of each kind that are cross-validated: of a long recording, evenly spread ones."""
LARGE_ERROR = 0.25
"""A mean error above which seconds are not divided up by the model: the parts would be wrong by about as much."""


@dataclass(frozen=True, slots=True)
class StepError:
    """How well steps of one kind and size are predicted."""

    kind: StepKind
    first: int
    last: int
    """Decode rows, or tokens of steps with prompts, from the first to the last number."""
    num_steps: int
    error: float
    """Mean absolute error relative to the measurement."""
    bias: float
    """Sum of predictions / sum of measurements - 1."""

    @property
    def label(self) -> str:
        size = str(self.first) if self.first == self.last else f"{self.first} to {self.last}"
        return f"decode, {size} rows" if self.kind == "decode" else f"with prompts, {size} tokens"


def errors_by_size(features: F64, measured: F64, predicted: F64) -> list[StepError]:
    """features: [num_steps, 6] as in `cost_model.FEATURES`; seconds of the same steps. Sizes are powers of two."""
    found = []
    has_prompt = features[:, 1] > 0
    tokens = (features[:, 1] + features[:, 2]).astype(np.int64)
    power = np.ceil(np.log2(np.maximum(tokens, 1))).astype(np.int64)
    for kind, rows in (("decode", ~has_prompt), ("prompt", has_prompt)):
        for number in np.unique(power[rows]).tolist():
            mine = rows & (power == number)
            found.append(
                StepError(
                    kind,  # type: ignore[arg-type]
                    int(tokens[mine].min()),
                    int(tokens[mine].max()),
                    int(mine.sum()),
                    _mape(measured[mine], predicted[mine]),
                    float(predicted[mine].sum() / measured[mine].sum() - 1),
                )
            )
    return found


def errors_by_kind(features: F64, measured: F64, predicted: F64) -> dict[StepKind, float]:
    """Mean absolute error of each kind of step that is there, relative to the measurement."""
    has_prompt = features[:, 1] > 0
    kinds: tuple[tuple[StepKind, NDArray[np.bool_]], ...] = (("decode", ~has_prompt), ("prompt", has_prompt))
    return {kind: _mape(measured[rows], predicted[rows]) for kind, rows in kinds if rows.any()}


def _mape(measured: F64, predicted: F64) -> float:
    return float((np.abs(predicted - measured) / measured).mean())


def repeatability(log: MeasuredSteps) -> float:
    """Median relative difference of decode steps in a row with the same number of rows: what no model can predict.

    NaN: there are none.
    """
    taken = log.ended - log.started
    alike = (log.p[1:] == 0) & (log.p[:-1] == 0) & (log.d[1:] == log.d[:-1]) & (taken[1:] > 0) & (taken[:-1] > 0)
    return float(np.median(np.abs(taken[1:] / taken[:-1] - 1)[alike])) if alike.any() else math.nan


@dataclass(frozen=True, slots=True, eq=False)
class RecordingFit:
    """What `fit_recording` returns."""

    model: LinearModel
    errors: dict[StepKind, float]
    """Of each kind of step that was seen, on steps that the model was not fitted to."""
    num_steps: dict[StepKind, int]
    """That were fitted to."""
    num_cold: int
    """That were left out."""
    warnings: tuple[str, ...]

    def is_sure_of(self, kind: StepKind) -> bool:
        """Whether what a step of this kind would have taken with less in it can be told."""
        return self.errors.get(kind, 1.0) <= LARGE_ERROR

    def told(self) -> list[str]:
        """For people: the error, and what limits it."""
        shares = [f"{self.errors[k]:.0%} of {self.num_steps[k]} {KINDS[k]}" for k in KINDS if k in self.errors]
        cold = f", without the {self.num_cold} first of their kind" if self.num_cold else ""
        text = f"step times are fitted to this recording{cold}; mean error {' and '.join(shares)}"
        return [text, *self.warnings]


def fit_recording(log: MeasuredSteps) -> RecordingFit | None:
    """None: there are too few steps for a model.

    The first step of each kind is left out: it pays for what later ones find warm.
    """
    taken = log.ended - log.started
    usable = np.isfinite(taken) & (taken > 0) & (log.p + log.d > 0)
    cold = np.zeros(len(log), np.bool_)
    for rows in (usable & (log.p > 0), usable & (log.p == 0)):
        if rows.any():
            cold[int(np.argmax(rows))] = True
    kept = MeasuredSteps(*(getattr(log, column)[~cold] for column in MeasuredSteps.__slots__))
    try:
        found = fit(kept, "fitted to these steps", hold_out=0)
    except ConfigError:
        return None
    features, measured = log.features()[usable & ~cold], taken[usable & ~cold]
    has_prompt = features[:, 1] > 0
    judged = of_each_kind(has_prompt, MAX_JUDGED)
    predicted = _cross_validated(features[judged], measured[judged], has_prompt[judged])
    return RecordingFit(
        found.model,
        errors_by_kind(features[judged], measured[judged], predicted),
        {"decode": int((~has_prompt).sum()), "prompt": int(has_prompt.sum())},
        int(cold.sum()),
        found.warnings,
    )


def of_each_kind(has_prompt: NDArray[np.bool_], most: int) -> NDArray[np.intp]:
    """Rows of steps, in order: at most so many of each kind, evenly spread."""

    def spread(rows: NDArray[np.intp]) -> NDArray[np.intp]:
        return rows[np.linspace(0, rows.size - 1, min(rows.size, most)).astype(np.intp)] if rows.size else rows

    return np.sort(np.concatenate([spread(np.flatnonzero(kind)) for kind in (has_prompt, ~has_prompt)]))


def _cross_validated(features: F64, measured: F64, has_prompt: NDArray[np.bool_]) -> F64:
    """What a model that was fitted to the other folds predicts for each step. Each kind is spread over all folds, so that
    of two steps with prompts one predicts the other."""
    fold = np.zeros(measured.size, np.int64)
    for rows in (has_prompt, ~has_prompt):
        fold[rows] = np.arange(int(rows.sum())) % NUM_FOLDS
    predicted = np.empty(measured.size)
    for number in range(NUM_FOLDS):
        held = fold == number
        if held.any():
            predicted[held] = predict(fit_coefficients(features[~held], measured[~held]), features[held])
    return predicted


def told_by_size(found: Sequence[StepError]) -> list[tuple[str, str, str, str]]:
    """Rows of a table: kind and size, steps, error, bias."""
    return [(one.label, f"{one.num_steps:,}", f"{one.error:.1%}", f"{one.bias:+.1%}") for one in found]


__all__ = (
    "LARGE_ERROR",
    "RecordingFit",
    "StepError",
    "StepKind",
    "errors_by_kind",
    "errors_by_size",
    "fit_recording",
    "of_each_kind",
    "repeatability",
    "told_by_size",
)
