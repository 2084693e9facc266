"""Which objectives of a workload no scheduling could meet: a fitted step model says what an empty engine would take."""

from __future__ import annotations

import numpy as np

from actorllm.scheduling.cost_model import StepModel, predict
from actorllm.slo.workload import Workload


def unattainable(workload: Workload, model: StepModel) -> list[str]:
    """Which objectives of a workload not even an empty engine with this model would meet, and for how many requests."""
    found = []
    promises = workload.promises
    for number, kind in enumerate(workload.classes):
        mine = workload.class_ids == number
        num = int(mine.sum())
        limits = promises.select(mine)
        if not num or not np.isfinite((limits.ttft, limits.tpot, limits.e2e)).any():
            continue
        size, steps = workload.num_prompt[mine].astype(float), workload.num_output[mine] - 1
        sizes, which = np.unique(size, return_inverse=True)
        none, row = np.zeros(sizes.size), np.ones(sizes.size)
        prefill = predict(model, np.stack((row, sizes, none, none, none, sizes * (sizes + 1) / 2), axis=1))[which]
        one = predict(model, np.stack((row, none, row, sizes, none, none), axis=1))[which]
        for label, limit, least, why in (
            ("ttft", limits.ttft + limits.ttft_per_prompt_token * size, prefill, "the prompt alone takes"),
            ("tpot", limits.tpot, one, "a step with no other request takes"),
            ("e2e", limits.e2e, prefill + steps * one, "on an empty engine it takes"),
        ):
            missed = int((least > limit).sum())
            if missed:
                found.append(
                    f"class {kind.name!r}: {label} cannot be met by {missed} of {num} requests with {model.name}: "
                    f"{why} up to {float(least.max()):.3g} s"
                )
    return found
