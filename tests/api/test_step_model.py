"""`step_model`: a fitted model in the live engine, and what `stats()` tells of its error."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from actorllm import SLO, AsyncLLM, SamplingParams
from actorllm.actors.record_file import fresh_scheduler, read_recording
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.messages import pack
from actorllm.scheduling.cost_model import LinearModel, Regime, from_json, preset, to_json
from actorllm.scheduling.step_time import CorrectedStepTime
from actorllm.scheduling.telemetry.recording import replay

PARAMS = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)


def test_a_preset_or_a_file(tmp_path: Path) -> None:
    config = EngineConfig.from_arguments("storyteller", step_model="a100-llama-3-8b")
    assert config.scheduler.step_model is not None
    assert from_json(config.scheduler.step_model) == preset("a100-llama-3-8b")
    assert EngineConfig.from_json(config.to_json()) == config
    file = tmp_path / "model.json"
    file.write_text(to_json(preset("a100-llama-3-8b")))
    again = EngineConfig.from_arguments("storyteller", step_model=file).scheduler.step_model
    assert again is not None
    assert from_json(again) == preset("a100-llama-3-8b")
    assert EngineConfig.from_arguments("storyteller").scheduler.step_model is None
    for value, problem in (
        ("a100-llama-3-8", "did you mean 'a100-llama-3-8b'"),
        (tmp_path, "Is a directory"),
        (5, "must be a path"),
    ):
        with pytest.raises(ConfigError, match=problem):
            EngineConfig.from_arguments("storyteller", step_model=value)
    file.write_text("{}")
    with pytest.raises(
        ConfigError, match=r"step_model='.*model.json': .* kind is one of 'linear', 'roofline', 'table'"
    ):
        EngineConfig.from_arguments("storyteller", step_model=file)


@pytest.mark.parametrize("policy", ["fcfs", "cohost"])
async def test_stats_tell_how_wrong_it_is_and_replays_stay_exact(policy: str, tmp_path: Path) -> None:
    """No step here takes ten seconds, however busy the machine is; a correction of the model follows that."""
    record, model = tmp_path / "run.bin", tmp_path / "model.json"
    slow = LinearModel((Regime(math.inf, (10.0, 0.0, 0.0, 0.0, 0.0, 0.0)),), name="ten seconds")
    model.write_text(to_json(slow))
    async with AsyncLLM(
        "storyteller",
        topology="inline",
        num_threads=1,
        scheduling_policy=policy,
        step_model=model,
        record=record,
        max_num_batched_tokens=256,
    ) as llm:
        for _ in range(3):
            await llm.complete("Once upon a time", PARAMS, slo=SLO(ttft=1.0, tpot=0.5), is_latency_sensitive=True)
        told = (await llm.stats())["scheduler"]["step_model"]
    assert told["name"] == "ten seconds"
    assert told["num_steps"] >= 90
    assert told["mape"] == told["bias"] > 1, "each is predicted to take longer than it does"
    assert told["mape"] > told["corrected_mape"] > 0
    assert told["decode_factor"] == pytest.approx(1 / CorrectedStepTime.BOUND)
    plans = [pack(plan) for plan in replay(read_recording(record), fresh_scheduler(record))]
    assert len(plans) == sum(call == "update" for call, _, _ in read_recording(record))


async def test_without_one_nothing_is_watched() -> None:
    async with AsyncLLM("storyteller", topology="inline", num_threads=1) as llm:
        await llm.complete("Once", SamplingParams(max_tokens=2))
        assert (await llm.stats())["scheduler"]["step_model"] is None
