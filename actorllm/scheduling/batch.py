"""`Batch`: the running sequences as numpy columns by slot, and the cached row set of the decode.

Invariants: a slot is free or holds one RUNNING sequence. `generation[slot]` changes whenever the slot changes hands, so
that a result planned for the previous owner is told apart. While `num_vacated` stays, no slot of a step in flight has
changed hands. A decoding slot has exactly one token more (known or in flight) than computed, and gets another one.
`rows` lists the decoding slots and is brought up to date only after a change of membership. Its arrays are handed to
plans and to the ledger and never changed in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import I32
from actorllm.scheduling.sequence import Sequence

ONE: I32 = np.ones((), np.int32)
"""To count columns up with: numpy converts a Python integer for longer than it adds one to all rows of a batch."""


class Rows:
    """An immutable set of rows: slots, with what belongs to them for as long as their sequences stay."""

    __slots__ = ("_batch", "_generations", "_sequences", "index", "limits", "num_vacated", "slots")

    def __init__(self, batch: Batch, index: NDArray[np.intp], limits: I32) -> None:
        """index: taken slots of the batch. limits: theirs."""
        self.index = index
        """The slots as numpy indexes with: from any other integers it makes these first, at each use."""
        self.slots: I32 = index.astype(np.int32)
        self.limits = limits
        self.num_vacated = batch.num_vacated
        """`Batch.num_vacated` when every row was last known to be in its slot."""
        self._batch = batch
        self._generations: I32 | None = None
        self._sequences: NDArray[Any] | None = None

    def __len__(self) -> int:
        return self.slots.size

    def hold(self) -> None:
        """Note whose these slots are, while none of them has changed hands. Rows that no step samples never need it."""
        if self._sequences is None:
            self.num_vacated = self._batch.num_vacated
            self._sequences = self._batch.sequences[self.index]
            self._generations = self._batch.generation[self.index]

    @property
    def sequences(self) -> NDArray[Any]:
        """Those that have the slots, or had them at `hold`."""
        if self._sequences is None:
            self.hold()
            assert self._sequences is not None
        return self._sequences

    @property
    def generations(self) -> I32:
        """Those of the slots, as `sequences`."""
        if self._generations is None:
            self.hold()
            assert self._generations is not None
        return self._generations


class Batch:
    """Columns by slot."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.sequences: NDArray[Any] = np.full(num_slots, None, object)
        self.generation: I32 = np.zeros(num_slots, np.int32)
        self.num_prompt: I32 = np.zeros(num_slots, np.int32)
        self.num_known: I32 = np.zeros(num_slots, np.int32)
        """Tokens whose ids are known here."""
        self.num_computed: I32 = np.zeros(num_slots, np.int32)
        """Tokens whose KV is computed or will be by a step in flight."""
        self.limit: I32 = np.zeros(num_slots, np.int32)
        self.adapter_id: I32 = np.zeros(num_slots, np.int32)
        """The slot of its adapter; 0: it has none."""
        self.is_decoding: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.is_simulated: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Some of the slot's token ids were never known here (`Scheduler.advance`)."""
        self.is_late: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.num_late = 0
        self.num_vacated = 0
        """How often any slot was while a step in flight had a row of it."""
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._rows = self.select(np.empty(0, np.intp))
        self._has_left = False

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def occupy(self, sequence: Sequence) -> int:
        """Give a sequence a slot; its known tokens are all that is known."""
        slot = self._free_slots.pop()
        submit = sequence.submit
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.num_prompt[slot] = submit.prompt.size
        self.num_known[slot] = sequence.known.size
        self.num_computed[slot] = sequence.num_done
        self.limit[slot] = sequence.limit
        self.adapter_id[slot] = sequence.adapter_slot
        if submit.needs_late_inputs:
            self.is_late[slot] = True
            self.num_late += 1
        return slot

    def vacate(self, slot: int, *, is_in_flight: bool = True) -> None:
        """Free a slot. Results that name it with the old generation are not for its next owner.

        is_in_flight: a step in flight may have a row of it. Without, every set of rows in use is as whole as before.
        """
        self.sequences[slot].slot = -1
        self.sequences[slot] = None
        self.generation[slot] = self.generation.item(slot) + 1
        self.num_vacated += is_in_flight
        if self.is_decoding.item(slot):
            self.stop_decoding(slot)
        self.is_simulated[slot] = False
        if self.num_late and self.is_late[slot]:
            self.is_late[slot] = False
            self.num_late -= 1
        self._free_slots.append(slot)

    def start_decoding(self, slots: list[int]) -> None:
        """These slots are decode rows from now on, behind all others."""
        before = self.rows()  # drops rows that left, so that a slot which left and joins again is not listed twice
        if slots:
            joining = np.array(slots, np.intp)
            self.is_decoding[joining] = True
            self._rows = self.select(np.concatenate((before.index, joining)))

    def stop_decoding(self, slot: int) -> None:
        """The slot gets no more tokens: it is ending, or it gives its blocks away."""
        if self.is_decoding.item(slot):
            self.is_decoding[slot] = False
            self._has_left = True

    def stop_rows(self, index: NDArray[np.intp]) -> None:
        """As `stop_decoding`, of slots that decode."""
        if index.size:
            self.is_decoding[index] = False
            self._has_left = True

    def rows(self) -> Rows:
        """The decode rows: the same object as last time while none joined or left."""
        if self._has_left:
            index = self._rows.index
            self._rows = self.select(index[self.is_decoding[index]])
            self._has_left = False
        return self._rows

    def select(self, slots: NDArray[np.intp]) -> Rows:
        """These taken slots as rows."""
        return Rows(self, slots, self.limit[slots])

    def has_all(self, rows: Rows) -> bool:
        """Whether every one of these rows is still in its slot."""
        if rows.num_vacated == self.num_vacated:
            return True
        if np.count_nonzero(self.generation[rows.index] != rows.generations):
            return False
        rows.num_vacated = self.num_vacated
        return True

    def check_integrity(self) -> None:
        """AssertionError when an invariant of the module docstring does not hold."""
        for slot, sequence in enumerate(self.sequences):
            assert (sequence is None) == (slot in self._free_slots), f"slot {slot} is neither free nor taken, or both"
            if sequence is None:
                assert not self.is_decoding[slot], f"free slot {slot} decodes"
                assert not self.is_late[slot], f"free slot {slot} waits for late inputs"
            else:
                assert sequence.slot == slot, f"slot {slot} holds a sequence that believes to be in {sequence.slot}"
                has_more = self.num_computed[slot] + 1 < self.limit[slot]
                assert has_more or not self.is_decoding[slot], f"slot {slot} decodes beyond its limit"
        assert len(set(self._free_slots)) == len(self._free_slots), "a slot is free twice"
        assert self.num_late == int(self.is_late.sum()), "count of late slots"
        rows = self.rows().slots
        assert np.unique(rows).size == rows.size, "a slot is in two decode rows"
        assert set(rows.tolist()) == set(np.flatnonzero(self.is_decoding).tolist()), "decode rows differ from the flags"
