"""Policy vtc forgets idle tenants, and nobody notices: neither those who are active nor a recording."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from actorllm.messages import pack
from actorllm.scheduling.policies.vtc import Vtc
from actorllm.scheduling.policy import StepDone
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.scheduling.telemetry.recording import RecordedScheduler, replay

BuildEngine = Callable[..., Any]


class Forgetful(Vtc):
    max_idle = 8


class Remembering(Vtc):
    max_idle = 1 << 40


def one_after_the_other(engine: Any, tenants: list[str], num_tokens: int = 3) -> None:
    """A request of each, and none of the next one before it has ended."""
    for tenant in tenants:
        rid = len(engine.streams) + 1
        engine.submit(rid, [rid % 90], max_tokens=num_tokens, ignore_eos=True, tenant=tenant)
        engine.run()


def test_vtc_forgets_idle_tenants(build_engine: BuildEngine) -> None:
    policy = Forgetful()
    engine = build_engine(policy=KeyPlanner(policy), max_num_seqs=2)
    one_after_the_other(engine, [f"tenant {i}" for i in range(300)])
    assert policy.num_tenants <= 8 + 2 + 1
    assert max(policy._served.size, len(policy._tenants), len(policy._active)) <= 16


def test_vtc_forgets_without_a_difference_whoever_is_behind_all_who_are_active(build_engine: BuildEngine) -> None:
    """Two tenants are active all the time, and have had more than each of many others that come and go, and come again."""
    ends = []
    for policy in (Forgetful(), Remembering()):
        engine = build_engine(policy=KeyPlanner(policy), max_num_seqs=2, depth=1)
        for rid in range(60):
            engine.submit(rid, [rid], max_tokens=4, ignore_eos=True, tenant="ab"[rid % 2])
        for rid in range(100, 130):
            for _ in range(4):
                engine.launch()
                engine.complete()
            engine.submit(rid, [1, 2], max_tokens=1, ignore_eos=True, tenant=f"guest {rid % 20}")
        num_known = policy.num_tenants
        engine.run()
        ends.append(list(engine.ends))
    assert num_known == 22, "the other one forgot nobody"
    assert ends[0] == ends[1]


def test_vtc_does_not_forget_who_had_much_for_many_who_had_little() -> None:
    policy, view = Forgetful(), SimpleNamespace(limits=SimpleNamespace(max_seqs=2), now=0.0)
    policy.on_arrival(fake("patient"), view)  # it is active all the time, and so keeps the least counter
    serve(policy, "greedy", 500, view)
    for number in range(100):
        serve(policy, f"passer-by {number}", 5, view)
    assert "greedy" in policy._numbers
    assert "passer-by 3" not in policy._numbers
    again, another = fake("greedy"), fake("passer-by 3")
    for sequence in (again, another):
        policy.on_arrival(sequence, view)
    assert policy.key(again, view) == (500.0,)
    assert policy.key(another, view) == (0.0,)


def serve(policy: Vtc, tenant: str, num_prompt: int, view: Any) -> None:
    sequence = fake(tenant, slot=0, num_prompt=num_prompt)
    policy.on_arrival(sequence, view)
    policy.on_admit(sequence, view)
    policy.on_end(sequence, view)


def test_vtc_replays_although_it_forgets(build_engine: BuildEngine) -> None:
    entries: list[Any] = []
    arguments: dict[str, Any] = {
        "num_blocks": 40,
        "block_size": 4,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "max_model_len": 40,
        "vocab_size": 97,
        "eos_token_ids": (5,),
    }
    engine = build_engine(**arguments)
    engine.scheduler = RecordedScheduler(sink=entries.append, policy=KeyPlanner(Forgetful()), **arguments)
    rng = random.Random(4)
    for rid in range(120):
        engine.submit(rid, [rid % 90], max_tokens=3, ignore_eos=True, tenant=f"tenant {rng.randrange(40)}")
        if rng.random() < 0.5 and engine.launch() is not None:
            engine.complete()
    engine.run()

    def encoded(plan: Any) -> Any:
        kind, scalars, arrays = pack(plan)
        return kind, scalars, [array.tobytes() for array in arrays]

    assert engine.scheduler.policy.policy.num_tenants < 20
    fresh = Scheduler(policy=KeyPlanner(Forgetful()), **arguments)
    assert [encoded(plan) for plan in replay(entries, fresh)] == [encoded(plan) for plan in engine.plans]


def test_vtc_step_does_not_depend_on_how_many_tenants_there_were() -> None:
    """It touches the rows of the step alone."""
    policy = Vtc()
    view = SimpleNamespace(limits=SimpleNamespace(max_seqs=2), now=0.0)
    for number in range(5000):
        policy.on_arrival(fake(f"tenant {number}"), view)
    policy.on_admit(fake("tenant 7", slot=0), view)
    policy.on_admit(fake("tenant 9", slot=1), view)
    before = policy._served.copy()
    policy._numbers = None  # type: ignore[assignment]
    policy.on_step(StepDone(1, np.array([0, 1, 1], np.int32), 0, 0.0, 0.0, 0.0), view)
    changed = np.flatnonzero(policy._served != before)
    assert {int(n): float(policy._served[n] - before[n]) for n in changed} == {7: 2.0, 9: 4.0}


def counter_of(policy: Vtc, tenant: str) -> float:
    return float(policy._served[policy._numbers[tenant]])


def test_vtc_counts_every_token_of_a_row_with_drafts(build_engine: BuildEngine) -> None:
    """Each step has three right drafts and the token behind them."""
    policy = Vtc()
    engine = build_engine(
        policy=KeyPlanner(policy), depth=1, block_size=16, max_model_len=64, num_lookahead_tokens=3,
        draft_ranges=((1, 100, 3),),
    )  # fmt: skip
    engine.worker.drafts_per_row = lambda slot, index: (3, 3)
    engine.submit(1, [1] * 5, max_tokens=13, ignore_eos=True, tenant="a")
    while len(engine.streams[1]) < 9:
        engine.launch()
        engine.complete()
    assert len(engine.streams[1]) == 9, "one with the prompt, and two steps of four"
    assert counter_of(policy, "a") == 5 + 2 * 9


def test_vtc_counts_a_prompt_that_sequences_share_once(build_engine: BuildEngine) -> None:
    policy = Vtc()
    engine = build_engine(policy=KeyPlanner(policy), depth=1)
    engine.submit_several(1, 3, range(12), max_tokens=5, ignore_eos=True, tenant="a")
    engine.run()
    assert engine.scheduler.statistics().num_forks == 2
    assert counter_of(policy, "a") == 12 + 3 * 2 * 5


def fake(tenant: str, slot: int = -1, num_prompt: int = 3) -> Any:
    return SimpleNamespace(tenant=tenant, policy_state={}, slot=slot, num_preemptions=0, num_prompt=num_prompt,
                           num_remaining=num_prompt)  # fmt: skip
