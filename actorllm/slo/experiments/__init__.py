"""Experiments: a policy against another over rates, seeds and strictness, with bands and a finding on every point.

`Sweep` runs them (`sweep.py` has an example); `Scenario`, `Variant` and `Point` say what is run, `SweepResults` what came out.
This is the one part of the laboratory that starts processes and writes files.
"""

from actorllm.slo.experiments.bands import Aggregate, Band
from actorllm.slo.experiments.comparison import Standing, Sustained, standing, sustained, sustained_ratio
from actorllm.slo.experiments.point import Point, Scenario, Variant
from actorllm.slo.experiments.pool import PointError
from actorllm.slo.experiments.search import Ladder
from actorllm.slo.experiments.store import read_results
from actorllm.slo.experiments.sweep import MaxRate, Sweep, SweepResults, ratio_band

__all__ = (
    "Aggregate",
    "Band",
    "Ladder",
    "MaxRate",
    "Point",
    "PointError",
    "Scenario",
    "Standing",
    "Sustained",
    "Sweep",
    "SweepResults",
    "Variant",
    "ratio_band",
    "read_results",
    "standing",
    "sustained",
    "sustained_ratio",
)
