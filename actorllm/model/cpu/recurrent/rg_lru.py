"""Real-gated linear recurrent units (RG-LRU of Griffin, arXiv:2402.19427), in float32 between their two products.

A channel keeps one number. A token multiplies it by a decay, which a gate makes of the token, and adds its input, which another
gate lets through. The input is scaled so that the numbers keep their size. Rows of prompts go token by token, with one operation
for each in all channels.
"""

from __future__ import annotations

import torch

from actorllm.model.cpu.recurrent.convolution import CausalConvolution
from actorllm.model.cpu.recurrent.states import Piece, StateRows, States
from actorllm.model.families.recurrent_shapes import RgLruShape
from actorllm.model.families.recurrent_tensors import RgLruTensors


class RgLruMixer:
    """Of one layer: from what its first product makes to what its last one reads."""

    def __init__(self, shape: RgLruShape, tensors: RgLruTensors) -> None:
        self._shape = shape
        self._convolution = CausalConvolution(tensors.kernel, tensors.kernel_bias, has_silu=False)
        self._gates, self._gate_biases, self._decay = tensors.gates, tensors.gate_biases, tensors.decay

    def __call__(self, made: torch.Tensor, states: States, rows: StateRows) -> torch.Tensor:
        """made: [num_tokens, 2 * num_channels]. states: of the layer.

        Returns [num_tokens, num_channels]; rows of padding are zeros.
        """
        gate, inputs = made.chunk(2, 1)
        x = self._convolution.step(inputs, states["conv"], rows)
        let_in, recurrence = self._gated(x)
        logarithms = recurrence.mul_(self._decay)
        # The paper's sqrt(1 - decay ** 2), without the loss of digits where the decay is near 1.
        scales = torch.expm1(2 * logarithms).neg_().sqrt_()
        for piece in rows.pieces:
            if piece.position == 0:  # before a sequence there is nothing that its first token makes room for
                scales[piece.start] = 1
        decays, out = logarithms.exp_(), x.mul_(let_in).mul_(scales)
        if rows.num_decodes:
            own, where = slice(0, rows.num_decodes), rows.decodes
            channels = states["channels"][where].mul_(decays[own]).add_(out[own])
            if isinstance(where, torch.Tensor):  # rows were gathered, and are put back
                states["channels"].index_copy_(0, where, channels)
            out[own] = channels
        for piece in rows.pieces:
            tokens = slice(piece.start, piece.start + piece.size)
            self._prompt(out[tokens], decays[tokens], states["channels"], piece)
        return out.mul_(torch.nn.functional.gelu(gate.float(), approximate="tanh")).to(made.dtype)

    def _gated(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gates of the input and of the recurrence, [num_tokens, num_channels] each."""
        by_block = x.view(len(x), self._shape.num_blocks, self._shape.block_size).transpose(0, 1)
        made = torch.matmul(by_block, self._gates).add_(self._gate_biases).sigmoid_()  # [2, num_blocks, n, block_size]
        let_in, recurrence = made.transpose(1, 2).reshape(2, *x.shape).unbind(0)
        return let_in, recurrence

    @staticmethod
    def _prompt(new: torch.Tensor, decays: torch.Tensor, channels: torch.Tensor, piece: Piece) -> None:
        """Consecutive tokens of one sequence.

        Arguments:
            new: [num_tokens, num_channels], what each token adds; the states behind it afterwards.
            decays: [num_tokens, num_channels].
            channels: the states of all slots, [num_slots, num_channels].
        """
        state = torch.zeros_like(channels[0]) if piece.position == 0 else channels[piece.slot]
        for decay, after in zip(decays.unbind(0), new.unbind(0), strict=True):
            state = after.addcmul_(decay, state)
        channels[piece.slot] = state
