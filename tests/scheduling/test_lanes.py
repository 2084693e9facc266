"""Several steps in flight on the stages of a pipeline: no row is in two of them, no lane starves, and lanes stay alike.

The worker is scripted and computes a step when it is launched. What a real pipeline could not do (a row again before its token is
known here) is therefore looked for in the plans.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actorllm.scheduling.lanes
from actorllm.messages import StepFailed, StepPlan, pack
from actorllm.scheduling.lanes import RowLanes
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policy import POLICIES
from tests.effort import examples
from tests.scheduling.chained_tokens import reference_stream
from tests.scheduling.conftest import Engine


class Pipe(Engine):
    """Fails when a plan names a row whose token of a step in flight it would need."""

    def __init__(self, num_lanes: int, **overrides: Any) -> None:
        super().__init__(num_lanes=num_lanes, **({"num_blocks": 60, "max_num_seqs": 8} | overrides))
        self.num_lanes = num_lanes
        self.rounds_without: dict[int, int] = {}
        """By slot that decodes, how many steps were launched since one named it."""

    def launch(self) -> StepPlan | None:
        waited_for = {
            (slot, generation)
            for record in self.scheduler.ledger
            for slot, generation in zip(record.rows.slots.tolist(), record.rows.generations.tolist(), strict=True)
        }
        plan = super().launch()
        if plan is None:
            return None
        record = self.scheduler.ledger.newest
        assert plan.lane.size == 2
        assert int(plan.lane[1]) == self.scheduler.ledger.last_done
        for slot, generation in zip(record.rows.slots.tolist(), record.rows.generations.tolist(), strict=True):
            assert (slot, generation) not in waited_for, f"slot {slot} is in two steps in flight"
        for sequence, _ in record.prefills:
            assert (sequence.slot, int(self.scheduler.batch.generation[sequence.slot])) not in waited_for
        named = {sequence.slot for sequence in record.named}
        decoding = set(self.scheduler.batch.rows().slots.tolist())
        self.rounds_without = {
            slot: 0 if slot in named else self.rounds_without.get(slot, 0) + 1 for slot in decoding | named
        }
        return plan

    def turn(self) -> bool:
        """As the loop of the engine: plan what there is room for, then take one result."""
        while self.scheduler.may_plan and self.launch() is not None:
            pass
        if self.results:
            self.complete()
            return True
        return False


def fill(pipe: Pipe, num: int, max_tokens: int = 30, num_prompt: int = 3) -> dict[int, list[int]]:
    prompts = {rid: [(7 * rid + i) % 97 for i in range(num_prompt)] for rid in range(1, num + 1)}
    for rid, prompt in prompts.items():
        pipe.submit(rid, prompt, max_tokens=max_tokens, ignore_eos=True)
    return {rid: reference_stream(prompt, rid, max_tokens) for rid, prompt in prompts.items()}


def test_with_one_lane_plans_are_what_they_were() -> None:
    """Digests of plans that were made before there were lanes."""
    found = []
    for seed in range(6):
        dice, crc = random.Random(seed), 0
        engine = Engine(depth=1 + seed % 2, num_blocks=14 + 10 * (seed % 3))
        left = 12
        for _ in range(600):
            if left and dice.random() < 0.3:
                prompt = [dice.randrange(97) for _ in range(dice.randint(1, 30))]
                n, most = dice.choice([1, 1, 2]), dice.randint(1, 20)
                engine.submit_several(100 * left, n, prompt, max_tokens=most, ignore_eos=True)
                left -= 1
            plan = engine.launch() if engine.scheduler.may_plan else None
            if engine.results and (plan is None or dice.random() < 0.5):
                engine.complete()
        for plan in engine.plans:
            kind, scalars, arrays = pack(plan)
            crc = zlib.crc32(repr((kind, scalars)).encode() + b"".join(a.tobytes() for a in arrays), crc)
        found.append((len(engine.plans), crc))
    assert found == [
        (64, 1396287271),
        (52, 360178273),
        (49, 581578087),
        (103, 736248272),
        (47, 3237295822),
        (68, 3619984134),
    ]


@pytest.mark.parametrize("num_lanes", [2, 3, 4])
def test_streams_are_those_of_one_lane(num_lanes: int) -> None:
    pipe = Pipe(num_lanes)
    expected = fill(pipe, 8)
    while pipe.turn():
        pass
    assert pipe.streams == expected


def test_every_lane_has_a_step_in_flight_and_as_many_rows() -> None:
    """All prompts end in the first steps, of one lane or two: they do not stay there."""
    pipe = Pipe(4, max_num_batched_tokens=64)
    fill(pipe, 8)
    for _ in range(16):
        pipe.turn()
    while pipe.scheduler.may_plan and pipe.launch() is not None:
        pass
    assert len(pipe.scheduler.ledger) == 4
    assert [record.num_decode for record in pipe.scheduler.ledger] == [2, 2, 2, 2]


def test_rows_do_not_gather_in_one_lane_after_a_stall() -> None:
    pipe = Pipe(2, max_num_batched_tokens=64)
    expected = fill(pipe, 8)
    for _ in range(7):
        pipe.turn()
    while pipe.results:  # nothing is planned meanwhile
        pipe.complete()
    for slot in range(8):
        pipe.scheduler._lanes._of_slot[slot] = 0  # type: ignore[union-attr]
    pipe.scheduler._lanes._made_of = [None, None]  # type: ignore[union-attr]
    pipe.turn()
    pipe.turn()
    while pipe.scheduler.may_plan and pipe.launch() is not None:
        pass
    assert sorted(record.num_decode for record in pipe.scheduler.ledger) == [4, 4]
    while pipe.turn():
        pass
    assert pipe.streams == expected


def test_lanes_are_alike_in_seconds_not_in_rows() -> None:
    """One row with a long context takes what many short ones do, and has fewer beside it."""
    pipe = Pipe(
        2, num_blocks=1200, max_model_len=4000, max_num_batched_tokens=4000, max_num_seqs=9, enable_prefix_caching=False
    )
    pipe.submit(100, [1] * 3900, max_tokens=60, ignore_eos=True)
    fill(pipe, 8, max_tokens=60)
    for _ in range(24):
        pipe.turn()
    while pipe.scheduler.may_plan and pipe.launch() is not None:
        pass
    sizes = sorted(record.num_decode for record in pipe.scheduler.ledger)
    assert sizes[0] <= 3, sizes
    assert sum(sizes) == 9


def test_a_single_stream_uses_one_lane() -> None:
    pipe = Pipe(4)
    expected = fill(pipe, 1)
    while pipe.turn():
        pass
    assert pipe.streams == expected
    assert len({int(plan.lane[0]) for plan in pipe.plans}) == 1


def test_rows_that_stay_are_not_named_again() -> None:
    """Cost follows change, also lane by lane."""
    pipe = Pipe(2, max_num_batched_tokens=64, num_blocks=120)
    fill(pipe, 8, max_tokens=34)
    for _ in range(12):
        pipe.turn()
    before = len(pipe.plans)
    for _ in range(20):
        pipe.turn()
    assert len(pipe.plans) - before >= 20
    assert all(plan.decode_slots is None for plan in pipe.plans[before:])


def test_chunks_of_one_prompt_follow_each_other_without_waiting() -> None:
    pipe = Pipe(3, max_num_batched_tokens=8)
    pipe.submit(1, list(range(30)), max_tokens=4, ignore_eos=True)
    while pipe.scheduler.may_plan and pipe.launch() is not None:
        pass
    assert [record.num_tokens for record in pipe.scheduler.ledger] == [8, 8, 8]
    while pipe.turn():
        pass
    assert pipe.streams[1] == reference_stream(list(range(30)), 1, 4)


def random_run(seed: int, policy: str, num_lanes: int) -> None:
    dice = random.Random(seed)
    pipe = Pipe(
        num_lanes,
        num_blocks=dice.choice([12, 16, 60]),
        max_num_seqs=dice.randint(1, 9),
        max_num_batched_tokens=dice.randint(9, 24),
        policy=load_policy(policy),
    )
    requests: dict[int, list[int]] = {}
    limits: dict[int, int] = {}
    left = dice.randint(2, 14)
    for _ in range(3000):
        event = dice.random()
        if left and event < 0.25:
            rid = left * 100
            n = dice.choice([1, 1, 3])
            prompt = [dice.randrange(97) for _ in range(dice.randint(1, 25))]
            limit = dice.randint(1, 14)
            for i in range(n):
                requests[rid + i], limits[rid + i] = prompt, limit
            pipe.submit_several(rid, n, prompt, max_tokens=limit, ignore_eos=True, priority=dice.randint(0, 2))
            left -= 1
        elif event > 0.985 and pipe.streams:
            pipe.abort(dice.choice(list(pipe.streams)))
        elif event > 0.97 and pipe.results:
            failed = dice.randrange(len(pipe.results))
            failure = StepFailed(step=pipe.results[failed].step, error="planted", rows=np.zeros(1, np.int32))
            del pipe.results[failed:]
            pipe.apply(pipe.scheduler.fail(failure, pipe.now))
            pipe.rounds_without.clear()
        elif event > 0.965:
            pipe.lose_workers()
            pipe.rounds_without.clear()
        else:
            pipe.turn()
        if not left and len(pipe.ends) == len(requests):
            break
        # A row that decodes has its turn in every round, unless the policy says otherwise.
        if policy in ("fcfs", "sarathi", "priority", "srpf"):
            assert max(pipe.rounds_without.values(), default=0) <= 2 * num_lanes, "a lane starves"
    assert len(pipe.ends) == len(requests), f"somebody starves: {policy} {seed}"
    while pipe.results:
        pipe.complete()
    for rid, prompt in requests.items():
        seed_of = rid if rid % 100 == 0 else rid - rid % 100 + 1_000 * (rid % 100)
        expected = reference_stream(prompt, seed_of, limits[rid])
        is_whole = pipe.ends[rid].reason == "length"
        assert pipe.streams[rid] == (expected if is_whole else expected[: len(pipe.streams[rid])])
    kv = pipe.scheduler.statistics().kv
    assert kv.num_free == kv.num_blocks


def test_a_row_is_not_moved_again_before_its_turn() -> None:
    """Found by the test below: rows left the lanes around one so that it moved each time before its turn."""
    random_run(107087, "srpf", 3)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(3, 60), deadline=None)
@given(seed=st.integers(0, 2**31), num_lanes=st.integers(2, 5))
def test_no_row_is_in_two_steps_and_no_lane_starves(policy: str, seed: int, num_lanes: int) -> None:
    random_run(seed, policy, num_lanes)


def _all_rows(lanes: RowLanes) -> Any:
    return lanes._batch.rows()


def _first_only(lanes: RowLanes) -> Any:
    busy = {record.lane for record in lanes._ledger}
    lanes.current = min(lane for lane in range(lanes.number) if lane not in busy)
    yield lanes.current


def _never(lanes: RowLanes) -> None:
    """Rows stay where they are."""


@pytest.mark.parametrize(
    ("method", "mistake", "fails"),
    [("rows", _all_rows, "two steps"), ("candidates", _first_only, "starve"), ("_rebalance", _never, "")],
)
def test_a_planted_mistake_is_found(monkeypatch: pytest.MonkeyPatch, method: str, mistake: Any, fails: str) -> None:
    """The negative control of the tests above."""
    monkeypatch.setattr(actorllm.scheduling.lanes.RowLanes, method, mistake)
    if method == "_rebalance":
        with pytest.raises(AssertionError):
            test_every_lane_has_a_step_in_flight_and_as_many_rows()
        return

    def runs() -> None:
        for seed in range(30):
            random_run(seed, "fcfs", 3)

    with pytest.raises(AssertionError, match=fails):
        runs()
