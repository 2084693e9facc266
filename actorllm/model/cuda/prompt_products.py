"""Products of 8 bits by 8 bits for rows of prompts (W8A8), where decode rows keep activations of the model's type (W8A16).

Many rows cost arithmetic, and hardly any reading. Matrix units multiply codes of 8 bits twice as fast as numbers of 16. So
activations are rounded to 8 bits, each row with a scale of its own, and multiplied with the codes of the weight. Floats go to
`torch._scaled_mm`, integers to `torch._int_mm`. That changes a result by more than rounding does. So the kind of a row decides,
and never the number of rows. Output that is computed once more is computed as decode rows are (`model.linear.by_kind`).

Only where `quantization_twin=True` asks for it. When an engine starts for the first time, products of every shape are held
against plain numbers, and one is timed. Where one is wrong or slower, none is used, and the log says why. Owned by the runner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from actorllm import clock
from actorllm.config import ModelConfig
from actorllm.errors import UnsupportedModelError
from actorllm.model.cuda import ops
from actorllm.model.cuda.device import Device
from actorllm.model.cuda.linear import DeviceLinear
from actorllm.model.cuda.proof.self_check import TOLERANCE, difference
from actorllm.model.cuda.quantized import DeviceQuantized, DeviceSideBySide
from actorllm.model.inputs import StepInputs
from actorllm.model.linear.by_kind import RowKinds
from actorllm_kernels import reference

ONE_KIND, TWO_KINDS = "w8a16", "w8a16+w8a8"
"""What products are computed as (`ModelConfig.scheme`): of all rows, or of decode rows and of prompts."""

MULTIPLE = 16
"""Of inputs and outputs, for the matrix units."""
MIN_ROWS = 32
"""Of a product of integers, which takes more than 16; rows that are missing have any codes."""
MAX_SUMS = 64 << 20
"""Sums of integers that are in memory at a time: 256 MiB."""
TRIED_ROWS = (1, 40, 515)
TRIED_OUTPUTS = 64
"""Compared at either end of a product."""
TIMED_ROWS, TIMED_CALLS, ROUNDS = 1024, 10, 5
ELSEWHERE = "at another rank, whose log says more"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepRows:
    """Which tokens of a step are of prompts."""

    split: int
    """Tokens before this one are decode rows, and the others are of prompts; where `prompts` is None."""
    prompts: torch.Tensor | None = None
    """int64: the tokens of prompts, where some prefill row has output."""
    decodes: torch.Tensor | None = None
    """int64: all other tokens; None with `prompts`."""


class DeviceByKind(DeviceLinear):
    """A product that prompts have in 8 bits."""

    __slots__ = ("_prompts", "_scales", "base")

    def __init__(self, base: DeviceQuantized, prompts: PromptProducts) -> None:
        super().__init__(base.out_features, base.in_features, base.num_bytes)
        self.base, self._prompts = base, prompts
        self._scales = base.exact_scales.unsqueeze(0)

    @property
    def form(self) -> str:
        return f"{self.base.form}, prompts in 8 bits"

    def fuses(self, num_rows: int, is_gated: bool) -> bool:
        return self._prompts.step is None and self.base.fuses(num_rows, is_gated)

    def launch(self, x: torch.Tensor, out: torch.Tensor, **around: Any) -> None:
        assert self._prompts.step is None, "rows of two kinds are never one launch"
        self.base.launch(x, out, **around)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        step = self._prompts.step
        if step is None:
            return self.base(x, out)
        if step.prompts is not None and step.decodes is not None:
            out.index_copy_(0, step.decodes, self.base(x.index_select(0, step.decodes)))
            if len(step.prompts):
                part = x.index_select(0, step.prompts)
                made = torch.empty(len(part), self.out_features, dtype=x.dtype, device=x.device)
                self.of_prompts(part, made)
                out.index_copy_(0, step.prompts, made)
            return out
        if step.split:
            self.base(x[: step.split], out[: step.split])
        if step.split < len(x):
            self.of_prompts(x[step.split :], out[step.split :])
        return out

    def of_prompts(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """The product of rows that are all of prompts. out: contiguous."""
        codes, bias = self.base.codes, self.base.bias
        if codes.dtype == torch.float8_e4m3fn:
            rounded, factors = self._rounded(x, len(x), torch.uint8)
            ops.float8_product(rounded, factors, codes, self._scales, out, bias)
            return
        most = max(MIN_ROWS, MAX_SUMS // self.out_features)
        for start in range(0, len(x), most):
            part, into = x[start : start + most], out[start : start + most]
            rounded, factors = self._rounded(part, max(MIN_ROWS, len(part)), torch.int8)
            sums = torch.empty(len(rounded), self.out_features, dtype=torch.int32, device=x.device)
            ops.integer_product(rounded, codes, sums)
            ops.scale_sums(sums, factors, self._scales[0], into, bias)

    def wide(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.base.wide(x, out)

    @staticmethod
    def _rounded(x: torch.Tensor, num_rows: int, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = torch.empty(num_rows, x.shape[1], dtype=kind, device=x.device)
        factors = torch.empty(len(x), 1, device=x.device)
        ops.quantize_rows(x, rounded, factors)
        return rounded, factors


class PromptProducts:
    """All such products of a model, and which rows of the step under way are of prompts."""

    def __init__(self) -> None:
        self.step: StepRows | None = None
        """None: all rows are computed alike."""
        self.is_used = True
        self._layers: list[DeviceByKind] = []
        self._kinds = RowKinds()

    def of(self, product: DeviceLinear) -> DeviceLinear:
        """The same with another product for prompts, as far as its weights have 8 bits."""
        if isinstance(product, DeviceSideBySide):
            return DeviceSideBySide([self.of(part) for part in product.parts])
        if not isinstance(product, DeviceQuantized) or not _has_codes_of_8_bits(product):
            return product
        made = DeviceByKind(product, self)
        self._layers.append(made)
        return made

    def rows_of(self, inputs: StepInputs, device: Device) -> StepRows | None:
        """Of a step with prompts; None: all rows are computed alike."""
        if not self.is_used:
            return None
        kinds = self._kinds
        kinds.begin(inputs)
        if kinds.prompts is None or kinds.decodes is None:
            return StepRows(kinds.split)
        return StepRows(kinds.split, *(device.upload(part.numpy()) for part in (kinds.prompts, kinds.decodes)))

    def choose(
        self, model: ModelConfig, dtype: torch.dtype, device: Device, all_agree: Callable[[bool], bool] = bool
    ) -> str:
        """What the products are computed as from now on: the same at all ranks.

        Arguments:
            model: its `scheme` is what another start has found, if there was one.
            dtype: of activations.
            device: where the weights are.
            all_agree: of the ranks (`Collectives.all_agree`).

        Raises:
            UnsupportedModelError: no weight has 8 bits, or what the worker before has computed cannot be computed here.
        """
        if not all_agree(bool(self._layers)):
            raise UnsupportedModelError(
                f"quantization_twin=True: on CUDA, rows of prompts have products of their own where weights have 8 bits, and "
                f"{model.architecture} with quantization={model.quantization!r} has no such layer; leave it out"
            )
        reason = self._why_wrong(dtype, device)
        if not all_agree(reason is None):
            reason = reason or f"they are wrong {ELSEWHERE}"
        gain = None
        if reason is None and model.scheme is None and device.proves_itself:
            gain = self._gain(dtype, device)
            if not all_agree(gain > 1):
                reason = f"they take {1 / gain:.2f} times as long" if gain <= 1 else f"they are slower {ELSEWHERE}"
        if reason is None:
            told = "" if gain is None else f": {gain:.2f} times as fast with {TIMED_ROWS} rows"
            logger.info("rows of prompts have products of 8 bits by 8 bits%s", told)
            return TWO_KINDS
        if model.scheme == TWO_KINDS:
            raise UnsupportedModelError(f"products of 8 bits, as another worker has computed, cannot be used: {reason}")
        logger.warning(
            "rows of prompts have the same products as decode rows: those of 8 bits are not used: %s", reason
        )
        self.is_used = False
        return ONE_KIND

    def _why_wrong(self, dtype: torch.dtype, device: Device) -> str | None:
        """What is wrong with the products here; None: nothing."""
        tried = set()
        for layer in self._layers:
            kind = layer.form, layer.out_features, layer.in_features
            if kind in tried:
                continue
            tried.add(kind)
            for num_rows in TRIED_ROWS:
                numbers = torch.randn(num_rows, layer.in_features, generator=torch.Generator().manual_seed(num_rows))
                x = numbers.to(device.torch_device, dtype)
                try:
                    wrong = difference_of(layer, x)
                except Exception as error:  # of a library, or of a compiler
                    wrong = f"{type(error).__name__}: {error!s:.300}"
                if wrong is not None:
                    return f"{num_rows} x {layer.in_features} to {layer.out_features}, {layer.form}: {wrong}"
        return None

    def _gain(self, dtype: torch.dtype, device: Device) -> float:
        """How many times as fast as the others these products are."""
        layer = max(self._layers, key=lambda layer: layer.num_bytes)
        x = torch.ones(TIMED_ROWS, layer.in_features, dtype=dtype, device=device.torch_device)
        out = torch.empty(TIMED_ROWS, layer.out_features, dtype=dtype, device=device.torch_device)
        ways: tuple[Callable[[torch.Tensor, torch.Tensor], Any], ...] = (layer.base, layer.of_prompts)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(ROUNDS):
            for compute, taken in zip(ways, times, strict=True):
                device.wait_for_all()
                began = clock.now()
                for _ in range(TIMED_CALLS):
                    compute(x, out)
                device.wait_for_all()
                taken.append(clock.now() - began)
        return median(times[0]) / median(times[1])


def _has_codes_of_8_bits(product: DeviceQuantized) -> bool:
    is_float = product.codes.dtype in (torch.float8_e4m3fn, torch.int8)
    return is_float and not product.out_features % MULTIPLE and not product.in_features % MULTIPLE


def difference_of(layer: DeviceByKind, x: torch.Tensor) -> str | None:
    """What is wrong with the product of these rows, if all are of prompts; None: nothing."""
    base = layer.base
    found = torch.empty(len(x), layer.out_features, dtype=x.dtype, device=x.device)
    layer.of_prompts(x, found)
    is_float = base.codes.dtype == torch.float8_e4m3fn
    rounded, factors = reference.quantized_rows(x.float(), torch.uint8 if is_float else torch.int8)
    numbers = reference.float8_numbers(rounded) if is_float else rounded.float()
    for outputs in (slice(0, TRIED_OUTPUTS), slice(-TRIED_OUTPUTS, None)):
        bias = None if base.bias is None else base.bias[outputs].float()
        sums = numbers @ base.codes[outputs].float().T
        expected = reference.scaled_sums(sums, factors, base.exact_scales[outputs], bias)
        wrong = difference(found[:, outputs], expected, tolerance=TOLERANCE[x.dtype])
        if wrong is not None:
            return wrong
    return None
