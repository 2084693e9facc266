from __future__ import annotations

import pytest
import torch
from triton.runtime.interpreter import interpreter_builder

from actorllm_kernels.skinny_gemm import SplitScratch, is_skinny, skinny_gemm
from tests.effort import each_value
from tests.kernels.cases import run_product as run
from tests.kernels.closeness import DTYPES

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "what", "activation"),
    each_value(
        DTYPES,
        [
            ("", ""),
            ("norm", ""),
            ("norm bias", ""),
            ("residual", ""),
            ("norm bias residual", ""),
            ("norm", "silu"),
            ("bias", "gelu"),
        ],
    ),
)
def test_what_is_fused(what: str, activation: str, dtype: torch.dtype) -> None:
    run(5, 40, 256, what, activation, dtype)


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"), each_value([1, 17, 64], [(48, 128), (16, 96), (33, 200)])
)
def test_shapes(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    run(num_rows, num_outputs, num_inputs, "norm")


@pytest.mark.parametrize(
    ("dtype", "what", "activation", "num_outputs", "num_inputs"),
    each_value(
        DTYPES,
        [("", ""), ("norm bias residual", ""), ("residual", ""), ("norm bias", "silu"), ("norm", "gelu_tanh")],
        [(7, 1536), (5, 4160)],
    ),
)
def test_one_row(num_outputs: int, num_inputs: int, what: str, activation: str, dtype: torch.dtype) -> None:
    """Neither outputs nor inputs fill the last piece."""
    run(1, num_outputs, num_inputs, what, activation, dtype)


def test_one_row_with_more_pieces_than_are_unrolled() -> None:
    run(1, 3, 9 * 2048 + 64, "norm", "silu")


@pytest.mark.parametrize(("num_outputs", "activation"), [(2100, ""), (8200, ""), (2050, "gelu_tanh")])
def test_wide_products(num_outputs: int, activation: str) -> None:
    run(2, num_outputs, 128, "norm residual", activation)


@pytest.mark.parametrize(
    ("split", "what", "activation"), each_value([2, 3, 5], [("residual", ""), ("norm bias", ""), ("norm", "silu")])
)
def test_parts_of_k_are_added_up_and_the_scratch_is_left_as_it_was(what: str, activation: str, split: int) -> None:
    """K is 5 steps of the loop and a piece; the scratch is used again, and what was in it does not count."""
    scratch = SplitScratch.empty(CPU)
    scratch.partials.fill_(torch.nan)
    for num_rows in (5, 17):
        run(num_rows, 40, 680, what, activation, scratch=scratch, split=split)
        assert not scratch.counters.any()


def test_the_sum_does_not_depend_on_the_program_that_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs of the interpreter run one after the other, here once in the opposite order."""
    scratch = SplitScratch.empty(CPU)
    torch.manual_seed(3)
    expected = run(5, 40, 680, "norm residual", scratch=scratch, split=3)
    number = interpreter_builder.set_grid_idx

    def backwards(x: int, y: int, z: int) -> None:
        columns, rows, layers = interpreter_builder.grid_dim
        number(columns - 1 - x, rows - 1 - y, layers - 1 - z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", backwards)
    torch.manual_seed(3)
    assert torch.equal(run(5, 40, 680, "norm residual", scratch=scratch, split=3), expected)


def test_the_table_decides_up_to_how_many_rows() -> None:
    assert is_skinny(1, 4096, CPU)
    assert is_skinny(16, 1024, CPU)
    assert not is_skinny(2, 4096, CPU)
    assert not is_skinny(17, 1024, CPU)


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="65 rows are too many for skinny_gemm, which takes 64"):
        skinny_gemm(torch.zeros(65, 16), torch.zeros(16, 16), torch.zeros(65, 16))
    with pytest.raises(ValueError, match="'relu' is none of silu, gelu, gelu_tanh"):
        skinny_gemm(torch.zeros(1, 16), torch.zeros(32, 16), torch.zeros(1, 16), activation="relu")
