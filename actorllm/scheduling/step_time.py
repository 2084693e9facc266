"""What policies know of the duration of steps: `StepTime`, learned while the engine runs, and how large a step may be.

A policy may be given a fitted model instead (`scheduling.cost_model`): whatever has its `seconds`. `CorrectedStepTime` lets
such a model follow the engine that it was not fitted to. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from actorllm.messages import F64
from actorllm.scheduling.policy import StepDone, View

if TYPE_CHECKING:
    from actorllm.scheduling.batch import Batch
    from actorllm.scheduling.ledger import StepRecord

CHUNKS = (2552, 2048, 1792, 1536, 1280, 1024, 768, 512, 256, 128)
"""Tokens of a step to choose from, as in the artifact of QoServe. Fewer would waste the machine."""


class Predicts(Protocol):
    def seconds(
        self, p: float, d: float, decode_context: float, prefill_context: float = 0.0, prefill_pairs: float = 0.0
    ) -> float:
        """Of a step with p prompt tokens and d decode rows that attend to so many tokens."""
        ...


class HasBatch(Protocol):
    """A scheduler, as far as `features_of` asks it."""

    @property
    def batch(self) -> Batch: ...


def features_of(record: StepRecord, scheduler: HasBatch) -> tuple[int, int, int, int, int]:
    """p, d, decode_context, prefill_context and prefill_pairs (`scheduling.cost_model`) of the step that was planned last."""
    computed, d = scheduler.batch.num_computed, record.num_decode
    context = int(computed[record.rows.index[:d]].sum()) if d else 0
    left = record.num_tokens - d
    before = pairs = 0
    for sequence, size in record.prefills:
        if left <= 0:
            break  # what follows are forks, which compute nothing
        left -= size
        had = computed.item(sequence.slot) - size
        before += had
        pairs += size * had + size * (size + 1) // 2
    return record.num_tokens - d, d, context, before, pairs


class StepTime:
    """Re-estimated with every step: recursive least squares with forgetting over 1, p, d and the context of the decode.

    Predicts nothing (0 seconds) before it has seen MIN_STEPS steps. Durations are weighted by their inverse, so that the
    relative error counts. forgetting: after 1 / (1 - forgetting) steps, what was seen before counts for a third.

    In plain floats: with arrays of four numbers, a step would take several times as long.
    """

    MIN_STEPS = 20
    SCALE = (1.0, 1e-3, 1e-2, 1e-5)
    MAX_COVARIANCE = 1e6
    """What the variance of a weight tends to that no step tells anything of."""

    def __init__(self, forgetting: float = 0.995) -> None:
        self._forgetting = forgetting
        self._weights = [0.0] * 4
        self._covariance = [[1e4 if row == column else 0.0 for column in range(4)] for row in range(4)]
        self._rates = [0.0] * 4
        self.num_steps = 0

    def observe(self, p: float, d: float, decode_context: float, seconds: float) -> None:
        if seconds <= 0:
            return
        self.num_steps += 1
        _, scale_p, scale_d, scale_context = self.SCALE
        row = (1.0 / seconds, p * scale_p / seconds, d * scale_d / seconds, decode_context * scale_context / seconds)
        forgetting, covariance = self._forgetting, self._covariance
        spread = [_dot(line, row) for line in covariance]
        norm = forgetting + _dot(spread, row)
        error = (1.0 - _dot(self._weights, row)) / norm
        self._weights = [weight + error * s for weight, s in zip(self._weights, spread, strict=True)]
        rate = max(1 - forgetting, 1 / self.num_steps)
        self._rates = [mean + rate * (now - mean) for mean, now in zip(self._rates, row, strict=True)]
        # s * t is t * s to the last bit, so that the matrix stays symmetric.
        covariance = [
            [(value - s * t / norm) / forgetting for value, t in zip(line, spread, strict=True)]
            for line, s in zip(covariance, spread, strict=True)
        ]
        # What no step tells apart is forgotten as well, and would grow without bound. Each step therefore counts as a very
        # inexact observation of one of the weights, which agrees with what is known of it.
        line = covariance[self.num_steps % 4]
        norm = self.MAX_COVARIANCE / (4 * max(1 - forgetting, 1e-6)) + line[self.num_steps % 4]
        self._covariance = [
            [value - s * t / norm for value, t in zip(values, line, strict=True)]
            for values, s in zip(covariance, line, strict=True)
        ]

    @property
    def weights(self) -> F64:
        """Seconds: of a step, of a prompt token, of a decode row, of a token of its context: [4]."""
        return np.array(self.learnt[:4])

    @property
    def rates(self) -> F64:
        """What the last steps did in a second, as means: steps, prompt tokens, decode rows, tokens of context: [4]."""
        return np.array(self.learnt[4:])

    @property
    def learnt(self) -> list[float]:
        """The weights, then the rates."""
        weights = [weight * scale for weight, scale in zip(self._weights, self.SCALE, strict=True)]
        return weights + [rate / scale for rate, scale in zip(self._rates, self.SCALE, strict=True)]

    def seconds(
        self, p: float, d: float, decode_context: float, prefill_context: float = 0.0, prefill_pairs: float = 0.0
    ) -> float:
        if self.num_steps < self.MIN_STEPS:
            return 0.0
        _, scale_p, scale_d, scale_context = self.SCALE
        predicted = _dot(self._weights, (1.0, p * scale_p, d * scale_d, decode_context * scale_context))
        return max(0.0, float(predicted))


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    """Of four numbers each."""
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]


class CorrectedStepTime:
    """A fitted model times a factor that follows the engine: one for steps with prompts, one for those without.

    The machine may be slower than the one that the model was fitted on, or share its cores with others. A factor is the
    geometric mean of measured / predicted over the last 1 / RATE steps or so. It never leaves 1 / BOUND to BOUND: beyond
    that the model is of another engine, and a wrong one would be hidden. `statistics` tells how wrong it is.
    """

    RATE = 0.02
    BOUND = 4.0
    MAX_JUMP = math.log(2.0)
    """One step counts for no more than twice or half the time that was expected: a host that was busy is no trend."""

    def __init__(self, model: Predicts, name: str = "model") -> None:
        self._model = model
        self._name = name
        self._log_factors = [0.0, 0.0]
        self._num_steps = [0, 0]
        self._error = self._corrected_error = self._bias = 0.0

    def observe(
        self,
        p: float,
        d: float,
        decode_context: float,
        seconds: float,
        prefill_context: float = 0.0,
        prefill_pairs: float = 0.0,
    ) -> None:
        """A step of this contents took so long."""
        expected = self._model.seconds(p, d, decode_context, prefill_context, prefill_pairs)
        if seconds <= 0 or expected <= 0:
            return
        kind = int(p > 0)
        was = self._log_factors[kind]
        self._num_steps[kind] += 1
        off = math.log(seconds / expected) - was
        rate = max(self.RATE, 1 / (self._num_steps[kind] + 1))
        moved = was + rate * max(-self.MAX_JUMP, min(off, self.MAX_JUMP))
        limit = math.log(self.BOUND)
        self._log_factors[kind] = max(-limit, min(moved, limit))
        rate = max(self.RATE, 1 / sum(self._num_steps))
        self._error += rate * (abs(expected / seconds - 1) - self._error)
        self._corrected_error += rate * (abs(math.exp(-off) - 1) - self._corrected_error)
        self._bias += rate * (expected / seconds - 1 - self._bias)

    def seconds(
        self, p: float, d: float, decode_context: float, prefill_context: float = 0.0, prefill_pairs: float = 0.0
    ) -> float:
        factor = math.exp(self._log_factors[int(p > 0)])
        return factor * self._model.seconds(p, d, decode_context, prefill_context, prefill_pairs)

    def statistics(self) -> dict[str, Any]:
        """mape and bias: of the model over the last steps, relative to what they took; corrected_mape: with the factors.

        The error of a step is that before it was learned from.
        """
        return {
            "name": self._name,
            "num_steps": sum(self._num_steps),
            "mape": self._error,
            "corrected_mape": self._corrected_error,
            "bias": self._bias,
            "decode_factor": math.exp(self._log_factors[0]),
            "prefill_factor": math.exp(self._log_factors[1]),
        }


class Pace:
    """A policy's view of time: what the step in flight still takes, and the largest step that ends in time."""

    DRAFT_RATE = 0.1
    """The share of the newest step in the mean number of drafts."""

    def __init__(self, step_time: Predicts | None = None, safety: float = 1.2) -> None:
        self.step_time: Predicts = StepTime() if step_time is None else step_time
        self.safety = safety
        """Predictions are taken to be so many times too short."""
        self._learns = step_time is None
        self.is_corrected = isinstance(step_time, CorrectedStepTime)
        """Steps without prompts tell something, too: a policy with this is to be told of all of them."""
        self._planned_at = self._planned_s = 0.0
        self._drafts_per_row = 0.0
        """Of the last steps: each draft takes what a decode row does, and how many there will be only the workers know."""

    def on_step(self, done: StepDone, view: View) -> None:
        p, slots, took = done.num_prefill_tokens, done.slots, done.ended - done.started
        d = slots.size + done.num_drafted
        if slots.size:
            self._drafts_per_row += self.DRAFT_RATE * (done.num_drafted / slots.size - self._drafts_per_row)
        if self._learns and isinstance(self.step_time, StepTime):
            self.step_time.observe(p, d, int(view.batch.num_computed[slots].sum()), took)
        elif isinstance(self.step_time, CorrectedStepTime):
            context = int(view.batch.num_computed[slots].sum())
            self.step_time.observe(p, d, context, took, 0, p * p / 2)  # as if there was one prompt, from its start

    def free_at(self, view: View) -> float:
        """When the worker is done with the steps in flight. The newest was planned by `largest`, or only decodes."""
        if not view.num_in_flight:
            return view.now
        alone = self.step_time.seconds(0, self._rows(view), self._context(view))
        is_known = view.now - self._planned_at <= 2 * max(self._planned_s, alone)
        return view.now + (self._planned_s if is_known else alone)

    def _rows(self, view: View) -> float:
        """Decode rows, and drafts of them as far as the last steps tell."""
        return view.decode_slots.size * (1 + self._drafts_per_row)

    @staticmethod
    def _context(view: View) -> int:
        return int(view.batch.num_computed[view.decode_slots].sum())

    def sizes(self, view: View) -> list[tuple[int, float]]:
        """Tokens of a step and the seconds that it would take, largest first: what the engine allows, then those of CHUNKS."""
        d, context, rows = view.decode_slots.size, self._context(view), self._rows(view)
        before = max((int(view.batch.num_computed[s.slot]) for s in view.prefilling), default=0)
        most = view.limits.max_tokens
        found = []
        for size in (most, *(size for size in CHUNKS if size < most)):
            p = max(0, size - d)
            found.append((size, self.step_time.seconds(p, rows, context, before, p * (before + p / 2))))
        return found

    def expect(self, seconds: float, view: View) -> None:
        """The step that is planned now takes so long, for `free_at` of the next one."""
        self._planned_at, self._planned_s = view.now, seconds

    def largest(self, view: View, until: float) -> int:
        """Tokens (decode rows and prompts) of the largest step that is over before `until`: what the engine allows, or one
        of CHUNKS; the smallest of them if none is."""
        d, context, start = view.decode_slots.size, self._context(view), self.free_at(view)
        rows = self._rows(view)
        before = max((int(view.batch.num_computed[s.slot]) for s in view.prefilling), default=0)
        most = view.limits.max_tokens
        tokens, took = most, 0.0
        for size in (most, *(size for size in CHUNKS if size < most)):
            p = max(0, size - d)
            tokens, took = size, self.step_time.seconds(p, rows, context, before, p * (before + p / 2))
            if start + self.safety * took <= until:
                break
        self._planned_at, self._planned_s = view.now, took
        return tokens
