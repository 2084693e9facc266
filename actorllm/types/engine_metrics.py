"""What `get_metrics` returns: counters, gauges and histograms, by vLLM's names (`vllm.v1.metrics.reader`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Metric:
    """One value, or one histogram, with its labels."""

    name: str
    """With its prefix: "vllm:" for what vLLM counts under this name, too, else "actorllm:"."""
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(Metric):
    """What only grows, since the scheduler started."""

    value: float


@dataclass(slots=True)
class Vector(Metric):
    """Counters in a row. No metric is one; programs test for the class."""

    values: list[int]


@dataclass(slots=True)
class Gauge(Metric):
    """What is so now."""

    value: float


@dataclass(slots=True)
class Histogram(Metric):
    """How often values were at most so large."""

    count: int
    """Of all values."""
    sum: float
    """Of all values."""
    buckets: dict[str, int]
    """By upper bound, "+Inf" the last: how many values are at most that."""
