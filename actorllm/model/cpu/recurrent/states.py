"""What recurrent layers keep of every sequence: one row a slot, whatever the length of the sequence.

A state belongs to a slot, the number that a worker knows a request by. A sequence that begins in a slot, at position 0, begins
with zeros. What an earlier request has left there is never read, so that nothing is cleared when a slot is freed. A chunk of a
prompt goes on from the state that the chunk before it has left. The state of a request whose worker has died is computed anew from
its tokens.

Behind the slots there are places for *snapshots*. Each is what a slot had behind some of its tokens, for requests that begin alike.
Plans name them (`StepPlan.saved_states`).

Layout of each array, per layer: [num_slots + num_snapshots, *shape].
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.model.cpu.attention import zero_pages
from actorllm.model.families.recurrent_shapes import StateSpec
from actorllm.model.inputs import SavedState, StepInputs

States = Mapping[str, torch.Tensor]
"""Of one layer, by the name of the array: [num_slots + num_snapshots, *shape]."""


class Piece(NamedTuple):
    """Consecutive tokens of one prompt in a step."""

    start: int
    """The first of them among the tokens of the step."""
    size: int
    position: int
    """Of the first of them in its sequence; 0: the sequence begins."""
    slot: int
    kept_in: int = -1
    """The row that the states behind these tokens are copied to; -1: none."""

    def store(self, rows: torch.Tensor, state: torch.Tensor) -> None:
        """These tokens are worked off. rows: an array of the layer. state: what it has behind them."""
        rows[self.slot] = state
        if self.kept_in >= 0:
            rows[self.kept_in] = state

    def cut(self, saves: list[SavedState], num_slots: int) -> list[Piece]:
        """The same tokens in as many pieces as end where states are kept. saves: of this slot, in the order of its tokens."""
        pieces: list[Piece] = []
        start, position, end = self.start, self.position, self.position + self.size
        for save in saves:
            size = save.position - position
            pieces.append(Piece(start, size, position, self.slot, num_slots + save.place))
            start, position = start + size, save.position
        if position < end:
            pieces.append(Piece(start, end - position, position, self.slot))
        return pieces


class StateRows:
    """Which rows of a step go on from which states; the same in every layer."""

    def __init__(self, inputs: StepInputs, num_slots: int) -> None:
        """num_slots: snapshots are behind so many."""
        slots = inputs.token_slots
        # Rows of padding are the last ones: they are shorter than all others where rows are sorted.
        self.num_decodes = int(np.count_nonzero(slots >= 0))
        slots = slots[: self.num_decodes]
        self.decodes: slice | torch.Tensor = slice(0, 0)
        """The rows of the decoded tokens: a slice where they follow each other."""
        if self.num_decodes:
            first = slots.item(0)
            if (slots == np.arange(first, first + len(slots))).all():
                self.decodes = slice(first, first + len(slots))
            else:
                self.decodes = torch.from_numpy(slots.astype(np.int64))
        chunks = zip(
            inputs.prefill_starts, inputs.prefill_counts, inputs.prefill_first, inputs.prefill_slots, strict=True
        )
        self.pieces = [Piece(*chunk) for chunk in chunks]
        """Of prompts, in the order of their tokens."""
        if inputs.saves:
            self.pieces = [
                part
                for piece in self.pieces
                for part in piece.cut([save for save in inputs.saves if save.slot == piece.slot], num_slots)
            ]


class SlotStates:
    """The states of every recurrent layer."""

    def __init__(
        self,
        num_layers: int,
        specs: Mapping[str, StateSpec],
        num_slots: int,
        dtype: torch.dtype,
        num_snapshots: int = 0,
    ) -> None:
        self.dtype, self.num_slots = dtype, num_slots
        self._pages: list[mmap.mmap] = []
        self._arrays: list[torch.Tensor] = []
        names: dict[str, Sequence[torch.Tensor]] = {}
        for name, spec in specs.items():
            kind = torch.float32 if spec.is_exact else dtype
            shape = (num_layers, num_slots + num_snapshots, *spec.shape)
            pages = zero_pages(max(1, math.prod(shape)) * kind.itemsize)
            array = torch.frombuffer(pages, dtype=kind, count=math.prod(shape)).view(shape)
            self._pages.append(pages)
            self._arrays.append(array)
            names[name] = array.unbind(0)
        self.layers: list[States] = [{name: rows[i] for name, rows in names.items()} for i in range(num_layers)]

    def release(self) -> None:  # what points to them still does
        for pages in self._pages:
            pages.madvise(mmap.MADV_DONTNEED)

    def copy(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Of these slots, all at once. Those behind num_slots are snapshots."""
        where, to = torch.from_numpy(sources), torch.from_numpy(targets)
        for array in self._arrays:
            array.index_copy_(1, to, array.index_select(1, where))
