"""The built-in admission policies by hand: peaks that can be counted, promises that cannot be kept, credits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorllm.scheduling.admission_policy import AdmissionGate, AdmissionPolicy
from actorllm.scheduling.admissions.credit import Credit
from actorllm.scheduling.admissions.past_future import MIN_PAST, PastFuture, peak
from actorllm.scheduling.admissions.ttft_reject import TtftReject
from actorllm.scheduling.admissions.worst_case import WorstCase
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policy import Admit
from tests.effort import examples
from tests.scheduling.chained_tokens import EOS, VOCAB, reference_stream
from tests.scheduling.conftest import Engine


class Fixed:
    """Steps take so many seconds, and so many more for each token of a prompt and each decode row."""

    def __init__(self, fixed: float, p: float = 0.0, d: float = 0.0) -> None:
        self._seconds = (fixed, p, d)

    def seconds(self, p: float, d: float, *context: float) -> float:
        fixed, of_p, of_d = self._seconds
        return fixed + of_p * p + of_d * d


def engine_with(admission: AdmissionPolicy, **arguments: Any) -> Engine:
    return Engine(policy=AdmissionGate(load_policy("fcfs"), admission), **arguments)  # type: ignore[arg-type]


def num_running(engine: Engine) -> int:
    return engine.scheduler.statistics().num_running


# Worst case ---------------------------------------------------------------------------------------------------------------


def test_worst_case_keeps_what_everybody_may_need() -> None:
    """40 blocks of 4: 8 + 16 tokens are 6 blocks."""
    engine = engine_with(WorstCase(), max_num_seqs=20, max_num_batched_tokens=99)
    for rid in range(1, 10):
        engine.submit(rid, [rid, *range(7)], max_tokens=16, ignore_eos=True)
    engine.launch()
    assert num_running(engine) == 6, "36 of the 40 blocks"
    engine.run()
    assert engine.scheduler.statistics().num_preemptions == 0
    assert len(engine.ends) == 9


def test_worst_case_counts_a_shared_prompt_once() -> None:
    """The prompt has 8 full blocks of its 9; each needs 2 more for what it says."""
    for sharing, expected in ((True, 12), (False, 3)):
        engine = engine_with(WorstCase(), max_num_seqs=20, max_num_batched_tokens=99, enable_prefix_caching=sharing)
        prompt = list(range(33))
        engine.submit(1, prompt, max_tokens=7, ignore_eos=True)
        engine.run()
        for rid in range(2, 20):
            engine.submit(rid, prompt, max_tokens=7, ignore_eos=True)
        for _ in range(9):  # one by one: each computes its last block
            if engine.scheduler.may_plan:
                engine.launch()
        most = num_running(engine)
        assert most >= expected if sharing else most <= 4
        engine.run()
        assert engine.scheduler.statistics().num_preemptions == 0


def test_who_displaces_somebody_counts_what_becomes_free() -> None:
    policy: Any = AdmissionGate(load_policy("priority"), WorstCase())
    engine = Engine(policy=policy, num_blocks=12, max_num_seqs=2, max_num_batched_tokens=64)
    for rid in (1, 2):
        engine.submit(rid, [rid, *range(7)], max_tokens=16, ignore_eos=True, priority=5)
    engine.launch()
    assert num_running(engine) == 2
    engine.submit(3, [3, *range(7)], max_tokens=16, ignore_eos=True, priority=0)
    engine.complete()
    engine.launch()
    urgent = engine.scheduler.sequence((0, 3))
    assert urgent is not None
    assert urgent.slot >= 0
    engine.run()
    assert engine.scheduler.statistics().num_preemptions == 1


# Past-Future --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 30)), min_size=1, max_size=8))
@settings(max_examples=examples(67, 200), deadline=None)
def test_the_peak_is_the_most_that_there_ever_is(requests: list[tuple[int, int]]) -> None:
    at_each_time = [sum(now + at for now, to_come in requests if at <= to_come) for at in range(1, 31)]
    tokens, to_come = (np.array(column, np.int64) for column in zip(*requests, strict=True))
    assert peak(tokens, to_come) == max(at_each_time)


def test_past_future_learns_how_long_answers_are() -> None:
    """They ask for 24 tokens and end after fewer, at the model's end of text."""
    prompts = []
    for first in range(1000):
        prompt = [first % VOCAB, first // VOCAB, *range(6)]
        stream = reference_stream(prompt, 1, 24)
        if EOS in stream[:5]:
            prompts.append(prompt)
    prompts = list(itertools.islice(itertools.cycle(prompts), 60))
    most: dict[str, int] = {}
    for name, admission in (("worst-case", WorstCase()), ("past-future", PastFuture())):
        engine = engine_with(admission, max_num_seqs=20, max_num_batched_tokens=99, enable_prefix_caching=False)
        for rid, prompt in enumerate(prompts[:30], 1):  # the past
            engine.submit(rid, prompt, max_tokens=24, seed=1)
        engine.run()
        for rid, prompt in enumerate(prompts[30:], 31):
            engine.submit(rid, prompt, max_tokens=24, seed=1)
        engine.launch()
        most[name] = num_running(engine)
        engine.run()
        assert engine.scheduler.statistics().num_preemptions == 0
        assert len(engine.ends) == 60
    assert most["worst-case"] == 5, "40 blocks, and everybody might need 8"
    assert most["past-future"] >= 9


def test_without_a_past_everybody_may_say_all_he_wants_to() -> None:
    admission = PastFuture()
    said, most = np.array([0, 3]), np.array([10, 10])
    assert admission._still_to_say(said, most, np.array([0.0, 0.9])).tolist() == [10, 7]
    admission._lengths.extend([4] * MIN_PAST)
    assert admission._still_to_say(said, most, np.array([0.0, 0.9])).tolist() == [4, 1]
    longer = admission._still_to_say(np.array([4, 7]), most, np.array([0.0, 0.9]))
    assert longer.tolist() == [6, 3], "nobody was ever longer than that: nothing is known"


@pytest.mark.parametrize("sharing", [True, False])
def test_an_answer_is_counted_when_it_ends_wherever_that_is(sharing: bool) -> None:
    admission = PastFuture()
    engine = engine_with(admission, num_blocks=14, enable_prefix_caching=sharing)
    for rid in range(1, 8):
        engine.submit(rid, [rid, *range(7)], max_tokens=10 + rid, ignore_eos=True)
    engine.run()
    assert sorted(admission._lengths) == list(range(11, 18))
    engine.submit(8, [8, 1, 2], max_tokens=9, ignore_eos=True)
    engine.submit(9, [9, 1, 2], max_tokens=9, ignore_eos=True)
    engine.launch()
    engine.abort(8)
    assert len(admission._lengths) == 8, "who gives up has used memory, too"
    assert admission._lengths[-1] == 9, "and nobody knows how long it would have been"
    admission._lengths.clear()
    admission._lengths.extend([4] * MIN_PAST)
    engine.abort(9)
    assert admission._lengths[-1] == 4, "as long as those who did not give up"


# Rejection ----------------------------------------------------------------------------------------------------------------


def test_who_cannot_have_its_first_token_in_time_is_rejected() -> None:
    """Steps of 16 tokens take a second; a prompt of 32 tokens needs two. The only slot is taken."""
    engine = engine_with(TtftReject(Fixed(0.0, p=1 / 16)), max_num_seqs=1)
    promise: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
    engine.submit(7, [6, *range(40, 71)], **promise)
    engine.submit(1, list(range(32)), slo=[2.0, None, None, 0.0], **promise)
    engine.submit(2, [1, *range(31)], slo=[2.5, None, None, 0.0], **promise)
    engine.submit(3, [2, *range(31)], slo=[9.0, None, None, 0.0], **promise)
    engine.submit(4, [3, *range(31)], slo=[1.0, None, None, 1 / 16], **promise)
    engine.submit(5, [4, *range(31)], slo=[None, 0.01, None, 0.0], **promise)
    engine.submit(6, [5, *range(31)], **promise)
    assert engine.launch() is not None
    assert list(engine.ends) == [1], "2 s x 1.2 are more than 2"
    assert "its prompt of 32 tokens alone takes 2.400 s" in str(engine.ends[1].error)
    engine.now = 0.2
    engine.launch()
    assert [rid for rid in engine.ends if rid != 1] == [2], "it was in time when it came"
    engine.run()
    assert {rid for rid, end in engine.ends.items() if end.reason == "length"} == {3, 4, 5, 6, 7}
    assert "0.2" in str(engine.ends[2].error)


def test_a_pause_is_no_reason_to_reject_anybody() -> None:
    engine = engine_with(TtftReject(Fixed(0.0, p=1 / 16)))
    engine.submit(1, [1, 2], max_tokens=20, ignore_eos=True)
    engine.launch()
    engine.scheduler.pause("wait", engine.now)
    engine.submit(2, list(range(16)), max_tokens=2, ignore_eos=True, slo=[2.0, None, None, 0.0], arrival=engine.now)
    engine.now += 5.0
    engine.complete()
    engine.launch()
    engine.complete()
    assert not engine.ends
    engine.scheduler.resume(engine.now)
    engine.launch()
    assert engine.ends[2].reason == "error", "but then it is too late"
    engine.run()


@pytest.mark.parametrize("is_paused", [False, True])
def test_who_is_too_late_when_its_turn_comes_is_rejected_once(is_paused: bool) -> None:
    """It came with a last chance in a second, and steps have become slower since. In a pause it is looked at again later."""
    engine, times = engine_with(AdmissionPolicy()), Fixed(0.0, p=1 / 16)
    admission, view = TtftReject(times), engine.scheduler
    engine.submit(1, list(range(16)), slo=[2.2, None, None, 0.0])
    (sequence,) = view.waiting()
    admission.on_arrival(sequence, view)
    times._seconds = (0.0, 2 / 16, 0.0)
    assert admission.admit(sequence, [], [], view) is Admit.SKIP
    view.now = 1.5
    if is_paused:
        view.pause("wait", 1.5)
        assert list(admission.reject(view)) == []
        view.resume(1.6)
    assert [one for one, _ in admission.reject(view)] == [sequence]
    assert list(admission.reject(view)) == []


def test_the_last_moment_is_in_time() -> None:
    class Exactly(TtftReject):
        safety = 1.0

    engine = engine_with(Exactly(Fixed(0.0, p=1 / 16)), max_num_seqs=1)
    engine.submit(1, [1, 2], max_tokens=20, ignore_eos=True)
    engine.launch()
    engine.now = 1.99
    engine.submit(2, list(range(16)), max_tokens=2, ignore_eos=True, slo=[3.0, None, None, 0.0])
    engine.launch()
    assert engine.now == 2.0
    assert not engine.ends
    engine.run()


def test_who_was_taken_by_a_scheduler_that_died_is_not_turned_away() -> None:
    """It may have had a slot there; and it is late because of the death, not of the load."""
    engine, slo = engine_with(TtftReject(Fixed(0.01))), [0.5, None, None, None]
    engine.now = 5.0
    for rid, is_resumed in ((1, True), (2, False)):
        engine.submit(rid, list(range(8)), max_tokens=2, ignore_eos=True, slo=slo, is_resumed=is_resumed)
    engine.run()
    assert {rid: end.reason for rid, end in engine.ends.items()} == {1: "length", 2: "error"}


def test_what_is_cached_counts() -> None:
    engine = engine_with(TtftReject(Fixed(0.0, p=1 / 16)))
    engine.submit(1, list(range(32)), max_tokens=2, ignore_eos=True)
    engine.run()
    engine.submit(2, list(range(32)), max_tokens=2, ignore_eos=True, slo=[1.0, None, None, 0.0], arrival=engine.now)
    engine.submit(3, [9, *range(31)], max_tokens=2, ignore_eos=True, slo=[1.0, None, None, 0.0], arrival=engine.now)
    engine.run()
    assert {rid: end.reason for rid, end in engine.ends.items()} == {1: "length", 2: "length", 3: "error"}


def test_nobody_is_rejected_before_anything_is_known() -> None:
    engine = engine_with(TtftReject())
    engine.submit(1, list(range(32)), max_tokens=2, ignore_eos=True, slo=[0.05, None, None, 0.0])
    engine.submit(2, list(range(30)), max_tokens=2, ignore_eos=True, slo=[0.001, None, None, 0.0])
    engine.run()
    assert {rid: end.reason for rid, end in engine.ends.items()} == {1: "length", 2: "error"}, (
        "but who is late, is late"
    )


# Credits ------------------------------------------------------------------------------------------------------------------


def test_slow_streams_go_slower_when_the_fast_ones_need_it() -> None:
    """Steps take 10 ms a row: one at 35 ms and two at 140 ms are a batch of 1.5, of which two run at a time at most."""
    admission = Credit(Fixed(0.0, d=0.01))
    engine = engine_with(admission, depth=1, max_num_batched_tokens=99)
    tpots = {1: 0.025, 2: 0.1, 3: 0.1}
    for rid, tpot in tpots.items():
        engine.submit(rid, [rid, 2, 3], max_tokens=16, ignore_eos=True, slo=[None, tpot, None, 0.0])
    engine.launch()
    engine.complete()
    lengths = []
    for _ in range(12):
        engine.launch()
        engine.complete()
        lengths.append([len(engine.streams[rid]) for rid in tpots])
    assert lengths[-1] == [13, 4, 4]
    engine.run()
    assert len(engine.ends) == 3


def test_streams_go_at_full_speed_while_there_is_time() -> None:
    engine = engine_with(Credit(Fixed(0.0, d=0.01)), depth=1)
    for rid in (1, 2):
        engine.submit(rid, [rid, 2, 3], max_tokens=9, ignore_eos=True, slo=[None, 0.025 * rid, None, 0.0])
    engine.run()
    assert len(engine.plans) == 9


def test_a_virtual_batch_is_full_when_its_steps_would_take_too_long() -> None:
    """1.1 x 10 ms a row: of streams at 50 ms four have time, of those at 100 ms nine."""
    for tpot, expected in ((0.05, 4), (0.1, 9)):
        engine = engine_with(Credit(Fixed(0.0, d=0.01)), max_num_seqs=20, max_num_batched_tokens=99)
        for rid in range(1, 15):
            engine.submit(rid, [rid, 2], max_tokens=8, ignore_eos=True, slo=[None, tpot, None, 0.0])
        engine.launch()
        engine.launch()
        assert num_running(engine) == expected
        engine.run()
        assert len(engine.ends) == 14


def test_who_promises_nothing_goes_on_all_the_same() -> None:
    engine = engine_with(Credit(Fixed(0.0, d=0.01)), depth=1)
    engine.submit(1, [1, 2], max_tokens=30, ignore_eos=True, slo=[None, 0.015, None, 0.0])
    engine.submit(2, [2, 2], max_tokens=3, ignore_eos=True)
    engine.run()
    assert list(engine.ends) == [2, 1] or len(engine.streams[2]) == 3


def test_ttft_reject_keeps_nobody_who_has_gone() -> None:
    """Their last chance to start would come in thirty years."""
    admission = TtftReject(Fixed(0.0))
    engine = engine_with(admission, max_num_seqs=1)
    engine.submit(1, [1], max_tokens=30, ignore_eos=True)
    engine.launch()
    for rid in range(2, 400):
        engine.submit(rid, [rid % 97], slo=[1e9, None, None, 0.0])
        engine.abort(rid)
    assert len(admission._heap) < 200
    engine.run()
