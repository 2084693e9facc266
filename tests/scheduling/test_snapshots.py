"""States of recurrent layers behind prefixes: which are kept, what finds them, and what becomes of them.

The scripted worker raises where a row begins with a state that is not that of its tokens. Borders are at multiples of 8 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actorllm.messages import StepFailed
from actorllm.scheduling.policy import Decision, KeyPolicy
from actorllm.scheduling.step_packing import KeyPlanner
from tests.scheduling.chained_tokens import reference_stream
from tests.scheduling.conftest import Engine


class RecurrentEngine(Engine):
    def __init__(self, **overrides: Any) -> None:
        super().__init__(**{"snapshots": 16, "snapshot_tokens": 8, "max_model_len": 80, "num_blocks": 80} | overrides)

    def ask(self, rid: int, prompt: Iterable[int], count: int = 4) -> int:
        """Run a request to its end; how many of its tokens were found."""
        tokens = list(prompt)
        self.submit(rid, tokens, max_tokens=count, ignore_eos=True)
        self.run()
        assert self.streams[rid] == reference_stream(tokens, rid, count)
        found: int = self.ends[rid].sequence.num_cached_tokens
        return found

    def kept(self) -> list[int]:
        """Behind how many tokens states were kept, by the plans so far."""
        return [position for plan in self.plans for position in plan.saved_states[1::3].tolist()]


def test_the_same_prompt_finds_the_last_border_before_its_last_token() -> None:
    engine = RecurrentEngine()
    assert engine.ask(1, range(27)) == 0
    assert engine.ask(2, range(27)) == 24
    assert engine.ask(3, range(24)) == 0, "its last token is to be computed, and behind 16 tokens nothing was kept"
    assert engine.ask(4, range(24)) == 16


def test_a_model_without_recurrent_layers_has_no_such_fields() -> None:
    engine = RecurrentEngine(snapshots=0)
    assert [engine.ask(rid, range(27)) for rid in (1, 2)] == [0, 24]
    assert not any(plan.saved_states.size or plan.restored_states.size for plan in engine.plans)


@pytest.mark.parametrize("budget", [5, 16, 64])
def test_a_prompt_is_not_cut_for_it(budget: int) -> None:
    engine, without = (RecurrentEngine(max_num_batched_tokens=budget, snapshots=n) for n in (16, 0))
    for one in (engine, without):
        one.ask(1, range(43))
    chunks = [[plan.prefill_counts.tolist() for plan in one.plans] for one in (engine, without)]
    assert chunks[0] == chunks[1]
    assert engine.ask(2, range(43)) == 40


def test_where_two_prompts_part_the_third_goes_on() -> None:
    engine = RecurrentEngine()
    system = list(range(20))
    assert engine.ask(1, [*system, *range(40, 60)]) == 0
    assert engine.ask(2, [*system, *range(60, 80)]) == 0, "that they part was not known before"
    assert engine.ask(3, [*system, *range(80, 96)]) == 16


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_turn_finds_the_output(depth: int) -> None:
    engine = RecurrentEngine(depth=depth)
    history = [3]
    for rid in range(1, 6):
        found = engine.ask(rid, history, 11)
        assert found >= (len(history) - 3) // 8 * 8 - (0 if depth == 1 else 8)
        assert found > 0 or rid == 1
        history = [*history, *engine.streams[rid], rid]


def test_an_own_one_is_replaced_and_takes_no_other_place() -> None:
    engine = RecurrentEngine(snapshots=4)
    engine.submit(1, range(10), max_tokens=60, ignore_eos=True)
    for _ in range(50):
        engine.launch()
        engine.complete()
    assert len(set(engine.kept())) > 5
    snapshots = engine.scheduler._snapshots
    assert snapshots is not None
    assert snapshots.num_published == 1, "that of its prompt"
    assert len(snapshots._own) == 1
    engine.run()
    assert snapshots.num_published == 2
    assert snapshots.num_evicted == 0


def test_the_one_used_longest_ago_gives_its_place() -> None:
    engine = RecurrentEngine(snapshots=2, max_num_seqs=1)
    prompts = [[first, *range(1, 12)] for first in (20, 30, 40)]
    for rid, number in enumerate((0, 1, 0, 2), 1):
        found = engine.ask(rid, prompts[number], 1)
        assert found == (8 if rid == 3 else 0)
    assert engine.ask(5, prompts[0], 1) == 8
    assert engine.ask(6, prompts[1], 1) == 0
    assert engine.scheduler.statistics().prefix_cache.num_evicted_snapshots == 2


def test_what_a_waiting_request_had_found_may_be_gone_when_it_starts() -> None:
    engine = RecurrentEngine(snapshots=1, max_num_seqs=1)
    engine.ask(1, range(20), 1)
    engine.submit(2, range(50, 70), max_tokens=2, ignore_eos=True)
    engine.launch()
    engine.submit(3, range(20), max_tokens=2, ignore_eos=True)
    engine.scheduler.remaining(engine.scheduler.sequence((0, 3)))
    engine.run()
    assert engine.streams[3] == reference_stream(range(20), 3, 2)
    assert engine.ends[3].sequence.num_cached_tokens == 0


def test_nothing_is_found_before_its_step_is_reported() -> None:
    engine = RecurrentEngine(depth=2, max_num_batched_tokens=64)
    engine.submit(1, range(20), max_tokens=20, ignore_eos=True)
    engine.launch()
    engine.submit(2, range(20), ignore_eos=True)
    assert engine.launch().new["num_computed"].tolist() == [0]
    engine.complete()
    engine.submit(3, range(20), ignore_eos=True)
    engine.run()
    assert [engine.ends[rid].sequence.num_cached_tokens for rid in (2, 3)] == [0, 16]


def test_of_a_failed_step_nothing_is_kept() -> None:
    engine = RecurrentEngine()
    engine.submit(1, range(20), max_tokens=20, ignore_eos=True)
    plan = engine.launch()
    engine.results.clear()
    engine.apply(engine.scheduler.fail(StepFailed(step=plan.step, error="planted", rows=np.zeros(1, np.int32)), 0.0))
    assert engine.ask(2, range(20)) == 0


def test_a_preempted_request_goes_on_from_the_last_border_it_passed() -> None:
    class Choosy(KeyPlanner):
        victim: Any = None

        def plan(self, view: Any) -> Decision:
            if self.victim is None:
                return super().plan(view)
            victim, self.victim = self.victim, None
            return Decision(preempt=[victim])

    planner = Choosy(KeyPolicy())
    engine = RecurrentEngine(policy=planner)
    engine.submit(1, range(13), max_tokens=24, ignore_eos=True)
    for _ in range(16):
        engine.launch()
        engine.complete()
    engine.launch()
    planner.victim = engine.scheduler.sequence((0, 1))
    engine.launch()
    engine.run()
    assert engine.streams[1] == reference_stream(range(13), 1, 24)
    counts = engine.scheduler.statistics().prefix_cache
    assert (counts.preempted_requests, counts.preempted_hits) == (1, 24)


def test_other_workers_have_no_states() -> None:
    engine = RecurrentEngine()
    engine.ask(1, range(20))
    engine.submit(2, range(20), max_tokens=20, ignore_eos=True)
    engine.launch()
    engine.lose_workers()
    engine.run()
    assert engine.streams[2] == reference_stream(range(20), 2, 20)
    assert engine.scheduler.statistics().prefix_cache.preempted_hits == 0


def test_what_is_not_finite_is_forgotten_with_all_that_begins_so() -> None:
    engine = RecurrentEngine(depth=1)
    engine.ask(1, range(30))
    engine.submit(2, range(30), max_tokens=9, ignore_eos=True)
    engine.launch()
    result = engine.results.pop(0)
    bad = np.zeros(1, np.int32)
    engine.apply(engine.scheduler.update(replace(result, nonfinite_rows=bad), engine.now))
    assert engine.ask(3, range(30)) == 0


def test_forks_have_states_of_their_own() -> None:
    engine = RecurrentEngine(max_num_batched_tokens=64)
    prompt = list(range(13))
    rids = engine.submit_several(1, 3, prompt, max_tokens=12, ignore_eos=True)
    engine.run()
    for rid in rids:
        assert engine.ask(10 + rid, [*prompt, *engine.streams[rid], 50]) >= 16
