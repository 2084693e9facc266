"""`shadow_notes`: what another policy would have done with the requests of a recording, in sentences for its report.

The requests are simulated twice, with step times that were fitted to the recording: under the policy that decided, and under the
other one. The difference of the two is that of the policies. That of the first to what was measured is the error of the simulation.
"""

from __future__ import annotations

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.slo.journal import RecordedRun
from actorllm.slo.metrics import RunMetrics, evaluate
from actorllm.slo.simulator import EngineShape, simulate


def shadow_notes(run: RecordedRun, config: EngineConfig, policy: str) -> list[str]:
    """policy: the other one, NAME or NAME+ADMISSION. Raises ConfigError if there is none, or if the recording has too few steps."""
    if run.model is None:
        raise ConfigError(
            f"shadow={policy!r} needs step times, and the recording has too few steps for them; record a longer run"
        )
    shape, own = EngineShape.of(config), config.scheduler
    scheduling, _, admission = policy.partition("+")
    mine = own.policy if own.admission is None else f"{own.policy}+{own.admission}"
    workload = run.workload
    measured = evaluate(
        run.timeline,
        workload.classes,
        workload.class_ids,
        promises=workload.own_promises,
        tenants=workload.tenant_ids,
        wanted=workload.num_output,
    )
    simulated = simulate(workload, shape, run.model, policy=own.policy, admission=own.admission)
    other = simulate(workload, shape, run.model, policy=scheduling, admission=admission or None)
    sooner = other.timeline.scheduled - simulated.timeline.scheduled
    notes = [
        f"Measured under {mine!r}: {_told(measured)}.",
        f"Simulated under {mine!r}: {_told(simulated.evaluate())}. The difference is the error of the simulation.",
        f"Simulated under {policy!r}: {_told(other.evaluate())}.",
        f"It starts {int((sooner < -1e-3).sum())} requests sooner and {int((sooner > 1e-3).sum())} later, "
        f"with {int(other.timeline.num_preemptions.sum())} preemptions instead of "
        f"{int(simulated.timeline.num_preemptions.sum())}.",
    ]
    if run.timeline.num_cached.any():
        notes.append("The prefix cache served this run and is not simulated: both simulations compute more prompts.")
    return notes


def _told(metrics: RunMetrics) -> str:
    overall = metrics.overall
    return (
        f"{overall.attainment['tpot']:.1%} of promises kept by the mean gap, {overall.attainment['deadline']:.1%} by due dates, "
        f"mean TTFT {overall.latency_ms['mean_ttft_ms']:.0f} ms, 99th percentile {overall.latency_ms['p99_ttft_ms']:.0f} ms"
    )
