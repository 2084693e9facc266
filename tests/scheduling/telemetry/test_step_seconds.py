"""A request's metrics say what the steps took that it was in: against a count by request and step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actorllm.messages import StepResult
from tests.scheduling.conftest import make_scheduler, make_submit


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [10, 40], ids=["preempted", "roomy"])
def test_the_sums_are_those_of_the_steps_that_name_the_request(
    build_engine: Callable[..., Any], depth: int, num_blocks: int
) -> None:
    engine = build_engine(depth=depth, num_blocks=num_blocks)
    scheduler = engine.scheduler
    named: dict[int, set[int]] = {}
    counted: Counter[int] = Counter()
    launch, update = scheduler.ledger.launch, scheduler.update

    def launched(record: Any) -> None:
        for sequence in record.named:
            named.setdefault(record.step, set()).add(sequence.key[1])
        launch(record)

    def updated(result: Any, now: float) -> Any:
        took = 2.0 ** -(result.step % 7)
        for rid in named[result.step]:
            counted[rid] += took
        return update(replace(result, started=10.0, ended=10.0 + took), now)

    scheduler.ledger.launch, scheduler.update = launched, updated
    for rid in range(1, 8):
        engine.submit(rid, list(range(10 + rid, 10 + 4 * rid)), max_tokens=12, ignore_eos=True)
    engine.run()
    assert (scheduler.statistics().num_preemptions > 0) == (num_blocks == 10)
    for rid, end in engine.ends.items():
        _, forward, _ = end.sequence.seconds
        if num_blocks == 40:
            assert forward == counted[rid]
        else:  # a step in flight when it lost its slot named it
            assert 0 < forward <= counted[rid]


def test_a_step_is_executed_from_its_launch_or_the_result_before_it() -> None:
    scheduler = make_scheduler()
    scheduler.submit(0, make_submit(1, [11, 12], max_tokens=2, ignore_eos=True), 0.0)
    ends = []
    launches, results = [1.0, 2.0], [5.0, 7.0]
    plans = [scheduler.schedule(at) for at in launches]
    for plan, at in zip(plans, results, strict=True):
        scheduler.seconds.planning += 0.25
        result = StepResult(step=plan.step, tokens=np.array([9], np.int32), started=at - 1, ended=at - 0.5)
        ends += scheduler.update(result, at).ends
    (end,) = ends
    assert end.sequence.seconds == (0.5, 1.0, 4.0 + 2.0)
