"""A scheduler whose policies change while requests run and wait."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from actorllm.errors import ConfigError
from actorllm.messages import pack
from actorllm.scheduling.admission_policy import ADMISSIONS
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policy import POLICIES, KeyPolicy
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.scheduling.telemetry.recording import Entry, RecordedScheduler, replay
from tests.scheduling.conftest import Engine, reference_stream

ARGUMENTS: dict[str, Any] = {
    "num_blocks": 14,
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 40,
    "vocab_size": 97,
    "eos_token_ids": (5,),
}


def encoded(plan: Any) -> Any:
    kind, scalars, arrays = pack(plan)
    return kind, scalars, [a.tobytes() for a in arrays]


def drain(engine: Engine) -> None:
    """No step is in flight."""
    while engine.results:
        engine.complete()


@pytest.mark.parametrize("seed", range(8))
def test_streams_and_replays_are_what_they_would_be(seed: int) -> None:
    """All policies take over from each other: requests lose nothing, and the recorded calls give the same plans."""
    rng, entries = random.Random(seed), []
    made: list[Entry] = entries
    engine = Engine()
    engine.scheduler = RecordedScheduler(sink=made.append, policy=load_policy("fcfs"), **ARGUMENTS)
    prompts = {}
    admissions = (
        None,
        *(name for name in ADMISSIONS.names if name not in ("slos-serve", "ttft-reject")),
    )  # these refuse
    for rid in range(1, 41):
        prompts[rid] = [rid % 3] * rng.randrange(3, 20)
        slo = [rng.choice((None, 0.05, 5.0)), rng.choice((None, 0.01)), None, 0.0]
        engine.submit(
            rid, prompts[rid], max_tokens=rng.randrange(1, 16), slo=slo, tenant=f"t{rid % 3}", ignore_eos=True
        )
        for _ in range(rng.randrange(3)):
            if engine.scheduler.may_plan:
                engine.launch()
            if engine.results:
                engine.complete()
        if rng.random() < 0.5:
            drain(engine)
            engine.scheduler.change_policy(rng.choice(list(POLICIES)), rng.choice(admissions), engine.now)
            engine.scheduler.check_integrity()
    engine.run()
    assert sorted(engine.ends) == sorted(prompts)
    for rid, stream in engine.streams.items():
        assert stream == reference_stream(prompts[rid], rid, len(stream)), rid
    fresh = Scheduler(policy=load_policy("fcfs"), **ARGUMENTS)
    assert [encoded(p) for p in replay(made, fresh)] == [encoded(p) for p in engine.plans]
    assert fresh.num_policy_changes == engine.scheduler.num_policy_changes > 5


def test_the_new_policy_orders_what_waits() -> None:
    engine = Engine(max_num_seqs=1)
    engine.submit(1, [1] * 8, max_tokens=4, ignore_eos=True)
    engine.launch()
    engine.submit(2, [1] * 8, max_tokens=2, ignore_eos=True, priority=1)
    engine.submit(3, [1] * 8, max_tokens=2, ignore_eos=True, priority=0)
    drain(engine)
    engine.scheduler.change_policy("priority", None, engine.now)
    engine.run()
    assert list(engine.ends) == [1, 3, 2]


def test_a_preempted_request_arrives_at_the_new_policy(build_engine: Callable[..., Any]) -> None:
    """And only after another preemption is it one that was preempted."""
    heard: list[str] = []

    class Listening(KeyPolicy):
        def on_arrival(self, sequence: Any, view: Any) -> None:
            heard.append("arrival")

        def on_admit(self, sequence: Any, view: Any) -> None:
            heard.append("admission")

        def on_preempt(self, sequence: Any, view: Any) -> None:
            heard.append("preemption")

    engine = build_engine(build_policy=lambda *names: KeyPlanner(Listening()))
    engine.submit(1, [1] * 8, max_tokens=9, ignore_eos=True)
    engine.launch()
    drain(engine)
    engine.scheduler._table.preempt_all()
    for _ in range(2):
        engine.scheduler.change_policy("listening", None, engine.now)
    assert heard == ["arrival", "arrival"]
    engine.launch()
    drain(engine)
    engine.scheduler._table.preempt_all()
    engine.run()
    assert heard == ["arrival", "arrival", "admission", "preemption", "admission"]


def test_a_tenant_whose_request_was_preempted_is_active_for_a_new_vtc() -> None:
    engine = Engine(max_num_seqs=1)
    engine.submit(1, [1] * 8, max_tokens=9, ignore_eos=True, tenant="a")
    engine.launch()
    drain(engine)
    engine.scheduler._table.preempt_all()
    engine.scheduler.change_policy("vtc", None, engine.now)
    planner: Any = engine.scheduler.policy
    assert planner.policy.num_tenants == 1
    engine.run()
    assert not planner.policy._alive.any()


def test_what_cannot_be_built_changes_nothing() -> None:
    engine = Engine()
    before = engine.scheduler.policy
    with pytest.raises(ConfigError, match="did you mean 'edf'"):
        engine.scheduler.change_policy("edg", None, 0.0)
    engine.submit(1, [1] * 8)
    engine.launch()
    with pytest.raises(ValueError, match="1 steps are in flight"):
        engine.scheduler.change_policy("edf", None, 0.0)
    assert (engine.scheduler.policy, engine.scheduler.num_policy_changes) == (before, 0)
