"""`RequestCounters`: what it makes of the ends of requests."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actorllm.messages import DEADLINE_PASSED, Submit, sequences_of
from actorllm.scheduling.events import End
from actorllm.scheduling.sequence import Sequence
from actorllm.scheduling.telemetry.request_counters import BOUNDS, FOLD, RequestCounters
from tests.scheduling.conftest import Engine


def sequence_of(
    slo: list[float | None] | None = None, first: float | None = 11.0, last: float | None = 12.0
) -> Sequence:
    """It came at 10.0, the scheduler had it at 10.1, it began at 10.5, and had 5 prompt tokens."""
    prompt = np.arange(5, dtype=np.int32)
    submit = Submit(rid=1, arrival=10.0, prompt=prompt, max_tokens=9, seed=0, slo=slo)
    sequence = Sequence((0, 1), submit, 0, prompt, 14, frozenset(), frozenset())
    sequence.queued, sequence.scheduled = 10.1, 10.5
    sequence.first_token, sequence.last_token = first, last
    return sequence


def test_times_and_counts_are_those_of_the_requests() -> None:
    tally = RequestCounters()
    for _ in range(2 * FOLD + 3):
        tally.add(End(sequence_of(), "length"), 3)
    tally.add(End(sequence_of(first=None, last=None), "abort"), -1)
    told = tally.statistics()
    number = 2 * FOLD + 3
    assert told["finished"] == {"length": number, "abort": 1}
    sums = {name: histogram["sum"] for name, histogram in told["histograms"].items()}
    counts = {name: sum(histogram["counts"]) for name, histogram in told["histograms"].items()}
    assert sums["time_to_first_token_seconds"] == pytest.approx(number)
    assert sums["request_intake_time_seconds"] == pytest.approx(0.1 * (number + 1))
    assert sums["request_queue_time_seconds"] == pytest.approx(0.4 * (number + 1))
    assert sums["request_prefill_time_seconds"] == pytest.approx(0.5 * number)
    assert sums["request_time_per_output_token_seconds"] == pytest.approx(0.5 * number)
    assert sums["e2e_request_latency_seconds"] == pytest.approx(2 * number)
    assert sums["request_generation_tokens"] == 3 * number
    assert counts["request_prompt_tokens"] == number + 1
    assert counts["request_generation_tokens"] == counts["time_to_first_token_seconds"] == number
    assert tally.statistics() == told


def test_a_request_counts_when_its_last_sequence_ends() -> None:
    tally = RequestCounters()
    request = replace(sequence_of().submit, siblings=np.array([2, 3], np.int32))
    members = []
    for submit in sequences_of(request):
        member = sequence_of()
        member.submit, member.key = submit, (0, submit.rid)
        members.append(member)
    for member, num_output in zip(members, (3, 9, 4), strict=True):
        assert not sum(tally.statistics()["histograms"]["request_params_n"]["counts"])
        tally.add(End(member, "length"), num_output)
    moved = sequence_of()  # to another scheduler, which knows nothing of its siblings
    moved.submit = replace(members[0].submit, is_resumed=True)
    tally.add(End(moved, "length"), 5)
    histograms = tally.statistics()["histograms"]
    longest = histograms["request_max_num_generation_tokens"]
    assert (sum(longest["counts"]), longest["sum"]) == (1, 9)
    assert histograms["request_params_n"]["sum"] == 3


@pytest.mark.parametrize("times", [(-1.7e308, 11.0), (1.7e308, 11.0), (-1.7e308, 1.7e308), (1.7e308, -1.7e308)])
def test_made_up_times_do_not_overflow_the_sums(times: tuple[float, float]) -> None:
    """An attached program may send any finite number as the time of arrival or of the first token."""
    tally = RequestCounters()
    for _ in range(2):
        sequence = sequence_of(first=times[1])
        sequence.submit = replace(sequence.submit, arrival=times[0])
        tally.add(End(sequence, "length"), 3)
    histograms = tally.statistics()["histograms"]
    assert all(math.isfinite(histogram["sum"]) for histogram in histograms.values())
    assert sum(histograms["time_to_first_token_seconds"]["counts"]) == 2


def test_a_bound_is_within_its_bucket() -> None:
    tally = RequestCounters()
    for num_output in (1, 2, 3, 10**9):
        tally.add(End(sequence_of(), "length"), num_output)
    counts = tally.statistics()["histograms"]["request_generation_tokens"]["counts"]
    assert BOUNDS["request_generation_tokens"][:3] == (1, 2, 5)
    assert counts[:3] == [1, 1, 1]
    assert counts[-1] == 1


@pytest.mark.parametrize(
    ("arguments", "promised", "kept"),
    [
        (("length", None), 1, (1, 1)),
        (("error", None), 1, (0, 0)),
        (("abort", None), 0, (0, 0)),
        (("abort", DEADLINE_PASSED), 1, (0, 0)),
    ],
)
def test_a_promise_is_judged_unless_somebody_gave_up(arguments: Any, promised: int, kept: tuple[int, int]) -> None:
    tally = RequestCounters()
    tally.add(End(sequence_of([2.0, 1.0, None, 0.0]), *arguments), 3)
    told = tally.statistics()
    assert told["slo_promised"] == promised
    assert told["slo_kept"] == {"tpot": kept[0], "deadline": kept[1]}


def test_the_two_readings_of_a_promise() -> None:
    tally = RequestCounters()
    tally.add(End(sequence_of([2.0, 0.4, None, 0.0]), "stop"), 3)  # half a second apart, and ahead of the reader
    assert tally.statistics()["slo_kept"] == {"tpot": 0, "deadline": 1}


def test_who_goes_on_under_another_scheduler_had_its_first_token_when_it_came() -> None:
    """Ninety tokens before a death and ten after it: kept by its first token, broken by the time per token."""
    prompt, output = np.arange(5, dtype=np.int32), np.arange(90, dtype=np.int32)
    submit = Submit(
        rid=1,
        arrival=10.0,
        prompt=prompt,
        output=output,
        max_tokens=100,
        slo=[2.0, 0.05, None, 0.0],
        is_resumed=True,
        first_token=11.0,
    )
    engine = Engine(max_model_len=150)
    engine.now = 109.0
    assert engine.scheduler.submit(0, submit, engine.now) is None
    sequence = engine.scheduler.sequence((0, 1))
    assert sequence is not None
    engine.launch()
    sequence.last_token = 110.0
    tally = RequestCounters()
    tally.add(End(sequence, "length"), 100)
    told = tally.statistics()
    assert told["slo_kept"] == {"tpot": 0, "deadline": 0}
    sums = {name: histogram["sum"] for name, histogram in told["histograms"].items()}
    counts = {name: sum(histogram["counts"]) for name, histogram in told["histograms"].items()}
    assert sums["time_to_first_token_seconds"] == pytest.approx(1.0)
    assert sums["request_time_per_output_token_seconds"] == pytest.approx(99.0 / 99)
    assert sums["request_decode_time_seconds"] == pytest.approx(99.0)
    assert counts["request_queue_time_seconds"] == counts["request_prefill_time_seconds"] == 0, "nobody knows"
    assert counts["request_intake_time_seconds"] == 0
