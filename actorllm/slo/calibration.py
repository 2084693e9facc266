"""Where the step times of an engine come from.

`steps_of`: a recording of its scheduler (`record="file"`) says of every step when it began and ended, and, replayed, what was
in it. That is what `cost_model.fit` wants.

`fit_to_run`: of another engine one may know only when requests came and went. How long a step took depends on what else was
in it, and that on everything before. So the whole run is simulated, and the coefficients are moved until the simulated
latencies are those that were measured. Only some of the requests are looked at; the others tell how good the model is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from actorllm.errors import ConfigError
from actorllm.messages import F64
from actorllm.scheduling.cost_model import FEATURES, LinearModel, MeasuredSteps, Regime
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.step_time import features_of
from actorllm.scheduling.telemetry.recording import Entry, replay
from actorllm.slo.simulator import EngineShape, simulate
from actorllm.slo.timeline import FINISHED, RunTimeline
from actorllm.slo.workload import Workload

LATENCIES = ("ttft", "tpot", "e2e")
QUANTILES = (0.1, 0.5, 0.9)
MAX_RUNS = 60
"""Simulations of a fit."""


def steps_of(entries: Iterable[Entry], scheduler: Scheduler) -> MeasuredSteps:
    """The steps of a recording that were finished; scheduler: a fresh one of the same configuration."""
    in_flight: dict[int, dict[str, float]] = {}
    rows: list[dict[str, float]] = []

    def watched() -> Iterator[Entry]:
        """The entries; each is asked for when the one before it has been carried out."""
        for call, now, argument in entries:
            yield call, now, argument
            if call == "schedule" and len(scheduler.ledger) and scheduler.ledger.newest.step not in in_flight:
                record = scheduler.ledger.newest
                told = zip(FEATURES[1:], features_of(record, scheduler), strict=True)
                in_flight[record.step] = {**dict(told), "launched": record.launched}
            elif call == "update":
                row = in_flight.pop(argument.step, None)
                if row is not None:
                    rows.append(row | {"started": argument.started, "ended": argument.ended})
            elif call == "fail":  # void, and the steps behind it
                for step in [step for step in in_flight if step >= argument.step]:
                    del in_flight[step]

    for _ in replay(watched(), scheduler):
        pass
    return MeasuredSteps.of(rows)


@dataclass(frozen=True, slots=True, eq=False)
class RunFit:
    """What `fit_to_run` returns."""

    model: LinearModel
    seen: dict[str, float]
    """Simulated mean / measured mean - 1 of each latency, over the requests that were fitted to."""
    unseen: dict[str, float]
    """The same over all others."""
    num_runs: int


def fit_to_run(
    workload: Workload,
    measured: RunTimeline,
    shape: EngineShape,
    start: LinearModel,
    rows: NDArray[np.bool_],
    *,
    policy: str = "fcfs",
    max_runs: int = MAX_RUNS,
) -> RunFit:
    """Move the coefficients of `start` that are not zero until the simulated run is like the measured one on `rows`.

    measured has a row per request of the workload. Raises ConfigError when nothing was measured of `rows`.
    """
    rows = rows & (measured.outcome == FINISHED)
    if not rows.any():
        raise ConfigError("none of the requests to fit to was finished in the measured run")
    others = ~rows & (measured.outcome == FINISHED)
    every = (*start.regimes, *start.decode_regimes)
    initial = np.array([regime.coefficients for regime in every])
    is_moved = initial > 0

    def model_of(point: F64) -> LinearModel:
        moved = initial.copy()
        moved[is_moved] *= np.exp(point)
        found = tuple(Regime(regime.max_tokens, tuple(c)) for regime, c in zip(every, moved.tolist(), strict=True))
        num = len(start.regimes)
        return replace(start, regimes=found[:num], decode_regimes=found[num:])

    def run(point: F64) -> RunTimeline:
        return simulate(workload, shape, model_of(point), policy=policy).timeline

    def having(name: str, which: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """A request with one token has no gap."""
        return which & (measured.num_output > 1) if name == "tpot" else which

    def error(point: F64) -> float:
        timeline = run(point)
        wrong = 0.0
        for name in LATENCIES:
            mine = having(name, rows)
            told, truth = getattr(timeline, name)[mine], getattr(measured, name)[mine]
            if not truth.size:
                continue
            if not np.isfinite(told).all():
                return math.inf
            wrong += 3 * (told.mean() / truth.mean() - 1) ** 2
            wrong += sum((np.quantile(told, q) / np.quantile(truth, q) - 1) ** 2 for q in QUANTILES)
        # Of two models that explain the run alike, the one nearer to where the search began.
        return float(wrong + 1e-3 * (point**2).mean())

    point, num_runs = nelder_mead(error, np.zeros(int(is_moved.sum())), 0.15, max_runs)
    found = run(point)

    def off(which: NDArray[np.bool_]) -> dict[str, float]:
        return {
            name: float(getattr(found, name)[mine].mean() / getattr(measured, name)[mine].mean() - 1)
            for name in LATENCIES
            if (mine := having(name, which)).any()
        }

    return RunFit(model_of(point), off(rows), off(others), num_runs + 1)


def guess(workload: Workload, measured: RunTimeline, name: str = "fitted") -> LinearModel:
    """Where `fit_to_run` may begin if nothing else is known: short gaps are steps, quick first tokens are prompts.

    A decode row and all that it attends to take a hundredth of a step each. Raises ConfigError when no request was finished.
    """
    done = measured.outcome == FINISHED
    if not done.any():
        raise ConfigError("no request was finished in the measured run")
    per_token = float(np.quantile(measured.ttft[done] / workload.num_prompt[done], 0.05))
    several = done & (measured.num_output > 1)
    step = float(np.quantile(measured.tpot[several] if several.any() else measured.ttft[done], 0.05))
    step = max(step, 1e-6)
    context = float((workload.num_prompt + workload.num_output / 2)[done].mean())
    coefficients = (step, max(per_token, 1e-9), step / 100, step / 100 / context, 0.0, 0.0)
    return LinearModel((Regime(math.inf, coefficients),), name)


def nelder_mead(function: Callable[[F64], float], start: F64, size: float, max_calls: int) -> tuple[F64, int]:
    """The best point that a simplex of this size found (Nelder and Mead 1965), and how often the function was called."""
    calls = 0

    def value(point: F64) -> float:
        nonlocal calls
        calls += 1
        return function(point)

    simplex = [start, *(start + size * unit for unit in np.eye(start.size))]
    values = [value(point) for point in simplex]
    while calls < max_calls:
        order = np.argsort(values, kind="stable")
        simplex, values = [simplex[i] for i in order], [values[i] for i in order]
        if max(float(np.abs(point - simplex[0]).max()) for point in simplex[1:]) < 1e-4:
            break
        centre = np.mean(simplex[:-1], axis=0)
        away = centre - simplex[-1]
        reflected = centre + away
        at_reflected = value(reflected)
        if at_reflected < values[0]:
            expanded = centre + 2 * away
            at_expanded = value(expanded)
            if at_expanded < at_reflected:
                reflected, at_reflected = expanded, at_expanded
        elif at_reflected >= values[-2]:
            reflected = centre + 0.5 * away if at_reflected < values[-1] else centre - 0.5 * away
            at_reflected = value(reflected)
            if at_reflected >= values[-1]:  # nothing along this line: draw everything towards the best
                simplex = [simplex[0], *((point + simplex[0]) / 2 for point in simplex[1:])]
                values = [values[0], *(value(point) for point in simplex[1:])]
                continue
        simplex[-1], values[-1] = reflected, at_reflected
    best = int(np.argmin(values))
    return simplex[best], calls
