"""What the papers say of their policies, as properties that can fail; and mistakes that are found by them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actorllm.messages import pack
from actorllm.scheduling.policies.andes import Andes
from actorllm.scheduling.policies.apt_serve import AptServe
from actorllm.scheduling.policies.sarathi import Sarathi
from actorllm.scheduling.policies.slidingserve import SlidingServe
from actorllm.scheduling.policies.uniboost import UniBoost
from actorllm.scheduling.policies.vtc import Vtc
from actorllm.scheduling.policy import KeyPolicy
from actorllm.scheduling.step_packing import KeyPlanner
from tests.scheduling.chained_tokens import reference_stream
from tests.scheduling.tiers.tiered_engine import TieredEngine

BuildEngine = Callable[..., Any]


class Linear:
    """Steps that take a millisecond and 0.1 ms per token."""

    def seconds(self, p: float, d: float, context: float, before: float = 0.0, pairs: float = 0.0) -> float:
        return 1e-3 + 1e-4 * (p + d)


def order(engine: Any) -> list[int]:
    engine.run()
    return list(engine.ends)


def step(engine: Any) -> None:
    engine.launch()
    engine.complete()


# VTC: between two tenants that have requests waiting all the time, service differs by a bound ------------------------------

MAX_PROMPT, SLOTS, BLOCKS, BLOCK_SIZE = 12, 4, 16, 4


class ForgetsOutput(Vtc):
    """A mistake."""

    per_output = 0.0


class Weighted(Vtc):
    weights = {"talks": 3.0}  # noqa: RUF012


def largest_difference(build_engine: BuildEngine, policy: Vtc) -> float:
    """Of the service of two tenants between any two steps; one asks for much and is told little, the other the reverse."""
    engine = build_engine(
        policy=KeyPlanner(policy), max_num_seqs=SLOTS, num_blocks=BLOCKS, block_size=BLOCK_SIZE, depth=1,
        max_num_batched_tokens=16, enable_prefix_caching=False,
    )  # fmt: skip
    rng = random.Random(2)
    counted: dict[int, int] = {}
    service = {"talks": 0.0, "listens": 0.0}
    seen = []
    for rid in range(1, 161):
        tenant = ("talks", "listens")[rid % 2]
        size, num = (rng.randint(1, 3), 20) if tenant == "talks" else (MAX_PROMPT, rng.randint(1, 3))
        engine.submit(rid, [rid % 90] * size, max_tokens=num, ignore_eos=True, tenant=tenant)
    for _ in range(110):
        step(engine)
        for rid, stream in engine.streams.items():
            sequence = engine.scheduler.sequence((0, rid))
            started = bool(stream) or (sequence is not None and sequence.slot >= 0)
            if not started:
                continue
            tenant = ("talks", "listens")[rid % 2]
            prompt = (
                (len(engine.scheduler.sequence((0, rid)).submit.prompt) if rid not in counted else 0) if sequence else 0
            )
            if rid not in counted:
                counted[rid] = 0
                service[tenant] += prompt / policy.weights.get(tenant, 1.0)
            service[tenant] += 2.0 * (len(stream) - counted[rid]) / policy.weights.get(tenant, 1.0)
            counted[rid] = len(stream)
        seen.append(service["talks"] - service["listens"])
    waiting = {s.tenant for s in engine.scheduler.waiting()}
    assert waiting == {"talks", "listens"}, "both have requests waiting to the end"
    return float(np.ptp([0.0, *seen]))


def test_vtc_keeps_two_backlogged_tenants_within_the_bound_of_the_paper(build_engine: BuildEngine) -> None:
    """Theorem 4.4: the difference is at most 2 * max(w_p * L_input, w_q * M), with M the tokens that fit into memory."""
    bound = 2 * max(1.0 * MAX_PROMPT, 2.0 * BLOCKS * BLOCK_SIZE)
    assert largest_difference(build_engine, Vtc()) <= bound
    assert largest_difference(build_engine, Weighted()) <= bound, "the service of each by its weight"


def test_a_vtc_that_forgets_output_tokens_is_found(build_engine: BuildEngine) -> None:
    bound = 2 * max(1.0 * MAX_PROMPT, 2.0 * BLOCKS * BLOCK_SIZE)
    assert largest_difference(build_engine, ForgetsOutput()) > bound


# Sarathi-Serve: prompts in chunks, none passes another, no decode pauses ----------------------------------------------------


@pytest.mark.parametrize(("is_strict", "first"), [(True, 2), (False, 3)])
def test_no_prompt_passes_another(build_engine: BuildEngine, is_strict: bool, first: int) -> None:
    class Packed(Sarathi):
        strict = is_strict

    engine = build_engine(policy=KeyPlanner(Packed()), max_num_batched_tokens=8, depth=1)
    engine.submit(1, [1], max_tokens=30, ignore_eos=True)
    step(engine)
    engine.submit(2, range(30), max_tokens=2, ignore_eos=True)
    engine.submit(3, [3, 4], max_tokens=2, ignore_eos=True)
    came: list[int] = []
    while len(came) < 2:
        had = len(engine.streams[1])
        step(engine)
        assert len(engine.streams[1]) == had + 1, "stall-free: a chunk pauses no decode"
        came += [rid for rid in (2, 3) if engine.streams[rid] and rid not in came]
    assert came[0] == first, "packed otherwise, the short one passes the long one"


# UniBoost: one knob from shortest first to first come, first served; and nobody is passed for long -------------------------


class Reversed(UniBoost):
    """A mistake: what is much work is boosted."""

    def boost(self, num_tokens: float) -> float:
        return 1e6 - super().boost(num_tokens)


def served(build_engine: BuildEngine, gamma: float, base: type[UniBoost] = UniBoost) -> list[int]:
    knobs = {"gamma": gamma, "max_preemptions": 0}
    engine = build_engine(policy=KeyPlanner(type("Tuned", (base,), knobs)()), max_num_seqs=1)
    for rid, size in ((1, 20), (2, 3), (3, 30), (4, 8)):
        engine.submit(rid, [rid] * size, max_tokens=1, arrival=0.05 * rid)
    return order(engine)


def test_the_knob_goes_from_shortest_first_to_first_come_first_served(build_engine: BuildEngine) -> None:
    assert served(build_engine, gamma=1e-3) == [2, 4, 1, 3]
    assert served(build_engine, gamma=1e6) == [1, 2, 3, 4]
    assert served(build_engine, gamma=1e-3, base=Reversed) != [2, 4, 1, 3]


def largest_wait_for_later_ones(policy: UniBoost, seed: int) -> float:
    """By how much a request that goes first came later than one that it passes, less the boost of the least work."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 4000) for _ in range(60)]
    arrivals = [rng.uniform(0, 60) for _ in sizes]
    places = sorted((arrival - policy.boost(size), arrival) for size, arrival in zip(sizes, arrivals, strict=True))
    latest, worst = -math.inf, -math.inf
    for _, arrival in places:
        worst = max(worst, latest - arrival)
        latest = max(latest, arrival)
    return worst - policy.boost(min(sizes))


def test_nobody_is_passed_by_one_that_came_later_than_the_largest_boost() -> None:
    for seed in range(20):
        assert largest_wait_for_later_ones(UniBoost(), seed) <= 1e-9
    assert max(largest_wait_for_later_ones(Reversed(), seed) for seed in range(20)) < 0, "the bound says nothing of it"
    longest = UniBoost()
    assert longest.boost(1) > longest.boost(100) > longest.boost(10_000) > 0


def test_a_long_answer_of_a_heavy_tail_loses_its_boost() -> None:
    policy = UniBoost()
    policy._sorted = sorted([10] * 90 + [1000] * 10)
    assert policy.rest(0) == pytest.approx(109)
    assert policy.rest(50) == pytest.approx(950), "those that said as much say much more"
    assert policy.rest(2000) == 2000, "longer than any was"
    assert policy.boost(policy.rest(0)) > policy.boost(policy.rest(50))


def test_uniboost_learns_how_long_answers_are(build_engine: BuildEngine) -> None:
    policy = UniBoost()
    engine = build_engine(policy=KeyPlanner(policy), max_num_seqs=2)
    for rid in range(1, 9):
        engine.submit(rid, [rid], max_tokens=rid, ignore_eos=True)
    engine.run()
    assert policy._sorted == list(range(1, 9))
    assert policy.rest(4) == pytest.approx(6.5 - 4)


def test_uniboost_displaces_for_memory_and_once(build_engine: BuildEngine) -> None:
    """A long answer gives its place to a short prompt that came a little later; the computation that is lost counts."""
    for lost_counts, expected in ((1e6, True), (0.5, False)):
        policy = type("Tuned", (UniBoost,), {"gamma": 0.1, "unknown_output": 1.0})()
        policy._tokens_per_s = lost_counts
        policy._sorted = sorted([1] * 50 + [39] * 2)
        engine = build_engine(policy=KeyPlanner(policy), max_num_seqs=1, depth=1)
        engine.submit(1, [1] * 10, max_tokens=25, ignore_eos=True)
        for _ in range(8):
            step(engine)
            policy._tokens_per_s = lost_counts
        engine.submit(2, [2], max_tokens=1, arrival=engine.now)
        engine.launch()
        assert (engine.scheduler.statistics().num_preemptions == 1) == expected
        engine.complete()
        engine.run()
        assert {end.reason for end in engine.ends.values()} == {"length"}


def test_uniboost_displaces_who_turns_out_to_be_long(build_engine: BuildEngine) -> None:
    """Most answers have three tokens, a few have 39. While the running one may end soon, it is not displaced."""
    policy = type("Tuned", (UniBoost,), {"gamma": 0.1})()
    policy._sorted = [3] * 50 + [39] * 2
    engine = build_engine(policy=KeyPlanner(policy), max_num_seqs=1, depth=1)

    def step_at_once() -> None:
        policy._tokens_per_s = 1e6  # what is lost counts nothing
        step(engine)

    engine.submit(1, [1], max_tokens=30, ignore_eos=True)
    step_at_once()
    engine.submit(2, [2] * 5, max_tokens=3, ignore_eos=True, arrival=engine.now)
    step_at_once()
    assert engine.scheduler.statistics().num_preemptions == 0
    for _ in range(3):
        step_at_once()
    assert engine.scheduler.statistics().num_preemptions == 1, "no other request came or went meanwhile"
    assert order(engine) == [2, 1]


class Counted(UniBoost):
    """Each request is held against the plain definition as well, if it is to be compared."""

    max_preemptions = 2

    def __init__(self, compares: bool = False) -> None:
        super().__init__()
        self._compares = compares
        self.num_asked = self.num_giving_way = 0

    def preempt_for(self, sequence: Any, victim: Any, view: Any) -> bool:
        self.num_asked += 1
        return super().preempt_for(sequence, victim, view)

    def giving_way(self, sequence: Any, view: Any) -> list[Any]:
        found = super().giving_way(sequence, view)
        self.num_giving_way += len(found)
        assert not self._compares or found == KeyPolicy.giving_way(self, sequence, view)
        return found


class AskedOneByOne(Counted):
    """The plain definition."""

    giving_way = KeyPolicy.giving_way


def random_plans(build_engine: BuildEngine, seed: int, policy: UniBoost) -> list[Any]:
    """What a small engine plans for requests of all kinds, some of which are aborted."""
    dice = random.Random(seed)
    policy.gamma = dice.choice([1e-6, 0.05, 1.0, 30.0])
    policy._tokens_per_s = dice.choice([30.0, 8500.0, 1e6])
    policy._sorted = sorted(dice.randint(1, 30) for _ in range(dice.choice([0, 1, 40])))
    engine = build_engine(
        policy=KeyPlanner(policy),
        depth=dice.choice([1, 2]),
        num_blocks=dice.choice([16, 40]),
        max_num_seqs=dice.randint(1, 6),
        max_num_batched_tokens=dice.randint(6, 24),
    )
    for rid in range(1, 25):
        engine.submit(
            rid,
            [dice.randrange(90) for _ in range(dice.randint(1, 25))],
            max_tokens=dice.randint(1, 14),
            arrival=engine.now - dice.choice([0.0, 0.0, 0.05]),
        )
        for _ in range(dice.randint(0, 4)):
            if engine.scheduler.may_plan:
                engine.launch()
            if engine.results and dice.random() < 0.8:
                engine.complete()
        if dice.random() < 0.1:
            engine.abort(dice.randint(1, rid))
    engine.run()
    assert len(engine.ends) == 24
    packed = map(pack, engine.plans)
    return [(scalars, [array.tobytes() for array in arrays]) for _, scalars, arrays in packed]


def test_uniboost_tells_of_all_at_once_what_it_says_of_each(build_engine: BuildEngine) -> None:
    num_giving_way = 0
    for seed in range(60):
        compared = Counted(compares=True)
        plans = random_plans(build_engine, seed, compared)
        assert plans == random_plans(build_engine, seed, AskedOneByOne())
        num_giving_way += compared.num_giving_way
    assert num_giving_way >= 50


@pytest.mark.parametrize("num_changes", [0, 1])
def test_uniboost_tells_that_none_gives_way_while_only_a_load_has_blocks(num_changes: int) -> None:
    """No request has had a slot, and the next one needs more blocks than are free."""
    prefix, other = list(range(16)), list(range(50, 74))
    first = TieredEngine()
    for rid in (1, 2):
        first.submit(rid, [*prefix, 50 + rid], max_tokens=2, ignore_eos=True)
        first.run()
    assert first.tier.contents
    engine = TieredEngine(
        first.tier,
        num_blocks=9,
        max_model_len=32,
        policy=KeyPlanner(UniBoost()),
        build_policy=lambda *names: KeyPlanner(UniBoost()),
    )
    engine.submit(3, [*prefix, 60], max_tokens=4, ignore_eos=True)
    engine.begin_moves()
    assert engine.scheduler.kv.num_free < 6, "the load has its blocks"
    engine.submit(4, other, max_tokens=4, ignore_eos=True)
    for _ in range(num_changes):
        engine.scheduler.change_policy("uniboost", None, engine.now)
    assert engine.launch() is None
    engine.run()
    assert engine.streams[3] == reference_stream([*prefix, 60], 3, 4)
    assert engine.streams[4] == reference_stream(other, 4, 4)


def test_a_uniboost_that_takes_over_tells_of_all_at_once_what_it_says_of_each(build_engine: BuildEngine) -> None:
    """Requests run that another policy has admitted. Some of them were displaced before, and may not be again."""
    num_giving_way = 0
    preemptions: set[int] = set()
    for seed in range(30):
        dice = random.Random(seed)
        made: list[Counted] = []

        def build(*names: Any, made: list[Counted] = made) -> KeyPlanner:
            policy = Counted(compares=True)
            policy.max_preemptions, policy.unknown_output, policy._tokens_per_s = 1, 1.0, 1e6
            made.append(policy)
            return KeyPlanner(policy)

        engine = build_engine(build_policy=build, num_blocks=16, depth=1)
        engine.now = 1000.0  # an arrival that is not known is far from the others
        for rid in range(1, 13):
            size, num = dice.randint(1, 20), dice.randint(1, 14)
            engine.submit(rid, [rid] * size, max_tokens=num, ignore_eos=True, arrival=engine.now)
            for _ in range(dice.randint(0, 3)):
                if engine.launch() is not None:
                    engine.complete()
            if dice.random() < 0.3:
                preemptions |= {one.num_preemptions for one in engine.scheduler.running()}
                engine.scheduler.change_policy("counted", None, engine.now)
        engine.run()
        num_giving_way += sum(policy.num_giving_way for policy in made)
    assert num_giving_way >= 20
    assert preemptions == {0, 1}


@pytest.mark.parametrize("kind", [Counted, AskedOneByOne])
def test_uniboost_asks_for_no_request_in_the_steps_of_a_full_engine(
    build_engine: BuildEngine, kind: type[Counted]
) -> None:
    policy = kind()
    engine = build_engine(
        policy=KeyPlanner(policy), depth=1, max_num_seqs=64, num_blocks=700, max_num_batched_tokens=128
    )
    for rid in range(1, 65):
        engine.submit(rid, [rid], max_tokens=30, ignore_eos=True)
    step(engine)
    engine.submit(65, [1] * 30, max_tokens=3, arrival=engine.now)
    for _ in range(10):
        step(engine)
    assert engine.scheduler.statistics().num_waiting == 1
    assert policy.num_asked == (0 if kind is Counted else 640)


# Andes: the reader that has enough to read makes room for one that has nothing ----------------------------------------------


class Indifferent(Andes):
    """A mistake: a reader's buffer does not count."""

    def density(self, sequence: Any, view: Any) -> float:
        return 1.0


@pytest.mark.parametrize(("cls", "is_displaced"), [(Andes, True), (Indifferent, False)])
def test_a_reader_with_enough_to_read_makes_room(
    build_engine: BuildEngine, cls: type[Andes], is_displaced: bool
) -> None:
    engine = build_engine(policy=KeyPlanner(cls(Linear())), max_num_seqs=1, depth=1)
    engine.submit(1, [1], max_tokens=30, ignore_eos=True, slo=[0.1, 0.5, None, 0.0])
    for _ in range(12):
        step(engine)  # a token every 20 ms, of which one is read in half a second
    engine.submit(2, [2], max_tokens=4, ignore_eos=True, arrival=engine.now, slo=[0.1, 0.5, None, 0.0])
    assert (order(engine) == [2, 1]) == is_displaced
    assert engine.scheduler.statistics().num_preemptions == is_displaced


def test_andes_displaces_nobody_while_there_is_room(build_engine: BuildEngine) -> None:
    engine = build_engine(policy=KeyPlanner(Andes(Linear())), max_num_seqs=4, depth=1, max_num_batched_tokens=2)
    for rid in (1, 2, 3):
        engine.submit(rid, [rid], max_tokens=20, ignore_eos=True, slo=[0.01, 0.5, None, 0.0])
    for _ in range(8):
        step(engine)
    engine.submit(4, range(8), max_tokens=4, ignore_eos=True, arrival=engine.now, slo=[0.01, 0.01, None, 0.0])
    engine.run()
    assert engine.scheduler.statistics().num_preemptions == 0


# Apt-Serve: pending time for memory --------------------------------------------------------------------------------------


class ByArrival(AptServe):
    """A mistake: memory does not count."""

    def key(self, sequence: Any, view: Any) -> Any:
        return (sequence.arrival,)


@pytest.mark.parametrize(("cls", "expected"), [(AptServe, [2, 1, 3]), (ByArrival, [3, 1, 2])])
def test_who_waited_longest_for_its_memory_is_next(
    build_engine: BuildEngine, cls: type[AptServe], expected: list[int]
) -> None:
    """Pending for 4 s with 8 blocks, 1 s with 1 block; and 9 s, of which 8 too late."""
    engine = build_engine(policy=KeyPlanner(cls()), max_num_seqs=1)
    engine.now = 9.0
    engine.submit(1, range(32), max_tokens=1, arrival=5.0)
    engine.submit(2, [2, 3], max_tokens=1, arrival=8.0)
    engine.submit(3, [3, 4], max_tokens=1, arrival=0.0, slo=[1.0, None, None, 0.0])
    assert order(engine) == expected


def test_who_has_run_is_pending_since_its_last_token(build_engine: BuildEngine) -> None:
    """The first one came 9 s before it lost its slot, with a token then; the second one has waited for a second."""
    engine = build_engine(policy=KeyPlanner(AptServe()), max_num_seqs=1, depth=1)
    engine.submit(1, [1], max_tokens=5, ignore_eos=True)
    step(engine)
    engine.now = 9.0
    step(engine)
    engine.submit(2, [2], max_tokens=2, ignore_eos=True, arrival=engine.now - 1.0)
    engine.scheduler._table.preempt_all()
    assert order(engine) == [2, 1]
    policy: Any = engine.scheduler.policy
    assert (policy.policy._num, policy.policy._starts) == (0, 0)


def test_prompts_wait_while_the_decode_is_worth_more(build_engine: BuildEngine) -> None:
    policy = AptServe()
    engine = build_engine(policy=KeyPlanner(policy), depth=1)
    for rid in (1, 2, 3):
        engine.submit(rid, [rid], max_tokens=30, ignore_eos=True)
    step(engine)
    policy._step_s = 0.02
    engine.submit(4, [4], max_tokens=1, arrival=engine.now)
    waited = 0
    while not engine.streams[4]:
        step(engine)
        policy._step_s = 0.02
        waited += 1
    assert waited == 4, "three running requests are pending for 20 ms a step each, the waiting one for 60 ms by then"
    engine.run()
    assert policy._num == 0
    assert policy._starts == 0


# SlidingServe: the largest set of those at risk, and pairs of steps -------------------------------------------------------


class NoRescue(SlidingServe):
    most_rescued = 0


@pytest.mark.parametrize(("cls", "num_in_time"), [(SlidingServe, 3), (NoRescue, 1)])
def test_of_those_at_risk_the_most_are_saved(
    build_engine: BuildEngine, cls: type[SlidingServe], num_in_time: int
) -> None:
    """One prompt of 36 tokens that is due a little sooner than three of 10, and 50 tokens by when they are due."""
    policy = type("Tuned", (cls,), {"risk_s": 10.0, "relegates": False, "is_dynamic": False})(Linear())
    engine = build_engine(policy=KeyPlanner(policy), depth=1, max_num_batched_tokens=10, max_num_seqs=4)
    policy._tokens_per_s = 500.0
    engine.submit(1, [1] * 36, max_tokens=1, slo=[0.075, None, None, 0.0])
    for rid in (2, 3, 4):
        engine.submit(rid, [rid] * 10, max_tokens=1, slo=[0.08, None, None, 0.0])
    first: dict[int, float] = {}
    while len(first) < 4:
        step(engine)
        policy._tokens_per_s = 500.0
        first |= {rid: engine.now for rid in engine.streams if engine.streams[rid] and rid not in first}
    in_time = sum(first[rid] <= due for rid, due in ((1, 0.075), (2, 0.08), (3, 0.08), (4, 0.08)))
    assert in_time >= num_in_time if cls is SlidingServe else in_time <= num_in_time


def at_risk(build_engine: BuildEngine, **knobs: Any) -> Any:
    """An engine of 12 tokens a step, whose policy takes it for one of 500 tokens a second."""
    knobs = {"risk_s": 0.05, "relegates": False, "is_dynamic": False, "strict": True} | knobs
    policy = type("Tuned", (SlidingServe,), knobs)(Linear())
    policy._tokens_per_s = 500.0
    return build_engine(
        policy=KeyPlanner(policy), depth=1, max_num_batched_tokens=12, max_num_seqs=4, enable_prefix_caching=False
    )


def test_who_was_left_behind_has_its_level_again(build_engine: BuildEngine) -> None:
    """The first two cannot both be on time. Once the second has started, the first goes before one that is not at risk."""
    engine = at_risk(build_engine)
    policy: Any = engine.scheduler.policy
    engine.submit(1, [1] * 36, max_tokens=1, slo=[0.1, None, None, 0.0])
    engine.submit(2, [2] * 10, max_tokens=2, ignore_eos=True, slo=[0.04, None, None, 0.0])
    step(engine)
    assert len(engine.streams[2]) == 1
    assert {s.key[1] for s in engine.scheduler.running()} == {2}
    engine.submit(3, [3] * 10, max_tokens=2, ignore_eos=True, slo=[0.112, None, None, 0.0])
    policy.policy._tokens_per_s = 500.0
    step(engine)
    assert {s.key[1] for s in engine.scheduler.running() if s in engine.scheduler.prefilling} == {1}
    assert not engine.streams[3]


def test_who_was_preempted_is_at_risk_again(build_engine: BuildEngine) -> None:
    engine = at_risk(build_engine, risk_s=10.0)
    policy: Any = engine.scheduler.policy
    for rid in (1, 2):
        engine.submit(rid, [rid] * 5, max_tokens=9, ignore_eos=True, slo=[None, None, 1.0, 0.0])
    assert {s.key[1] for s in policy.policy._at_risk} == {1, 2}
    step(engine)
    assert len(engine.scheduler.running()) == 2
    assert not policy.policy._at_risk
    engine.scheduler._table.preempt_all()
    assert {s.key[1] for s in policy.policy._at_risk} == {1, 2}, "they are looked at together again"
    engine.abort(1, 2)
    assert not policy.policy._at_risk, "nothing is kept of requests that have ended"


class Recorded(SlidingServe):
    """Keeps what it knew when it chose the size of a step."""

    def __init__(self, step_time: Any = None) -> None:
        super().__init__(step_time)
        self.chosen: list[tuple[float, float, float]] = []

    def _two_steps(self, view: Any) -> int:
        tokens = super()._two_steps(view)
        start = self._pace.free_at(view) if not view.num_in_flight else math.nan
        first = float(self._deadlines.next_due(view).min(initial=math.inf)) - start
        self.chosen.append((tokens, first, view.decode_slots.size))
        return tokens


def test_a_step_ends_before_the_tokens_are_due_that_it_brings(build_engine: BuildEngine) -> None:
    policy = Recorded(Linear())
    engine = build_engine(
        policy=KeyPlanner(policy), depth=1, max_num_batched_tokens=2552, num_blocks=4000, max_model_len=4000
    )
    engine.submit(1, [1], max_tokens=60, ignore_eos=True, slo=[0.05, 0.1, None, 0.0])
    for _ in range(3):
        step(engine)
    engine.submit(2, [i % 90 for i in range(3900)], max_tokens=2)
    for _ in range(40):
        step(engine)
    sizes = [(tokens, first) for tokens, first, d in policy.chosen if d and math.isfinite(first)]
    assert sizes
    for tokens, first in sizes:
        assert 1.2 * Linear().seconds(tokens, 0, 0) <= first or tokens == 128, "the smallest step there is"
    assert max(tokens for tokens, _ in sizes) >= 512, "and it is no smaller than need be"


@pytest.mark.parametrize("cls", [KeyPolicy, UniBoost, Andes, AptServe, SlidingServe, Sarathi])
def test_a_policy_replays_with_the_same_plans(build_engine: BuildEngine, cls: type[KeyPolicy]) -> None:
    """It looks at nothing but what it is told: two runs of the same calls end alike."""
    ends = []
    for _ in range(2):
        engine = build_engine(policy=KeyPlanner(cls()), num_blocks=22, max_num_batched_tokens=12)
        rng = random.Random(7)
        for rid in range(1, 30):
            slo = [None, [0.3, 0.05, None, 0.01], [None, None, 3.0, 0.0]][rid % 3]
            engine.submit(rid, [rid] * rng.randint(1, 20), max_tokens=rng.randint(1, 15), ignore_eos=True, slo=slo,
                          arrival=engine.now)  # fmt: skip
            if rng.random() < 0.5 and engine.launch() is not None:
                engine.complete()
        engine.run()
        ends.append(list(engine.ends))
    assert ends[0] == ends[1]
