"""Calibration: let an engine run so that its steps tell what they cost, and fit a step-time model to them.

The steps are read from a recording of the scheduler (`record=`), which knows of every one what was in it and when it began and
ended. `exercise` keeps a number of requests in flight, level after level, so that prompts and decode rows come in many numbers
and mixtures, and, with one request at a time, on an idle worker. A recording of any other run will do as well, as far as that
had several batch sizes.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from actorllm.actors.record_file import fresh_scheduler, read_recording, recorded_configuration
from actorllm.clock import now, to_epoch
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.slo.calibration import steps_of
from actorllm.slo.cost_model import Fit, StepLog, fit
from actorllm.slo.workload import seed_stream

if TYPE_CHECKING:
    from actorllm.async_llm import AsyncLLM

LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MAX_OUTPUT = 64


@dataclass(frozen=True, slots=True)
class Delays:
    """What lies between a client and the scheduler; medians, in seconds."""

    submit_s: float = 0.0
    deliver_s: float = 0.0


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
        raise _first(errors) from None  # one that fails ends all of them: the others say nothing new
    if not there:
        raise ConfigError(f"no request was done within {duration_s:g} s; let the engine run for longer")
    return Delays(_median(there), _median(back))


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _median(values: list[float]) -> float:
    return max(0.0, float(np.median(values))) if values else 0.0


def _request(llm: AsyncLLM, rng: np.random.Generator) -> tuple[list[int], Any]:
    """Random ids: short prompts are as frequent as long ones, and nothing is found in the prefix cache."""
    from actorllm.request import SamplingParams

    longest = llm.config.model.max_model_len
    num_output = int(rng.integers(1, min(MAX_OUTPUT, longest // 2) + 1))
    num_prompt = int(np.exp(rng.uniform(np.log(4), np.log(max(5, longest - num_output)))))
    prompt = rng.integers(0, llm.config.model.vocab_size, num_prompt).tolist()
    return prompt, SamplingParams(max_tokens=num_output, ignore_eos=True, detokenize=False, seed=0)


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """What came out of it."""

    fit: Fit
    log: StepLog
    config: EngineConfig
    """Of the engine whose steps these are."""

    @property
    def repeatability(self) -> float:
        """Median relative difference of decode steps in a row with the same number of rows: what no model can predict.

        NaN: there are none.
        """
        log, taken = self.log, self.log.ended - self.log.started
        alike = (log.p[1:] == 0) & (log.p[:-1] == 0) & (log.d[1:] == log.d[:-1]) & (taken[1:] > 0) & (taken[:-1] > 0)
        return float(np.median(np.abs(taken[1:] / taken[:-1] - 1)[alike])) if alike.any() else math.nan


def read_steps(path: str | Path) -> StepLog:
    """Of a recording that an engine made with record=path. Raises ConfigError if it is none."""
    return steps_of(read_recording(path), fresh_scheduler(path))


def calibrate_recording(path: str | Path, name: str | None = None, delays: Delays | None = None) -> Calibration:
    """Fit to the steps of a recording. Raises ConfigError, also when there are too few of them.

    delays: from the client to the scheduler and back, as the client saw them; None: that to the scheduler is in the recording,
    and that back is not known. From the worker to the scheduler is added.
    """
    config = recorded_configuration(path)
    log = read_steps(path)
    there: list[float] = []
    back: list[float] = []
    for call, at, argument in read_recording(path):
        if call.startswith("submit"):
            there.append(at - argument.arrival)
        elif call == "update":
            back.append(at - argument.ended)
    if delays is None:
        delays = Delays(_median(there))
    delays = Delays(delays.submit_s, delays.deliver_s + _median(back))
    found = fit(log, name or f"{Path(config.model.name).name}-calibrated")
    model = replace(found.model, submit_s=delays.submit_s, deliver_s=delays.deliver_s)
    return Calibration(replace(found, model=model), log, config)


async def calibrate_engine(
    model: str, duration_s: float, *, seed: int = 0, name: str | None = None, **arguments: Any
) -> Calibration:
    """Start an engine, let it run for about this time, stop it, and fit to its steps. arguments: as of `AsyncLLM`."""
    from actorllm.async_llm import AsyncLLM

    if duration_s <= 0:
        raise ConfigError(f"duration={duration_s!r} must be a positive number of seconds")
    with tempfile.TemporaryDirectory(prefix="actorllm-calibrate-") as folder:
        record = Path(folder) / "run.bin"
        async with AsyncLLM(model, record=record, **arguments) as llm:
            delays = await exercise(llm, duration_s, seed)
        return calibrate_recording(record, name, delays)
