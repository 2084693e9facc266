"""`energy_of`: joules and money of a simulated run, by a model that is stated: `PowerModel`.

A replica takes `idle_w` watts while it is there, and `busy_w` while its worker computes, whatever the step has in it. That is a
line through two points that are measured at the machine. Clocks, temperature and the size of steps are not in it.
A replica costs `price_per_hour` while it is there, and `price_per_kwh` for what it takes. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actorllm.errors import ConfigError, shown

if TYPE_CHECKING:
    from actorllm.slo.simulator import SimulatedRun


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Of one replica, with all that belongs to it. Raises ConfigError for values that make no sense."""

    idle_w: float
    busy_w: float
    price_per_hour: float = 0.0
    price_per_kwh: float = 0.0

    def __post_init__(self) -> None:
        for name in ("idle_w", "busy_w", "price_per_hour", "price_per_kwh"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value < 0:
                raise ConfigError(f"power: {name}={shown(value)} must be a number, 0 or more")
        if self.busy_w < self.idle_w:
            raise ConfigError(f"power: busy_w={self.busy_w} must be at least idle_w={self.idle_w}")

    @classmethod
    def parse(cls, text: str) -> PowerModel:
        """`IDLE_W:BUSY_W[:PRICE_PER_HOUR[:PRICE_PER_KWH]]`. Raises ConfigError."""
        parts = text.split(":")
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            numbers = []
        if not 2 <= len(numbers) <= 4:
            raise ConfigError(
                f"power={text!r:.80} must be IDLE_W:BUSY_W[:PRICE_PER_HOUR[:PRICE_PER_KWH]], such as 75:650:2.5"
            )
        return cls(*numbers)


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """What a run took; NaN where it would be divided by nothing."""

    joules: float
    cost: float
    """In the currency of the prices."""
    utilization: float
    """The share of the time of replicas in which their workers computed."""
    joules_per_request: float
    joules_per_output_token: float
    cost_per_request: float
    cost_per_million_output_tokens: float
    joules_per_good_request: float
    """All of it, shared by the requests that kept their promises."""


def energy_of(run: SimulatedRun, power: PowerModel) -> EnergyUse:
    """Raises ConfigError for a run without the times of its workers (`simulate(metered=True)`)."""
    if not run.busy_s:
        raise ConfigError("energy needs a run that knows how long its workers computed: simulate(..., metered=True)")
    busy, there = math.fsum(run.busy_s), run.replica_seconds
    joules = power.idle_w * there + (power.busy_w - power.idle_w) * busy
    cost = power.price_per_hour * there / 3600 + power.price_per_kwh * joules / 3.6e6
    num_requests, num_tokens = len(run.timeline), int(run.timeline.num_output.sum())
    summary = run.evaluate().summary
    num_good = round(float(summary["request_goodput"]) * float(summary["duration"]))
    return EnergyUse(
        joules,
        cost,
        _ratio(busy, there),
        _ratio(joules, num_requests),
        _ratio(joules, num_tokens),
        _ratio(cost, num_requests),
        1e6 * _ratio(cost, num_tokens),
        _ratio(joules, num_good),
    )


def _ratio(value: float, by: float) -> float:
    return value / by if by else math.nan
