"""The steps of a live replay: what its engine recorded, on the clock of what its client saw.

    async with AsyncLLM(model, record="run.bin") as llm:
        target = EmbeddedTarget(llm)
        run = await replay(workload, target)
    steps = recorded_steps("run.bin", run, target)
    html = run_page(title, run.timeline, run.workload, steps.journal, steps.model)

So the page and the trace of a live run show the same as those of a simulated one. Warm-ups, and requests of others that the
engine had meanwhile, are in the steps and in no row.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from actorllm.actors.record_file import read_recording, recorded_arguments, recorded_configuration, recorded_policy
from actorllm.scheduling.cost_model import AnyModel, StepModel, from_json
from actorllm.scheduling.sequence import Key
from actorllm.slo.journal import Journal, run_of_recording
from actorllm.slo.live.embedded import EmbeddedTarget
from actorllm.slo.live.replay import LiveRun


@dataclass(frozen=True, slots=True, eq=False)
class RecordedSteps:
    """What `recorded_steps` returns."""

    journal: Journal
    keys: tuple[Key, ...]
    """Of every row of the run, in the journal; (-1, row) of those that never reached the scheduler."""
    model: StepModel | None
    """That of the engine's policies (`step_model`), else one fitted to these steps; None: there are too few."""
    deviation: str | None
    """As in `journal.RecordedRun`: from there on the steps are not what happened."""


def recorded_steps(path: str | Path, run: LiveRun, target: EmbeddedTarget) -> RecordedSteps:
    """Raises ConfigError, also for a recording without a request."""
    found = run_of_recording(list(read_recording(path)), recorded_arguments(path), recorded_policy(path))
    keys: list[Key] = [(-1, row) for row in range(len(run.workload))]
    for key, name in zip(found.keys, found.names, strict=True):
        row = target.row_of(name)
        if row is not None and 0 <= row < len(keys):
            keys[row] = key
    given = recorded_configuration(path).scheduler.step_model
    model: AnyModel | StepModel | None = found.model if given is None else from_json(given)
    return RecordedSteps(found.journal.moved(-run.start), tuple(keys), model, found.deviation)
