"""Short convolutions between two gates (LFM2): what is kept of a sequence is the last few inputs, and nothing older."""

from __future__ import annotations

import torch

from actorllm.model.cpu.recurrent.convolution import CausalConvolution
from actorllm.model.cpu.recurrent.states import StateRows, States
from actorllm.model.families.recurrent_tensors import ShortConvTensors


class ShortConvMixer:
    """Of one layer: from what its first product makes to what its last one reads."""

    def __init__(self, tensors: ShortConvTensors) -> None:
        self._convolution = CausalConvolution(tensors.kernel, tensors.kernel_bias, has_silu=False)

    def __call__(self, made: torch.Tensor, states: States, rows: StateRows) -> torch.Tensor:
        """made: [num_tokens, 3 * num_channels]. states: of the layer.

        Returns [num_tokens, num_channels]; rows of padding are zeros.
        """
        let_in, let_out, x = made.chunk(3, 1)
        return self._convolution.step(let_in * x, states["conv"], rows).mul_(let_out).to(made.dtype)
