"""Selective state-space layers whose decay differs by channel and entry (Mamba, arXiv:2312.00752), in float32 between products.

A channel keeps `state_size` numbers. A token multiplies each by a decay of its own, adds its x times B, and reads them by C. Decays
that differ in every number leave no product of matrices to work off several tokens at once. So rows of prompts go token by token,
with one operation for each in all channels. What surrounds these is computed for as many tokens as stay in the cache of a core.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from actorllm.model.cpu.recurrent.convolution import CausalConvolution
from actorllm.model.cpu.recurrent.states import Piece, StateRows, States
from actorllm.model.families.recurrent_shapes import MambaShape
from actorllm.model.families.recurrent_tensors import MambaTensors
from actorllm.model.linear import Linear, LinearWeight

MOST_NUMBERS = 1 << 17
"""Of the states of tokens that are worked off together: they stay in the cache of a core."""


class MambaMixer:
    """Of one layer: from what its first product makes to what its last one reads."""

    def __init__(self, shape: MambaShape, tensors: MambaTensors, linear: Callable[[LinearWeight], Linear]) -> None:
        """linear: makes the products."""
        self._shape = shape
        self._convolution = CausalConvolution(tensors.kernel, tensors.kernel_bias)
        self._select, self._steps = linear(tensors.select), linear(tensors.steps)
        self._step_bias, self._decay, self._skip = tensors.step_bias, tensors.decay, tensors.skip
        self._norms: tuple[torch.Tensor | None, ...] = tensors.norms or (None,) * 3
        """Weights, of the numbers for step sizes, of B, of C."""

    def __call__(self, made: torch.Tensor, states: States, rows: StateRows) -> torch.Tensor:
        """made: [num_tokens, 2 * num_channels]. states: of the layer.

        Returns [num_tokens, num_channels]; rows of padding are zeros.
        """
        shape = self._shape
        inputs, gate = made.chunk(2, 1)
        x = self._convolution.step(inputs, states["conv"], rows)
        chosen = self._select(x.to(made.dtype))
        ranks, b, c = torch.split(chosen, [shape.step_rank, shape.state_size, shape.state_size], 1)
        if shape.norm_eps is not None:
            parts = zip((ranks, b, c), self._norms, strict=True)
            ranks, b, c = (self._normed(part, weight) for part, weight in parts)
        steps = torch.nn.functional.softplus(self._steps(ranks.contiguous()).float() + self._step_bias)
        b, c, new = b.float(), c.float(), x * steps
        out = torch.zeros_like(x)
        if rows.num_decodes:
            first = slice(0, rows.num_decodes)
            out[first] = self._decode(new[first], steps[first], b[first], c[first], states, rows)
        for piece in rows.pieces:
            tokens = slice(piece.start, piece.start + piece.size)
            out[tokens] = self._prompt(new[tokens], steps[tokens], b[tokens], c[tokens], states, piece)
        return out.addcmul_(x, self._skip).mul_(torch.nn.functional.silu(gate.float())).to(made.dtype)

    def _normed(self, part: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Divided by its root mean square."""
        exact = part.float()
        assert self._shape.norm_eps is not None
        normed = exact * exact.square().mean(1, keepdim=True).add_(self._shape.norm_eps).rsqrt_()
        return (normed if weight is None else normed.mul_(weight)).to(part.dtype)

    def _decode(
        self, new: torch.Tensor, steps: torch.Tensor, b: torch.Tensor, c: torch.Tensor, states: States, rows: StateRows
    ) -> torch.Tensor:
        """One token of each sequence, rounded as in `_prompt`.

        Arguments:
            new: what is added to states, times B; [n, num_channels].
            steps: [n, num_channels].
            b, c: [n, state_size].

        Returns [n, num_channels].
        """
        where = rows.decodes
        channels = states["channels"][where]  # [n, num_channels, state_size]
        decays = (steps.unsqueeze(2) * self._decay).exp_()
        torch.addcmul(new.unsqueeze(2) * b.unsqueeze(1), decays, channels, out=channels)
        if isinstance(where, torch.Tensor):  # rows were gathered, and are put back
            states["channels"].index_copy_(0, where, channels)
        return _read(channels, c, decays)

    def _prompt(
        self, new: torch.Tensor, steps: torch.Tensor, b: torch.Tensor, c: torch.Tensor, states: States, piece: Piece
    ) -> torch.Tensor:
        """Consecutive tokens of one sequence: as `_decode`."""
        channels = states["channels"]
        state = torch.zeros_like(channels[0]) if piece.position == 0 else channels[piece.slot]
        out = torch.empty_like(new)
        most = max(1, MOST_NUMBERS // state.numel())
        for start in range(0, len(new), most):
            here = slice(start, start + most)
            decays = (steps[here].unsqueeze(2) * self._decay).exp_()  # [count, num_channels, state_size]
            passed = new[here].unsqueeze(2) * b[here].unsqueeze(1)  # which becomes the states, token by token
            for decay, after in zip(decays.unbind(0), passed.unbind(0), strict=True):
                state = after.addcmul_(decay, state)
            out[here] = _read(passed, c[here], decays)
        piece.store(channels, state)
        return out


def _read(states: torch.Tensor, c: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """What tokens read of their states. A sum of its own for each channel, so that its bits depend on no other token.

    Arguments:
        states: [n, num_channels, state_size].
        c: [n, state_size].
        room: of the shape of states, which is written to.

    Returns [n, num_channels].
    """
    return torch.mul(states, c.unsqueeze(1), out=room).sum(2)
