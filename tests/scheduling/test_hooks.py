"""The hooks that later work builds on: each is a field, a message or an action that must have an effect today."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actorllm.errors import ConfigError
from actorllm.kvcache.prefix_index import HASH_BYTES, hash_blocks
from actorllm.messages import StepResult, pack
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policy import Admit, Decision, KeyPolicy, StepDone
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.sequence import State
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.scheduling.telemetry.recording import RecordedScheduler, replay
from tests.scheduling.conftest import Engine


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_may_carry_any_number_of_tokens(
    build_engine: Callable[..., Any], reference: Callable[..., list[int]], depth: int
) -> None:
    engine = build_engine(depth=depth, num_lookahead_tokens=1, num_blocks=24)
    engine.worker.tokens_per_row = lambda slot, index: (index * 7 + slot) % 3
    worker_sample = engine.worker._sample
    calls = {"n": 0}

    def sample(slot: int, row: Any) -> list[int]:
        calls["n"] += 1
        engine.worker.tokens_per_row = lambda slot, index: (calls["n"] * 7 + slot) % 3
        return worker_sample(slot, row)

    engine.worker._sample = sample
    for rid in range(1, 7):
        engine.submit(rid, range(rid, rid + 5), max_tokens=13, ignore_eos=True)
    engine.run()
    for rid in range(1, 7):
        assert engine.streams[rid] == reference(range(rid, rid + 5), rid, 13)
    assert engine.scheduler.statistics().kv.num_free == 24


@pytest.mark.parametrize("size", [30, 40])
def test_a_pooled_request_ends_at_prefill_with_a_vector(
    engine: Any, reference: Callable[..., list[int]], size: int
) -> None:
    """A prompt as long as the model allows (40) leaves no room for output, and needs none."""
    engine.submit(1, range(size), pooling="last", max_tokens=1)
    engine.submit(2, [1, 2], ignore_eos=True)
    engine.run()
    assert engine.vectors[1] == [0.0, float(size)]
    assert engine.streams[1] == []
    assert engine.ends[1].reason == "stop"
    assert engine.streams[2] == reference([1, 2], 2, 8)


def test_late_rows_are_flagged_in_every_step_that_samples_them(engine: Any) -> None:
    engine.submit(1, range(20), needs_late_inputs=True, max_tokens=3, ignore_eos=True)
    engine.submit(2, [1], max_tokens=5, ignore_eos=True)
    engine.run()
    assert [slots for _, slots in engine.worker.late_steps] == [[0], [0], [0]]
    assert engine.plans[0].late_slots.size == 0, "a chunk that does not sample needs nothing"


def test_a_blocked_request_waits_for_its_unblock(engine: Any) -> None:
    engine.submit(1, [1, 2], blocked_on="grammar", ignore_eos=True)
    engine.submit(2, [1, 2], blocked_on="remote KV", ignore_eos=True)
    engine.run()
    assert engine.streams[1] == []
    assert engine.scheduler.statistics().blocked_on == {"grammar": 1, "remote KV": 1}
    assert engine.scheduler.unblock((0, 1), None, 1.0) is None
    end = engine.scheduler.unblock((0, 2), "no such grammar", 1.0)
    assert (end.reason, end.error) == ("error", "no such grammar")
    engine.run()
    assert len(engine.streams[1]) == 8
    assert engine.scheduler.statistics().num_blocked == 0


def test_a_request_can_refuse_chunking(engine: Any, reference: Callable[..., list[int]]) -> None:
    engine.submit(1, range(10), ignore_eos=True)
    engine.submit(2, range(13), is_chunkable=False, ignore_eos=True)
    engine.run()
    assert [plan.prefill_counts.tolist() for plan in engine.plans if 13 in plan.prefill_counts.tolist()] == [[13]]
    assert engine.streams[2] == reference(range(13), 2, 8)


def test_a_whole_prompt_ignores_the_chunk_size_and_may_be_computed_again_in_chunks(
    build_engine: Callable[..., Any], reference: Callable[..., list[int]]
) -> None:
    engine = build_engine(prefill_chunk=4, num_blocks=10, max_num_seqs=3)
    for rid in (1, 2, 3):
        engine.submit(rid, range(rid, rid + 12), is_chunkable=False, max_tokens=20, ignore_eos=True)
    engine.submit(4, range(9), max_tokens=2, ignore_eos=True)
    engine.run()
    assert engine.scheduler.statistics().num_preemptions > 0
    for rid in (1, 2, 3):
        assert engine.streams[rid] == reference(range(rid, rid + 12), rid, 20)
    assert len(engine.streams[4]) == 2, "nobody starves behind it"


def test_the_extra_key_separates_equal_tokens() -> None:
    tokens = np.arange(40, dtype=np.int32)
    plain, salted = hash_blocks(tokens, 16), hash_blocks(tokens, 16, b"salt")
    assert plain.size == salted.size == 2 * HASH_BYTES
    assert not np.array_equal(plain[:HASH_BYTES], salted[:HASH_BYTES])
    assert not np.array_equal(plain[HASH_BYTES:], salted[HASH_BYTES:])
    other_start = tokens.copy()
    other_start[0] = 7
    assert not np.array_equal(hash_blocks(other_start, 16)[HASH_BYTES:], plain[HASH_BYTES:]), "a hash covers its prefix"


def test_block_hashes_travel_with_the_request(engine: Any) -> None:
    hashes = hash_blocks(np.arange(8, dtype=np.int32), 4, b"salt")
    engine.submit(1, range(8), block_hashes=hashes)
    assert engine.scheduler.sequence((0, 1)).submit.block_hashes is hashes


def test_the_adapter_reaches_the_worker(engine: Any) -> None:
    engine.submit(1, [1], adapter="1" * 64, blocked_on="adapter", ignore_eos=True)
    engine.scheduler.unblock((0, 1), None, 0.0, 3)
    engine.launch()
    assert engine.worker.rows[0].adapter_id == 3
    assert engine.scheduler.batch.adapter_id[0] == 3


def test_a_policy_sees_the_adapter_of_a_request(build_engine: Callable[..., Any]) -> None:
    """One that lets requests of one adapter follow each other, whatever came first."""

    class ByAdapter(KeyPolicy):
        name = "by-adapter"

        def key(self, sequence: Any, view: Any) -> Any:
            return (sequence.submit.adapter or "", sequence.adapter_slot)

    engine = build_engine(policy=KeyPlanner(ByAdapter()), max_num_seqs=1)
    for rid, (digest, slot) in enumerate([("2", 1), ("1", 2), ("2", 1), ("1", 2)], 1):
        engine.submit(rid, [rid], adapter=digest * 64, blocked_on="adapter", max_tokens=2, ignore_eos=True)
        engine.scheduler.unblock((0, rid), None, 0.0, slot)
    engine.run()
    assert list(engine.ends) == [2, 4, 1, 3]


def test_block_tables_carry_a_group(engine: Any) -> None:
    engine.submit(1, [1], max_tokens=12, ignore_eos=True)
    engine.run()
    extended = [plan for plan in engine.plans if plan.extended_slots.size]
    assert extended
    assert all(not plan.extended_groups.size for plan in extended), "there is one group, so none is named"
    assert engine.scheduler.kv.tables.shape[0] == 1


def test_blocks_of_a_row_with_bad_logits_are_zeroed_before_reuse(
    engine: Any, reference: Callable[..., list[int]]
) -> None:
    engine.submit(1, range(6), ignore_eos=True)
    engine.submit(2, range(7, 10), ignore_eos=True)
    engine.launch()
    result = engine.results.pop()
    bad = StepResult(step=result.step, tokens=result.tokens, nonfinite_rows=np.array([0], np.int32))
    blocks = engine.scheduler.kv.tables[0, 0, : engine.scheduler.kv.num_blocks[0]].tolist()
    engine.apply(engine.scheduler.update(bad, engine.now))
    assert engine.ends[1].reason == "error"
    assert "not finite" in engine.ends[1].error
    engine.launch()
    assert engine.worker.zeroed == blocks
    engine.run()
    assert engine.streams[2] == reference(range(7, 10), 2, 8)
    assert engine.worker.zeroed == blocks, "zeroed once"


def test_block_copies_travel_in_the_next_plan(engine: Any) -> None:
    engine.submit(1, [1], ignore_eos=True)
    engine.scheduler.kv.copy(3, 9)
    engine.launch()
    assert engine.worker.copied == [(3, 9)]
    engine.run()
    assert engine.worker.copied == [(3, 9)]


@pytest.mark.parametrize("steps", [1, 2, 7, 31])
@pytest.mark.parametrize(("depth", "lookahead"), [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)])
def test_advance_does_what_single_steps_do(
    build_engine: Callable[..., Any], steps: int, depth: int, lookahead: int
) -> None:
    """Also with steps in flight, of which as many are in flight afterwards."""

    def build() -> Any:
        engine = build_engine(
            depth=depth, max_model_len=80, num_blocks=60, max_num_batched_tokens=64, num_lookahead_tokens=lookahead
        )
        for rid in range(1, 5):
            engine.submit(rid, range(3 * rid), max_tokens=60, ignore_eos=True)
        for _ in range(3):
            while engine.scheduler.may_plan:
                engine.launch()
            engine.complete()
        return engine

    one, many = build(), build()
    done = many.scheduler.advance(steps, 1.0)
    assert done == steps
    for _ in range(steps):
        one.launch()
        one.complete()
    many.scheduler.check_integrity()
    assert np.array_equal(one.scheduler.batch.num_known, many.scheduler.batch.num_known)
    assert np.array_equal(one.scheduler.batch.num_computed, many.scheduler.batch.num_computed)
    assert np.array_equal(one.scheduler.kv.tables, many.scheduler.kv.tables)
    assert one.scheduler.statistics() == many.scheduler.statistics()
    assert [r.step for r in one.scheduler.ledger] == [r.step for r in many.scheduler.ledger]
    plans = [engine.scheduler.schedule(2.0) for engine in (one, many)]
    assert pack(plans[0])[1] == pack(plans[1])[1]


def test_advance_stops_before_anything_happens(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(depth=1, max_num_batched_tokens=64)
    for rid, count in ((1, 20), (2, 9)):
        engine.submit(rid, [rid], max_tokens=count, ignore_eos=True)
    engine.launch()
    assert engine.scheduler.advance(5, 1.0) == 0, "there is no room for a step"
    engine.complete()
    assert engine.scheduler.advance(1000, 1.0) == 7, "request 2 ends with the step after"
    engine.submit(3, [3], max_tokens=5)
    assert engine.scheduler.advance(5, 1.0) == 0, "somebody waits"
    engine.scheduler.check_integrity()


def test_advance_declines_where_a_step_in_flight_is_another(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(depth=2, max_num_batched_tokens=64)
    engine.submit(1, [1], max_tokens=20, ignore_eos=True)
    engine.launch()
    assert engine.scheduler.advance(5, 1.0) == 0, "the step in flight computes a prompt"
    engine.launch()
    engine.complete()
    assert engine.scheduler.advance(5, 1.0) == 5, "it decodes the same row"
    engine = build_engine(depth=2, max_num_batched_tokens=64)
    for rid, count in ((1, 20), (2, 4)):
        engine.submit(rid, [rid], max_tokens=count, ignore_eos=True)
    for _ in range(3):
        engine.launch()
        engine.launch()
        engine.complete()
    assert len(engine.scheduler.decode_slots) == 2
    assert engine.scheduler.advance(5, 1.0) == 0, "the step in flight is the last one of request 2"


@pytest.mark.parametrize(
    ("hook", "says", "expected"),
    [
        (None, None, 5),
        ("decode_mask", None, 0),
        ("wake_at", None, 0),
        ("on_step", None, 0),
        ("on_step", True, 5),
        (None, False, 0),
    ],
)
def test_advance_declines_unless_the_policy_need_not_be_asked(
    build_engine: Callable[..., Any], hook: str | None, says: bool | None, expected: int
) -> None:
    overridden = {} if hook is None else {hook: lambda self, *arguments: getattr(KeyPolicy, hook)(self, *arguments)}
    policy = type("Mine", (KeyPolicy,), {"ignores_decode_steps": says} | overridden)()
    engine = build_engine(policy=KeyPlanner(policy), depth=1)
    engine.submit(1, [1], max_tokens=20, ignore_eos=True)
    engine.launch()
    engine.complete()
    assert engine.scheduler.advance(5, 1.0) == expected


def test_advance_declines_for_a_policy_that_decides_whole_steps(build_engine: Callable[..., Any]) -> None:
    class Own:
        """Like fcfs, but nobody knows."""

        def __init__(self) -> None:
            self._inner = load_policy("fcfs")

        def __getattr__(self, name: str) -> Any:
            if name == "ignores_decode_steps":
                raise AttributeError(name)
            return getattr(self._inner, name)

    engine = build_engine(policy=Own(), depth=1)
    engine.submit(1, [1], max_tokens=20, ignore_eos=True)
    engine.launch()
    engine.complete()
    assert engine.scheduler.advance(5, 1.0) == 0


def test_decode_mask_holds_rows_back(build_engine: Callable[..., Any], reference: Callable[..., list[int]]) -> None:
    class EverySecond(KeyPolicy):
        calls = 0

        def decode_mask(self, view: Any) -> Any:
            self.calls += 1
            return (view.decode_slots + self.calls) % 2 == 0

    engine = build_engine(policy=KeyPlanner(EverySecond()))
    for rid in (1, 2, 3):
        engine.submit(rid, [rid], max_tokens=6, ignore_eos=True)
    largest = 0
    for _ in range(60):
        while engine.scheduler.may_plan and engine.launch() is not None:
            largest = max(largest, len(engine.worker.decode))
        if not engine.results:
            break
        engine.complete()
    assert largest == 2, "never all three at once"
    for rid in (1, 2, 3):
        assert engine.streams[rid] == reference([rid], rid, 6)


def test_policies_hear_of_steps_and_can_ask_to_be_woken(build_engine: Callable[..., Any]) -> None:
    class Patient(KeyPolicy):
        def __init__(self) -> None:
            self.done: list[StepDone] = []
            self.heard: list[str] = []

        def admit(self, sequence: Any, view: Any) -> Admit:
            return Admit.ADMIT if view.now >= 5.0 else Admit.WAIT

        def wake_at(self, view: Any) -> float:
            return 5.0 if view.now < 5.0 else float("inf")

        def on_arrival(self, sequence: Any, view: Any) -> None:
            self.heard.append("arrival")

        def on_admit(self, sequence: Any, view: Any) -> None:
            self.heard.append("admit")

        def on_end(self, sequence: Any, view: Any) -> None:
            self.heard.append("end")

        def on_step(self, done: StepDone, view: Any) -> None:
            self.done.append(done)

    policy = Patient()
    engine = build_engine(policy=KeyPlanner(policy))
    engine.submit(1, [1, 2, 3], max_tokens=2, ignore_eos=True)
    assert engine.launch() is None
    assert engine.scheduler.wake_at == 5.0
    engine.now = 5.0
    engine.run()
    assert policy.heard == ["arrival", "admit", "end"]
    assert [d.num_prefill_tokens for d in policy.done] == [3, 0]
    assert engine.scheduler.wake_at == float("inf")


def test_keys_order_the_waiting_and_expire_at_their_horizon(build_engine: Callable[..., Any]) -> None:
    class Flip(KeyPolicy):
        """Shortest first until t = 1, longest first after."""

        def key(self, sequence: Any, view: Any) -> tuple[int]:
            return (sequence.num_prompt if view.now < 1.0 else -sequence.num_prompt,)

        def key_horizon(self, sequence: Any, view: Any) -> float:
            return 1.0 if view.now < 1.0 else float("inf")

    for now, expected in ((0.0, [2, 3, 1]), (2.0, [1, 3, 2])):
        engine = build_engine(policy=KeyPlanner(Flip()), max_num_seqs=1)
        for rid, length in ((1, 9), (2, 2), (3, 5)):
            engine.submit(rid, range(length), max_tokens=1)
        engine.now = now
        engine.run()
        assert list(engine.ends) == expected


def test_what_a_decision_cannot_have_is_left_out_and_counted(
    build_engine: Callable[..., Any], reference: Callable[..., list[int]]
) -> None:
    class Greedy:
        """A level-2 policy that asks for too much of everything."""

        def __init__(self) -> None:
            self.waiting: list[Any] = []

        def plan(self, view: Any) -> Decision:
            waiting, self.waiting = self.waiting, []
            running = [(s, 1000) for s in view.prefilling]
            return Decision(decode=np.ones(3, bool), prefill=[*running, *((s, s.known.size) for s in waiting)])

        def victim(self, view: Any) -> Any:
            return max(view.running(), key=lambda s: s.arrival_index)

        def on_arrival(self, sequence: Any, view: Any) -> None:
            self.waiting.append(sequence)

        on_refusal = on_arrival

        def on_admit(self, sequence: Any, view: Any) -> None: ...

        def on_end(self, sequence: Any, view: Any) -> None: ...

        def on_step(self, done: StepDone, view: Any) -> None: ...

    engine = build_engine(policy=Greedy(), num_blocks=12)
    for rid in range(1, 8):
        engine.submit(rid, range(rid + 5), max_tokens=12, ignore_eos=True)
    engine.run()
    for rid in range(1, 8):
        assert engine.streams[rid] == reference(range(rid + 5), rid, 12)
    assert engine.scheduler.statistics().num_refused_decisions > 0


@pytest.mark.parametrize(("size", "is_chunkable"), [(0, True), (-3, True), (3, False)])
def test_an_admission_without_a_chunk_is_refused(
    build_engine: Callable[..., Any], size: int, is_chunkable: bool
) -> None:
    class Mean(KeyPlanner):
        """Admits, and gives too little to start with."""

        def plan(self, view: Any) -> Decision:
            decision = super().plan(view)
            decision.prefill = [(s, size if s.submit.rid == 1 else n) for s, n in decision.prefill]
            return decision

    engine = build_engine(policy=Mean(KeyPolicy()))
    engine.submit(1, range(9), is_chunkable=is_chunkable, ignore_eos=True)
    assert engine.scheduler.schedule(0.0) is None
    assert engine.scheduler.sequence((0, 1)).state is State.WAITING
    assert engine.scheduler.statistics().num_refused_decisions == 1
    engine.scheduler.abort([(0, 1)], 0.0)
    engine.submit(2, range(5), max_tokens=3, ignore_eos=True)
    engine.run()
    assert len(engine.streams[2]) == 3
    assert all(slot >= 0 for plan in engine.plans for slot in plan.new["slot"].tolist())


def test_carried_fields_reach_the_policy(engine: Any) -> None:
    engine.submit(
        1,
        [1],
        slo=[0.2, 0.05, None, 0.0],
        tenant="a",
        deadline=9.0,
        priority=-1,
        type_info="chat",
        is_latency_sensitive=True,
    )
    submit = engine.scheduler.sequence((0, 1)).submit
    assert (submit.slo, submit.tenant, submit.deadline, submit.priority) == ([0.2, 0.05, None, 0.0], "a", 9.0, -1)
    assert (submit.type_info, submit.is_latency_sensitive) == ("chat", True)


def test_a_frontend_that_is_gone_takes_its_requests_with_it(engine: Any) -> None:
    from tests.scheduling.conftest import make_submit

    for frontend in (0, 1):
        for rid in (1, 2):
            engine.scheduler.submit(frontend, make_submit(rid, [rid]), 0.0)
    ends = engine.scheduler.abort_frontend(1, 0.0)
    assert sorted(e.sequence.key for e in ends) == [(1, 1), (1, 2)]
    assert engine.scheduler.sequence((0, 1)).state is State.WAITING


def test_a_recording_replays_to_the_same_plans_byte_for_byte(build_engine: Callable[..., Any]) -> None:
    entries: list[Any] = []
    engine = build_engine(num_blocks=10)
    arguments = {
        "num_blocks": 10,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 40,
        "vocab_size": 97,
        "eos_token_ids": (5,),
    }
    engine.scheduler = RecordedScheduler(sink=entries.append, policy=load_policy("fcfs"), **arguments)
    for rid in range(1, 9):
        engine.submit(rid, range(rid, rid + 2 * rid), max_tokens=12, blocked_on="x" if rid == 5 else None)
    for turn in range(30):
        while engine.scheduler.may_plan and engine.launch() is not None:
            pass
        if turn == 4:
            engine.abort(2)
        if turn == 6:
            engine.scheduler.unblock((0, 5), None, engine.now)
        if turn == 8 and (sequence := engine.scheduler.running()[0]):
            engine._ended(engine.scheduler.finish([(sequence, "stop", "x")], engine.now))
        if engine.results:
            engine.complete()
    engine.run()
    assert engine.scheduler.statistics().num_preemptions > 0

    def encoded(plan: Any) -> Any:
        kind, scalars, arrays = pack(plan)
        return kind, scalars, [a.tobytes() for a in arrays]

    fresh = Scheduler(policy=load_policy("fcfs"), **arguments)
    assert [encoded(p) for p in replay(entries, fresh)] == [encoded(p) for p in engine.plans]
    broken = Scheduler(policy=load_policy("fcfs"), **(arguments | {"num_blocks": 40}))
    assert [encoded(p) for p in replay(entries, broken)] != [encoded(p) for p in engine.plans]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fcsf", "did you mean 'fcfs'"),
        ("nowhere:Policy", "No module named 'nowhere'"),
        ("json:Policy", "has no attribute 'Policy'"),
        ("json:loads", "json:loads.*TypeError"),
        ("collections:OrderedDict", "neither a KeyPolicy nor a PlanPolicy"),
    ],
)
def test_a_policy_that_cannot_be_used_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_policy(name)


def test_requests_that_gave_up_do_not_pile_up(build_engine: Callable[..., Any]) -> None:
    planner = KeyPlanner(KeyPolicy())
    engine = build_engine(max_num_seqs=1, policy=planner)
    engine.submit(1, [1], max_tokens=30, ignore_eos=True)
    engine.launch()
    for rid in range(2, 1000):
        engine.submit(rid, [rid % 97])
        engine.abort(rid)
    assert len(planner._order) < 200
    engine.run()
    assert engine.ends[1].reason == "length"


def test_a_masked_row_stays_out_although_somebody_must_go(build_engine: Callable[..., Any]) -> None:
    class Third(KeyPolicy):
        """Only the first decode row runs, and the rows need more blocks than there are."""

        def decode_mask(self, view: Any) -> Any:
            return view.decode_slots == view.decode_slots[:1]

    engine = build_engine(policy=KeyPlanner(Third()), num_blocks=10, max_num_seqs=3)
    for rid in (1, 2, 3):
        engine.submit(rid, range(11), max_tokens=12, ignore_eos=True)
    for _ in range(200):
        while engine.scheduler.may_plan and engine.launch() is not None:
            assert len(engine.worker.decode) <= 1
        if not engine.results:
            break
        engine.complete()
    assert all(engine.ends[rid].reason == "length" for rid in (1, 2, 3))


def test_a_token_of_a_row_without_finite_logits_is_void(engine: Any) -> None:
    engine.submit(1, [1], ignore_eos=True)
    engine.submit(2, [2], ignore_eos=True)
    engine.launch()
    result = engine.results.pop()
    tokens = result.tokens.copy()
    tokens[0] = -1
    void = StepResult(step=result.step, tokens=tokens, nonfinite_rows=np.array([0], np.int32))
    engine.apply(engine.scheduler.update(void, engine.now))
    assert engine.ends[1].reason == "error"
    assert len(engine.streams[2]) == 1


def test_a_request_ended_while_it_waits_for_its_token_counts_it(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(num_blocks=10, max_num_seqs=2)
    engine.submit(1, range(16), max_tokens=20, ignore_eos=True)
    engine.submit(2, range(20, 34), max_tokens=20, ignore_eos=True)
    for _ in range(200):
        while engine.scheduler.may_plan and engine.launch() is not None:
            pass
        preempted = [s for s in engine.scheduler._table.preempted if s.last_step > engine.scheduler.ledger.last_done]
        if preempted:
            break
        engine.complete()
    (sequence,) = preempted
    engine.abort(sequence.key[1])
    assert sequence.num_wasted_tokens >= 1
    engine.run()


def test_a_planner_may_change_the_decisions_that_it_builds_on(reference: Callable[..., list[int]]) -> None:
    class Pausing(KeyPlanner):
        """Holds slot 0 back once, in a step in which nothing else happens."""

        num_held = 0

        def plan(self, view: Any) -> Decision:
            decision = super().plan(view)
            if not self.num_held and not decision.prefill and view.decode_slots.size == 2:
                self.num_held += 1
                decision.decode = view.decode_slots != 0
                decision.wake_at = 7.0
            return decision

    policy = Pausing(KeyPolicy())
    engine = Engine(policy=policy)
    engine.submit(1, [1], max_tokens=6, ignore_eos=True)
    engine.submit(2, [2], max_tokens=6, ignore_eos=True)
    engine.run()
    assert policy.num_held == 1
    assert engine.scheduler.wake_at == float("inf"), "the change outlived its step"
    other = KeyPlanner(KeyPolicy()).plan(engine.scheduler)
    assert other.decode is None
    assert other.wake_at == float("inf")
    for rid in (1, 2):
        assert engine.streams[rid] == reference([rid], rid, 6)
