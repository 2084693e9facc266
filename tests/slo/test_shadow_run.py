"""Beside which policy a recording is simulated: the one that decided at each time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actorllm.scheduling.cost_model import preset
from actorllm.scheduling.policy import PlanPolicy
from actorllm.scheduling.scheduler import Scheduler
from actorllm.slo.journal import PolicyChange
from actorllm.slo.shadow_run import _Changing
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.workload import synthetic

SHAPE = EngineShape(num_blocks=8192, max_num_seqs=4, enable_prefix_caching=False)
WORKLOAD = synthetic(120, 4.0, seed=3)
AT = float(WORKLOAD.arrival[60])


def simulated(policy: str, *changes: PolicyChange) -> SimulatedRun:
    made: list[_Changing] = []

    def changing(_: int, first: PlanPolicy) -> Scheduler:
        made.append(_Changing(changes, policy=first, **SHAPE.scheduler_arguments()))
        return made[-1]

    run = simulate(WORKLOAD, SHAPE, preset("a100-llama-3-8b"), policy=policy, make_scheduler=changing)
    assert [one.num_policy_changes for one in made] == [len(changes)]
    return run


def started(run: SimulatedRun) -> Any:
    return run.timeline.scheduled


def test_policies_change_when_they_did() -> None:
    fcfs, changed = simulated("fcfs"), simulated("fcfs", PolicyChange(AT, "srpf", None))
    before = started(fcfs) < AT
    assert 0 < before.sum() < len(before)
    assert np.array_equal(started(changed)[before], started(fcfs)[before])
    assert not np.array_equal(started(changed)[~before], started(fcfs)[~before])
    back = simulated("fcfs", PolicyChange(AT, "srpf", None), PolicyChange(AT, "fcfs", None))
    assert np.array_equal(started(back), started(fcfs))


@pytest.mark.parametrize("at", [-1.0, 0.0])
def test_one_that_changed_before_the_first_request_decides_from_there(at: float) -> None:
    assert np.array_equal(started(simulated("fcfs", PolicyChange(at, "srpf", None))), started(simulated("srpf")))
