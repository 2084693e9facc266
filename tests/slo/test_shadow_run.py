"""Beside which policy a recording is simulated: the one that decided at each time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actorllm.scheduling.cost_model import preset
from actorllm.scheduling.policy import PlanPolicy
from actorllm.scheduling.scheduler import Scheduler
from actorllm.slo.journal import PolicyChange
from actorllm.slo.objectives import Promises
from actorllm.slo.shadow_run import _Changing, _told
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.timeline import timeline_of_streams
from actorllm.slo.workload import fixed_lengths, make_workload, synthetic
from actorllm.types.objective import SLO

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


def test_shares_are_of_promises_and_not_of_requests() -> None:
    """Nine of ten are promised nothing and end. The tenth is late."""
    workload = make_workload(np.arange(10.0), fixed_lengths(10, 8, 2))
    streams = [np.array([at + 0.5, at + 0.6]) for at in workload.arrival.tolist()]
    timeline = timeline_of_streams(workload.arrival, workload.num_prompt, streams)
    assert _told(timeline, workload).startswith("nothing was promised, mean TTFT 500 ms")
    own = Promises.of([SLO(ttft=0.1) if row == 3 else None for row in range(10)])
    told = _told(timeline, replace(workload, own_promises=own))
    assert told.startswith("0.0% of promises kept by the mean gap, 0.0% by due dates, ")
    empty = timeline_of_streams(workload.arrival, workload.num_prompt, [np.zeros(0)] * 10)
    assert _told(empty, workload) == "nothing was promised, no request finished"
