"""`shadow_notes`: what another policy would have done with the requests of a recording, in sentences for its report.

The requests are simulated twice, with step times that were fitted to the recording: under the policy that decided, and under the
other one. The difference of the two is that of the policies. That of the first to what was measured is the error of the simulation.
Where the policy of the engine was changed, it changes at the same times in the first simulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.messages import StepPlan
from actorllm.scheduling.policy import PlanPolicy
from actorllm.scheduling.scheduler import Scheduler
from actorllm.slo.journal import PolicyChange, RecordedRun
from actorllm.slo.metrics import good
from actorllm.slo.simulator import EngineShape, simulate
from actorllm.slo.timeline import FINISHED, RunTimeline
from actorllm.slo.workload import Workload
from actorllm.types.objective import READINGS


def told_policies(run: RecordedRun, config: EngineConfig) -> str:
    """What decided, one after the other: 'fcfs', from 12.3 s on 'edf+credit'."""
    own = config.scheduler
    first = PolicyChange(0.0, own.policy, own.admission)
    return ", ".join(
        [repr(first.name), *(f"from {max(0.0, change.at):.1f} s on {change.name!r}" for change in run.changes)]
    )


def shadow_notes(run: RecordedRun, config: EngineConfig, policy: str) -> list[str]:
    """policy: the other one, NAME or NAME+ADMISSION. Raises ConfigError if there is none, or if the recording has too few steps."""
    if run.model is None:
        raise ConfigError(
            f"shadow={policy!r} needs step times, and the recording has too few steps for them; record a longer run"
        )
    # Each simulation has the policies that its sentence names, and the prompts of a recording are simulated as if each were new.
    shape = replace(EngineShape.of(config), admission=None, enable_prefix_caching=False)
    own = config.scheduler
    scheduling, _, admission = policy.partition("+")
    workload = run.workload

    def changing(_: int, first: PlanPolicy) -> Scheduler:
        return _Changing(run.changes, policy=first, **shape.scheduler_arguments())

    simulated = simulate(
        workload,
        shape,
        run.model,
        policy=own.policy,
        admission=own.admission,
        make_scheduler=changing if run.changes else None,
    )
    other = simulate(workload, shape, run.model, policy=scheduling, admission=admission or None)
    sooner = other.timeline.scheduled - simulated.timeline.scheduled
    mine = told_policies(run, config)
    notes = [
        f"Measured under {mine}: {_told(run.timeline, workload)}.",
        f"Simulated under {mine}: {_told(simulated.timeline, workload)}. The difference is the error of the simulation.",
        f"Simulated under {policy!r}: {_told(other.timeline, workload)}.",
        f"It starts {int((sooner < -1e-3).sum())} requests sooner and {int((sooner > 1e-3).sum())} later, "
        f"with {int(other.timeline.num_preemptions.sum())} preemptions instead of "
        f"{int(simulated.timeline.num_preemptions.sum())}.",
    ]
    if run.timeline.num_cached.any():
        notes.append("The prefix cache served this run and is not simulated: both simulations compute more prompts.")
    return notes


class _Changing(Scheduler):
    """Its policies change when those of the recording did, as in an engine once no step is in flight."""

    def __init__(self, changes: Sequence[PolicyChange], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._changes = deque(changes)

    def schedule(self, now: float) -> StepPlan | None:
        while self._changes and self._changes[0].at <= now:
            if len(self.ledger):
                return None
            change = self._changes.popleft()
            self.change_policy(change.policy, change.admission, now)
        return super().schedule(now)


def _told(timeline: RunTimeline, workload: Workload) -> str:
    """Shares are of the requests that were promised something: all others that end would count as kept."""
    promises, told = workload.promises, "nothing was promised"
    if promises.made.any():
        by_gap, by_due_dates = (good(timeline, promises, reading)[promises.made].mean() for reading in READINGS)
        told = f"{by_gap:.1%} of promises kept by the mean gap, {by_due_dates:.1%} by due dates"
    ttft = timeline.ttft[timeline.outcome == FINISHED]
    if not ttft.size:
        return f"{told}, no request finished"
    return f"{told}, mean TTFT {1e3 * ttft.mean():.0f} ms, 99th percentile {1e3 * np.quantile(ttft, 0.99):.0f} ms"
