"""Linear attention with a gated delta rule (Gated DeltaNet, arXiv:2412.06464), in float32 between its two products.

A head keeps a matrix [key_dim, value_dim]. A token multiplies it by a decay. Then it moves what the matrix has for its key towards
its value, by the share beta, and reads by its query. Decode rows do just that. Rows of prompts are worked off in tiles (`tiles`).
What the tokens of a tile write depends on each other, which is a triangular system for each head.
"""

from __future__ import annotations

import torch

from actorllm.model.cpu.recurrent.convolution import CausalConvolution
from actorllm.model.cpu.recurrent.states import Piece, StateRows, States
from actorllm.model.cpu.recurrent.tiles import decays, rounds, tiled, untiled
from actorllm.model.families.recurrent_shapes import GatedDeltaShape
from actorllm.model.families.recurrent_tensors import GatedDeltaTensors

LENGTH_EPS = 1e-6
"""Of the lengths that keys and queries are divided by."""

Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class GatedDeltaMixer:
    """Of one layer: from what its first product makes to what its last one reads."""

    def __init__(self, shape: GatedDeltaShape, tensors: GatedDeltaTensors) -> None:
        self._shape = shape
        self._convolution = CausalConvolution(tensors.kernel, None)
        self._step_bias, self._decay, self._norm = tensors.step_bias, tensors.decay, tensors.norm

    def __call__(self, made: torch.Tensor, states: States, rows: StateRows) -> torch.Tensor:
        """made: [num_tokens, made_size]. states: of the layer. Returns [num_tokens, inner_size]; rows of padding are zeros."""
        shape, num_heads = self._shape, self._shape.num_value_heads
        inputs, gate, beta, steps = torch.split(made, [shape.conv_size, shape.inner_size, num_heads, num_heads], 1)
        beta = beta.float().sigmoid()
        decay = torch.nn.functional.softplus(steps.float() + self._step_bias).mul_(self._decay)
        out = torch.zeros(len(made), num_heads, shape.value_dim)
        if rows.num_decodes:
            first = slice(0, rows.num_decodes)
            out[first] = self._decode(inputs[first], decay[first], beta[first], states, rows)
        for piece in rows.pieces:
            tokens = slice(piece.start, piece.start + piece.size)
            out[tokens] = self._prompt(inputs[tokens], decay[tokens], beta[tokens], states, piece)
        scale = out.square().mean(2, keepdim=True).add_(shape.eps).rsqrt_()
        out.mul_(scale).mul_(self._norm)
        return out.view(len(made), -1).mul_(torch.nn.functional.silu(gate.float())).to(made.dtype)

    def _split(self, made: torch.Tensor) -> Tokens:
        """Queries and keys [n, num_value_heads, key_dim], and values [n, num_value_heads, value_dim]."""
        shape, count = self._shape, len(made)
        both, value = made[:, : -shape.inner_size], made[:, -shape.inner_size :]
        both = both.reshape(count, 2, shape.num_key_heads, 1, shape.key_dim)
        scale = both.square().sum(4, keepdim=True).add_(LENGTH_EPS).rsqrt_()
        scale[:, 0].mul_(shape.key_dim**-0.5)
        repeats = shape.num_value_heads // shape.num_key_heads
        both = (both * scale).expand(-1, -1, -1, repeats, -1).reshape(count, 2, shape.num_value_heads, shape.key_dim)
        return both[:, 0], both[:, 1], value.reshape(count, -1, shape.value_dim)

    def _decode(
        self, inputs: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, states: States, rows: StateRows
    ) -> torch.Tensor:
        """One token of each sequence. inputs: [n, conv_size]. decay, a logarithm, and beta: [n, num_value_heads]."""
        shape, where = self._shape, rows.decodes
        before = states["conv"][where]
        heads = states["heads"][where]  # [n, num_value_heads, key_dim, value_dim]
        query, key, value = self._split(self._convolution.decode(inputs, before))
        heads.mul_(decay.exp()[:, :, None, None])
        flat = heads.view(-1, shape.key_dim, shape.value_dim)
        key = key.reshape(len(flat), 1, -1)
        missing = value.reshape(len(flat), 1, -1) - torch.bmm(key, flat)
        flat.baddbmm_(key.transpose(1, 2), missing.mul_(beta.reshape(-1, 1, 1)))
        out = torch.bmm(query.reshape(len(flat), 1, -1), flat)
        if isinstance(where, torch.Tensor):  # rows were gathered, and are put back
            states["conv"].index_copy_(0, where, before)
            states["heads"].index_copy_(0, where, heads)
        return out.view(value.shape)

    def _prompt(
        self, inputs: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, states: States, piece: Piece
    ) -> torch.Tensor:
        """Consecutive tokens of one sequence: as `_decode`."""
        is_new = piece.position == 0
        conv, heads = states["conv"], states["heads"]
        made, before = self._convolution.prompt(inputs, None if is_new else conv[piece.slot])
        piece.store(conv, before)
        query, key, value = self._split(made)
        state = torch.zeros_like(heads[0]) if is_new else heads[piece.slot].clone()
        out = torch.empty_like(value)
        for here, ahead in rounds(piece):
            out[here] = self._tiles((query[here], key[here], value[here]), decay[here], beta[here], state, ahead)
        piece.store(heads, state)
        return out

    @staticmethod
    def _tiles(
        tokens: Tokens, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor, ahead: int
    ) -> torch.Tensor:
        """What tokens read of the states. ahead: tokens of the first tile before them. state: goes to that behind them."""
        count = len(decay)
        # [num_tiles, num_heads, TILE, dim], and without dim
        query, key, value = (tiled(one, ahead) for one in tokens)
        beta = tiled(beta, ahead).unsqueeze(3)
        passed = tiled(decay, ahead).cumsum(2)
        left, since = decays(passed), passed.exp().unsqueeze(3)
        weighted = key * beta
        system = torch.matmul(weighted, key.transpose(2, 3)).mul_(left)  # of which what is below the diagonal counts
        right = torch.cat((value * beta, weighted * since), 3)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        values, keys = solved.split([value.shape[3], key.shape[3]], 3)
        scores = torch.matmul(query, key.transpose(2, 3)).mul_(left)
        reads = query * since
        ends = key * (passed[:, :, -1:] - passed).exp_().unsqueeze(3)
        whole = passed[:, :, -1].exp()[:, :, None, None]
        out = torch.empty_like(value)
        for number in range(len(value)):  # [num_heads, key_dim, value_dim]
            new = values[number] - torch.matmul(keys[number], state)
            out[number] = torch.matmul(reads[number], state) + torch.matmul(scores[number], new)
            state.mul_(whole[number]).add_(torch.matmul(ends[number].transpose(1, 2), new))
        return untiled(out, ahead, count)
