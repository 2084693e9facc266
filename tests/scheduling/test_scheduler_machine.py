"""The scheduler as a state machine: random interleavings of everything, each request's stream held against its reference.

The mutation check plants one mistake after the other and demands that the machine finds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from actorllm.kvcache.block_pool import BlockPool
from actorllm.kvcache.manager import KVCacheManager
from actorllm.kvcache.snapshot_pool import SnapshotPool
from actorllm.messages import I32, StepFailed, StepPlan
from actorllm.messages.logit_rules import SamplingRules
from actorllm.scheduling.batch import Batch
from actorllm.scheduling.followers import Followers
from actorllm.scheduling.forks import Forks
from actorllm.scheduling.ledger import Ledger
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.plan import PlanBuilder
from actorllm.scheduling.prefix_cache import PrefixCache
from actorllm.scheduling.results import Results
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.sequence import State
from actorllm.scheduling.snapshots import Snapshots
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.scheduling.stopping import Stopping
from actorllm.scheduling.tiers.transfers import Transfers
from tests.effort import examples
from tests.scheduling.chained_tokens import EOS, SIBLING, reference_stream
from tests.scheduling.conftest import Engine
from tests.scheduling.reporting import Reporting
from tests.scheduling.tiers.tiered_engine import TieredEngine


class SchedulerMachine(RuleBasedStateMachine):
    def make_engine(self, **arguments: Any) -> Engine:
        return Engine(**arguments)

    def more_of(self, rid: int) -> dict[str, Any]:
        """What else a request with this number asks for."""
        return {}

    @initialize(
        depth=st.sampled_from([1, 2]),
        num_blocks=st.sampled_from([10, 12, 20, 40]),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 20),
    )
    def start(self, depth: int, num_blocks: int, max_num_seqs: int, budget: int) -> None:
        self.engine = self.make_engine(
            depth=depth, num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
        )
        self.submitted: dict[int, Any] = {}
        self.blocked: set[int] = set()

    @rule(
        length=st.integers(1, 38),
        max_tokens=st.integers(1, 24),
        min_tokens=st.integers(0, 6),
        ignore_eos=st.booleans(),
        stop=st.lists(st.integers(0, 96), max_size=3),
        prefix=st.integers(0, 4),
        blocked=st.booleans(),
        family=st.integers(0, 2),
        salt=st.sampled_from([None, None, "a"]),
        n=st.sampled_from([1, 1, 2, 3, 5]),
        patience=st.sampled_from([None, None, 0.03, 0.3]),
    )
    def submit(
        self,
        length: int,
        max_tokens: int,
        min_tokens: int,
        ignore_eos: bool,
        stop: list[int],
        prefix: int,
        blocked: bool,
        family: int,
        salt: str | None,
        n: int,
        patience: float | None,
    ) -> None:
        rid = len(self.submitted) + 1
        prompt = [(family * 31 + i) % 97 for i in range(length)]
        if n > 1:
            prefix = 0
        output = reference_stream(prompt, rid, min(prefix, max_tokens - 1, 39 - length))
        arguments = {
            "max_tokens": max_tokens,
            "min_tokens": min(min_tokens, max_tokens),
            "ignore_eos": ignore_eos,
            "stop_token_ids": stop,
            "cache_salt": salt,
        }
        extras = {
            "blocked_on": "x" if blocked else None,
            "deadline": None if patience is None else self.engine.now + patience,
            **self.more_of(rid),
        }
        for i in range(n):
            self.submitted[rid + i] = (prompt, rid + SIBLING * i, len(output), arguments)
            if blocked:
                self.blocked.add(rid + i)
        if n > 1:
            self.engine.submit_several(rid, n, prompt, **extras, **arguments)
        else:
            self.engine.submit(rid, prompt, output=np.array(output, np.int32), **extras, **arguments)

    @precondition(lambda self: self.submitted)
    @rule(other=st.integers(1, 40), is_same=st.booleans(), ignore_eos=st.booleans())
    def come_late(self, other: int, is_same: bool, ignore_eos: bool) -> None:
        """A sibling of whoever it is, at whatever stage; perhaps with another prompt, which it must not share."""
        rid = len(self.submitted) + 1
        other = other % len(self.submitted) + 1
        prompt = self.submitted[other][0]
        if not is_same:
            prompt = [*prompt[:-1], (prompt[-1] + 1) % 97]
        arguments = {"max_tokens": 12, "min_tokens": 0, "ignore_eos": ignore_eos, "stop_token_ids": []}
        self.submitted[rid] = (prompt, rid, 0, arguments)
        self.engine.submit(rid, prompt, fork_of=other, **arguments)

    @rule(rid=st.integers(1, 30))
    def abort(self, rid: int) -> None:
        self.engine.abort(rid)

    @rule()
    def expire(self) -> None:
        self.engine._ended(self.engine.scheduler.expire(self.engine.now))

    @precondition(lambda self: self.blocked)
    @rule()
    def unblock(self) -> None:
        rid = self.blocked.pop()
        self.engine.scheduler.unblock((0, rid), None, self.engine.now)

    @rule()
    def launch(self) -> None:
        self.engine.launch()

    @precondition(lambda self: self.engine.results)
    @rule()
    def complete(self) -> None:
        self.engine.complete()

    @rule(turns=st.integers(1, 6))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.engine.launch()
            if self.engine.results:
                self.engine.complete()

    @rule(row=st.integers(0, 3))
    def fail(self, row: int) -> None:
        while self.engine.scheduler.may_plan and self.engine.launch() is not None:
            pass  # as many steps in flight as there can be
        if not len(self.engine.scheduler.ledger):
            return
        record = next(iter(self.engine.scheduler.ledger))  # results of voided steps may be before its own
        self.engine.results.clear()
        at_fault = np.array([row % len(record.named)], np.int32)
        failure = StepFailed(step=record.step, error="planted", rows=at_fault)
        self.engine.apply(self.engine.scheduler.fail(failure, self.engine.now))

    @rule(is_busy=st.booleans(), num_delivered=st.integers(0, 2))
    def lose_the_workers(self, is_busy: bool, num_delivered: int) -> None:
        while is_busy and self.engine.scheduler.may_plan and self.engine.launch() is not None:
            pass
        for _ in range(min(num_delivered, len(self.engine.results))):
            self.engine.complete()
        self.engine.lose_workers()

    @rule(with_running=st.booleans())
    def reset_prefix_cache(self, with_running: bool) -> None:
        self.engine.scheduler.reset_prefix_cache(self.engine.now, with_running)

    @precondition(lambda self: self.engine.results and self.engine.results[0].tokens.size)
    @rule(row=st.integers(0, 3))
    def lose_the_logits(self, row: int) -> None:
        result = self.engine.results.pop(0)
        bad = np.array([row % result.tokens.size], np.int32)
        void = dataclasses.replace(result, nonfinite_rows=bad)
        self.engine.apply(self.engine.scheduler.update(void, self.engine.now))

    @rule(position=st.integers(0, 3))
    def stop_by_text(self, position: int) -> None:
        running = self.engine.scheduler.running()
        if position < len(running):
            self.engine._ended(self.engine.scheduler.finish([(running[position], "stop", "text")], self.engine.now))

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for rid in self.blocked:
            self.engine.scheduler.unblock((0, rid), None, self.engine.now)
        self.engine.run()
        for rid, (prompt, seed, num_prefix, arguments) in self.submitted.items():
            stream, end = self.engine.streams[rid], self.engine.ends.pop(rid)
            innocent = (None, "planted")
            assert end.error in innocent or "logits are not finite" in end.error or "workers died 2" in end.error
            expected = reference_stream(prompt, seed, min(arguments["max_tokens"], 40 - len(prompt)))
            stops = set(arguments["stop_token_ids"]) | (set() if arguments["ignore_eos"] else {EOS})
            first = next(
                (i for i, t in enumerate(expected) if t in stops and i >= max(arguments["min_tokens"], num_prefix)),
                None,
            )
            if first is not None:
                expected = expected[: first + 1]
            if end.reason in ("abort", "error") or end.stop_reason == "text":
                assert stream == expected[: len(stream)]
            else:
                assert stream == expected
                assert end.reason == ("length" if first is None else "stop")
        assert not self.engine.ends
        statistics = self.engine.scheduler.statistics()
        assert statistics.kv.num_free == statistics.kv.num_blocks, "blocks leak"
        assert statistics.num_running == statistics.num_waiting == statistics.num_blocked == 0


SchedulerMachine.TestCase.settings = settings(
    max_examples=examples(20, 300), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestScheduler = SchedulerMachine.TestCase


class FailingMachine(SchedulerMachine):
    """The same, and steps fail for no known reason as well."""

    @rule(is_out_of_memory=st.booleans())
    def fail_for_no_known_reason(self, is_out_of_memory: bool) -> None:
        while self.engine.scheduler.may_plan and self.engine.launch() is not None:
            pass
        if not len(self.engine.scheduler.ledger):
            return
        step = next(iter(self.engine.scheduler.ledger)).step  # results of voided steps may be before its own
        self.engine.results.clear()
        failure = StepFailed(step=step, error="planted", is_out_of_memory=is_out_of_memory)
        self.engine.apply(self.engine.scheduler.fail(failure, self.engine.now))

    @precondition(lambda self: self.engine.results and self.engine.plans[-1].prefill_slots.size)
    @rule(row=st.integers(0, 3))
    def lose_a_prompt(self, row: int) -> None:
        """Its states are not finite, and what it had written is cleared."""
        plan = next(plan for plan in self.engine.plans if plan.step == self.engine.results[0].step)
        if not plan.prefill_slots.size:
            return
        result = self.engine.results.pop(0)
        row %= plan.prefill_slots.size
        void = dataclasses.replace(result, nonfinite_prefills=np.array([row], np.int32))
        self.engine.apply(self.engine.scheduler.update(void, self.engine.now))


FailingMachine.TestCase.settings = settings(SchedulerMachine.TestCase.settings, max_examples=examples(12, 200))
TestFailingSteps = FailingMachine.TestCase


class PausingMachine(SchedulerMachine):
    """The same with priorities that displace, log-probabilities of prompts, and pauses."""

    def make_engine(self, **arguments: Any) -> Engine:
        self.reporting = Reporting(policy=load_policy("priority"), **arguments)
        self.paused_at: float | None = None
        return self.reporting.engine

    def more_of(self, rid: int) -> dict[str, Any]:
        return {"priority": rid % 3, "rules": PROMPT_RULES if rid % 2 else None}

    @rule(mode=st.sampled_from(["wait", "wait", "keep", "abort"]))
    def pause(self, mode: str) -> None:
        self.engine._ended(self.engine.scheduler.pause(mode, self.engine.now))
        self.paused_at = self.engine.now

    @precondition(lambda self: self.paused_at is not None)
    @rule()
    def resume(self) -> None:
        self.engine.scheduler.resume(self.engine.now)
        self.paused_at = None

    @rule(is_busy=st.booleans(), num_delivered=st.integers(0, 2))
    def lose_the_workers(self, is_busy: bool, num_delivered: int) -> None:
        super().lose_the_workers(is_busy, num_delivered)
        self.reporting.watch_worker()

    @invariant()
    def nobody_starts_while_paused(self) -> None:
        if hasattr(self, "engine") and self.paused_at is not None:
            for sequence in self.engine.scheduler.running():
                assert sequence.scheduled <= self.paused_at or sequence.submit.output.size, f"{sequence.key} started"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.resume()
        for rid in self.blocked:
            self.engine.scheduler.unblock((0, rid), None, self.engine.now)
        self.engine.run()
        ends = dict(self.engine.ends)
        super().teardown()
        for rid, end in ends.items():
            is_whole = end.reason in ("stop", "length") and end.stop_reason != "text"
            if end.sequence.rules is not None and is_whole:
                assert len(self.reporting.prompts.get(rid, [])) == len(self.submitted[rid][0]) - 1


class WindowedMachine(SchedulerMachine):
    """The same with a second KV group, of layers with a sliding window."""

    def make_engine(self, **arguments: Any) -> Engine:
        return Engine(window=6, **arguments)


WindowedMachine.TestCase.settings = settings(SchedulerMachine.TestCase.settings, max_examples=examples(12, 200))
TestWindowedGroup = WindowedMachine.TestCase


class RecurrentMachine(FailingMachine):
    """The same with recurrent layers: a prefix is worth what ends with a state that the workers have kept."""

    def make_engine(self, **arguments: Any) -> Engine:
        return Engine(snapshots=1 + arguments["num_blocks"] % 7, snapshot_tokens=8, **arguments)

    @rule(family=st.integers(0, 2), length=st.integers(9, 30), turns=st.integers(1, 3))
    def converse(self, family: int, length: int, turns: int) -> None:
        """Prompts that begin alike, the next of them with the output of the one before."""
        prompt = [(family * 31 + i) % 97 for i in range(length)]
        for _ in range(turns):
            if len(prompt) > 34:
                return
            rid = len(self.submitted) + 1
            arguments = {"max_tokens": 4, "min_tokens": 0, "ignore_eos": True, "stop_token_ids": []}
            self.submitted[rid] = (prompt, rid, 0, arguments)
            self.engine.submit(rid, prompt, **arguments)
            if self.blocked:
                return
            self.engine.run()
            prompt = [*prompt, *self.engine.streams[rid], rid % 97]


RecurrentMachine.TestCase.settings = settings(SchedulerMachine.TestCase.settings, max_examples=examples(15, 300))
TestRecurrent = RecurrentMachine.TestCase

PROMPT_RULES = SamplingRules(num_prompt_logprobs=1).to_fields()
PausingMachine.TestCase.settings = settings(SchedulerMachine.TestCase.settings, max_examples=examples(12, 200))
TestPauses = PausingMachine.TestCase


class TieredMachine(SchedulerMachine):
    """The same, with a tier and priorities that displace: whatever is stored, loaded, lost or forgotten, no stream differs."""

    engine: TieredEngine

    def make_engine(self, **arguments: Any) -> TieredEngine:
        return TieredEngine(policy=load_policy("priority"), **arguments)

    def more_of(self, rid: int) -> dict[str, Any]:
        return {"priority": rid % 3}

    @rule()
    def rest(self) -> None:
        """Everything ends, and what was used again is stored."""
        if not self.blocked:
            self.engine.run()

    @rule(length=st.integers(12, 30), family=st.integers(0, 2))
    def use_a_prompt_twice_and_lose_it(self, length: int, family: int) -> None:
        for _ in range(2):
            self.ask_again(length, family)
            self.rest()
        if not self.blocked:
            self.engine.lose_workers()
            self.ask_again(length, family)
            self.ask_again(max(8, length - 4), family)
            self.engine.begin_moves()

    @precondition(lambda self: self.engine.moves)
    @rule(number=st.integers(1, 3))
    def finish_moves(self, number: int) -> None:
        for _ in range(min(number, len(self.engine.moves))):
            self.engine.finish_move()

    @rule(number=st.integers(1, 3))
    def lose_slots_of_the_tier(self, number: int) -> None:
        self.engine.tier.lose(number)

    @rule(seconds=st.sampled_from([0.1, 5.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.engine.now += seconds

    @rule(length=st.integers(8, 30), family=st.integers(0, 2))
    def ask_again(self, length: int, family: int) -> None:
        """Prompts of which there were some before, so that much is used again."""
        rid = len(self.submitted) + 1
        prompt = [(family * 31 + i) % 97 for i in range(length)]
        arguments = {"max_tokens": 3, "min_tokens": 0, "ignore_eos": True, "stop_token_ids": []}
        self.submitted[rid] = (prompt, rid, 0, arguments)
        self.engine.submit(rid, prompt, **self.more_of(rid), **arguments)


TieredMachine.TestCase.settings = settings(SchedulerMachine.TestCase.settings, max_examples=examples(8, 200))
TestTiers = TieredMachine.TestCase


def _patch(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrong: Callable[..., Any]) -> None:
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: wrong(right, *a, **k))


def leak_a_block(right: Any, pool: BlockPool, blocks: I32) -> Any:
    return right(pool, blocks[1:] if blocks.size > 2 else blocks)


def keep_the_generation(right: Any, batch: Batch, slot: int, **told: bool) -> None:
    right(batch, slot, **told)
    batch.generation[slot] -= 1


def forget_to_free(right: Any, builder: PlanBuilder, slot: int) -> None:
    if slot != 1:
        right(builder, slot)


def forget_the_displaced_token(right: Any, results: Results, sequence: Any, tokens: I32, slot: int) -> int:
    known = sequence.known
    start: int = right(results, sequence, tokens, slot)
    if slot < 0:
        sequence.known = known
    return start


def read_one_token_too_few(right: Any, kv: KVCacheManager, slot: int, start: int, stop: int) -> I32:
    return right(kv, slot, start, stop - 1)


def swap_extended_blocks(right: Any, kv: KVCacheManager, slots: I32) -> I32:
    return right(kv, slots)[::-1]


def void_one_step_only(right: Any, ledger: Ledger, step: int) -> Any:
    later = list(ledger.in_flight)[1:]
    voided = right(ledger, step)
    ledger.in_flight.extend(later)
    return voided[:1]


def ignore_min_tokens(right: Any, stopping: Stopping, sequence: Any, token: int, num_outputs: int) -> Any:
    return right(stopping, sequence, token, num_outputs + 1)


def never_send_rows(right: Any, *arguments: Any) -> StepPlan:
    plan: StepPlan = right(*arguments)
    if plan.step > 1 and plan.decode_slots is not None and plan.decode_slots.size:
        object.__setattr__(plan, "decode_slots", None)
    return plan


def publish_a_block_too_many(right: Any, cache: PrefixCache, prefills: Any, besides: Any) -> None:
    for sequence, _ in prefills:
        sequence.num_done += 4
    right(cache, prefills, besides)
    for sequence, _ in prefills:
        sequence.num_done -= 4


def take_over_without_a_reference(right: Any, kv: KVCacheManager, blocks: I32) -> None:
    right(kv, blocks[1:])


def keep_the_cache_of_the_dead(right: Any, scheduler: Scheduler, error: str, now: float) -> Any:
    index, scheduler.kv.index = scheduler.kv.index, None
    ends = right(scheduler, error, now)
    scheduler.kv.index = index
    return ends


def count_free_hits_as_held(right: Any, cache: PrefixCache, sequence: Any) -> int:
    right(cache, sequence)
    return int(sequence.hits.size)


def copy_at_once(right: Any, kv: KVCacheManager, *arguments: Any) -> I32:
    blocks: I32 = right(kv, *arguments)
    if kv._actions is not None:
        kv._actions.copy += kv._actions.copy_later
        kv._actions.copy_later = []
    return blocks


def never_copy(right: Any, kv: KVCacheManager, *arguments: Any) -> I32:
    blocks: I32 = right(kv, *arguments)
    if kv._actions is not None:
        kv._actions.copy_later.clear()
    return blocks


def follow_anybody(right: Any, forks: Forks, sequence: Any) -> Any:
    leader = forks._table.alive.get((0, sequence.submit.fork_of))
    is_good = leader is not None and leader.state is State.WAITING and leader.known.size == leader.num_prompt
    return leader if is_good else right(forks, sequence)


def take_more_than_there_is(right: Any, forks: Forks, last: Any) -> tuple[int, int]:
    return 100, 100


def lose_the_followers(right: Any, followers: Followers, leader: Any) -> list[Any]:
    right(followers, leader)
    return []


MUTANTS: list[tuple[type, str, Callable[..., Any]]] = [
    (BlockPool, "release", leak_a_block),
    (Batch, "vacate", keep_the_generation),
    (PlanBuilder, "free", forget_to_free),
    (Results, "_append", forget_the_displaced_token),
    (KVCacheManager, "read_token_ids", read_one_token_too_few),
    (KVCacheManager, "extend", swap_extended_blocks),
    (Ledger, "void", void_one_step_only),
    (Stopping, "end_of", ignore_min_tokens),
    (PlanBuilder, "build", never_send_rows),
    (PrefixCache, "publish_prefills", publish_a_block_too_many),
    (KVCacheManager, "share", take_over_without_a_reference),
    (Scheduler, "lose_workers", keep_the_cache_of_the_dead),
    (PrefixCache, "num_held", count_free_hits_as_held),
    (KVCacheManager, "fork", copy_at_once),
    (KVCacheManager, "fork", never_copy),
    (Forks, "leader_of", follow_anybody),
    (Forks, "_room", take_more_than_there_is),
    (Followers, "take", lose_the_followers),
]


def start_in_spite_of_a_pause(right: Any, scheduler: Scheduler, sequence: Any) -> bool:
    return True


def forget_who_is_aside(right: Any, planner: KeyPlanner, *arguments: Any) -> None:
    planner._aside.clear()
    right(planner, *arguments)


def read_the_cache_in_spite_of_log_probabilities(right: Any, cache: PrefixCache, sequence: Any) -> None:
    told, sequence.num_prompt_logprobs = sequence.num_prompt_logprobs, sequence.num_prompt
    right(cache, sequence)
    sequence.num_prompt_logprobs = told


MUTANTS_OF_PAUSES: list[tuple[type, str, Callable[..., Any]]] = [
    (Scheduler, "may_start", start_in_spite_of_a_pause),
    (KeyPlanner, "_fill", forget_who_is_aside),
    (PrefixCache, "look_up", read_the_cache_in_spite_of_log_probabilities),
]


def keep_what_the_dead_moved(right: Any, transfers: Transfers) -> None:
    transfers._is_losing = True


def evict_in_silence(right: Any, pool: SnapshotPool) -> Any:
    """Also what a waiting request has found, and is about to go on from."""
    version = pool.version
    place = right(pool)
    pool.version = version
    return place


def publish_before_the_report(right: Any, snapshots: Snapshots, *arguments: Any) -> Any:
    saves = right(snapshots, *arguments)
    for save in saves:
        if save.is_marked:
            snapshots._pool.publish(save.sequence.hashes, save.position // 4, save.place)
    return saves


def keep_one_border_too_many(right: Any, snapshots: Snapshots, saves: Any, bad: Any) -> None:
    right(snapshots, [save._replace(position=save.position + 8) for save in saves], bad)


def keep_what_is_void(right: Any, snapshots: Snapshots, saves: Any) -> None:
    snapshots.reported(saves, set())


def keep_what_was_reset(right: Any, pool: SnapshotPool) -> None:
    """Also after a death of the workers: the others have no states."""


def name_an_own_one_after_others(right: Any, snapshots: Snapshots, sequence: Any) -> None:
    own = snapshots._own.get(sequence)
    if own is not None and own[0] > 8:
        snapshots._own[sequence] = own[0] - 8, own[1]
    right(snapshots, sequence)


def take_over_blocks_without_a_state(right: Any, snapshots: Snapshots, hashes: bytes, found: I32) -> I32:
    usable: I32 = right(snapshots, hashes, found)
    return found if usable.size else usable


def never_restore(right: Any, snapshots: Snapshots) -> Any:
    right(snapshots)
    return []


MUTANTS_OF_SNAPSHOTS: list[tuple[type, str, Callable[..., Any]]] = [
    (SnapshotPool, "take", evict_in_silence),
    (Snapshots, "plan", publish_before_the_report),
    (Snapshots, "reported", keep_one_border_too_many),
    (Snapshots, "voided", keep_what_is_void),
    (SnapshotPool, "clear", keep_what_was_reset),
    (Snapshots, "publish_own", name_an_own_one_after_others),
    (Snapshots, "usable", take_over_blocks_without_a_state),
    (Snapshots, "take_restored", never_restore),
]


MUTANTS_OF_TIERS: list[tuple[type, str, Callable[..., Any]]] = [
    (Transfers, "lose_workers", keep_what_the_dead_moved),
]


RARE = {
    *(never_copy, follow_anybody, publish_a_block_too_many, forget_who_is_aside, start_in_spite_of_a_pause),
    *(keep_what_is_void, evict_in_silence, name_an_own_one_after_others),
}
"""What only few runs come upon."""


def mistakes(machine: type, mutants: list[tuple[type, str, Callable[..., Any]]]) -> list[Any]:
    slow = pytest.mark.slow(reason="some hundred runs until the mistake is met; the others are quick")
    return [
        pytest.param(machine, *mutant, marks=[slow] if mutant[2] in RARE else [], id=mutant[2].__name__)
        for mutant in mutants
    ]


@pytest.mark.parametrize(
    ("machine", "owner", "name", "wrong"),
    mistakes(SchedulerMachine, MUTANTS)
    + mistakes(PausingMachine, MUTANTS_OF_PAUSES)
    + mistakes(TieredMachine, MUTANTS_OF_TIERS)
    + mistakes(RecurrentMachine, MUTANTS_OF_SNAPSHOTS),
)
def test_the_machine_finds_planted_mistakes(
    monkeypatch: pytest.MonkeyPatch, machine: type, owner: type, name: str, wrong: Callable[..., Any]
) -> None:
    _patch(monkeypatch, owner, name, wrong)
    quick = settings(
        max_examples=400,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=[p for p in settings().phases if p.name in ("explicit", "generate")],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError, ExceptionGroup)):
        run_state_machine_as_test(machine, settings=quick)
