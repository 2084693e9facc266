"""Is a measured run what the simulator says it is? Each figure is judged by how far off it is.

The run is simulated with its own arrivals and lengths. Nothing is fitted to the requests that are judged. With `fit_share`
the first of the requests choose the coefficients of the step times, and the others are judged. That is the easier case,
since both share a queue. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from actorllm.errors import ConfigError
from actorllm.scheduling.cost_model import AnyModel, LinearModel
from actorllm.slo.calibration import fit_to_run
from actorllm.slo.measured_runs import MeasuredRun
from actorllm.slo.simulator import EngineShape, simulate
from actorllm.slo.timeline import FINISHED

MEAN, TAIL = 0.08, 0.15
"""How far off a mean, and a 99th percentile, may be."""
MIN_OF_TAIL = 100
"""Requests from which on a 99th percentile is judged."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One figure."""

    name: str
    measured: float
    predicted: float
    limit: float | None
    """None: it is told and not judged."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return "not judged"
        if math.isnan(self.error):
            return "not tested"
        return "met" if abs(self.error) <= self.limit else "missed"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What `predict_run` returns."""

    figures: tuple[Judged, ...]
    model: AnyModel
    num_judged: int
    num_fitted: int
    num_unfinished: int = 0
    """Requests that did not finish in the simulation: they are in no figure, and a prediction without them does not hold."""

    @property
    def is_met(self) -> bool:
        return not self.num_unfinished and all(figure.verdict != "missed" for figure in self.figures)


def predict_run(
    run: MeasuredRun,
    shape: EngineShape,
    model: AnyModel,
    *,
    policy: str = "fcfs",
    seed: int = 0,
    fit_share: float = 0.0,
    max_runs: int = 40,
) -> Prediction:
    """Simulate a measured run and judge the latencies.

    fit_share: of the requests, in the order in which they came, that the step times are fitted to. max_runs: simulations of
    that fit. Raises ConfigError when the model has no coefficients to fit, the shape refuses a request, or nothing is left to
    judge.
    """
    if not 0 <= fit_share < 1:
        raise ConfigError(f"fit_share={fit_share} must be 0 or more and below 1")
    run.check_fits(shape.max_model_len)
    num = len(run.workload)
    fitted = np.arange(num) < round(fit_share * num)
    if fitted.any():
        if not isinstance(model, LinearModel):
            raise ConfigError(
                f"only linear step times are fitted to a run; {model.name!r} is none: leave fit_share at 0"
            )
        model = fit_to_run(run.workload, run.timeline, shape, model, fitted, policy=policy, max_runs=max_runs).model
    told = simulate(run.workload, shape, replace(model, residuals=()), policy=policy, seed=seed).timeline
    judged = ~fitted & (told.outcome == FINISHED)
    if not judged.any():
        raise ConfigError("no request is left to judge: none finished in the simulation")
    figures = []
    for name in ("ttft", "tpot", "e2e"):
        # A request with one token has no gap.
        rows = judged & (run.timeline.num_output > 1) if name == "tpot" else judged
        is_promised = name != "e2e"
        if not rows.any():
            figures.append(Judged(f"mean {name}", math.nan, math.nan, MEAN))
            continue
        mine, theirs = getattr(told, name)[rows], getattr(run.timeline, name)[rows]
        figures.append(Judged(f"mean {name}", float(theirs.mean()), float(mine.mean()), MEAN if is_promised else None))
        tail = TAIL if is_promised and int(rows.sum()) >= MIN_OF_TAIL else None
        figures.append(Judged(f"p99 {name}", float(np.quantile(theirs, 0.99)), float(np.quantile(mine, 0.99)), tail))
    num_unfinished = int((told.outcome != FINISHED).sum())
    return Prediction(tuple(figures), model, int(judged.sum()), int(fitted.sum()), num_unfinished)
