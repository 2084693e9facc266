"""The self-check of a scheduler: before it probes suspects, it shows that it can schedule a request of its own.

A policy may end its process whatever the request is. Without the check, one request after the other would be blamed for
that. A second, pure Scheduler with policies of its own takes a tiny request through every hook. If the process dies of
that, no request is blamed, since none was in a probe group. Such deaths in a row end the engine. `SchedulerProbes` calls
it once a life.
"""

from __future__ import annotations

import logging

import numpy as np

from actorllm.actors.scheduler_setup import build_policy, scheduler_arguments
from actorllm.config import EngineConfig
from actorllm.messages import StepPlan, StepResult, Submit
from actorllm.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

NUM_TOKENS = 3
"""Of the request: its prompt is computed, it decodes, and it ends."""


def check_policy(config: EngineConfig) -> None:
    """Take a made-up request from its arrival to its end. An exception of a policy is reported when a real request meets it."""
    try:
        scheduler = Scheduler(policy=build_policy(config.scheduler), **scheduler_arguments(config, (), None))
        _run(scheduler, 0 if config.model.pooler is None else config.model.pooler.vector_size)
    except Exception:  # of a policy: anything; it is the finding
        logger.exception("a scheduler could not schedule a request of its own")


def _run(scheduler: Scheduler, vector_size: int) -> None:
    submit = Submit(
        rid=1,
        arrival=0.0,
        prompt=np.zeros(1, np.int32),
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        detokenize=False,
        pooling="last" if vector_size else None,
    )
    scheduler.submit(0, submit, 0.0)
    for number in range(NUM_TOKENS):
        plan = scheduler.schedule(number + 0.5)
        if plan is None:
            return
        scheduler.update(_result(plan, vector_size), number + 1.0)


def _result(plan: StepPlan, vector_size: int) -> StepResult:
    """Of a step with one row."""
    if vector_size:
        none = np.zeros(1, np.int32)  # no token, of row 0
        return StepResult(step=plan.step, counts=none, vector_rows=none, vectors=np.zeros(vector_size, np.float32))
    return StepResult(step=plan.step, tokens=np.zeros(1, np.int32))
