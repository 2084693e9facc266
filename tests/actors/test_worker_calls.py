"""`WorkerCalls` by itself: a call that is asked twice is made once."""

from __future__ import annotations

from typing import Any, cast

from actorllm.actors.call_values import decode_value, encode_value
from actorllm.actors.worker_calls import WorkerCalls


class Counting:
    """In the place of a worker, which is brought no weights."""

    num_calls = 0

    def count(self) -> int:
        self.num_calls += 1
        return self.num_calls

    def take_weights(self) -> dict[str, Any]:
        return {}


def test_a_scheduler_that_asks_again_gets_the_answer_of_before() -> None:
    """It took the place of one that died when the workers were through and its caller was not told."""
    worker = Counting()
    calls = WorkerCalls(cast(Any, worker))
    data = encode_value({"args": [], "kwargs": {}}, "arguments")
    told = [decode_value(calls.answer(identity, "count", False, data)) for identity in ("a", "a", "b", "b", "a")]
    assert told == [{"value": 1}, {"value": 1}, {"value": 2}, {"value": 2}, {"value": 3}]
