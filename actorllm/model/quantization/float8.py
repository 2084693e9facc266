"""Weights of floats of 8 bits (float8_e4m3fn) with one scale for each output. Activations stay as they are (W8A16).

Only devices that multiply them have this form (`model.cuda`). `Fp8.__call__` states the arithmetic.
"""

from __future__ import annotations

import torch

from actorllm.model.quantization.per_output import PerOutput

LARGEST = 448.0
"""Of the numbers of this type."""


class Fp8(PerOutput):
    """See the module docstring."""

    __slots__ = ()

    DTYPE = torch.float8_e4m3fn
    LARGEST = LARGEST

    @staticmethod
    def nearest_codes(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        made = (x.double() @ self.dense().double().T).to(x.dtype)
        return made if self.bias is None else made + self.bias.to(x.dtype)
