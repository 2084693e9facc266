"""Quantized weights on a device: fewer bytes of them are read, and activations stay in the type of the model.

For few rows a kernel multiplies with the codes (`ops.quantized_gemm`). For many, reading the weight is not what a product costs.
It is dequantized into the type of the model, slice by slice, and multiplied as a dense one. Both compute the same up to rounding,
so streams do not depend on the number of rows. Rows of prompts may have products of 8 bits by 8 bits (`prompt_products`).

`device_form` says what a checkpoint is read as. Where a model is not rounded from plain weights, layers are read on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from actorllm.config import ModelConfig
from actorllm.errors import UnsupportedModelError
from actorllm.model.cuda import ops
from actorllm.model.cuda.linear import DeviceDense, DeviceLinear
from actorllm.model.linear import Form, LinearPart, LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.linear.side_by_side import SideBySide, side_by_side
from actorllm.model.quantization import form_of, open_weights
from actorllm.model.quantization.checkpoint import CheckpointForm
from actorllm.model.quantization.float8 import Fp8
from actorllm.model.quantization.gguf import GgufForm
from actorllm.model.quantization.grouped import nearest
from actorllm.model.quantization.int4 import Int4
from actorllm.model.quantization.int8 import Int8
from actorllm.model.weights import ALL, Stored, Weights
from actorllm_kernels.float8 import FLOAT8_SCALE
from actorllm_kernels.quantized_gemm import MAX_ROWS, packed

SLICE_NUMBERS = 8 << 20
"""Weights that are dequantized at a time: 16 MiB, which the second-level cache of large GPUs holds until they are multiplied."""


class DeviceQuantized(DeviceLinear):
    """A weight of 8 or 4 bits, as `quantized_gemm` reads it."""

    __slots__ = ("_dtype", "_slice", "bias", "codes", "scales")

    def __init__(self, weight: Int8 | Int4 | Fp8, workspaces: Workspaces) -> None:
        super().__init__(weight.out_features, weight.in_features, weight.num_bytes)
        device = workspaces.device
        codes, scales = codes_of(weight)
        self.codes, self.scales = codes.contiguous().to(device), scales.contiguous().to(device)
        self.bias = None if weight.bias is None else weight.bias.to(device)
        self._slice = workspaces.slice_of(weight.out_features, weight.in_features)

    @property
    def form(self) -> str:
        groups = f", {self.scales.shape[2] // 2} groups in 128" if self.scales.dim() == 3 else ""
        return f"{self.codes.dtype}{groups}, {'no ' if self.bias is None else ''}bias"

    @property
    def exact_scales(self) -> torch.Tensor:
        """Of codes of 8 bits: what a code is multiplied by, float32 [out_features]."""
        return self.scales / FLOAT8_SCALE if self.codes.dtype == torch.float8_e4m3fn else self.scales

    def fuses(self, num_rows: int, is_gated: bool) -> bool:
        return num_rows <= MAX_ROWS

    def launch(self, x: torch.Tensor, out: torch.Tensor, **around: Any) -> None:
        ops.quantized_gemm(x, self.codes, self.scales, out, bias=self.bias, **around)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        if len(x) <= MAX_ROWS:
            ops.quantized_gemm(x, self.codes, self.scales, out, bias=self.bias)
            return out
        for rows, weight in self._slices():
            ops.linear(x, weight, out[:, rows], None if self.bias is None else self.bias[rows])
        return out

    def wide(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if len(x) <= MAX_ROWS:
            ops.quantized_gemm(x, self.codes, self.scales, out)
            return
        for rows, weight in self._slices():
            ops.wide_linear(x, weight, out[:, rows])

    def _slices(self) -> Any:
        """(outputs, their weight in the type of the model), one after the other in the same memory."""
        for start in range(0, self.out_features, len(self._slice)):
            rows = slice(start, min(start + len(self._slice), self.out_features))
            weight = self._slice[: rows.stop - start]
            ops.dequantize(self.codes, self.scales, weight, start)
            yield rows, weight


class DeviceSideBySide(DeviceLinear):
    """Layers of one input in several forms."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[DeviceLinear]) -> None:
        super().__init__(
            sum(part.out_features for part in parts), parts[0].in_features, sum(part.num_bytes for part in parts)
        )
        self.parts = tuple(parts)

    @property
    def form(self) -> str:
        return " | ".join(f"{part.out_features}: {part.form}" for part in self.parts)

    def fuses(self, num_rows: int, is_gated: bool) -> bool:
        return False

    def launch(self, x: torch.Tensor, out: torch.Tensor, **around: Any) -> None:
        raise AssertionError("several products are never one launch")

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._each(x, out, x.dtype, lambda part, y: part(x, y))

    def wide(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._each(x, out, torch.float32, lambda part, y: part.wide(x, y))

    def _each(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None,
        dtype: torch.dtype,
        compute: Callable[[DeviceLinear, torch.Tensor], Any],
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty(len(x), self.out_features, dtype=dtype, device=x.device)
        start = 0
        for part in self.parts:
            own = torch.empty(len(x), part.out_features, dtype=dtype, device=x.device)
            compute(part, own)
            ops.copy(own, out[:, start : start + part.out_features])
            start += part.out_features
        return out


class Workspaces:
    """Where weights are dequantized to: one for all layers, which run one after the other."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._memory: torch.Tensor | None = None

    def slice_of(self, out_features: int, in_features: int) -> torch.Tensor:
        """[as many outputs as fit, in_features]."""
        num_outputs = min(out_features, max(1, SLICE_NUMBERS // in_features))
        if in_features > SLICE_NUMBERS:
            raise UnsupportedModelError(f"a quantized layer of {in_features} inputs is not supported on CUDA")
        if self._memory is None:
            self._memory = torch.empty(SLICE_NUMBERS, dtype=self.dtype, device=self.device)
        return self._memory[: num_outputs * in_features].view(num_outputs, in_features)


def linear(weight: LinearWeight, workspaces: Workspaces) -> DeviceLinear:
    """What computes with this weight here."""
    if isinstance(weight, SideBySide):
        # Of GPTQ with desc_act, parts have several orders, and one form without any.
        weight = side_by_side([in_order(part, workspaces.dtype) for part in weight.parts])
        if isinstance(weight, SideBySide):
            return DeviceSideBySide([linear(part, workspaces) for part in weight.parts])
    weight = in_order(weight, workspaces.dtype)
    if isinstance(weight, Int8 | Int4 | Fp8):
        return DeviceQuantized(weight, workspaces)
    if not isinstance(weight, Dense):
        raise UnsupportedModelError(f"weights of the form {type(weight).__name__} are not supported on CUDA")
    on = workspaces.device
    return DeviceDense(weight.weight.to(on), None if weight.bias is None else weight.bias.to(on))


def codes_of(weight: LinearWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as the kernels read them."""
    if isinstance(weight, Int4):
        return packed(weight.codes, weight.scales, weight.zeros)
    if isinstance(weight, Fp8):
        return weight.codes, weight.scales * FLOAT8_SCALE
    if not isinstance(weight, Int8):
        raise UnsupportedModelError(f"weights of the form {type(weight).__name__} are not supported on CUDA")
    return weight.codes, weight.scales


def in_order(weight: LinearWeight, dtype: torch.dtype) -> LinearWeight:
    """Where the inputs of a group of 4 bits are no neighbours: the same in 8 bits, or in the type of the model."""
    if isinstance(weight, Int4) and weight.order is not None:
        return nearest(weight.dense(), weight.bias, dtype)
    return weight


class _OnDevice(Weights):
    """Tensors of a checkpoint, moved to a device; `host`: those on the CPU."""

    def __init__(self, host: Weights, device: torch.device) -> None:
        super().__init__(host.dtype, device)
        self.host = host

    def take(
        self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self.host.take(name, *shape, rows=rows, columns=columns, dtype=dtype).to(self.device)

    def stored(self, name: str) -> Stored | None:
        return self.host.stored(name)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.host.own(tensor)

    def close(self, is_ignorable: Callable[[str], bool]) -> None:
        self.host.close(is_ignorable)

    def __exit__(self, *raised: Any) -> None:
        self.host.__exit__(*raised)


class ReadOnHost:
    """The form (`model.linear.Form`) of layers whose readers compute on the CPU."""

    def __init__(self, form: Form) -> None:
        self.of, self.fused = form.of, form.fused
        self._form = form

    def head_of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        made = self._form.head_of(weight.cpu(), bias)
        return Dense(weight, bias) if isinstance(made, Dense) else made  # not a copy of what is there already

    def sharded(self, weights: Weights, part: LinearPart) -> LinearWeight:
        assert isinstance(weights, _OnDevice)
        return self._form.sharded(weights.host, part)


def device_form(model: ModelConfig) -> Form:
    """What the linear layers of this model are read as for a device."""
    form = form_of(model, keeps_floats=True)
    return ReadOnHost(form) if isinstance(form, CheckpointForm | GgufForm) else form


def open_on_device(
    model: ModelConfig, form: Form, dtype: torch.dtype, show_progress: bool | None, device: torch.device
) -> Weights:
    """The weights that such a form reads."""
    if isinstance(form, ReadOnHost):
        return _OnDevice(open_weights(model, dtype, show_progress), device)
    return open_weights(model, dtype, show_progress, device)
