"""The built-in policies: whom each of them serves first, on the scripted engine; every stream stays what it must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.scheduling.deadlines import Deadlines, first_due, last_due
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policies.cohost import Cohost
from actorllm.scheduling.policies.fairbatch import FairBatch
from actorllm.scheduling.policies.fcfs import Fcfs
from actorllm.scheduling.policies.qoserve import QoServe
from actorllm.scheduling.policies.vtc import Vtc
from actorllm.scheduling.policy import POLICIES, KeyPolicy, PlanPolicy, register_policy
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.scheduling.step_time import CorrectedStepTime, StepTime

BuildEngine = Callable[..., Any]


class Linear:
    """Steps that take a millisecond and 0.1 ms per token."""

    def seconds(self, p: float, d: float, context: float, before: float = 0.0, pairs: float = 0.0) -> float:
        return 1e-3 + 1e-4 * (p + d)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("depth", [1, 2])
def test_streams_stay_what_they_must_be_and_nobody_starves(
    build_engine: BuildEngine, reference: Callable[..., list[int]], name: str, depth: int
) -> None:
    """Few blocks, so that requests are preempted; some promise something, some do not."""
    engine = build_engine(policy=load_policy(name), depth=depth, num_blocks=22, max_num_batched_tokens=12)
    for rid in range(1, 13):
        slo = [None, [0.5, 0.05, None, 0.01], [None, None, 3.0, 0.0], [None, 0.1, None, 0.0]][rid % 4]
        engine.submit(
            rid,
            range(rid, rid + 3 * (rid % 5) + 2),
            max_tokens=15,
            ignore_eos=True,
            slo=slo,
            is_latency_sensitive=rid % 3 == 0,
            tenant=f"t{rid % 2}",
            arrival=engine.now,
        )
        if rid > 4:
            engine.launch()
            if engine.results:
                engine.complete()
    engine.run()
    for rid in range(1, 13):
        assert engine.streams[rid] == reference(range(rid, rid + 3 * (rid % 5) + 2), rid, 15)
    statistics = engine.scheduler.statistics()
    assert statistics.kv.num_free == 22
    assert statistics.num_refused_decisions == 0


@pytest.mark.parametrize("is_of_class", [True, False])
def test_a_policy_hears_of_admissions_and_ends_by_its_own_hooks(build_engine: BuildEngine, is_of_class: bool) -> None:
    heard: list[tuple[str, int]] = []

    def hear(event: str) -> Callable[..., None]:
        return lambda *arguments: heard.append((event, arguments[-2].key[1]))

    hooks = {name: hear(name) for name in ("on_admit", "on_end")}
    policy = type("Listening", (KeyPolicy,), hooks if is_of_class else {})()
    if not is_of_class:
        vars(policy).update(hooks)
    engine = build_engine(policy=KeyPlanner(policy))
    engine.submit(1, range(5), max_tokens=2)
    engine.submit(2, range(5, 9), max_tokens=3)
    engine.run()
    assert heard == [("on_admit", 1), ("on_admit", 2), ("on_end", 1), ("on_end", 2)]


def order(engine: Any) -> list[int]:
    engine.run()
    return list(engine.ends)


def test_edf_goes_by_the_deadline_of_the_first_token(build_engine: BuildEngine) -> None:
    engine = build_engine(policy=load_policy("edf"), max_num_seqs=1)
    slos = {
        1: None,
        2: [None, None, 2.0, 0.0],
        3: [0.9, None, None, 0.1],
        4: [1.5, 0.1, None, 0.0],
        5: [None, 0.1, None, 0.0],
    }
    for rid, slo in slos.items():
        engine.submit(rid, range(5), max_tokens=1, slo=slo)
    assert order(engine) == [5, 3, 4, 2, 1], "due at 0, 1.4, 1.5, 2.0 and never"


def test_srpf_goes_by_what_is_left_of_the_prompt(build_engine: BuildEngine) -> None:
    engine = build_engine(policy=load_policy("srpf"), max_num_seqs=1)
    for rid, size in ((1, 9), (2, 3), (3, 30), (4, 5)):
        engine.submit(rid, range(rid, rid + size), max_tokens=1)
    assert order(engine) == [2, 4, 1, 3]


def test_hrrn_lets_the_long_wait_only_in_proportion(build_engine: BuildEngine) -> None:
    engine = build_engine(policy=load_policy("hrrn"), max_num_seqs=1)
    engine.now = 100.0
    engine.submit(1, range(30), max_tokens=1, arrival=0.0)
    engine.submit(2, range(3), max_tokens=1, arrival=99.0)
    engine.submit(3, range(3), max_tokens=1, arrival=50.0)
    assert order(engine) == [3, 1, 2], "ratios 16, 3.3 and 0.3"


def test_vtc_serves_who_got_least(build_engine: BuildEngine) -> None:
    engine = build_engine(policy=load_policy("vtc"), max_num_seqs=1)
    for rid in range(1, 7):
        engine.submit(rid, [rid, rid], max_tokens=5, ignore_eos=True, tenant="greedy")
    engine.submit(7, [7, 7], max_tokens=5, ignore_eos=True, tenant="modest")
    engine.submit(8, [8, 8], max_tokens=5, ignore_eos=True, tenant="modest")
    assert order(engine) == [1, 7, 2, 8, 3, 4, 5, 6]


def test_vtc_knows_weights_and_does_not_let_anybody_save_up(build_engine: BuildEngine) -> None:
    class Weighted(Vtc):
        weights = {"big": 2.0}  # noqa: RUF012

    engine = build_engine(policy=KeyPlanner(Weighted()), max_num_seqs=1, depth=1)
    for rid in range(1, 7):
        engine.submit(rid, [rid, rid], max_tokens=5, ignore_eos=True, tenant="big")
        engine.submit(rid + 10, [rid, rid], max_tokens=5, ignore_eos=True, tenant="small")
    for _ in range(15):
        engine.launch()
        engine.complete()
    engine.submit(30, [1, 2], max_tokens=5, ignore_eos=True, tenant="late")
    engine.submit(31, [1, 2], max_tokens=5, ignore_eos=True, tenant="late")
    engine.run()
    ends = list(engine.ends)
    first = ends[:9]
    assert sum(rid < 10 for rid in first) > sum(10 < rid < 30 for rid in first), "the big one gets more"
    assert ends.index(31) - ends.index(30) > 1, "who comes late has no credit from before"


def test_vtc_lets_nobody_save_up_while_the_engine_is_idle(build_engine: BuildEngine) -> None:
    engine = build_engine(policy=load_policy("vtc"), max_num_seqs=1)
    for rid in range(1, 21):
        engine.submit(rid, [rid], max_tokens=5, ignore_eos=True, tenant="a")
    engine.run()
    for rid in range(31, 36):
        engine.submit(rid, [rid], max_tokens=5, ignore_eos=True, tenant="b")
        engine.submit(rid + 10, [rid], max_tokens=5, ignore_eos=True, tenant="a")
    ends = order(engine)[20:]
    assert [sum(rid < 40 for rid in ends[at : at + 2]) for at in range(0, 10, 2)] == [1] * 5, "they take turns"


def test_vtc_counts_only_who_waited(build_engine: BuildEngine) -> None:
    engine = build_engine(policy=load_policy("vtc"), max_num_seqs=1)
    engine.submit(1, [1, 2], max_tokens=3, tenant="a", blocked_on="grammar")
    engine.abort(1)
    engine.submit(2, [1, 2], max_tokens=3, ignore_eos=True, tenant="a")
    engine.submit(3, [1, 2], max_tokens=3, ignore_eos=True, tenant="b")
    engine.submit(4, [1, 2], max_tokens=3, ignore_eos=True, tenant="a")
    assert order(engine) == [1, 2, 3, 4]


def test_cohost_displaces_best_effort_and_leaves_room(build_engine: BuildEngine) -> None:
    engine = build_engine(policy=KeyPlanner(Cohost(Linear())), max_num_seqs=2, depth=1)
    for rid in (1, 2, 3):
        engine.submit(rid, [rid], max_tokens=10, ignore_eos=True)
    engine.launch()
    engine.complete()
    engine.submit(9, [9], max_tokens=2, ignore_eos=True, is_latency_sensitive=True)
    engine.launch()
    assert {s.key[1] for s in engine.scheduler.running()} == {1, 9}, "the later best-effort request gave way"
    engine.run()
    assert next(iter(engine.ends)) == 9
    small = build_engine(policy=KeyPlanner(Cohost(Linear())), num_blocks=20, depth=1)
    small.submit(1, range(20), max_tokens=3, ignore_eos=True)
    small.submit(2, range(50, 90 - 2), max_tokens=2, ignore_eos=True)
    small.submit(3, range(40, 74), max_tokens=2, ignore_eos=True, is_latency_sensitive=True)
    small.launch()
    assert 3 in {s.key[1] for s in small.scheduler.running()}


class CountedCohost(Cohost):
    """Counts what it is asked about a request."""

    def __init__(self) -> None:
        super().__init__(Linear())
        self.num_calls = 0

    def key(self, sequence: Any, view: Any) -> Any:
        self.num_calls += 1
        return super().key(sequence, view)

    def line(self, sequence: Any, view: Any) -> Any:
        self.num_calls += 1
        return super().line(sequence, view)

    def admit(self, sequence: Any, view: Any) -> Any:
        self.num_calls += 1
        return super().admit(sequence, view)


def short_reserve(build_engine: BuildEngine, policy: Cohost, num_left: int) -> Any:
    """Of 20 blocks 3 are held by a sensitive request, and so many are left for best effort."""
    policy.reserve = (17 - num_left) / 20
    engine = build_engine(policy=KeyPlanner(policy), num_blocks=20, depth=1, max_num_batched_tokens=100)
    engine.submit(1, range(9), max_tokens=30, ignore_eos=True, is_latency_sensitive=True)
    engine.launch()
    engine.complete()
    return engine


def test_a_step_does_not_go_through_a_flood_of_best_effort(build_engine: BuildEngine) -> None:
    """None of which fits beside the reserve. Steps go on, and a sensitive request starts in each."""
    policy = CountedCohost()
    engine = short_reserve(build_engine, policy, num_left=1)
    for rid in range(1000, 21_000):
        engine.submit(rid, [50] * (8 * (rid % 3) + 5))
    for rid in range(2, 22):
        engine.submit(rid, [60], max_tokens=1, is_latency_sensitive=True)
        policy.num_calls = 0
        plan = engine.scheduler.schedule(engine.now)
        assert plan is not None
        engine.apply(engine.scheduler.update(engine.worker.run(plan), engine.now))
        assert rid in engine.ends
        assert policy.num_calls < 30, "what it is asked of the first request of each line, and of one that starts"
    assert engine.scheduler.statistics().num_waiting == 20_000


def test_best_effort_that_waits_holds_back_its_own_size_alone(build_engine: BuildEngine) -> None:
    """Smaller requests and sensitive ones pass, although they come later; one that would fit, and is of its size, does not."""
    engine = short_reserve(build_engine, Cohost(Linear()), num_left=4)
    for rid, size, is_sensitive in ((2, 21, False), (3, 13, False), (4, 2, False), (5, 13, True)):
        slo = [0.1 * rid, None, None, 0.0]  # who came first is due first
        engine.submit(rid, [40 + rid] * size, slo=slo, is_latency_sensitive=is_sensitive, arrival=engine.now)
    assert [engine.scheduler.admission_blocks(s) for s in engine.scheduler.waiting()] == [6, 4, 1, 4]
    engine.launch()
    assert {s.key[1] for s in engine.scheduler.running()} == {1, 4, 5}


@pytest.mark.parametrize(("e2e", "pauses"), [(1000.0, True), (None, True), (0.5, False)])
def test_best_effort_pauses_while_sensitive_prompts_are_computed(
    build_engine: BuildEngine, e2e: float | None, pauses: bool
) -> None:
    """A prompt of 36 tokens goes through in chunks of a few; who has used up half of what it was promised goes on."""
    engine = build_engine(policy=KeyPlanner(Cohost(Linear())), depth=1, max_num_batched_tokens=6)
    slo = None if e2e is None else [None, None, e2e, 0.0]
    engine.submit(1, [1], max_tokens=30, ignore_eos=True, slo=slo)
    engine.submit(2, [2], max_tokens=30, ignore_eos=True, is_latency_sensitive=True, slo=[0.1, None, None, 0.0])
    for _ in range(3):
        engine.launch()
        engine.complete()
    engine.now += 0.3
    before = [len(engine.streams[rid]) for rid in (1, 2)]
    engine.submit(3, range(36), max_tokens=2, ignore_eos=True, is_latency_sensitive=True, slo=[9.0, None, None, 0.0])
    for _ in range(7):
        engine.launch()
        engine.complete()
    got = [len(engine.streams[rid]) - had for rid, had in zip((1, 2), before, strict=True)]
    assert got == ([1, 7] if pauses else [7, 7]), "all of them run in one step of eight"
    while engine.scheduler.prefilling:
        engine.launch()
        engine.complete()
    had = len(engine.streams[1])
    engine.launch()
    engine.complete()
    assert len(engine.streams[1]) == had + 1, "nobody waits for a prompt any more"
    engine.run()
    assert {end.reason for end in engine.ends.values()} == {"length"}


def test_sensitive_requests_without_a_promise_come_before_best_effort_without_one(build_engine: BuildEngine) -> None:
    engine = build_engine(policy=KeyPlanner(Cohost(Linear())), max_num_seqs=1)
    engine.submit(1, [1], max_tokens=1)
    engine.submit(2, [2], max_tokens=1, is_latency_sensitive=True)
    assert order(engine) == [2, 1]


def test_qoserve_relegates_who_cannot_make_it(build_engine: BuildEngine) -> None:
    engine = build_engine(policy=KeyPlanner(QoServe(Linear())), max_num_seqs=1)
    engine.now = 10.0
    engine.submit(1, range(5), max_tokens=1, arrival=0.0, slo=[2.0, None, None, 0.0])
    engine.submit(2, range(6), max_tokens=1, arrival=9.9, slo=[5.0, None, None, 0.0])
    assert order(engine) == [2, 1], "the deadline of the first one has passed"

    class Keeps(QoServe):
        relegates = False

    engine = build_engine(policy=KeyPlanner(Keeps(Linear())), max_num_seqs=1)
    engine.now = 10.0
    engine.submit(1, range(5), max_tokens=1, arrival=0.0, slo=[2.0, None, None, 0.0])
    engine.submit(2, range(6), max_tokens=1, arrival=9.9, slo=[5.0, None, None, 0.0])
    assert order(engine) == [1, 2]


@pytest.mark.parametrize("cls", [Cohost, QoServe])
def test_a_prompt_that_is_mostly_cached_can_be_in_time(build_engine: BuildEngine, cls: type[QoServe]) -> None:
    """Of 39 tokens at 100 tokens/s only 7 are not cached: due in 0.2 s, it is not given up when it starts."""
    policy = type("Fixed", (cls,), {"is_dynamic": False, "strict": True})(Linear())
    engine = build_engine(policy=KeyPlanner(policy), depth=1, max_num_batched_tokens=4)
    engine.submit(1, range(33), max_tokens=1)
    engine.run()

    def step() -> None:
        policy._tokens_per_s = 100.0
        engine.launch()
        engine.complete()

    promise: dict[str, Any] = {"arrival": engine.now, "is_latency_sensitive": True, "max_tokens": 1}
    engine.submit(2, range(39), slo=[0.2, None, None, 0.0], **promise)
    step()
    assert engine.scheduler.sequence((0, 2)).num_cached_tokens == 32
    engine.submit(3, range(50, 58), slo=[10.0, None, None, 0.0], **promise)
    assert order(engine) == [1, 2, 3], "one that was given up would have come last"


@pytest.mark.parametrize("cls", [Cohost, QoServe])
def test_who_has_its_first_token_did_not_miss_it(build_engine: BuildEngine, cls: type[QoServe]) -> None:
    """A policy that comes later, when that token is long due, does not take the request for one that was given up."""
    engine = build_engine(policy=load_policy("fcfs"), depth=1)
    engine.submit(1, [1], max_tokens=20, ignore_eos=True, is_latency_sensitive=True, slo=[1.0, 1.0, None, 0.0])
    engine.launch()
    engine.complete()
    engine.now = 5.0
    engine.scheduler.change_policy(cls.name, None, engine.now)
    assert engine.scheduler.sequence((0, 1)).policy_state["relegated"] is False


@pytest.mark.parametrize("cls", [Cohost, QoServe])
def test_a_promise_per_token_alone_is_not_hopeless(build_engine: BuildEngine, cls: type[QoServe]) -> None:
    engine = build_engine(policy=KeyPlanner(cls(Linear())), max_num_seqs=1)
    engine.submit(1, [1], max_tokens=1)
    engine.submit(2, [2], max_tokens=1, is_latency_sensitive=True, slo=[None, 0.05, None, 0.0])
    assert order(engine) == [2, 1]


@pytest.mark.parametrize("cls", [Cohost, QoServe])
@pytest.mark.parametrize(("e2e", "expected"), [(None, [1, 2]), (1.5, [2, 1])])
def test_who_was_preempted_after_its_first_token_is_hopeless_only_by_its_end(
    build_engine: BuildEngine, cls: type[QoServe], e2e: float | None, expected: list[int]
) -> None:
    engine = build_engine(policy=KeyPlanner(cls(Linear())), max_num_seqs=1, depth=1)
    engine.submit(1, [1], max_tokens=5, ignore_eos=True, is_latency_sensitive=True, slo=[1.0, 1.0, e2e, 0.0])
    engine.launch()
    engine.complete()
    assert len(engine.streams[1]) == 1
    engine.scheduler._table.preempt_all()
    engine.now = 2.0
    engine.submit(2, [2], max_tokens=2, arrival=2.0, is_latency_sensitive=True, slo=[None, None, 1000.0, 0.0])
    assert order(engine) == expected


@pytest.mark.parametrize(("tpot", "expected"), [(10.0, 3901), (0.1, 768), (0.02, 128)])
def test_qoserve_makes_steps_as_large_as_the_tightest_stream_allows(
    build_engine: BuildEngine, tpot: float, expected: int
) -> None:
    class First(QoServe):
        anchor = "first"

    engine = build_engine(
        policy=KeyPlanner(First(Linear())), max_num_batched_tokens=4096, max_model_len=4000, num_blocks=3000, depth=1
    )
    engine.submit(1, [1], max_tokens=40, ignore_eos=True, slo=[1.0, tpot, None, 0.0])
    engine.launch()
    engine.results[0] = type(engine.results[0])(step=1, tokens=engine.results[0].tokens, started=0.01, ended=engine.now)
    engine.complete()
    engine.submit(2, [i % 90 for i in range(3900)], max_tokens=2)
    engine.now -= 0.02  # a step and its result take 0.01 s of the scripted engine each
    plan = engine.launch()
    assert plan.prefill_counts.tolist() == [expected - 1]


def test_fairbatch_holds_back_who_is_ahead_while_prompts_are_there(
    build_engine: BuildEngine, reference: Callable[..., list[int]]
) -> None:
    engine = build_engine(policy=KeyPlanner(FairBatch(Linear())), max_num_batched_tokens=16, depth=1, num_blocks=80)
    engine.submit(1, [1], max_tokens=30, ignore_eos=True, slo=[100.0, 1.0, None, 0.0])
    engine.submit(2, [2], max_tokens=30, ignore_eos=True, slo=[0.01, 0.01, None, 0.0])
    for _ in range(3):
        engine.launch()
        engine.complete()
    engine.submit(3, range(35), max_tokens=2, ignore_eos=True, slo=[1.0, 0.1, None, 0.0])
    rows = []
    while len(engine.streams[3]) < 1:
        engine.launch()
        rows.append(len(engine.worker.decode))
        engine.complete()
    assert 1 in rows, "request 1 has a hundred seconds of slack"
    engine.run()
    assert engine.streams[1] == reference([1], 1, 30)
    assert engine.streams[2] == reference([2], 2, 30)


def test_deadlines_of_tokens_have_two_anchors(build_engine: BuildEngine) -> None:
    class Watch(KeyPolicy):
        def __init__(self, anchor: Any) -> None:
            self.deadlines = Deadlines(anchor)

        def on_admit(self, sequence: Any, view: Any) -> None:
            self.deadlines.on_admit(sequence, view)

        def on_step(self, done: Any, view: Any) -> None:
            self.deadlines.on_step(done, view)

    due = {}
    for anchor in ("slo", "first"):
        policy = Watch(anchor)
        engine = build_engine(policy=KeyPlanner(policy), depth=1)
        for rid, slo in (
            (1, [5.0, 0.5, None, 0.0]),
            (2, [None, 0.5, None, 0.0]),
            (3, None),
            (4, [0.1, 0.5, None, 0.0]),
        ):
            engine.submit(rid, [rid], max_tokens=9, ignore_eos=True, slo=slo)
        engine.launch()
        result = engine.results[0]
        engine.results[0] = type(result)(step=result.step, tokens=result.tokens, started=1.0, ended=2.0)
        engine.complete()
        engine.scheduler._decode.find()
        due[anchor] = policy.deadlines.next_due(engine.scheduler).tolist()
    assert due["slo"] == [5.5, 2.5, float("inf"), 2.5], "a first token that was late starts the clock anew"
    assert due["first"] == [2.5, 2.5, float("inf"), 2.5]


def test_a_deadline_per_token_outlives_the_scheduler(build_engine: BuildEngine, reference: Any) -> None:
    """Five tokens came, the first of them at 7.0, from a scheduler that died."""

    class Watch(KeyPolicy):
        def __init__(self) -> None:
            self.deadlines = Deadlines("slo")

        def on_admit(self, sequence: Any, view: Any) -> None:
            self.deadlines.on_admit(sequence, view)

    policy = Watch()
    engine = build_engine(policy=KeyPlanner(policy), depth=1)
    output = np.array(reference([1], 1, 5), np.int32)
    again: dict[str, Any] = {"output": output, "is_resumed": True, "first_token": 7.0}
    engine.submit(1, [1], max_tokens=9, ignore_eos=True, slo=[None, 0.5, None, 0.0], **again)
    engine.launch()
    engine.complete()
    engine.scheduler._decode.find()
    assert policy.deadlines.next_due(engine.scheduler).tolist() == [7.0 + 6 * 0.5], "of the seventh token"


def test_what_is_due_first(build_engine: BuildEngine) -> None:
    engine = build_engine()
    for rid, slo in ((1, [1.0, 0.1, 9.0, 0.5]), (2, [None, 0.1, 9.0, 0.0]), (3, [None, 0.1, None, 0.0]), (4, None)):
        engine.submit(rid, [1, 2, 3, 4], arrival=3.0, slo=slo)
    due = [first_due(engine.scheduler.sequence((0, rid))) for rid in (1, 2, 3, 4)]
    assert due == [6.0, 12.0, 3.0, float("inf")]
    last = [last_due(engine.scheduler.sequence((0, rid))) for rid in (1, 2, 3, 4)]
    assert last == [6.0, 12.0, float("inf"), float("inf")], "waiting for a first token breaks no promise per token"


def test_step_times_are_learned_and_follow_a_change() -> None:
    rng = np.random.default_rng(1)
    learned = StepTime()
    assert learned.seconds(100, 10, 1000) == 0.0, "nothing is known yet"

    def truth(p: float, d: float, context: float, factor: float) -> float:
        return factor * (5e-3 + 8e-5 * p + 3e-5 * d + 1e-7 * context)

    for factor in (1.0, 2.0):
        for _ in range(1500):
            p, d = float(rng.integers(0, 2000)), float(rng.integers(0, 100))
            context = d * float(rng.integers(100, 3000))
            learned.observe(p, d, context, truth(p, d, context, factor) * float(np.exp(0.02 * rng.standard_normal())))
        for case in ((1000, 50, 60_000), (0, 20, 20_000), (2000, 0, 0)):
            assert learned.seconds(*case) == pytest.approx(truth(*case, factor), rel=0.06)
    learned.observe(10, 10, 10, 0.0)
    assert learned.num_steps == 3000, "a step that took no time tells nothing"


@pytest.mark.parametrize("seed", range(3))
def test_of_rows_that_are_always_as_many_nothing_absurd_is_learned(seed: int) -> None:
    """What a row takes and what is fixed cannot be told apart then. Half as many rows take from half the time to all of it."""
    rng = np.random.default_rng(seed)
    learned = StepTime()
    for at in range(5000):
        p = 0 if at % 15 else 300
        learned.observe(p, 32, 32 * (20 + at % 180), 0.006 + 5e-5 * p + 0.002 * float(rng.uniform()))
        if at >= 100:
            assert 0.0035 < learned.seconds(0, 16, 16 * 100) < 0.008


@pytest.mark.parametrize("p", [0, 300])
def test_what_steps_take_is_followed_however_long_nothing_has_told_rows_and_steps_apart(p: int) -> None:
    learned = StepTime()
    for slower in (1.0, 2.0):
        for at in range(5000 if slower == 1.0 else 1000):
            learned.observe(p * (at % 2), 32, 32 * (20 + at % 180), slower * (0.006 + 5e-5 * p * (at % 2)))
    assert learned.seconds(0, 32, 32 * 100) == pytest.approx(0.012, rel=0.05)


class Mine(KeyPolicy):
    name = "mine"


def test_policies_can_be_given_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorllm.scheduling.policy.REGISTRY.names", dict(POLICIES))
    register_policy("calm", "actorllm.scheduling.policies.fcfs:Fcfs")
    register_policy("calm", Fcfs)
    loaded: PlanPolicy = load_policy("calm")
    assert isinstance(loaded, KeyPlanner)
    assert isinstance(loaded.policy, Fcfs)
    config = EngineConfig.from_arguments("storyteller", scheduling_policy="calm")
    assert config.scheduler.policy == "actorllm.scheduling.policies.fcfs:Fcfs", "the scheduler's process knows no names"
    with pytest.raises(ConfigError, match="scheduling policy 'edf' exists already"):
        register_policy("edf", Fcfs)
    with pytest.raises(ConfigError, match="at the top of its module, not as 'nowhere'"):
        register_policy("x", "nowhere")

    class Inner(KeyPolicy): ...

    with pytest.raises(ConfigError, match=r"at the top of its module, not as .*<locals>\.Inner"):
        register_policy("inner", Inner)
    monkeypatch.setattr(Mine, "__module__", "__main__")
    register_policy("mine", Mine)
    with pytest.raises(ConfigError, match="use topology='inline', or a module of its own"):
        load_policy("mine")


@pytest.mark.parametrize("path", [".own:Policy", "own:", ":Policy", "own:Policy:more", "my own:Policy"])
def test_a_path_that_names_no_class_is_told_with_its_form(path: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no scheduling policy .* your own is named as 'module:Class'"):
        load_policy(path)


class Constant:
    """Whatever is in a step, it takes this long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self, p: float, d: float, context: float, before: float = 0.0, pairs: float = 0.0) -> float:
        return self._seconds


def test_a_fitted_model_follows_the_engine_within_bounds() -> None:
    times = CorrectedStepTime(Constant(0.01), "constant")
    assert times.seconds(5, 1, 10) == 0.01
    for _ in range(300):
        times.observe(0, 4, 100, 0.02)
        times.observe(64, 4, 100, 0.008)
    assert times.seconds(0, 4, 100) == pytest.approx(0.02, rel=0.01)
    assert times.seconds(64, 4, 100) == pytest.approx(0.008, rel=0.01), "prompts have a factor of their own"
    told = times.statistics()
    assert told["num_steps"] == 600
    assert told["mape"] == pytest.approx((0.5 + 0.25) / 2, abs=0.01), "of the model as it was fitted"
    assert told["bias"] == pytest.approx((-0.5 + 0.25) / 2, abs=0.01)
    assert told["corrected_mape"] < 0.01
    times.observe(0, 4, 100, 100.0)
    assert times.seconds(0, 4, 100) < 0.021, "one step is no trend"
    times.observe(0, 4, 100, 0.0)
    assert times.statistics()["num_steps"] == 601, "a step that took no time tells nothing"
    for _ in range(2000):
        times.observe(0, 4, 100, 1.0)
    assert times.seconds(0, 4, 100) == pytest.approx(0.04), "this is another engine"
    assert times.statistics()["corrected_mape"] > 0.9


@pytest.mark.parametrize("name", ["qoserve", "fairbatch", "cohost"])
def test_a_policy_is_given_a_model_and_learns_from_every_step(name: str, build_engine: BuildEngine) -> None:
    times = CorrectedStepTime(Constant(0.5))
    policy = load_policy(name, times)
    assert not policy.ignores_decode_steps, "a simulation must not leave any of them out"
    assert load_policy(name).ignores_decode_steps
    assert load_policy(name, Constant(0.5)).ignores_decode_steps, "one that does not change need not be told"
    engine = build_engine(policy=policy, depth=1)
    engine.submit(1, [1, 2, 3], max_tokens=5, ignore_eos=True, slo=[5.0, 0.5, None, 0.0])
    for _ in range(5):
        engine.launch()
        result = engine.results[0]
        engine.results[0] = type(result)(step=result.step, tokens=result.tokens, started=1.0, ended=2.0)
        engine.complete()
    assert times.statistics()["num_steps"] == 5
    assert times.seconds(0, 1, 1) == pytest.approx(times.seconds(3, 1, 1), rel=0.5)
    assert times.seconds(0, 1, 1) > 0.6
    assert isinstance(load_policy("fcfs", times), KeyPlanner), "one that does not ask does without"
