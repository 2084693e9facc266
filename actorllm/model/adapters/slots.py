"""The adapters that rows of a step may use, and their products on the CPU.

Every adapted product has room for `max_loras` adapters at once: slot s holds the tensors of one, filled up with zeros to
`max_lora_rank`. Slot 0 is the base, which has none. What a slot adds to a token is sum(h[j] * up[j]), with
h = sum(x[i] * down[i]): twice the sum of some rows of a table, with weights. `torch.embedding_bag` computes such sums for any
choice of rows. So all decode rows need two calls a product, whatever adapters they have, and read the tensors of their own only.
A stretch of prefill tokens has one adapter, and is multiplied by its tensors.

Few slots of low rank (MAX_JOINED_RANKS) are multiplied with side by side instead, for all tokens of a step in two products.
What a token gets from slots of others is set to 0 in between. That is less work than sums for so few ranks. Which way it is
depends on the arguments of the engine alone. Packed weights would be no faster for so few ranks, and filling a slot would pack
those of all slots anew, between two steps.

Invariants: no sum has a term of another row, so no row depends on the adapters of others. A slot never changes while a row in
flight uses it (`scheduling.residency`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.model.adapters import AdaptedLayer, LowRank, Slots
from actorllm.model.inputs import StepInputs
from actorllm.model.linear import Linear

MAX_JOINED_RANKS = 32
"""Ranks of all slots together up to which they are multiplied with side by side."""

MAX_SUMMED_ROWS = 32
"""Decode rows of one adapter that are computed by sums; more are faster as one product."""


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Tokens [start, end) of a step, all with the adapter of one slot."""

    start: int
    end: int
    slot: int


class AdaptedRows:
    """The decode rows of a step that have adapters."""

    def __init__(self, ids: NDArray[np.int32]) -> None:
        """ids: of each decode row its slot, of which at least one is not 0."""
        self.ids = ids
        self.count = len(ids)
        """Of all decode rows."""
        adapted = np.flatnonzero(ids)
        self.rows = None if len(adapted) == len(ids) else torch.from_numpy(adapted)
        """Those that have one; None: all."""
        self.distinct = np.unique(ids[adapted]).tolist()
        self._slots = torch.from_numpy(ids[adapted]).unsqueeze(1) - 1
        self._places: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def places(self, per_slot: int, per_sum: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which rows of a table are summed, and where each sum begins among them, both int32.

        per_slot: rows of the table that a slot has, all of which are used. per_sum: how many of them are one sum.
        """
        found = self._places.get((per_slot, per_sum))
        if found is None:
            rows = (self._slots * per_slot + torch.arange(per_slot, dtype=torch.int32)).view(-1)
            found = rows, torch.arange(0, len(rows), per_sum, dtype=torch.int32)
            self._places[per_slot, per_sum] = found
        return found


class TokenSlots:
    """Which slot each token of a step uses, where slots are multiplied with side by side."""

    def __init__(self, ids: NDArray[np.int32], num_slots: int) -> None:
        """ids: of each token its slot, of which at least one is not 0."""
        self.ids = ids
        self.distinct = [int(slot) for slot in np.unique(ids) if slot]
        is_other = ids[:, None] != np.arange(1, num_slots + 1)
        self.is_other = torch.from_numpy(is_other).unsqueeze(2) if is_other.any() else None
        """bool [num_tokens, num_slots, 1]; None: there is one slot, and all tokens use it."""


class Adapted(Linear):
    """A product of the base, and on top of it those of adapters."""

    __slots__ = ("_slots", "_targets", "_used", "base")

    def __init__(self, base: Linear, targets: Sequence[AdaptedLayer], slots: AdapterSlots) -> None:
        """targets: what the outputs are of, side by side."""
        super().__init__(base.out_features, base.in_features, base.num_bytes)
        self.base = base
        self._slots, self._targets = slots, targets
        self._used = [False] * slots.num_slots
        """Of each slot, whether its adapter has any of the targets."""

    def drop_base(self) -> None:
        """Nothing is computed before it has another one (`rebased`)."""
        del self.base

    @property
    @abstractmethod
    def num_adapter_bytes(self) -> int:
        """Of all slots."""

    @abstractmethod
    def put(self, slot: int, pairs: Sequence[LowRank | None]) -> None:
        """Fill a slot. pairs: of each target; None: the adapter does not have it."""


class JoinedAdapted(Adapted):
    """Those of all slots side by side, in two products."""

    __slots__ = ("_down", "_down_weight", "_up", "_up_weight")

    def __init__(self, base: Linear, targets: Sequence[AdaptedLayer], slots: AdapterSlots) -> None:
        super().__init__(base, targets, slots)
        num_slots, num_ranks, dtype = slots.num_slots, len(targets) * slots.max_rank, slots.dtype
        self._down_weight = torch.zeros(num_slots, num_ranks, base.in_features, dtype=dtype)
        self._up_weight = torch.zeros(base.out_features, num_slots, num_ranks, dtype=dtype)
        """With zeros where a rank is of another target than the output."""
        self._down, self._up = self._down_weight.flatten(0, 1).T, self._up_weight.flatten(1).T
        """The same memory: [in_features, ranks] and [ranks, out_features]."""

    @property
    def num_adapter_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self._down_weight, self._up_weight))

    def put(self, slot: int, pairs: Sequence[LowRank | None]) -> None:
        rank = self._slots.max_rank
        down, up = self._down_weight[slot - 1].zero_(), self._up_weight[:, slot - 1].zero_()
        for i, (target, pair) in enumerate(zip(self._targets, pairs, strict=True)):
            if pair is not None:
                a, b = pair
                ranks = slice(i * rank, i * rank + len(a))
                down[ranks] = a
                up[target.outputs, ranks] = b.T
        self._used[slot - 1] = any(pair is not None for pair in pairs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        tokens = self._slots.tokens
        if tokens is not None and any(self._used[slot - 1] for slot in tokens.distinct):
            dtype = self._slots.dtype
            hidden = torch.mm(x if x.dtype == dtype else x.to(dtype), self._down)
            if tokens.is_other is not None:
                hidden.view(len(x), self._slots.num_slots, -1).masked_fill_(tokens.is_other, 0)
            if out.dtype == dtype:
                out.addmm_(hidden, self._up)
            else:
                out.add_(torch.mm(hidden, self._up))
        return out


class SummedAdapted(Adapted):
    """Those of the adapters of each row, by sums; of stretches, by products."""

    __slots__ = ("_down", "_down_rows", "_pieces", "_up", "_up_rows")

    def __init__(self, base: Linear, targets: Sequence[AdaptedLayer], slots: AdapterSlots) -> None:
        super().__init__(base, targets, slots)
        num_slots, rank, dtype = slots.num_slots, slots.max_rank, slots.dtype
        self._down = torch.zeros(num_slots, base.in_features, len(targets) * rank, dtype=dtype)
        # Outputs are cut into pieces of one width, so that those of targets of several widths are sums of rows of one table.
        width = math.gcd(*(len(target.rows) for target in targets))
        pieces = [i for i, target in enumerate(targets) for _ in range(len(target.rows) // width)]
        self._pieces = None if len(pieces) == len(targets) else torch.tensor(pieces)
        """Of each piece its target; None: each target is one."""
        self._up = torch.zeros(num_slots, len(pieces), rank, width, dtype=dtype)
        self._down_rows, self._up_rows = self._down.flatten(0, 1), self._up.flatten(0, 2)
        """The same memory, as tables."""

    @property
    def num_adapter_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self._down, self._up))

    def put(self, slot: int, pairs: Sequence[LowRank | None]) -> None:
        rank, width = self._slots.max_rank, self._up.shape[3]
        down, up = self._down[slot - 1].zero_(), self._up[slot - 1].zero_()
        for i, (target, pair) in enumerate(zip(self._targets, pairs, strict=True)):
            if pair is not None:
                a, b = pair
                down[:, i * rank : i * rank + len(a)] = a.T
                pieces = slice(target.outputs.start // width, target.outputs.stop // width)
                up[pieces, : len(b)] = b.view(len(b), -1, width).transpose(0, 1)
        self._used[slot - 1] = any(pair is not None for pair in pairs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        rows = self._slots.rows
        if rows is not None and any(self._used[slot - 1] for slot in rows.distinct):
            self._add_rows(x, out, rows)
        for stretch in self._slots.stretches:
            if self._used[stretch.slot - 1]:
                self._add_stretch(x, out, stretch)
        return out

    def _add_rows(self, x: torch.Tensor, out: torch.Tensor, rows: AdaptedRows) -> None:
        # A call costs more than what it computes for few rows, so none is made that changes nothing.
        down, up, rank = self._down_rows, self._up_rows, self._slots.max_rank
        if rows.rows is not None:
            x = x.index_select(0, rows.rows)
        elif rows.count < len(x):
            x, out = x[: rows.count], out[: rows.count]
        if x.dtype != down.dtype:
            x = x.to(down.dtype)
        per_slot = self._up.shape[1] * rank
        hidden = _sums(down, x, rows.places(self.in_features, self.in_features))
        if self._pieces is not None:
            hidden = hidden.view(-1, len(self._targets), rank).index_select(1, self._pieces)
        added = _sums(up, hidden, rows.places(per_slot, rank))  # [num_rows * num_pieces, width]
        if rows.rows is None:
            out.view(added.shape).add_(added)
        else:
            out.index_add_(0, rows.rows, added.view(len(x), -1).to(out.dtype))

    def _add_stretch(self, x: torch.Tensor, out: torch.Tensor, stretch: Stretch) -> None:
        down, up = self._down[stretch.slot - 1], self._up[stretch.slot - 1]
        num_pieces, rank, width = up.shape
        hidden = torch.mm(x[stretch.start : stretch.end].to(down.dtype), down).view(-1, len(self._targets), rank)
        if self._pieces is not None:
            hidden = hidden.index_select(1, self._pieces)
        added = torch.bmm(hidden.transpose(0, 1), up)  # [num_pieces, num_tokens, width]
        out[stretch.start : stretch.end].view(-1, num_pieces, width).add_(added.transpose(0, 1))


def _sums(table: torch.Tensor, weights: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Of the rows of a table, each times its weight (`AdaptedRows.places`). Weights are of the table's type."""
    return torch.embedding_bag(table, *places, per_sample_weights=weights.reshape(-1))[0]


def rebased(adapted: Linear, base: Linear) -> Linear:
    """What adapters do to another base of the same sizes; where there are none, that base."""
    if not isinstance(adapted, Adapted):
        return base
    adapted.base, adapted.num_bytes = base, base.num_bytes
    return adapted


class AdapterSlots(Slots):
    """The slots of one rank, in every adapted product of its model.

    Filling one takes as long as some steps. It may be done beside them: sums read the slots of their rows only, and what is made of
    a token with another slot is set to 0.
    """

    fills_beside_steps = True

    def __init__(self, num_slots: int, max_rank: int, dtype: torch.dtype) -> None:
        super().__init__(num_slots, max_rank, dtype)
        self.rows: AdaptedRows | None = None
        self.stretches: list[Stretch] = []
        """Of the step that is computed, as `rows`."""
        self._last_rows: AdaptedRows | None = None
        self.is_joined = num_slots * max_rank <= MAX_JOINED_RANKS
        self.tokens: TokenSlots | None = None
        """Of the step that is computed, where slots are multiplied with side by side."""
        self._last_tokens: TokenSlots | None = None
        self._layers: dict[tuple[str, ...], Adapted] = {}

    def adapt(self, base: Linear, targets: Sequence[AdaptedLayer]) -> Linear:
        """The product of these targets, side by side. Where they have one, it gets this base."""
        names = tuple(target.name for target in targets)
        if names in self._layers:
            return rebased(self._layers[names], base)
        kind = JoinedAdapted if self.is_joined else SummedAdapted
        adapted = self._layers[names] = kind(base, targets, self)
        self.targets |= {target.name: target for target in targets}
        return adapted

    def drop_bases(self) -> None:
        """Let go of the bases of all products, which get others (`adapt`)."""
        for layer in self._layers.values():
            layer.drop_base()

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_adapter_bytes for layer in self._layers.values())

    @torch.inference_mode()
    def put(self, slot: int, tensors: Mapping[str, LowRank]) -> None:
        for names, layer in self._layers.items():
            layer.put(slot, [tensors.get(name) for name in names])

    def begin(self, inputs: StepInputs) -> None:
        """A step with these tokens is computed next."""
        self.rows, self.stretches, self.tokens = None, [], None
        ids = inputs.adapter_ids
        if ids is None:
            return
        if self.is_joined:
            last_tokens = self._last_tokens
            if last_tokens is None or not np.array_equal(last_tokens.ids, ids):
                last_tokens = self._last_tokens = TokenSlots(ids.copy(), self.num_slots)
            self.tokens = last_tokens
            return
        decodes = ids[: inputs.num_decodes]
        if decodes.any():
            last = self._last_rows
            if last is None or not np.array_equal(last.ids, decodes):
                last = self._last_rows = AdaptedRows(decodes.copy())
            self.rows = last
            if len(last.distinct) == 1 and last.rows is None and last.count > MAX_SUMMED_ROWS:
                self.rows, self.stretches = None, [Stretch(0, last.count, last.distinct[0])]
        self.stretches += stretches_of(inputs, ids)


def stretches_of(inputs: StepInputs, ids: NDArray[np.int32]) -> list[Stretch]:
    """Of the prefill tokens that have adapters. ids: [num_tokens] the slot of each token's adapter; 0: none."""
    stretches: list[Stretch] = []
    for start, count in zip(inputs.prefill_starts, inputs.prefill_counts, strict=True):
        slot = int(ids[start])
        if stretches and stretches[-1].end == start and stretches[-1].slot == slot:
            stretches[-1] = Stretch(stretches[-1].start, start + count, slot)
        elif slot:
            stretches.append(Stretch(start, start + count, slot))
    return stretches
