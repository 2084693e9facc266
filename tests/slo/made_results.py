"""Results of sweeps that were never run: what each variant attains at each rate is said by hand."""

from __future__ import annotations

from actorllm.scheduling.policy import POLICIES
from actorllm.slo.experiments import Scenario, SweepResults, Variant


def results_of(
    good_of: dict[str, dict[float, tuple[int, ...]]],
    targets: tuple[float, ...] = (),
    growing: tuple[tuple[str, float], ...] = (),
) -> SweepResults:
    """good_of: for each label and rate how many of 1,000 requests of a block are good, by seed. growing: labels and rates."""
    records = [
        {
            "variant": {"label": label},
            "rate": rate,
            "scale": 1.0,
            "seed": seed,
            "summary": {"actorllm_overall": {"requests": 20_000}},
            "blocks": {"n": [[1000]] * 20, "tpot": [[num]] * 20, "deadline": [[num]] * 20},
            "stationarity": {"verdict": "growing" if (label, rate) in growing else "stationary", "message": ""},
            "warnings": [],
        }
        for label, by_rate in good_of.items()
        for rate, by_seed in by_rate.items()
        for seed, num in enumerate(by_seed)
    ]
    scenario = Scenario(workload="synthetic", num_requests=20_000)
    variants = tuple(Variant.parse(label if label in POLICIES else "fcfs", label) for label in good_of)
    return SweepResults(scenario, variants, (0, 1), tuple(records), targets=targets)
