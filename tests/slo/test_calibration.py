"""Calibration by whole runs: on a run whose truth is known, and on one of a real vLLM."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from actorllm.errors import ConfigError
from actorllm.scheduling.cost_model import LinearModel, Regime, fit
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policy import PlanPolicy
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.telemetry.recording import Entry, RecordedScheduler
from actorllm.slo.calibration import fit_to_run, nelder_mead, steps_of
from actorllm.slo.simulator import EngineShape, simulate
from actorllm.slo.timeline import timeline_of_streams
from actorllm.slo.workload import gamma_arrivals, lognormal_lengths, make_workload

BESIDE = Path(__file__).parents[3] / "shared" / "traces"
"""Large recordings may lie beside the checkout, too."""
VLLM_RUN = Path(os.environ.get("ACTORLLM_TRACES", BESIDE)) / "vllm_rtx4090_llama31_8b"


def linear(*coefficients: float) -> LinearModel:
    return LinearModel((Regime(math.inf, coefficients),))


def test_the_simplex_finds_the_bottom() -> None:
    def valley(point: np.ndarray) -> float:
        return float((point[0] - 1) ** 2 + 10 * (point[1] + 0.5) ** 2)

    found, calls = nelder_mead(valley, np.zeros(2), 0.3, 200)
    assert found == pytest.approx([1.0, -0.5], abs=1e-3)
    assert calls <= 203


def test_coefficients_are_found_from_latencies_alone() -> None:
    workload = make_workload(gamma_arrivals(80, 4.0, 1.0), lognormal_lengths(80, (200, 900), (40, 150), longest=900))
    shape = EngineShape(num_blocks=600, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=2048)
    measured = simulate(workload, shape, linear(0.02, 1e-4, 2e-4, 0.0, 0.0, 0.0)).timeline
    found = fit_to_run(
        workload, measured, shape, linear(0.012, 2e-4, 1e-4, 0.0, 0.0, 0.0), np.arange(80) < 40, max_runs=30
    )
    assert max(map(abs, found.unseen.values())) < 0.03
    assert found.num_runs <= 35
    (regime,) = found.model.regimes
    assert regime.coefficients[0] == pytest.approx(0.02, rel=0.1)
    assert regime.coefficients[3:] == (0.0, 0.0, 0.0), "what is zero stays out"
    with pytest.raises(ConfigError, match="none of the requests"):
        fit_to_run(workload, measured, shape, found.model, np.zeros(80, bool))


def test_a_recording_has_the_steps_to_fit_to() -> None:
    """Simulated steps of a known model, read from the recording of their scheduler, give that model again."""
    workload = make_workload(gamma_arrivals(120, 25.0, 1.5), lognormal_lengths(120, (200, 900), (40, 150), longest=900))
    shape = EngineShape(num_blocks=150, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=2048)
    truth = linear(0.004, 5e-5, 1e-4, 3e-7, 0.0, 1e-8)
    entries: list[Entry] = []

    def recorded(number: int, policy: PlanPolicy) -> Scheduler:
        return RecordedScheduler(sink=entries.append, policy=policy, **shape.scheduler_arguments())

    run = simulate(workload, shape, truth, make_scheduler=recorded, skip=False)
    assert run.timeline.num_preemptions.any()
    log = steps_of(entries, shape.scheduler(load_policy("fcfs")))
    assert len(log) == run.num_steps
    assert log.ended.tolist() == run.timeline.step_ends[0].tolist()
    assert [truth.seconds(*row[1:]) for row in log.features().tolist()] == pytest.approx(log.ended - log.started)
    found = fit(log)
    assert found.mape < 1e-6
    assert found.model.gap_s == pytest.approx(0.0, abs=1e-9)


@pytest.mark.skipif(not VLLM_RUN.exists(), reason=f"not in {VLLM_RUN.parent}; name the folder with ACTORLLM_TRACES")
def test_a_run_of_vllm_is_predicted_from_its_first_half() -> None:
    """vLLM 0.19, Llama-3.1-8B on an RTX 4090, 300 requests, most of the time out of KV blocks."""
    requests = [json.loads(line) for line in (VLLM_RUN / "requests.jsonl").read_text().splitlines()]
    requests.sort(key=lambda request: request["queued_ts"])
    queued, first, last = (
        np.array([request[name] for request in requests]) for name in ("queued_ts", "first_token_ts", "last_token_ts")
    )
    size, count = (
        np.array([request[name] for request in requests], np.int32) for name in ("input_toks", "output_toks")
    )
    workload = make_workload(queued - queued[0], (size, count))
    # Of the tokens in between only the number is known.
    streams = [np.linspace(a, b, n) - queued[0] for a, b, n in zip(first, last, count.tolist(), strict=True)]
    measured = timeline_of_streams(workload.arrival, size, streams)
    meta = json.loads((VLLM_RUN / "meta.json").read_text())
    shape = EngineShape(
        num_blocks=meta["kv_cache"]["num_gpu_blocks"],
        max_num_seqs=meta["engine_kwargs"]["max_num_seqs"],
        max_num_batched_tokens=meta["engine_kwargs"]["max_num_batched_tokens"],
    )
    # A data sheet's guess: 16 GB of weights and 128 KiB of KV per token at 1 TB/s, 11,000 prompt tokens per second.
    start = linear(0.016, 9e-5, 0.0, 1.3e-7, 0.0, 0.0)
    found = fit_to_run(workload, measured, shape, start, np.arange(300) < 150, max_runs=7)
    for latency in ("ttft", "tpot", "e2e"):
        assert abs(found.unseen[latency]) < 0.1, found.unseen
