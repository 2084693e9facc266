"""Linear layers on a device: products into tensors of the caller, with what comes before and after them where a kernel does both.

A dense product of few rows is `skinny_gemm`'s, where the table of configurations wants it. The same launch then takes its norm, its
activation and its residual (`fuses`). Other products are cuBLAS's. Both give the same up to rounding, and the number of rows alone
decides. Another form of weight is another `DeviceLinear`, with kernels of its own (`quantized`).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from actorllm.model.cuda import ops
from actorllm.model.linear import Linear
from actorllm_kernels.skinny_gemm import SplitScratch, is_skinny


class DeviceLinear(Linear):
    """Launches; nothing is allocated where `out` is given."""

    __slots__ = ()

    @property
    @abstractmethod
    def form(self) -> str:
        """What of the weight, beside its shape, decides which builds of kernels compute with it."""

    @abstractmethod
    def fuses(self, num_rows: int, is_gated: bool) -> bool:
        """Whether `launch` is to be called for so many rows, and not the plain product. is_gated: with an activation."""

    @abstractmethod
    def launch(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        activation: str = "",
        residual: torch.Tensor | None = None,
        scratch: SplitScratch | None = None,
        pdl: bool = False,
    ) -> None:
        """out = activation(norm(x) @ weight.T + bias) + residual, in one launch. Only where it `fuses`.

        scratch: for products that are split; launches one after the other share it.
        """

    @abstractmethod
    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...

    @abstractmethod
    def wide(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """The product without a bias in float32, as it was summed, also where x is narrower."""


class DeviceDense(DeviceLinear):
    """A dense weight, as the checkpoint has it."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight.shape[0], weight.shape[1], weight.numel() * weight.element_size())
        self.weight, self.bias = weight, bias

    @property
    def form(self) -> str:
        return f"plain, {'no ' if self.bias is None else ''}bias"

    def fuses(self, num_rows: int, is_gated: bool) -> bool:
        return is_skinny(num_rows, self.out_features // (1 + is_gated), self.weight.device)

    def launch(self, x: torch.Tensor, out: torch.Tensor, **around: Any) -> None:
        ops.skinny_gemm(x, self.weight, out, bias=self.bias, **around)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        ops.linear(x, self.weight, out, self.bias)
        return out

    def wide(self, x: torch.Tensor, out: torch.Tensor) -> None:
        ops.wide_linear(x, self.weight, out)
