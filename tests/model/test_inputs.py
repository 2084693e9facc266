"""The persistent batch against a naive model of it: dictionaries and loops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from actorllm.messages import StepPlan
from actorllm.model.inputs import PersistentBatch, padded
from tests.effort import examples
from tests.model.columns import new_columns
from tests.model.driver import int32

VOCAB, SIZE, NUM_BLOCKS, MAX_BLOCKS = 50, 4, 60, 8
MAX_LENGTH = SIZE * MAX_BLOCKS


@dataclass
class Naive:
    """One request as a person would write it down."""

    tokens: list[int]
    computed: int
    outputs: int
    blocks: list[int] = field(default_factory=list)
    is_prefilled: bool = False


class BatchMachine(RuleBasedStateMachine):
    """Random plans, applied to both."""

    @initialize(sort_gain=st.sampled_from([0, 5, 10_000]), padding_block=st.sampled_from([None, 99]))
    def start(self, sort_gain: int, padding_block: int | None) -> None:
        self.batch = PersistentBatch(
            vocab_size=VOCAB,
            block_size=SIZE,
            num_blocks=NUM_BLOCKS,
            max_blocks=MAX_BLOCKS,
            sort_gain=sort_gain,
            padding_block=padding_block,
        )
        self.requests: dict[int, Naive] = {}
        self.decode: list[int] = []
        self.free = list(range(NUM_BLOCKS))
        self.step = 0

    @rule(data=st.data())
    def one_step(self, data: st.DataObject) -> None:
        live = sorted(self.requests)
        freed = data.draw(st.lists(st.sampled_from(live), unique=True, max_size=3)) if live else []
        for slot in freed:
            self.free += self.requests.pop(slot).blocks
        rows = []
        for slot in data.draw(st.lists(st.integers(0, 40), unique=True, max_size=3)):
            tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
            need = -(-len(tokens) // SIZE)
            if slot in self.requests or len(self.free) < need + 12:
                continue
            request = Naive(tokens, data.draw(st.integers(0, len(tokens) - 1)), data.draw(st.integers(0, 3)))
            request.blocks = [self.free.pop() for _ in range(need)]
            self.requests[slot] = request
            rows.append(
                {
                    "slot": slot,
                    "tokens": tokens,
                    "computed": request.computed,
                    "outputs": request.outputs,
                    "blocks": [request.blocks],
                }
            )
        candidates = [
            s
            for s, r in self.requests.items()
            if len(r.tokens) - r.computed == 1 and (r.computed < len(r.blocks) * SIZE or len(r.blocks) < MAX_BLOCKS)
        ]
        kept = [s for s in self.decode if s in candidates]
        if freed or rows or kept != self.decode or data.draw(st.booleans()):
            decode = data.draw(st.permutations(candidates))[: data.draw(st.integers(0, len(candidates)))]
            decode_slots = int32(decode)
        else:
            decode, decode_slots = self.decode, None
        extended = []
        for slot in decode:
            request = self.requests[slot]
            if request.computed == len(request.blocks) * SIZE:
                assume(self.free)
                request.blocks.append(self.free.pop())
                extended.append((slot, request.blocks[-1]))
        prefill = {}
        for slot, request in self.requests.items():
            left = len(request.tokens) - request.computed
            if slot not in decode and not request.is_prefilled and data.draw(st.booleans()):
                prefill[slot] = data.draw(st.integers(1, left))
        self.step += 1
        plan = StepPlan(
            step=self.step,
            freed=int32(freed),
            **(new_columns(rows) if rows else {}),
            extended_slots=int32([e[0] for e in extended]),
            extended_blocks=int32([e[1] for e in extended]),
            extended_groups=np.zeros(len(extended), np.uint8),
            decode_slots=decode_slots,
            prefill_slots=int32(list(prefill)),
            prefill_counts=int32(list(prefill.values())),
        )
        self.decode = list(decode)
        self.batch.apply(plan)
        inputs = self.batch.inputs(plan)
        self.compare(inputs, prefill)
        self.batch.advance(inputs)
        for slot in decode:
            self.requests[slot].computed += 1
        finished = []
        for slot, count in prefill.items():
            self.requests[slot].computed += count
            if self.requests[slot].computed == len(self.requests[slot].tokens):
                finished.append(slot)
        assert inputs.result_slots.tolist() == self.decode + finished
        sampled = [(7 * slot + self.step) % VOCAB for slot in inputs.result_slots.tolist()]
        self.batch.store(inputs.result_slots, int32(sampled))
        for slot, token in zip(inputs.result_slots.tolist(), sampled, strict=True):
            request = self.requests[slot]
            request.outputs += 1
            request.is_prefilled = True
            if len(request.tokens) == MAX_LENGTH:
                request.tokens[-1] = token  # never decoded: it has no room
            else:
                request.tokens.append(token)

    def compare(self, inputs: Any, prefill: dict[int, int]) -> None:
        got = list(zip(inputs.token_ids.tolist(), inputs.positions.tolist(), inputs.kv_slots.tolist(), strict=True))
        padding = (0, 0, 99 * SIZE)
        rows, tail = got[: inputs.num_decodes], got[inputs.num_decodes :]
        assert inputs.decode_slots.tolist() == self.decode
        if self.batch.padding_block is None:
            assert inputs.num_decodes == len(self.decode)
        else:
            assert inputs.num_decodes == padded(len(self.decode))
            assert not prefill or len(got) == padded(inputs.num_decodes + sum(prefill.values()))
        decoded = [self.token(self.requests[s], self.requests[s].computed) for s in self.decode]
        assert sorted(rows) == sorted(decoded + [padding] * (len(rows) - len(decoded)))
        if inputs.is_sorted:
            assert (np.diff(inputs.decode_lengths) <= 0).all()
        else:
            assert rows[: len(decoded)] == decoded
        assert inputs.decode_positions.tolist() == inputs.positions[: len(rows)].tolist()
        assert inputs.decode_lengths.tolist() == (inputs.decode_positions + 1).tolist()
        owner = {block: slot for slot, request in self.requests.items() for block in request.blocks}
        for row, (_, position, kv_slot) in enumerate(rows):
            used = position // SIZE + 1
            blocks = inputs.decode_table[row, :used].tolist()
            assert blocks == (self.requests[owner[kv_slot // SIZE]].blocks[:used] if kv_slot != padding[2] else [99])
        expected: list[tuple[int, int, int]] = []
        for slot, count in prefill.items():
            request = self.requests[slot]
            expected += [self.token(request, i) for i in range(request.computed, request.computed + count)]
        assert tail == expected + [padding] * (len(tail) - len(expected))
        for slot, token in zip(inputs.result_slots.tolist(), inputs.result_tokens.tolist(), strict=True):
            request = self.requests[slot]
            assert got[token] == self.token(request, request.computed + prefill.get(slot, 1) - 1)

    def token(self, request: Naive, position: int) -> tuple[int, int, int]:
        slot = request.blocks[position // SIZE] * SIZE + position % SIZE
        return request.tokens[position], position, slot

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "batch"):
            self.batch.check_integrity()
            for slot, request in self.requests.items():
                assert self.batch.columns.num_outputs[slot] == request.outputs


TestPersistentBatch = BatchMachine.TestCase
TestPersistentBatch.settings = settings(max_examples=examples(10, 30), stateful_step_count=20, deadline=None)


def test_padding_is_monotonous_and_small() -> None:
    sizes = [padded(n) for n in range(3000)]
    assert sizes[:18] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 10, 12, 12, 14, 14, 16, 16, 20]
    assert all(n <= size <= 1.25 * n and padded(size) == size for n, size in enumerate(sizes))
    assert sizes == sorted(sizes)
    assert len(set(sizes[:129])) == 25


@pytest.fixture
def batch() -> PersistentBatch:
    return PersistentBatch(vocab_size=VOCAB, block_size=SIZE, num_blocks=NUM_BLOCKS, max_blocks=MAX_BLOCKS)


GOOD = {"slot": 3, "tokens": [1, 2, 3, 4, 5], "blocks": [[7, 9]]}


def test_a_new_slot_far_away_makes_room(batch: PersistentBatch) -> None:
    batch.apply(StepPlan(step=1, **new_columns([GOOD, GOOD | {"slot": 1000, "seed": 2**64 - 1}])))
    batch.check_integrity()
    assert batch.num_slots > 1000
    assert batch.columns.seeds[1000] == 2**64 - 1
    assert batch.columns.is_live[[3, 1000]].all()


def test_a_slot_is_freed_and_filled_in_one_plan(batch: PersistentBatch) -> None:
    batch.apply(StepPlan(step=1, **new_columns([GOOD])))
    batch.apply(StepPlan(step=2, freed=int32([3]), **new_columns([GOOD | {"tokens": [8], "blocks": [[2]]}])))
    batch.check_integrity()
    assert batch.known_tokens[3].tolist() == [8]
    assert batch.num_slot_blocks[0, 3] == 1


def test_several_blocks_of_one_slot_in_one_plan_stay_in_order(batch: PersistentBatch) -> None:
    batch.apply(StepPlan(step=1, **new_columns([GOOD])))
    batch.apply(
        StepPlan(
            step=2,
            extended_slots=int32([3, 3]),
            extended_blocks=int32([20, 21]),
            extended_groups=np.zeros(2, np.uint8),
        )
    )
    assert batch.block_tables[0, 3, :4].tolist() == [7, 9, 20, 21]


def test_block_tables_are_kept_per_group() -> None:
    batch = PersistentBatch(vocab_size=VOCAB, block_size=SIZE, num_blocks=60, max_blocks=8, num_groups=2)
    rows = [GOOD | {"blocks": [[1, 2], [3]]}, {"slot": 0, "tokens": [4], "blocks": [[5], [6, 7]]}]
    batch.apply(StepPlan(step=1, **new_columns(rows)))
    assert batch.num_slot_blocks[:, [3, 0]].tolist() == [[2, 1], [1, 2]]
    assert batch.block_tables[1, 0, :2].tolist() == [6, 7]
    batch.apply(
        StepPlan(step=2, extended_slots=int32([3]), extended_blocks=int32([30]), extended_groups=np.ones(1, np.uint8))
    )
    assert batch.block_tables[1, 3, :2].tolist() == [3, 30]
    assert batch.num_slot_blocks[0, 3] == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (GOOD | {"slot": -1}, "negative"),
        (GOOD | {"computed": 5}, "at least one token"),
        (GOOD | {"tokens": [VOCAB]}, "token ids"),
        (GOOD | {"blocks": [[NUM_BLOCKS]]}, "block ids"),
        (GOOD | {"blocks": [[-1]]}, "block ids"),
        (GOOD | {"blocks": [list(range(9))]}, "at most 8 blocks"),
        (GOOD | {"adapter": 1}, "adapters"),
    ],
)
def test_an_impossible_new_slot_is_refused(batch: PersistentBatch, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch.apply(StepPlan(step=1, **new_columns([row])))
    batch.check_integrity()
    assert not batch.columns.is_live.any()


def test_plans_about_unknown_slots_are_refused(batch: PersistentBatch) -> None:
    batch.apply(StepPlan(step=1, **new_columns([GOOD])))
    for plan in (
        StepPlan(step=2, decode_slots=int32([4])),
        StepPlan(step=2, **new_columns([GOOD])),
        StepPlan(step=2, extended_slots=int32([4]), extended_blocks=int32([1]), extended_groups=np.zeros(1, np.uint8)),
    ):
        with pytest.raises(ValueError, match="in use"):
            batch.apply(plan)
    prefill = StepPlan(step=2, prefill_slots=int32([3]), prefill_counts=int32([6]))
    batch.apply(prefill)
    with pytest.raises(ValueError, match="left to prefill"):
        batch.inputs(prefill)
    decode = StepPlan(step=3, decode_slots=int32([3]))
    batch.apply(decode)
    with pytest.raises(ValueError, match="other than one token"):
        batch.inputs(decode)


def test_freeing_what_is_free_changes_nothing(batch: PersistentBatch) -> None:
    """After a failed step the scheduler frees every slot, also those that never got here."""
    batch.apply(StepPlan(step=1, **new_columns([GOOD])))
    batch.apply(StepPlan(step=2, freed=int32([4, 4000, 3, 3])))
    batch.check_integrity()
    assert not batch.columns.is_live.any()


def test_a_decode_row_without_a_block_is_refused(batch: PersistentBatch) -> None:
    plan = StepPlan(
        step=1,
        **new_columns([GOOD | {"tokens": [1, 2, 3, 4], "blocks": [[7]]}]),
        prefill_slots=int32([3]),
        prefill_counts=int32([4]),
    )
    batch.apply(plan)
    inputs = batch.inputs(plan)
    batch.advance(inputs)
    batch.store(inputs.result_slots, int32([1]))
    decode = StepPlan(step=2, decode_slots=int32([3]))
    batch.apply(decode)
    with pytest.raises(ValueError, match="no block"):
        batch.inputs(decode)


def test_the_rows_versions_change_only_with_the_rows(batch: PersistentBatch) -> None:
    first = StepPlan(step=1, **new_columns([GOOD]), prefill_slots=int32([3]), prefill_counts=int32([5]))
    batch.apply(first)
    batch.advance(batch.inputs(first))
    batch.store(int32([3]), int32([1]))
    versions = set()
    for plan in (
        StepPlan(step=2, decode_slots=int32([3])),
        StepPlan(step=3),
        StepPlan(step=4, decode_slots=int32([3]), freed=int32([5])),
    ):
        batch.apply(plan)
        inputs = batch.inputs(plan)
        versions.add((inputs.rows_version, inputs.decode_version))
        batch.advance(inputs)
        batch.store(int32([3]), int32([1]))
    assert len(versions) == 1
    again = GOOD | {"tokens": [9], "computed": 0}
    for step, rows in ((5, int32([3])), (6, None)):
        plan = StepPlan(step=step, freed=int32([3]), **new_columns([again]), decode_slots=rows)
        batch.apply(plan)
        inputs = batch.inputs(plan)
        assert (inputs.rows_version, inputs.decode_version) not in versions
        versions.add((inputs.rows_version, inputs.decode_version))
