"""The adapters that rows of a step may use, and their products on the CPU.

Every adapted product has room for `max_loras` adapters at once: slot s holds A[s] and B[s], filled up with zeros to
`max_lora_rank`. Slot 0 is the base, which has none. A step is cut into segments: the decode rows, and each stretch of prefill
rows of one adapter. A segment costs one product down to the ranks and one product up for each part, whatever the number of its
adapters. Several adapters are multiplied side by side, and what is of another row's adapter is set to 0 in between.

Invariants: what a slot holds is finite. So a zero in between is a zero in the result, and no row depends on the adapters of
others. Slots change between steps only, and never while a row in flight uses them (`scheduling.residency`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.model.adapters import AdaptedLayer
from actorllm.model.adapters.reading import LowRank
from actorllm.model.inputs import StepInputs
from actorllm.model.linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class AdapterSegment:
    """Tokens [start, end) of a step, whose adapters are of the slots [low, high)."""

    start: int
    end: int
    low: int
    high: int
    foreign: torch.Tensor | None
    """bool [end - start, high - low]: the token is not of this slot's adapter; None: all are of the one slot."""


class AdaptedLinear(Linear):
    """A product of the base, and on top of it those of the adapters of each row."""

    __slots__ = ("_down", "_outputs", "_slots", "_up", "_used", "base")

    def __init__(self, base: Linear, targets: Sequence[AdaptedLayer], slots: AdapterSlots) -> None:
        super().__init__(base.out_features, base.in_features, base.num_bytes)
        self.base = base
        self._slots = slots
        num_slots, rank, dtype = slots.num_slots, slots.max_rank, slots.dtype
        self._outputs = [target.outputs for target in targets]
        self._used = [0] * num_slots
        """Of each slot, which targets its adapter has: a bit for each."""
        self._down = torch.zeros(num_slots, len(targets) * rank, base.in_features, dtype=dtype)
        self._up = [torch.zeros(num_slots, rank, len(target.rows), dtype=dtype) for target in targets]

    @property
    def num_adapter_bytes(self) -> int:
        """Of all slots."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self._down, *self._up))

    def drop_base(self) -> None:
        """Nothing is computed before it has another one (`rebased`)."""
        del self.base

    def put(self, slot: int, pairs: Sequence[LowRank | None]) -> None:
        """Fill a slot. pairs: of each target; None: the adapter does not have it."""
        rank = self._slots.max_rank
        down, used = self._down[slot - 1].zero_(), 0
        for i, pair in enumerate(pairs):
            up = self._up[i][slot - 1].zero_()
            if pair is not None:
                a, b = pair
                used |= 1 << i
                down[i * rank : i * rank + len(a)] = a
                up[: len(b)] = b
        self._used[slot - 1] = used

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        for segment in self._slots.segments:
            low, high = segment.low - 1, segment.high - 1
            used = 0
            for slot in range(low, high):
                used |= self._used[slot]
            if used:
                self._add(x, out, segment, low, high, used)
        return out

    def _add(self, x: torch.Tensor, out: torch.Tensor, segment: AdapterSegment, low: int, high: int, used: int) -> None:
        rows, count = slice(segment.start, segment.end), high - low
        num_tokens, num_targets, rank = segment.end - segment.start, len(self._up), self._slots.max_rank
        seen = x[rows] if x.dtype == self._down.dtype else x[rows].to(self._down.dtype)
        hidden = torch.mm(seen, self._down[low:high].view(-1, x.shape[1]).T)
        hidden = hidden.view(num_tokens, count, num_targets, rank)
        if segment.foreign is not None:
            hidden.masked_fill_(segment.foreign[:, :, None, None], 0)
        for i, outputs in enumerate(self._outputs):
            if used >> i & 1:
                up = self._up[i][low:high].view(count * rank, -1)
                part, target = hidden[:, :, i].reshape(num_tokens, count * rank), out[rows, outputs]
                if out.dtype == up.dtype:
                    target.addmm_(part, up)
                else:
                    target.add_(torch.mm(part, up))


def rebased(adapted: Linear, base: Linear) -> Linear:
    """What adapters do to another base of the same sizes; where there are none, that base."""
    if not isinstance(adapted, AdaptedLinear):
        return base
    adapted.base, adapted.num_bytes = base, base.num_bytes
    return adapted


class AdapterSlots:
    """The slots of one rank, in every adapted product of its model."""

    def __init__(self, num_slots: int, max_rank: int, dtype: torch.dtype) -> None:
        """dtype: of the products."""
        self.num_slots, self.max_rank, self.dtype = num_slots, max_rank, dtype
        self.targets: dict[str, AdaptedLayer] = {}
        """All that can be adapted, by name."""
        self.segments: list[AdapterSegment] = []
        """Of the step that is computed."""
        self._layers: list[tuple[AdaptedLinear, tuple[str, ...]]] = []

    def adapt(self, base: Linear, targets: Sequence[AdaptedLayer]) -> AdaptedLinear:
        """The product of these targets, side by side."""
        adapted = AdaptedLinear(base, targets, self)
        self._layers.append((adapted, tuple(target.name for target in targets)))
        self.targets |= {target.name: target for target in targets}
        return adapted

    @property
    def num_bytes(self) -> int:
        """Of all slots in all products."""
        return sum(layer.num_adapter_bytes for layer, _ in self._layers)

    @torch.inference_mode()
    def put(self, slot: int, tensors: Mapping[str, LowRank]) -> None:
        """Let a slot, 1 to num_slots, hold this adapter (`reading.read_adapter`)."""
        for layer, names in self._layers:
            layer.put(slot, [tensors.get(name) for name in names])

    def begin(self, inputs: StepInputs) -> None:
        """A step with these tokens is computed next."""
        self.segments = [] if inputs.adapter_ids is None else segments_of(inputs, inputs.adapter_ids)


def segments_of(inputs: StepInputs, ids: NDArray[np.int32]) -> list[AdapterSegment]:
    """ids: [num_tokens] the slot of each token's adapter; 0: none, as of padding."""
    num_decodes, num_tokens = inputs.num_decodes, len(ids)
    num_rows = num_decodes + sum(inputs.prefill_counts)
    used = ids[:num_rows]
    first = int(used[0])
    if (used == first).all():  # what is computed of padding is looked at by nothing
        return [AdapterSegment(0, num_tokens, first, first + 1, None)] if first else []
    segments = []
    decodes = ids[:num_decodes]
    if decodes.any():
        low, high = int(decodes[decodes > 0].min()), int(decodes.max()) + 1
        foreign = decodes[:, None] != np.arange(low, high)
        segments.append(AdapterSegment(0, num_decodes, low, high, torch.from_numpy(foreign) if foreign.any() else None))
    for start, count in zip(inputs.prefill_starts, inputs.prefill_counts, strict=True):
        slot, last = int(ids[start]), segments[-1] if segments else None
        if last is not None and last.foreign is None and last.low == slot and last.end == start:
            segments[-1] = AdapterSegment(last.start, start + count, slot, slot + 1, None)
        elif slot:
            segments.append(AdapterSegment(start, start + count, slot, slot + 1, None))
    return segments
