"""A mixture of experts on a device: what a layer launches in the place of its MLP.

The router's scores are float32. Each token then takes its experts, and the pairs of tokens and experts are put in the order of
experts. Two products, in one launch each, read the weights of those experts that have pairs. At last the results of each token are
weighted and added up in the order of its choice. The MLP that every token takes is added, if there is one. All of it is launched
with fixed grids, so it can be a part of a recorded step.

The weights of a rank's experts are one tensor for each of the two products. Padding takes no expert. Many tokens go through in
pieces, so that what lies between the products stays small.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from actorllm.errors import UnsupportedModelError
from actorllm.model.cuda import ops
from actorllm.model.cuda.linear import DeviceLinear
from actorllm.model.cuda.quantized import Workspaces, codes_of, in_order, linear
from actorllm.model.families.decoder_config import ExpertShape
from actorllm.model.families.tensors import ExpertTensors
from actorllm.model.linear import LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm_kernels.grouped_gemm import SWIGLU
from actorllm_kernels.skinny_gemm import SplitScratch

PIECE_TOKENS = 2048
"""That go through the experts at a time."""


class StackedWeights:
    """The weights of one product of all experts."""

    def __init__(self, num_experts: int) -> None:
        self.num_bytes = 0
        """Of one expert."""
        self.weight: torch.Tensor
        """[num_experts, out_features, in_features], or codes."""
        self.scales: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self._num_experts, self._count = num_experts, 0

    def add(self, weight: LinearWeight, workspaces: Workspaces) -> None:
        """The next expert's. All have one form."""
        weight = in_order(weight, workspaces.dtype)
        scales: torch.Tensor | None = None
        if isinstance(weight, Dense):
            numbers = weight.weight
        else:
            numbers, scales = codes_of(weight)
        bias: torch.Tensor | None = getattr(weight, "bias", None)
        parts = {"weight": numbers, "scales": scales, "bias": bias}
        if not self._count:
            self.num_bytes = weight.num_bytes
            for name, part in parts.items():
                if part is not None:
                    room = torch.empty(self._num_experts, *part.shape, dtype=part.dtype, device=workspaces.device)
                    setattr(self, name, room)
        for name, part in parts.items():
            room = getattr(self, name)
            same = (room is None) == (part is None)
            if not same or (part is not None and (room.dtype != part.dtype or room.shape[1:] != part.shape)):
                raise UnsupportedModelError(
                    "experts of one layer whose weights have several forms are not supported on CUDA; use device='cpu'"
                )
            if part is not None:
                room[self._count].copy_(part)
        self._count += 1

    @property
    def form(self) -> str:
        """What, beside the shape, decides which builds of kernels compute with it."""
        scales = "" if self.scales is None else f", scales {tuple(self.scales.shape[1:])}"
        shape = " x ".join(map(str, self.weight.shape))
        return f"experts {shape} {self.weight.dtype}{scales}, {'no ' if self.bias is None else ''}bias"


class ExpertActivations:
    """What flows through the experts of a layer, for so many tokens of a step."""

    def __init__(
        self,
        num_tokens: int,
        shape: ExpertShape,
        size: int,
        inner: int,
        shared_inner: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """size: of the hidden states. inner, shared_inner: of an expert and of the MLP of all tokens (0: none), of this rank."""
        num_tokens, num_active = min(num_tokens, PIECE_TOKENS), shape.num_active
        self.scores = torch.empty(num_tokens, shape.num_experts, device=device)
        self.numbers = torch.empty(num_tokens, num_active, dtype=torch.int32, device=device)
        self.weights = torch.empty(num_tokens, num_active, device=device)
        self.order = torch.zeros(num_tokens * num_active, dtype=torch.int32, device=device)
        self.starts = torch.zeros(shape.num_experts + 1, dtype=torch.int32, device=device)
        self.middle = torch.zeros(num_tokens * num_active, inner, dtype=dtype, device=device)
        self.found = torch.zeros(num_tokens * num_active, size, dtype=dtype, device=device)
        self.shared_gate_up = torch.empty(num_tokens, 2 * shared_inner, dtype=dtype, device=device)
        self.shared_middle = torch.empty(num_tokens, shared_inner, dtype=dtype, device=device)
        self.shared = torch.empty(num_tokens, size if shared_inner else 0, dtype=dtype, device=device)


class DeviceExperts:
    """Of one layer. See the module docstring."""

    def __init__(
        self,
        shape: ExpertShape,
        tensors: ExpertTensors,
        activation: str,
        workspaces: Workspaces,
        scratch: SplitScratch,
    ) -> None:
        """tensors: of this rank; its experts are read one after the other. activation: of the model."""
        if tensors.shared_gate is not None:
            raise UnsupportedModelError(
                "experts beside an MLP of all tokens that has a gate are not supported on CUDA; use device='cpu'"
            )
        self._shape, self._scratch = shape, scratch
        self._activation = SWIGLU if shape.swiglu is not None else activation
        self._plain_activation = activation
        on = workspaces.device
        self._router = tensors.router.to(on)
        self._router_bias = None if tensors.router_bias is None else tensors.router_bias.to(on)
        self._correction = None if tensors.correction is None else tensors.correction.to(on)
        self.shared: tuple[DeviceLinear, DeviceLinear] | None = None
        """Gate and up, and down, of the MLP that every token takes."""
        if tensors.shared is not None:
            self.shared = linear(tensors.shared[0], workspaces), linear(tensors.shared[1], workspaces)
        self._first, self._end = tensors.numbers.start, tensors.numbers.stop
        count = len(tensors.numbers)
        self._gate_up, self._down = StackedWeights(count), StackedWeights(count)
        for gate_up, down in tensors:
            self._gate_up.add(gate_up, workspaces)
            self._down.add(down, workspaces)

    @property
    def num_bytes(self) -> int:
        """Of the weights that a token reads."""
        per_expert = self._gate_up.num_bytes + self._down.num_bytes
        always = self._router.numel() * self._router.element_size()
        always += sum(part.num_bytes for part in self.shared or ())
        return always + min(self._shape.num_active, self._end - self._first) * per_expert

    @property
    def forms(self) -> Iterator[str]:
        shape = self._shape
        yield f"router {shape.num_active} of {shape.num_experts}, {'no ' if self._router_bias is None else ''}bias"
        yield from (part.form for part in (self._gate_up, self._down))
        yield from (f"{part.out_features} x {part.in_features}, {part.form}" for part in self.shared or ())

    def __call__(
        self, x: torch.Tensor, kv_slots: torch.Tensor, out: torch.Tensor, room: ExpertActivations, *, pdl: bool
    ) -> None:
        """out = what the experts make of x, [num_tokens, hidden_size]; with several ranks a part of a sum.

        kv_slots: int64 [num_tokens]; less than 0: padding.
        """
        for start in range(0, len(x), PIECE_TOKENS):
            piece = slice(start, start + PIECE_TOKENS)
            self._piece(x[piece], kv_slots[piece], out[piece], room, pdl=pdl)

    def _piece(
        self, x: torch.Tensor, kv_slots: torch.Tensor, out: torch.Tensor, room: ExpertActivations, *, pdl: bool
    ) -> None:
        count, shape = len(x), self._shape
        pairs = count * shape.num_active
        scores, numbers, weights = room.scores[:count], room.numbers[:count], room.weights[:count]
        order, starts = room.order[:pairs], room.starts[: self._end - self._first + 1]
        middle, found = room.middle[:pairs], room.found[:pairs]
        gate_up, down = self._gate_up, self._down
        ops.router_scores(x, self._router, self._router_bias, scores, pdl=pdl)
        ops.choose_experts(
            scores,
            kv_slots,
            numbers,
            weights,
            shape.normalizes,
            correction=self._correction,
            num_groups=shape.num_groups,
            num_active_groups=shape.num_active_groups,
            scale=shape.scale,
            pdl=pdl,
        )
        ops.group_pairs(numbers, order, starts, self._first, pdl=pdl)
        ops.grouped_gemm(
            x,
            gate_up.weight,
            gate_up.scales,
            gate_up.bias,
            order,
            starts,
            middle,
            count,
            activation=self._activation,
            swiglu=shape.swiglu,
            pdl=pdl,
        )
        ops.grouped_gemm(middle, down.weight, down.scales, down.bias, order, starts, found, count, pdl=pdl)
        beside = None if self.shared is None else self._of_all(x, room, pdl=pdl)
        ops.sum_experts(found, numbers, weights, out, self._first, self._end, beside, pdl=pdl)

    def _of_all(self, x: torch.Tensor, room: ExpertActivations, *, pdl: bool) -> torch.Tensor:
        """What the MLP that every token takes makes of x."""
        assert self.shared is not None
        (gate_up, down), count = self.shared, len(x)
        middle, out, activation = room.shared_middle[:count], room.shared[:count], self._plain_activation
        if gate_up.fuses(count, True):
            gate_up.launch(x, middle, activation=activation, scratch=self._scratch, pdl=pdl)
        else:
            gate_up(x, room.shared_gate_up[:count])
            ops.activation_mul(room.shared_gate_up[:count], middle, activation, pdl=pdl)
        if down.fuses(count, False):
            down.launch(middle, out, scratch=self._scratch, pdl=pdl)
        else:
            down(middle, out)
        return out
