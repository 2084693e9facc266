"""Calibration: let an engine run so that its steps tell what they cost, and fit a step-time model to them.

The steps are read from a recording of the scheduler (`record=`). It knows of every one what was in it and when it began and
ended. `exercise` keeps a number of requests in flight, level after level, so that prompts and decode rows come in many numbers
and mixtures. With one request at a time, they come on an idle worker. A recording of any other run will do as well, as far as
that had several batch sizes.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from actorllm.actors.record_file import read_recording, recorded_configuration, told_scheduler
from actorllm.clock import now, to_epoch
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, innermost
from actorllm.scheduling.cost_model import Fit, MeasuredSteps, fit
from actorllm.scheduling.telemetry.recording import Entry
from actorllm.slo.calibration import steps_of
from actorllm.slo.live.replay import Delays
from actorllm.slo.step_fit import repeatability
from actorllm.slo.workload import seed_stream

if TYPE_CHECKING:
    from actorllm.api.async_llm import AsyncLLM

LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MAX_OUTPUT = 64


async def exercise(llm: AsyncLLM, duration_s: float, seed: int = 0) -> Delays:
    """Run requests for about this time. Raises ConfigError when there was no time for any.

    All levels up and down again: a machine that gets slower meanwhile does not look like a cost of many rows.
    """
    await llm.start()
    rng = seed_stream(seed, "calibration")
    config = llm.config
    most = min(config.scheduler.max_num_seqs, (config.cache.num_blocks or 0) * config.cache.block_size // 128)
    levels = [level for level in LEVELS if level <= max(1, most)]
    shares = [2 + math.sqrt(level) for level in levels]  # the more rows, the longer it takes until they are there
    times = [duration_s / 2 * share / sum(shares) for share in shares]
    there: list[float] = []
    back: list[float] = []

    wanted = 0
    alive: set[int] = set()

    async def client(number: int) -> None:
        """One request after the other, until so many clients are not wanted any more."""
        while number < wanted:
            prompt, params = _request(llm, rng)
            metrics = (await llm.complete(prompt, params)).metrics
            if metrics is not None:
                there.append(metrics.queued_ts - metrics.arrival_time)
                back.append(to_epoch(now()) - metrics.last_token_ts)
        alive.discard(number)

    try:
        async with anyio.create_task_group() as group:
            up = list(zip(levels, times, strict=True))
            for wanted, time_s in [*up, *reversed(up)]:
                for number in set(range(wanted)) - alive:
                    alive.add(number)
                    group.start_soon(client, number)
                await anyio.sleep(time_s)
            group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        raise innermost(errors) from None  # one that fails ends all of them: the others say nothing new
    if not there:
        raise ConfigError(f"no request was done within {duration_s:g} s; let the engine run for longer")
    return Delays.of(there, back)


def _request(llm: AsyncLLM, rng: np.random.Generator) -> tuple[list[int], Any]:
    """Random ids: short prompts are as frequent as long ones, and nothing is found in the prefix cache."""
    from actorllm.types.params import SamplingParams

    longest = llm.config.model.max_model_len
    num_output = int(rng.integers(1, min(MAX_OUTPUT, longest // 2) + 1))
    num_prompt = int(np.exp(rng.uniform(np.log(4), np.log(max(5, longest - num_output)))))
    prompt = rng.integers(0, llm.config.model.vocab_size, num_prompt).tolist()
    return prompt, SamplingParams(max_tokens=num_output, ignore_eos=True, detokenize=False, seed=0)


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """What came out of it."""

    fit: Fit
    log: MeasuredSteps
    config: EngineConfig
    """Of the engine whose steps these are."""

    @property
    def repeatability(self) -> float:
        """As `step_fit.repeatability`, of all its steps."""
        return repeatability(self.log)


def read_recorded(path: str | Path) -> tuple[MeasuredSteps, Delays]:
    """The steps of a recording that an engine made with record=path, and the delays that it knows of.

    These are the way there, and of the way back the first half, from the worker to the scheduler. Raises ConfigError if the
    file is none.
    """
    there: list[float] = []
    back: list[float] = []

    def watched() -> Iterator[Entry]:
        for entry in read_recording(path):
            call, at, argument = entry
            if call.startswith("submit"):
                there.append(at - argument.arrival)
            elif call == "update":
                back.append(at - argument.ended)
            yield entry

    log = steps_of(watched(), told_scheduler(path))
    return log, Delays.of(there, back)


def calibrate_steps(log: MeasuredSteps, name: str, client: Delays | None, recorded: Delays) -> Fit:
    """Fit a model with its delays. client: as `exercise` found them; without them there is only what was recorded."""
    found = fit(log, name)
    submit_s = recorded.submit_s if client is None else client.submit_s
    deliver_s = recorded.deliver_s + (0.0 if client is None else client.deliver_s)
    return replace(found, model=replace(found.model, submit_s=submit_s, deliver_s=deliver_s))


def calibrate_recording(path: str | Path, name: str | None = None, client: Delays | None = None) -> Calibration:
    """Fit to the steps of a recording. Raises ConfigError, also when there are too few of them."""
    config = recorded_configuration(path)
    log, recorded = read_recorded(path)
    label = name or f"{Path(config.model.name).name}-calibrated"
    return Calibration(calibrate_steps(log, label, client, recorded), log, config)


async def calibrate_engine(
    model: str, duration_s: float, *, seed: int = 0, name: str | None = None, **arguments: Any
) -> Calibration:
    """Start an engine, let it run for about this time, stop it, and fit to its steps. arguments: as of `AsyncLLM`."""
    from actorllm.api.async_llm import AsyncLLM

    if duration_s <= 0:
        raise ConfigError(f"duration={duration_s!r} must be a positive number of seconds")
    with tempfile.TemporaryDirectory(prefix="actorllm-calibrate-") as folder:
        record = Path(folder) / "run.bin"
        async with AsyncLLM(model, record=record, **arguments) as llm:
            delays = await exercise(llm, duration_s, seed)
        return calibrate_recording(record, name, delays)
