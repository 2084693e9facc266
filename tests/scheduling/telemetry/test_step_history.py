"""What is kept of steps: the newest one by one, all of them as sums."""

from __future__ import annotations

from actorllm.scheduling.batch import Batch
from actorllm.scheduling.ledger import StepRecord
from actorllm.scheduling.telemetry.step_history import FOLD, KEPT, STEP_BOUNDS, StepHistory

ROWS = Batch(1).rows()


def record(step: int, num_decode: int = 2, num_tokens: int = 10) -> StepRecord:
    return StepRecord(step, ROWS, num_decode, (), num_tokens, launched=float(step))


def test_steps_in_order_without_those_that_were_void() -> None:
    log = StepHistory()
    for step in (1, 2, 3, 4):
        log.launched(record(step))
    log.done(1, 1.1, 1.2, 1.3)
    log.done(4, 4.1, 4.2, 4.3)  # two and three failed
    log.done(3, 3.1, 3.2, 3.3)  # a result that nobody expects
    assert log.newest(0, 10) == [[1, 1.0, 1.1, 1.2, 1.3, 2, 10], [4, 4.0, 4.1, 4.2, 4.3, 2, 10]]
    assert [entry[0] for entry in log.newest(1, 10)] == [4]
    assert [entry[0] for entry in log.newest(0, 1)] == [4]


def test_sums_over_more_steps_than_are_kept() -> None:
    log = StepHistory()
    number = KEPT + FOLD + 7
    for step in range(1, number + 1):
        log.launched(record(step, num_decode=3, num_tokens=5))
        log.done(step, step + 0.0, step + 0.004, step + 0.5)
    assert len(log.newest(0, 10 * KEPT)) == KEPT
    steps = log.statistics()
    assert sum(steps["iteration_tokens_total"]["counts"]) == number
    assert steps["iteration_tokens_total"]["sum"] == 5 * number
    place = STEP_BOUNDS["step_duration_seconds"].index(0.005)
    assert steps["step_duration_seconds"]["counts"][place] == number
    gaps = steps["inter_token_latency_seconds"]
    assert sum(gaps["counts"]) == 3 * (number - 1)  # before the first there was none
    assert abs(gaps["sum"] - 3 * (number - 1)) < 1e-6
    assert log.statistics() == steps
