"""Admission policies before any scheduling policy: what they may decide, and that whatever they do costs nobody a token."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.messages import OVERLOADED
from actorllm.scheduling.admission_policy import (
    ADMISSIONS,
    AdmissionGate,
    AdmissionPolicy,
    load_admission,
    register_admission,
)
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policy import Admit, Decision, KeyPolicy
from actorllm.scheduling.policy_fallback import PolicyWithFallback
from actorllm.scheduling.sequence import Sequence, State
from actorllm.scheduling.step_packing import KeyPlanner
from tests.scheduling.chained_tokens import SIBLING, reference_stream
from tests.scheduling.conftest import Engine


class Capricious(AdmissionPolicy):
    """Decides by dice."""

    ignores_decode_steps = False

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.waiting: set[Any] = set()

    def admit(self, sequence: Any, joining: Any, leaving: Any, view: Any) -> Admit:
        assert sequence.state is State.WAITING or sequence.submit.fork_of is not None
        assert not any(s.slot < 0 for s in leaving)
        assert all(s.slot < 0 for s in joining)
        return self.dice.choice([Admit.ADMIT, Admit.ADMIT, Admit.SKIP, Admit.WAIT])

    def decode_mask(self, view: Any) -> Any:
        return np.array([self.dice.random() < 0.7 for _ in range(view.decode_slots.size)], bool)

    def reject(self, view: Any) -> Iterable[tuple[Any, str]]:
        return [(s, "dice") for s in view.waiting() if s.scheduled is None and self.dice.random() < 0.02]


class Direct:
    """A policy of its own kind, first come, first served; it does not ask anybody."""

    def __init__(self) -> None:
        self.refused: list[int] = []

    def plan(self, view: Any) -> Decision:
        chunks = [(s, view.remaining(s)) for s in [*view.prefilling, *view.waiting()]]
        return Decision(prefill=chunks)

    def victim(self, view: Any) -> Any:
        return max(view.running(), key=lambda s: s.arrival_index)

    def on_refusal(self, sequence: Any, view: Any) -> None:
        self.refused.append(sequence.key[1])

    def nothing(self, *arguments: Any) -> None: ...

    on_arrival = on_admit = on_end = on_step = nothing


class Masking(AdmissionPolicy):
    def decode_mask(self, view: Any) -> Any:
        return None


@pytest.mark.parametrize(("kind", "ignores"), [(AdmissionPolicy, True), (Masking, False)])
def test_one_that_chooses_rows_hears_of_every_step(kind: type[AdmissionPolicy], ignores: bool) -> None:
    """Unless its class says otherwise."""
    assert AdmissionGate(load_policy("fcfs"), kind()).ignores_decode_steps is ignores
    for says in (True, False):
        saying = type("Saying", (kind,), {"ignores_decode_steps": says})
        assert AdmissionGate(load_policy("fcfs"), saying()).ignores_decode_steps is says


POLICIES: dict[str, Callable[[], Any]] = {name: (lambda name=name: load_policy(name)) for name in ("fcfs", "srpf")} | {
    "priority": lambda: load_policy("priority"),
    "fairbatch": lambda: load_policy("fairbatch"),
    "direct": Direct,
}


def run(policy: Any, dice: random.Random, num_blocks: int = 24, num: int = 12, **more: Any) -> Engine:
    """Requests of all kinds, until the last one has ended as it should."""
    engine = Engine(policy=policy, num_blocks=num_blocks, max_num_seqs=dice.randint(2, 6), **more)
    lengths: dict[int, tuple[list[int], int]] = {}
    rid = 1
    waiting: list[tuple[int, int, list[int], int]] = []
    while rid <= num:
        prompt = [dice.randrange(97) for _ in range(dice.randint(1, 24))]
        n, count = dice.choice([1, 1, 1, 2]), dice.randint(1, 16)
        waiting.append((rid, n, prompt, count))
        for i in range(n):
            lengths[rid + i] = prompt, count
        rid += n
    for _ in range(4000):
        if waiting and dice.random() < 0.3:
            rid, n, prompt, count = waiting.pop(0)
            slo = dice.choice([None, [0.1, 0.05, None, 0.0], [None, None, 9.0, 0.0], [None, 0.02, None, 0.0]])
            engine.submit_several(
                rid,
                n,
                prompt,
                max_tokens=count,
                ignore_eos=True,
                slo=slo,
                priority=dice.randint(0, 2),
                arrival=engine.now,
            )
        plan = engine.launch() if engine.scheduler.may_plan else None
        if engine.results and (plan is None or dice.random() < 0.5):
            engine.complete()
        if not waiting and len(engine.ends) == len(lengths):
            break
    assert len(engine.ends) == len(lengths), "somebody starves"
    while engine.results:
        engine.complete()
    for rid, (prompt, count) in lengths.items():
        end = engine.ends[rid]
        if end.reason == "error":
            assert end.sequence.scheduled is None, "who has been taken is not refused any more"
            assert engine.streams[rid] == []
            continue
        index = end.sequence.submit.sample_index
        assert engine.streams[rid] == reference_stream(prompt, rid + (SIBLING - 1) * index, count)
    statistics = engine.scheduler.statistics()
    assert statistics.kv.num_free == num_blocks
    assert statistics.num_rejected == sum(end.reason == "error" for end in engine.ends.values())
    return engine


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("admission", [*ADMISSIONS.names, "dice"])
def test_whatever_is_combined_costs_nobody_a_token(policy: str, admission: str) -> None:
    num_rejected = 0
    for seed in range(8):
        dice = random.Random(seed)
        module = Capricious(dice) if admission == "dice" else load_admission(admission)
        engine = run(AdmissionGate(POLICIES[policy](), module), dice, depth=dice.choice([1, 2]))
        statistics = engine.scheduler.statistics()
        num_rejected += statistics.num_rejected
        if admission == "worst-case" and policy in ("fcfs", "srpf"):
            assert statistics.num_preemptions == 0
    if admission != "slos-serve":  # it turns requests away under some policies
        assert (num_rejected > 0) == (admission in ("dice", "ttft-reject"))


def test_one_that_is_not_there_costs_nothing() -> None:
    assert KeyPlanner(KeyPolicy()).gatekeeper is None


def closed(verdict: Admit) -> AdmissionPolicy:
    """Lets nobody in but the first and the third."""

    class Closed(AdmissionPolicy):
        def admit(self, sequence: Sequence, joining: Any, leaving: Any, view: Any) -> Admit:
            return Admit.ADMIT if sequence.key[1] in (1, 3) else verdict

    return Closed()


@pytest.mark.parametrize("policy", ["fcfs", "direct"])
def test_to_wait_holds_up_everybody_behind_and_to_be_skipped_does_not(policy: str) -> None:
    for verdict, expected in ((Admit.WAIT, {1}), (Admit.SKIP, {1, 3})):
        inner = POLICIES[policy]()
        engine = Engine(policy=AdmissionGate(inner, closed(verdict)))
        for rid in (1, 2, 3):
            engine.submit(rid, [rid, 2, 3], max_tokens=2, ignore_eos=True)
        engine.run()
        assert set(engine.ends) == expected
        assert engine.scheduler.statistics().num_waiting == 3 - len(expected)
        if policy == "direct":
            assert 2 in inner.refused, "it is told who was not let in"


def test_who_is_rejected_hears_why_and_others_go_on() -> None:
    class Picky(AdmissionPolicy):
        name = "picky"

        def reject(self, view: Any) -> Iterable[tuple[Sequence, str]]:
            return [(s, "not on a Sunday") for s in view.waiting() if s.key[1] == 2]

    engine = Engine(policy=AdmissionGate(load_policy("fcfs"), Picky()))
    for rid in (1, 2, 3):
        engine.submit(rid, [rid, 2, 3], max_tokens=2, ignore_eos=True)
    engine.run()
    end = engine.ends[2]
    assert (end.reason, end.error) == (
        "error",
        "turned away by the admission policy 'picky': not on a Sunday",
    )
    assert end.details == {"kind": OVERLOADED, "num_waiting_requests": 3}
    assert [engine.ends[rid].reason for rid in (1, 3)] == ["length", "length"]
    assert engine.streams[2] == []
    assert engine.scheduler.statistics().num_rejected == 1


def test_who_has_been_taken_is_never_rejected() -> None:
    class Merciless(AdmissionPolicy):
        def reject(self, view: Any) -> Iterable[tuple[Sequence, str]]:
            return [(s, "go away") for s in view.waiting() if s.is_taken]

    engine = Engine(policy=AdmissionGate(load_policy("fcfs"), Merciless()), num_blocks=12)
    for rid in (1, 2, 3, 4):
        engine.submit(rid, [rid, *range(9)], max_tokens=12, ignore_eos=True)
    engine.submit(
        5, [5, 6, 7], max_tokens=6, ignore_eos=True, output=np.array(reference_stream([5, 6, 7], 5, 2), np.int32)
    )
    engine.run()
    engine.submit(6, [6, 7, 8], max_tokens=2, ignore_eos=True, is_resumed=True)
    engine.run()
    statistics = engine.scheduler.statistics()
    assert statistics.num_preemptions > 0
    assert statistics.num_rejected == 0
    assert {rid: end.reason for rid, end in engine.ends.items()} == dict.fromkeys(range(1, 7), "length")
    assert statistics.num_refused_decisions > 0, "it is counted what was left out"


# Those that go wrong ------------------------------------------------------------------------------------------------------

HOOKS = ["admit", "decode_mask", "reject", "on_arrival", "on_admit", "on_end", "on_step"]


class Failing(AdmissionPolicy):
    def __init__(self, hook: str, calls: int, wrong: Callable[[], Any]) -> None:
        right = getattr(self, hook)

        def failing(*arguments: Any) -> Any:
            nonlocal calls
            calls -= 1
            return right(*arguments) if calls >= 0 else wrong()

        setattr(self, hook, failing)


def planted() -> Any:
    raise RuntimeError("planted")


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("calls", [0, 3])
def test_one_that_raises_is_replaced_and_told_of(hook: str, calls: int) -> None:
    told: list[str] = []
    gate = AdmissionGate(
        load_policy("fcfs"), Failing(hook, calls, planted), lambda what, error: told.append(f"{what}: {error}")
    )
    engine = run(gate, random.Random(1))
    assert told == [f"{hook}: planted"]
    assert gate.failure == f"{hook} raised RuntimeError: planted"
    assert {end.reason for end in engine.ends.values()} == {"length"}


@pytest.mark.parametrize(
    ("hook", "answer"),
    [
        ("admit", True),
        ("decode_mask", [True]),
        ("decode_mask", np.ones(77, bool)),
        ("reject", ["x"]),
        ("reject", [(1, "x")]),
        ("reject", None),
    ],
)
def test_what_is_no_answer_is_a_failure_too(hook: str, answer: Any) -> None:
    told: list[str] = []
    gate = AdmissionGate(
        load_policy("fcfs"), Failing(hook, 1, lambda: answer), lambda what, error: told.append(type(error).__name__)
    )
    run(gate, random.Random(2))
    assert len(told) == 1


def test_without_anybody_to_tell_it_goes_through() -> None:
    with pytest.raises(RuntimeError, match="planted"):
        run(AdmissionGate(load_policy("fcfs"), Failing("admit", 2, planted)), random.Random(1))


def test_it_outlives_the_scheduling_policy() -> None:
    """One that fails is replaced by another, and who may start is decided as before."""

    class Broken(KeyPolicy):
        def on_step(self, done: Any, view: Any) -> None:
            raise RuntimeError("planted")

    admission = load_admission("worst-case")
    policy = PolicyWithFallback(
        AdmissionGate(KeyPlanner(Broken()), admission),
        fallback=lambda: AdmissionGate(load_policy("fcfs"), admission),  # type: ignore[arg-type]
    )
    engine = run(policy, random.Random(5))
    assert policy.failure is not None
    assert isinstance(policy.policy, AdmissionGate)
    assert engine.scheduler.statistics().num_preemptions == 0


# Names --------------------------------------------------------------------------------------------------------------------


class Mine(AdmissionPolicy):
    name = "mine"


def test_they_can_be_given_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ADMISSIONS, "names", dict(ADMISSIONS.names))
    register_admission("mine", Mine)
    assert isinstance(load_admission("mine"), Mine)
    config = EngineConfig.from_arguments("storyteller", admission_policy="mine")
    assert config.scheduler.admission == f"{Mine.__module__}:Mine", "the scheduler's process knows no names"
    assert EngineConfig.from_json(config.to_json()) == config
    with pytest.raises(ConfigError, match="'past-futur'; did you mean 'past-future'"):
        load_admission("past-futur")
    with pytest.raises(ConfigError, match="no AdmissionPolicy"):
        load_admission("actorllm.scheduling.policies.fcfs:Fcfs")
    with pytest.raises(ConfigError, match="admission policy 'credit' exists already"):
        register_admission("credit", Mine)
    with pytest.raises(ConfigError, match="admission_policy=5 must be a string"):
        EngineConfig.from_arguments("storyteller", admission_policy=5)
