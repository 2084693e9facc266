from __future__ import annotations

import numpy as np

from actorllm.messages import Submit
from actorllm.scheduling.batch import Batch
from actorllm.scheduling.sequence import Sequence


def _occupied(num_slots: int) -> Batch:
    """Every slot holds a sequence; slot i has the limit 10 + i."""
    batch = Batch(num_slots)
    for slot in range(num_slots):
        assert batch.occupy(_sequence(slot, 10 + slot)) == slot
    return batch


def _sequence(rid: int, limit: int) -> Sequence:
    prompt = np.array([7], np.int32)
    submit = Submit(rid=rid, arrival=0.0, prompt=prompt, max_tokens=limit - 1)
    return Sequence((0, rid), submit, rid, prompt, limit, frozenset(), frozenset())


def test_rows_keep_their_order_when_others_leave_and_join() -> None:
    batch = _occupied(5)
    batch.start_decoding([3, 0, 4])
    assert batch.rows().slots.tolist() == [3, 0, 4]
    batch.stop_decoding(0)
    batch.start_decoding([1, 2])
    rows = batch.rows()
    assert rows.slots.tolist() == rows.index.tolist() == [3, 4, 1, 2]
    assert rows.limits.tolist() == [13, 14, 11, 12]
    assert [s.key for s in rows.sequences] == [(0, 3), (0, 4), (0, 1), (0, 2)]
    batch.check_integrity()


def test_a_slot_that_changes_hands_is_listed_once_and_last() -> None:
    batch = _occupied(3)
    batch.start_decoding([0, 1, 2])
    before = batch.rows()
    before.hold()
    batch.vacate(1)
    assert batch.occupy(_sequence(9, 40)) == 1
    batch.start_decoding([1])
    rows = batch.rows()
    assert rows.slots.tolist() == [0, 2, 1]
    assert rows.limits.tolist() == [10, 12, 40]
    assert rows.generations.tolist() == [0, 0, 1]
    assert before.slots.tolist() == [0, 1, 2], "rows that were handed out never change"
    assert before.limits.tolist() == [10, 11, 12]
    assert before.generations.tolist() == [0, 0, 0]
    assert [s.key for s in before.sequences] == [(0, 0), (0, 1), (0, 2)]
    batch.check_integrity()


def test_rows_are_the_same_object_while_nobody_joins_or_leaves() -> None:
    batch = _occupied(3)
    batch.start_decoding([0, 1])
    rows = batch.rows()
    batch.stop_decoding(2)  # it does not decode
    assert batch.rows() is rows
    batch.stop_decoding(0)
    assert batch.rows().slots.tolist() == [1]


def test_rows_are_all_there_until_one_of_them_leaves() -> None:
    batch = _occupied(3)
    batch.start_decoding([0, 1])
    rows = batch.rows()
    assert batch.has_all(rows)
    batch.vacate(2)  # which is no row of them
    assert batch.has_all(rows)
    batch.vacate(1)
    assert not batch.has_all(rows)
    batch.occupy(_sequence(9, 40))
    assert not batch.has_all(rows), "the slot is taken again, and by another"
    assert batch.has_all(batch.rows())
