"""State-space layers whose decay is one number a head (Mamba 2, arXiv:2405.21060), in float32 between their two products.

A head keeps a matrix [head_dim, state_size]. A token multiplies it by a decay, adds the product of its x and B, and reads it by C.
Decode rows do just that. Rows of prompts are worked off in tiles (`tiles`), by products of matrices (the paper's section 6).
Within a tile each token attends to those before it, and to the state that the tile began with.
"""

from __future__ import annotations

import torch

from actorllm.model.cpu.recurrent.convolution import CausalConvolution
from actorllm.model.cpu.recurrent.states import Piece, StateRows, States
from actorllm.model.cpu.recurrent.tiles import decays, rounds, tiled, untiled
from actorllm.model.families.recurrent_shapes import Mamba2Shape
from actorllm.model.families.recurrent_tensors import Mamba2Tensors


class Mamba2Mixer:
    """Of one layer: from what its first product makes to what its last one reads."""

    def __init__(self, shape: Mamba2Shape, tensors: Mamba2Tensors) -> None:
        self._shape = shape
        self._convolution = CausalConvolution(tensors.kernel, tensors.kernel_bias)
        self._step_bias, self._decay = tensors.step_bias, tensors.decay
        self._skip = tensors.skip.unsqueeze(1)  # [num_heads, 1]
        self._norm = tensors.norm
        sizes = (shape.inner_size, shape.inner_size, *2 * (shape.num_groups * shape.state_size,), shape.num_heads)
        self._scales: torch.Tensor | None = None
        if any(scale != 1 for scale in shape.scales):
            scales = zip(shape.scales, sizes, strict=True)
            self._scales = torch.cat([torch.full((size,), scale) for scale, size in scales])
        self._has_limits = shape.limits != (0.0, float("inf"))

    def __call__(self, made: torch.Tensor, states: States, rows: StateRows) -> torch.Tensor:
        """made: [num_tokens, made_size]. states: of the layer. Returns [num_tokens, inner_size]; rows of padding are zeros."""
        shape = self._shape
        if self._scales is not None:
            made = (made * self._scales).to(made.dtype)
        gate, inputs, steps = torch.split(made, [shape.inner_size, shape.conv_size, shape.num_heads], 1)
        steps = torch.nn.functional.softplus(steps.float() + self._step_bias)
        if self._has_limits:
            steps = steps.clamp(*shape.limits)
        num_decodes = rows.num_decodes
        if num_decodes == len(made):
            return self._gated(self._decode(inputs, steps, states, rows), gate).to(made.dtype)
        out = torch.zeros(len(made), shape.inner_size)
        if num_decodes:
            out[:num_decodes] = self._decode(inputs[:num_decodes], steps[:num_decodes], states, rows)
        for piece in rows.pieces:
            tokens = slice(piece.start, piece.start + piece.size)
            out[tokens] = self._prompt(inputs[tokens], steps[tokens], states, piece)
        return self._gated(out, gate).to(made.dtype)

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The gate, and the norm over each group of heads."""
        gate = torch.nn.functional.silu(gate.float())
        if self._norm is None:
            return out.mul_(gate)
        if self._shape.gates_first:
            return self._normed(out.mul_(gate)).mul_(self._norm)
        return self._normed(out).mul_(self._norm).mul_(gate)

    def _normed(self, out: torch.Tensor) -> torch.Tensor:
        """Divided by the root mean square of each group."""
        by_group = out.view(len(out), self._shape.num_groups, -1)
        scale = by_group.square().mean(2, keepdim=True).add_(self._shape.eps).rsqrt_()
        return by_group.mul_(scale).view_as(out)

    def _split(self, made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [n, num_heads, head_dim], B and C [n, num_groups, state_size]."""
        shape, size = self._shape, self._shape.num_groups * self._shape.state_size
        x, b, c = torch.split(made, [shape.inner_size, size, size], 1)
        by_group = (len(made), shape.num_groups, shape.state_size)
        return x.view(-1, shape.num_heads, shape.head_dim), b.view(by_group), c.view(by_group)

    def _decode(self, inputs: torch.Tensor, steps: torch.Tensor, states: States, rows: StateRows) -> torch.Tensor:
        """One token of each sequence. inputs: [n, conv_size]. steps: [n, num_heads]. Returns [n, inner_size]."""
        shape, where = self._shape, rows.decodes
        before = states["conv"][where]
        heads = states["heads"][where]  # [n, num_heads, head_dim, state_size]
        x, b, c = self._split(self._convolution.decode(inputs, before))
        per_group = shape.num_heads // shape.num_groups
        # [n * num_groups, heads of a group * head_dim, state_size], times one number a head
        heads.mul_((steps * self._decay).exp_()[:, :, None, None])
        flat = heads.view(len(x) * shape.num_groups, per_group * shape.head_dim, shape.state_size)
        new = (x * steps.unsqueeze(2)).reshape(len(flat), -1, 1)
        flat.addcmul_(new, b.reshape(len(flat), 1, -1))
        out = torch.bmm(flat, c.reshape(len(flat), -1, 1)).view(x.shape)
        if isinstance(where, torch.Tensor):  # rows were gathered, and are put back
            states["conv"].index_copy_(0, where, before)
            states["heads"].index_copy_(0, where, heads)
        return torch.addcmul(out, x, self._skip).reshape(len(x), -1)

    def _prompt(self, inputs: torch.Tensor, steps: torch.Tensor, states: States, piece: Piece) -> torch.Tensor:
        """Consecutive tokens of one sequence: as `_decode`."""
        is_new = piece.position == 0
        conv, heads = states["conv"], states["heads"]
        made, before = self._convolution.prompt(inputs, None if is_new else conv[piece.slot])
        piece.store(conv, before)
        x, b, c = self._split(made)
        state = torch.zeros_like(heads[0]) if is_new else heads[piece.slot].clone()
        out = torch.empty_like(x)
        for here, ahead in rounds(piece):
            out[here] = self._tiles(x[here], b[here], c[here], steps[here], state, ahead)
        piece.store(heads, state)
        return torch.addcmul(out, x, self._skip).reshape(len(x), -1)

    def _tiles(
        self, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, steps: torch.Tensor, state: torch.Tensor, ahead: int
    ) -> torch.Tensor:
        """What tokens read of the states. ahead: tokens of the first tile before them. state: goes to that behind them."""
        shape, count = self._shape, len(x)
        per_group = shape.num_heads // shape.num_groups
        x = tiled(x * steps.unsqueeze(2), ahead)  # [num_tiles, num_heads, TILE, head_dim]
        b, c = tiled(b, ahead), tiled(c, ahead)  # [num_tiles, num_groups, TILE, state_size]
        passed = tiled(steps * self._decay, ahead).cumsum(2)  # [num_tiles, num_heads, TILE]
        left = decays(passed)
        scores = torch.matmul(c, b.transpose(2, 3)).repeat_interleave(per_group, 1).mul_(left)
        out = torch.matmul(scores, x)
        # What a tile adds to the state, of each token as much as is left at its end.
        ends = (passed[:, :, -1:] - passed).exp_().unsqueeze(3)
        added = torch.matmul((x * ends).transpose(2, 3), b.repeat_interleave(per_group, 1))
        whole = passed[:, :, -1].exp()[:, :, None, None]
        since = passed.exp().unsqueeze(3)
        reads = c.repeat_interleave(per_group, 1)
        for number in range(len(x)):  # [num_heads, head_dim, state_size]
            out[number] += torch.matmul(reads[number], state.transpose(1, 2)).mul_(since[number])
            state.mul_(whole[number]).add_(added[number])
        return untiled(out, ahead, count)
