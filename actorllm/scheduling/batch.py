"""`Batch`: the running sequences as numpy columns by slot, and the cached row set of the decode.

Invariants: a slot is free or holds one RUNNING sequence. `generation[slot]` changes whenever the slot changes hands, so
that a result planned for the previous owner is told apart; none does while `num_vacated` stays. A decoding slot has
exactly one token more (known or in flight) than computed. `rows` lists the decoding slots and is brought up to date only
after a change of membership. Its arrays are handed to plans and to the ledger and never changed in place.
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

    __slots__ = ("generations", "index", "limits", "num_vacated", "sequences", "slots")

    def __init__(
        self, index: NDArray[np.intp], generations: I32, limits: I32, sequences: NDArray[Any], num_vacated: int
    ) -> None:
        self.index = index
        """The slots as numpy indexes with: from any other integers it makes these first, at each use."""
        self.slots: I32 = index.astype(np.int32)
        self.generations = generations
        self.limits = limits
        self.sequences = sequences
        self.num_vacated = num_vacated
        """`Batch.num_vacated` when every row was last known to be in its slot."""

    def __len__(self) -> int:
        return self.slots.size

    def where(self, mask: NDArray[np.bool_]) -> Rows:
        """Those of the rows that the mask selects, in the same order."""
        return Rows(self.index[mask], self.generations[mask], self.limits[mask], self.sequences[mask], self.num_vacated)

    def joined(self, other: Rows) -> Rows:
        """These rows followed by the others."""
        if not len(other):
            return self
        if not len(self):
            return other
        return Rows(
            np.concatenate((self.index, other.index)),
            np.concatenate((self.generations, other.generations)),
            np.concatenate((self.limits, other.limits)),
            np.concatenate((self.sequences, other.sequences)),
            min(self.num_vacated, other.num_vacated),
        )


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
        """How often any slot was."""
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._rows = self.select([])
        self._has_left = False

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def occupy(self, sequence: Sequence) -> int:
        """Give a sequence a slot; its known tokens are all that is known."""
        slot = self._free_slots.pop()
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.num_prompt[slot] = sequence.submit.prompt.size
        self.num_known[slot] = sequence.known.size
        self.num_computed[slot] = sequence.num_done
        self.limit[slot] = sequence.limit
        self.adapter_id[slot] = sequence.adapter_slot
        if sequence.submit.needs_late_inputs:
            self.is_late[slot] = True
            self.num_late += 1
        return slot

    def vacate(self, slot: int) -> None:
        """Free a slot. Results that name it with the old generation are not for its next owner."""
        self.sequences[slot].slot = -1
        self.sequences[slot] = None
        self.generation[slot] += 1
        self.num_vacated += 1
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
            self._rows = self._of(np.concatenate((before.index, joining)))

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
            self._rows = self._rows.where(self.is_decoding[self._rows.index])
            self._has_left = False
        return self._rows

    def select(self, slots: list[int]) -> Rows:
        """These slots as rows."""
        return self._of(np.array(slots, np.intp))

    def _of(self, index: NDArray[np.intp]) -> Rows:
        """The rows of these taken slots."""
        return Rows(index, self.generation[index], self.limit[index], self.sequences[index], self.num_vacated)

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
        assert len(set(self._free_slots)) == len(self._free_slots), "a slot is free twice"
        assert self.num_late == int(self.is_late.sum()), "count of late slots"
        rows = self.rows().slots
        assert np.unique(rows).size == rows.size, "a slot is in two decode rows"
        assert set(rows.tolist()) == set(np.flatnonzero(self.is_decoding).tolist()), "decode rows differ from the flags"
