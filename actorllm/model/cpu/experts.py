"""A mixture of experts on the CPU: the router, and the products of those experts that rows of the step have chosen.

Each expert is two packed products, so a step reads the weights of the experts that its rows take, and no others. The rows of a
step are put in the order of their experts. Each expert then computes its rows at once. For few rows, a call takes longer than
what it computes: all but the products is one call for all experts.

A row's result does not depend on which other rows share its expert. The router's scores are float32, summed in float64.
Sums in float32 depend on the number of rows, and their rounding would decide between scores that are nearly equal. The
products of an expert treat each row alike. Results of a row are weighted and added up in the order of its own choice, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from actorllm.model.cpu.layers import linear
from actorllm.model.families.decoder_config import ExpertShape
from actorllm.model.families.tensors import ExpertTensors
from actorllm.model.linear import Linear
from actorllm.model.quantization.int8 import quantized, rescaled
from actorllm.model.quantization.onednn import Int8Linear

MAX_TOGETHER = 256
"""Pairs of row and expert whose activations are computed in one piece; of more, those of an expert stay in the cache."""


class Experts:
    """See the module docstring."""

    def __init__(
        self, shape: ExpertShape, tensors: ExpertTensors, activation: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """tensors: of this rank; its experts are read one after the other."""
        self.num_active = shape.num_active
        self._normalizes = shape.normalizes
        self._activation = activation
        self._num_experts = shape.num_experts
        self._first = tensors.numbers.start
        """The experts of this rank begin there."""
        self._gated = self._product_of_gate if shape.swiglu is None else partial(swiglu, *shape.swiglu)
        self._has_gate = shape.has_gate
        self.router = tensors.router.double().T.contiguous()  # [hidden_size, num_experts]
        self._router_bias = None if tensors.router_bias is None else tensors.router_bias.double()
        self._correction = tensors.correction
        self._is_sigmoid, self._scale = shape.scoring == "sigmoid", shape.scale
        self._scales_inputs = shape.scoring == "inputs"
        self._num_groups, self._num_active_groups = shape.num_groups, shape.num_active_groups
        self.experts: list[tuple[Linear, Linear]] = [(linear(gate_up), linear(down)) for gate_up, down in tensors]
        self.shared: tuple[Linear, Linear] | None = None
        """What every row takes beside the experts that it has chosen."""
        if tensors.shared is not None:
            self.shared = linear(tensors.shared[0]), linear(tensors.shared[1])
        self.latents: tuple[Linear, Linear] | None = None
        """What makes the latents that experts read, and what reads those that they make."""
        if tensors.latents is not None:
            self.latents = linear(tensors.latents[0]), linear(tensors.latents[1])
        self._shared_gate = None if tensors.shared_gate is None else tensors.shared_gate.T.contiguous()
        self._one_row = torch.zeros(shape.num_active, dtype=torch.int64), torch.arange(shape.num_active)
        """Of each pair of a single row its token, and its place among all pairs."""

    @property
    def num_bytes(self) -> int:
        """Of the weights that a row reads: those of the router, and of so many experts as a row takes."""
        per_expert = sum(one.num_bytes for one in self.experts[0]) if self.experts else 0
        always = self.router.numel() * self.router.element_size()
        if self.shared is not None:
            always += sum(one.num_bytes for one in self.shared)
        if self.latents is not None:
            always += sum(one.num_bytes for one in self.latents)
        return always + min(self.num_active, len(self.experts)) * per_expert

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each row, int64 [num_tokens, num_active], the one with the highest score first, and their weights."""
        exact = torch.mm(x.double(), self.router)  # [num_tokens, num_experts]
        scores = (exact if self._router_bias is None else exact.add_(self._router_bias)).float()
        if self._scales_inputs:
            highest, numbers = scores.topk(self.num_active)
            return numbers, highest.sigmoid_()
        if self._is_sigmoid:
            weights = scores.sigmoid_()
            wanted = self._within_groups(weights if self._correction is None else weights + self._correction)
            numbers = wanted.topk(self.num_active)[1]
            weights = weights.gather(1, numbers)
            if self._normalizes:
                weights = weights / weights.sum(1, keepdim=True).add_(1e-20)
            return numbers, weights.mul_(self._scale)
        if self._normalizes and self._num_groups == 1:
            highest, numbers = scores.topk(self.num_active)
            return numbers, highest.softmax(1)
        weights, numbers = self._within_groups(scores.softmax(1)).topk(self.num_active)
        if self._normalizes:
            weights = weights / weights.sum(1, keepdim=True)
        return numbers, weights if self._scale == 1 else weights.mul_(self._scale)

    def _within_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """The same, and what no other is below where the group is not one that the row takes experts of.

        A group counts as its best expert does; scores of a sigmoid, as its best two together.
        """
        if self._num_groups == 1:
            return scores
        by_group = scores.view(len(scores), self._num_groups, -1)
        best = by_group.topk(2, 2)[0].sum(2) if self._is_sigmoid else by_group.amax(2)
        groups = best.topk(self._num_active_groups, 1)[1]
        is_left = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, True).unsqueeze(2)
        return by_group.masked_fill(~is_left, -torch.inf if self._is_sigmoid else 0.0).view_as(scores)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same; with several ranks a part of a sum."""
        numbers, weights = self.choose(x)
        seen = x if self.latents is None else self.latents[0](x)
        num_pairs, chosen = numbers.numel(), numbers.reshape(-1)  # pairs of row and expert
        here = range(self._first, self._first + len(self.experts))
        if len(x) == 1 and len(here) == self._num_experts:  # an expert has one pair at most, so their order may stay
            rows, places = self._one_row
            pairs = places
            taken = [(number, 1) for number in chosen.tolist()]
        else:
            order = chosen.argsort(stable=True)
            counts = torch.bincount(chosen, minlength=self._num_experts).tolist()
            start = sum(counts[: here.start])
            taken = [(at, count) for at, count in enumerate(counts[here.start : here.stop]) if count]
            num_here = sum(count for _, count in taken)
            pairs = order[start : start + num_here]
            rows = pairs.div(self.num_active, rounding_mode="floor")
            places = order.argsort().sub_(start)
            if num_here < num_pairs:  # what experts of other ranks compute is the row of zeros
                places = places.masked_fill((places < 0) | (places >= num_here), num_here)
        weights = weights.reshape(-1)
        if self._scales_inputs:
            seen = seen.index_select(0, rows) * weights[pairs].unsqueeze(1).to(seen.dtype)
            rows, weights = torch.arange(len(rows)), torch.ones_like(weights)
        found = self._results(seen, rows, taken)
        if len(found) < num_pairs:
            found = torch.cat((found, found.new_zeros(1, seen.shape[1])))
        # One sum for each row, over its pairs in the order of its choice, whatever the step.
        starts = torch.arange(0, num_pairs, self.num_active)
        total = torch.embedding_bag(found.float(), places, starts, per_sample_weights=weights)[0]
        if self.latents is not None:
            total = self.latents[1](total.to(x.dtype))
        if self.shared is None:
            return total.to(x.dtype)
        always = self._product(self.shared, x)
        if self._shared_gate is not None:
            always = (always * torch.mm(x.float(), self._shared_gate).sigmoid_()).to(x.dtype)
        return always.add_(total)

    def _results(self, x: torch.Tensor, rows: torch.Tensor, taken: list[tuple[int, int]]) -> torch.Tensor:
        """[num_pairs, outputs of an expert] of the pairs that are computed here, in the order of their experts.

        Arguments:
            x: [num_tokens, inputs of an expert].
            rows: of each pair its token.
            taken: the experts that have pairs, and how many each has.
        """
        if not taken:
            return x.new_empty(0, x.shape[1])
        counts = [count for _, count in taken]
        if len(rows) > MAX_TOGETHER:
            parts = zip(taken, rows.split_with_sizes(counts), strict=True)
            return torch.cat([self._product(self.experts[at], x.index_select(0, here)) for (at, _), here in parts])
        pairs = [self.experts[at] for at, _ in taken]
        made = self._activated(_products([gate_up for gate_up, _ in pairs], x, rows, counts))
        return _products([down for _, down in pairs], made, None, counts)

    def _product(self, expert: tuple[Linear, Linear], x: torch.Tensor) -> torch.Tensor:
        gate_up, down = expert
        return down(self._activated(gate_up(x)))

    def _activated(self, made: torch.Tensor) -> torch.Tensor:
        """made: gate and up side by side; where experts have no gate, up alone."""
        return self._gated(*made.chunk(2, 1)) if self._has_gate else self._activation(made)

    def _product_of_gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self._activation(gate).mul_(up)


def _products(linears: Sequence[Linear], x: torch.Tensor, rows: torch.Tensor | None, counts: list[int]) -> torch.Tensor:
    """Those of the first linear, then those of the next one.

    Arguments:
        x: [num_tokens, inputs].
        rows: of each product its token; None: each token once, in this order.
        counts: how many products each linear has.
    """
    codes, scales = x, None
    if all(isinstance(one, Int8Linear) for one in linears):
        codes, scales = quantized(x)  # once for all experts of a token
    if rows is not None:
        codes = codes.index_select(0, rows)
        scales = None if scales is None else scales.index_select(0, rows)
    made: list[torch.Tensor] = []
    bias: list[torch.Tensor] = []
    for one, part in zip(linears, codes.split_with_sizes(counts), strict=True):
        if scales is None or not isinstance(one, Int8Linear):
            made.append(one(part))
            continue
        made.append(one.of_codes(part))
        if one.bias is not None:
            bias.append(one.bias.expand(len(part), -1))
    together = torch.cat(made)
    return together if scales is None else rescaled(together, scales, torch.cat(bias) if bias else None, x.dtype)


def swiglu(alpha: float, limit: float, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), with gate and up within the limit."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return up.add_(1).mul_(gate * torch.sigmoid(gate * alpha))
