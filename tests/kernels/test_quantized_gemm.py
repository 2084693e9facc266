"""Products with weights of 8 and 4 bits, against the product with the dequantized weight."""

from __future__ import annotations

import pytest
import torch

from actorllm_kernels import reference
from actorllm_kernels.float8 import FLOAT8_SCALE
from actorllm_kernels.quantized_gemm import dequantize, packed, quantized_gemm
from actorllm_kernels.skinny_gemm import SplitScratch
from tests.effort import each_value
from tests.kernels.closeness import DTYPES, assert_close

KINDS = ("int8", "fp8", "int4-32", "int4-64", "int4-128")
CPU = torch.device("cpu")


def weight_of(kind: str, num_outputs: int, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and scales, and the same weight as its numbers, float32."""
    size = 1 / num_inputs**0.5
    if kind.startswith("int4"):
        group = int(kind.partition("-")[2])
        codes = torch.randint(16, (num_outputs, num_inputs), dtype=torch.uint8)
        scales = (torch.rand(num_outputs, num_inputs // group) * size / 4).bfloat16()
        zeros = (torch.randn(num_outputs, num_inputs // group) * size / 4).bfloat16()
        wide = (codes.float() - 8).view(num_outputs, -1, group) * scales.float().unsqueeze(2) + zeros.float().unsqueeze(
            2
        )
        return *packed(codes, scales, zeros), wide.flatten(1)
    scales = 0.5 + torch.rand(num_outputs)
    if kind == "int8":
        codes = torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8)
        scales *= size / 64
        return codes, scales, codes.float() * scales.unsqueeze(1)
    every = torch.arange(256, dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )  # subnormal numbers and negative zero as well
    every = every[every.float().isfinite()]
    codes = every.view(torch.uint8)[torch.randint(len(every), (num_outputs, num_inputs))].view(torch.float8_e4m3fn)
    scales *= size / 128
    return codes, scales * FLOAT8_SCALE, codes.float() * scales.unsqueeze(1)


def run(
    kind: str,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    what: str = "",
    activation: str = "",
    dtype: torch.dtype = torch.float32,
    y_dtype: torch.dtype | None = None,
    scratch: SplitScratch | None = None,
    split: int | None = None,
) -> None:
    outputs = 2 * num_outputs if activation else num_outputs
    codes, scales, weight = weight_of(kind, outputs, num_inputs)
    x = torch.randn(num_rows, num_inputs).to(dtype)
    given = {
        "norm": (1 + torch.randn(num_inputs) / 4).to(dtype),
        "bias": torch.randn(outputs).to(dtype),
        "residual": torch.randn(num_rows, num_outputs).to(dtype),
    }
    given = {name: tensor for name, tensor in given.items() if name in what}
    wide = {name: tensor.double() for name, tensor in given.items()}
    expected = reference.fused_linear(x.double(), weight.double(), activation=activation, **wide)
    y = given.get("residual", torch.full((num_rows, num_outputs), torch.nan, dtype=y_dtype or dtype))
    quantized_gemm(x, codes, scales, y, activation=activation, scratch=scratch, split=split, **given)
    assert_close(y.to(dtype), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_inputs", [128, 384])
def test_the_reference_states_the_layout(kind: str, num_inputs: int) -> None:
    codes, scales, weight = weight_of(kind, 6, num_inputs)
    assert torch.allclose(reference.dequantized(codes, scales, num_inputs), weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("dtype", "kind"), each_value(DTYPES, KINDS))
def test_what_is_fused(kind: str, dtype: torch.dtype) -> None:
    run(kind, 5, 40, 256, "norm bias residual", "", dtype)
    run(kind, 3, 24, 256, "norm bias", "silu", dtype)


@pytest.mark.parametrize(
    ("kind", "num_inputs", "num_rows"),
    each_value([("int8", 200), ("fp8", 96), ("int4-32", 96), ("int4-64", 192)], [1, 17, 32]),
)
def test_inputs_that_are_no_multiple_of_128(kind: str, num_inputs: int, num_rows: int) -> None:
    run(kind, num_rows, 33, num_inputs, "norm")


@pytest.mark.parametrize(
    ("kind", "num_outputs", "activation"),
    each_value(["int8", "int4-32"], [(2100, ""), (8200, ""), (2050, "gelu_tanh")]),
)
def test_every_width_of_the_table(kind: str, num_outputs: int, activation: str) -> None:
    run(kind, 2, num_outputs, 128, "norm", activation)


@pytest.mark.parametrize(("kind", "activation"), each_value(["fp8", "int4-64"], ["", "silu"]))
def test_parts_of_k_are_added_up(kind: str, activation: str) -> None:
    scratch = SplitScratch.empty(CPU)
    scratch.partials.fill_(torch.nan)
    for split in (2, 5):
        run(kind, 5, 40, 640, "norm", activation, scratch=scratch, split=split)
        assert not scratch.counters.any()


def test_logits_are_as_wide_as_they_were_summed() -> None:
    """Of a head, in float32 although the states are bfloat16."""
    codes, scales, weight = weight_of("int8", 300, 64)
    x, y = torch.randn(3, 64).bfloat16(), torch.empty(3, 300)
    quantized_gemm(x, codes, scales, y)
    assert_close(y, x.double() @ weight.double().T)


@pytest.mark.parametrize(
    ("dtype", "kind", "num_inputs"),
    each_value(DTYPES, [("int8", 200), ("fp8", 128), ("int4-32", 160), ("int4-128", 256)]),
)
def test_a_part_of_a_weight_in_the_type_of_the_model(kind: str, num_inputs: int, dtype: torch.dtype) -> None:
    codes, scales, weight = weight_of(kind, 100, num_inputs)
    y = torch.full((60, num_inputs), torch.nan, dtype=dtype)
    dequantize(codes, scales, y, 40)
    assert torch.allclose(
        y.float(), weight[40:].to(dtype).float(), rtol=1e-2 if dtype != torch.float32 else 1e-6, atol=0
    )


def test_too_many_rows_are_refused() -> None:
    codes, scales, _ = weight_of("int8", 16, 16)
    with pytest.raises(ValueError, match="33 rows are too many for quantized_gemm, which takes 32"):
        quantized_gemm(torch.zeros(33, 16), codes, scales, torch.zeros(33, 16))
    with pytest.raises(ValueError, match="'relu' is none of silu, gelu, gelu_tanh"):
        quantized_gemm(torch.zeros(1, 16), codes, scales, torch.zeros(1, 8), activation="relu")
