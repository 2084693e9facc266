"""Adapters on a device: `model.adapters` by two kernels for each adapted product, `lora_shrink` and `lora_expand`.

Every adapted product has room for `max_loras` adapters there. A token's adapter is found through the state table, by the row of
its request. So a recorded step serves requests with any adapters.

Adapters read what was normed, and add to the product itself. So the launch of a product with adapters takes neither the norm
in front of it nor what comes behind. A step in which no row has an adapter launches what it would launch without any. Slots are
filled in order with the steps that were launched before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from actorllm.model.adapters import AdaptedLayer, LowRank, Slots
from actorllm.model.cuda import ops
from actorllm.model.cuda.device import Device
from actorllm.model.cuda.linear import DeviceLinear
from actorllm_kernels.lora_shrink import FEW_TOKENS, num_parts
from actorllm_kernels.skinny_gemm import SplitScratch

MIN_RANK = 16
"""What the matrix units multiply at a time."""


class DeviceAdapted(DeviceLinear):
    """A product of the base, and on top of it those of the adapters of each token."""

    __slots__ = ("_scratch", "_slots", "_starts", "_targets", "_widest", "base", "down", "up")

    def __init__(
        self, base: DeviceLinear, targets: Sequence[AdaptedLayer], slots: DeviceSlots, scratch: SplitScratch
    ) -> None:
        """targets: what the outputs are of, side by side."""
        super().__init__(base.out_features, base.in_features, base.num_bytes)
        self.base = base
        self._slots, self._targets, self._scratch = slots, targets, scratch
        num_slots, rank, dtype, on = slots.num_slots, slots.rank, slots.dtype, slots.device.torch_device
        self.down = torch.zeros(num_slots, len(targets) * rank, base.in_features, dtype=dtype, device=on)
        self.up = torch.zeros(num_slots, base.out_features, rank, dtype=dtype, device=on)
        starts = np.array([0, *(target.outputs.stop for target in targets)], np.int32)
        self._starts = slots.device.upload(starts)
        self._widest = max(len(target.rows) for target in targets)

    @property
    def form(self) -> str:
        adapted = f"{len(self._targets)} adapted by {self._slots.num_slots} of rank {self._slots.rank}"
        return f"{self.base.form}, {adapted}"

    def fuses(self, num_rows: int, is_gated: bool) -> bool:
        return self._slots.step is None and self.base.fuses(num_rows, is_gated)

    def launch(self, x: torch.Tensor, out: torch.Tensor, **around: Any) -> None:
        assert self._slots.step is None, "a product with adapters is never one launch"
        self.base.launch(x, out, **around)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        step = self._slots.step
        if step is None:
            return self.base(x, out)
        if self.base.fuses(len(x), False):
            self.base.launch(x, out, scratch=self._scratch, pdl=step.pdl)
        else:
            self.base(x, out)
        tokens = (step.token_rows, step.adapters)
        ops.lora_shrink(x, self.down, *tokens, step.hidden, pdl=step.pdl)
        ops.lora_expand(step.hidden, self.up, self._starts, *tokens, out, self.in_features, self._widest, pdl=step.pdl)
        return out

    def wide(self, x: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError("heads have no adapters")

    @property
    def num_adapter_bytes(self) -> int:
        """Of all slots."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.down, self.up))

    def num_hidden(self, num_tokens: int) -> int:
        """Numbers between the two kernels, for so many tokens."""
        return num_tokens * num_parts(num_tokens, self.in_features) * self.down.shape[1]

    def put(self, slot: int, pairs: Sequence[LowRank | None]) -> None:
        """pairs: of each target, on the device; None: the adapter does not have it."""
        rank = self._slots.rank
        down, up = self.down[slot - 1].zero_(), self.up[slot - 1].zero_()
        for i, (target, pair) in enumerate(zip(self._targets, pairs, strict=True)):
            if pair is not None:
                a, b = pair
                down[i * rank : i * rank + len(a)] = a
                up[target.outputs, : len(b)] = b.T


class StepAdapters:
    """What tells the adapter of each token of a step, and where its products leave their middles."""

    def __init__(self, token_rows: torch.Tensor, adapters: torch.Tensor, hidden: torch.Tensor, pdl: bool) -> None:
        """token_rows: int32, rows of the state table. adapters: its column. hidden: float32."""
        self.token_rows, self.adapters, self.hidden, self.pdl = token_rows, adapters, hidden, pdl


class DeviceSlots(Slots):
    """The slots of one rank. See the module docstring."""

    def __init__(self, num_slots: int, max_rank: int, dtype: torch.dtype, device: Device) -> None:
        super().__init__(num_slots, max_rank, dtype)
        self.rank = max(MIN_RANK, 1 << (max_rank - 1).bit_length())
        """What all adapters are filled up to."""
        self.device = device
        self.step: StepAdapters | None = None
        """The step whose launches are being made, where some row of it may have an adapter."""
        self._layers: list[DeviceAdapted] = []
        self._targets: list[Sequence[AdaptedLayer]] = []

    def adapt(self, base: DeviceLinear, targets: Sequence[AdaptedLayer], scratch: SplitScratch) -> DeviceAdapted:
        """The product of these targets, side by side. scratch: of `skinny_gemm`."""
        adapted = DeviceAdapted(base, targets, self, scratch)
        self._layers.append(adapted)
        self._targets.append(targets)
        self.targets |= {target.name: target for target in targets}
        return adapted

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_adapter_bytes for layer in self._layers)

    def hidden(self, num_tokens: int) -> torch.Tensor:
        """Memory between the two kernels, for steps of up to so many tokens."""
        sizes = {num_tokens, min(num_tokens, FEW_TOKENS)}
        most = max(layer.num_hidden(size) for layer in self._layers for size in sizes)
        return torch.zeros(most, device=self.device.torch_device)

    @torch.inference_mode()
    def put(self, slot: int, tensors: Mapping[str, LowRank]) -> None:
        numbers = [part.reshape(-1) for pair in tensors.values() for part in pair]
        with self.device.active():
            there: dict[str, LowRank] = {}
            if numbers:
                flat = self.device.upload(torch.cat(numbers).view(torch.uint8).numpy()).view(self.dtype)
                pieces = iter(torch.split(flat, [part.numel() for part in numbers]))
                there = {
                    name: (next(pieces).view(a.shape), next(pieces).view(b.shape)) for name, (a, b) in tensors.items()
                }
            for layer, targets in zip(self._layers, self._targets, strict=True):
                layer.put(slot, [there.get(target.name) for target in targets])

    def made_up(self) -> dict[str, LowRank]:
        """The tensors of an adapter of all targets, for a check of the kernels."""
        generator = torch.Generator().manual_seed(0)

        def numbers(num_inputs: int, *shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).div_(num_inputs**0.5).to(self.dtype)

        rank = self.max_rank
        return {
            name: (
                numbers(target.in_features, rank, len(range(target.in_features)[target.columns])),
                numbers(rank, rank, len(target.rows)),
            )
            for name, target in self.targets.items()
        }
