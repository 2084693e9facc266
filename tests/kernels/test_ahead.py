"""Small kernels that ask for the next weight: which lines, and that their own work stays what it was."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from actorllm_kernels import ahead, reference, rmsnorm, silu_mul
from actorllm_kernels.configs import dependent
from tests.kernels.closeness import assert_close


def marked(at):  # type: ignore[no-untyped-def]
    tl.store(at, 1.0)


@pytest.fixture(params=[1, 700])
def num_lines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many lines are asked for, which leaves a mark: the interpreter knows no instruction for it."""
    count: int = request.param
    monkeypatch.setattr(ahead, "prefetch_line", InterpretedFunction(marked))

    def wanted(weight: torch.Tensor, *_: object) -> int:
        return count

    modules: tuple[ModuleType, ...] = (rmsnorm, silu_mul)
    for module in modules:
        monkeypatch.setattr(module, "lines_ahead", wanted)
    return count


def check_asked(weight: torch.Tensor, num_lines: int) -> None:
    marks = weight.view(-1, 64)
    assert (marks[:num_lines, 0] > 0).all()
    marks[:num_lines, 0] = 0
    assert not marks.any()


@pytest.mark.parametrize("num_rows", [1, 33])
def test_norm(num_rows: int, num_lines: int) -> None:
    x, residual, weight, next_weight = (
        torch.randn(num_rows, 40),
        torch.randn(num_rows, 40),
        torch.randn(40),
        torch.zeros(1000, 64),
    )
    stream = x.double() + residual.double()
    expected = reference.rmsnorm(stream, weight.double(), 1e-6)
    rmsnorm.rmsnorm(x, weight, 1e-6, x, residual, ahead=next_weight)
    assert_close(x, expected)
    assert_close(residual, stream)
    check_asked(next_weight, num_lines)


@pytest.mark.parametrize("num_rows", [1, 33])
def test_activation(num_rows: int, num_lines: int) -> None:
    x, y, next_weight = torch.randn(num_rows, 2 * 1100), torch.empty(num_rows, 1100), torch.zeros(1000, 64)
    silu_mul.activation_mul(x, y, ahead=next_weight)
    assert_close(y, reference.activation_mul(x.double()))
    check_asked(next_weight, num_lines)


def test_what_is_asked_for() -> None:
    """Nothing where nothing waits for the launch in front, for many rows, or if the table says so; and not more than fits."""
    weight, waiting = torch.zeros(4096, 1024, dtype=torch.bfloat16), dependent(True, torch.device("meta"))
    assert triton.cdiv(weight.numel() * 2, ahead.LINE) == ahead.lines_ahead(weight, 64, dict(waiting)) == 65536
    assert ahead.lines_ahead(weight.repeat(3, 1), 64, dict(waiting)) == ahead.MAX_BYTES // ahead.LINE
    assert ahead.lines_ahead(weight, 65, dict(waiting)) == 0
    assert ahead.lines_ahead(None, 32, dict(waiting)) == 0
    assert ahead.lines_ahead(weight.float(), 32, dict(waiting)) == 0
    assert ahead.lines_ahead(weight, 32, {**waiting, "PDL": False}) == 0
    assert ahead.lines_ahead(weight, 32, {**waiting, "PREFETCH": 0}) == 0
