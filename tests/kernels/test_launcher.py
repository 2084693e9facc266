"""Launches by Triton's own launcher, on a driver library without a device, and those that we keep of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from actorllm_kernels import reference
from actorllm_kernels.rmsnorm import rmsnorm
from actorllm_kernels.shipped import SHIPPED
from tests.kernels.closeness import assert_close
from tests.kernels.stub import runner as stub
from tests.kernels.stub.programs import STREAM, bits

pytestmark = [
    pytest.mark.skipif(
        stub.COMPILER is None,
        reason="needs a C compiler: Triton builds its driver module, and we the stub of the driver library, with one",
    ),
    pytest.mark.timeout(600),
]

QUICK = (
    *("embed-1024-pdl", "step_prep-pdl", "kv_clear", "rmsnorm-4096", "qknorm_rope_kv-33-16x8x128-norm"),
    *("quantized_gemm-16-1024x3072-int4g32-residual-pdl", "dequantize-6144x4096-fp8"),
)


def address(value: int) -> str:
    return value.to_bytes(8, "little").hex()


NUMBERS = [1, 3, 16, 2**31, 0, 17, -16, -(2**31), -(2**31) - 1, 2**63 + 16]


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[Any, list[stub.Launched]]]:
    """Of one process, which takes seconds to start."""
    plain = (("norms",), ("kinds", NUMBERS), ("hooked",), ("forgotten",))
    programs: tuple[tuple[Any, ...], ...] = (*plain, ("shipped", QUICK), ("specializations", QUICK))
    return dict(zip((name for name, *_ in programs), stub.run(*programs), strict=True))


Found = dict[str, tuple[Any, list[stub.Launched]]]


def test_the_driver_is_given_what_the_kernel_reads(found: Found) -> None:
    addresses, launches = found["norms"]
    assert len(launches) == 2
    for one in launches:
        assert (one.kernel, one.grid, one.threads, one.stream) == ("rmsnorm_kernel", [32, 1, 1], 128, STREAM)
        assert (one.is_dependent, one.num_other_attributes) == (1, 0)
        assert one.parameters == [*map(address, addresses), bits(1e-6), address(0), address(0)]


def check_kept(names: Sequence[str], launches: list[stub.Launched]) -> None:
    assert len(launches) == 3 * len(names)
    for i, name in enumerate(names):
        by_triton, first, kept = launches[3 * i : 3 * i + 3]
        assert by_triton == first == kept, name
        assert bool(kept.is_dependent) == ("-pdl" in name)


def test_a_kept_launch_is_tritons(found: Found) -> None:
    check_kept(QUICK, found["shipped"][1])


def test_builds_are_told_apart_as_triton_does(found: Found) -> None:
    """By addresses and integers that are multiples of 16, by 1, and by 64 bits."""
    launches = found["kinds"][1]
    third = len(launches) // 3
    assert third == 3 * len(NUMBERS) * 4
    by_triton, first, kept = launches[:third], launches[third : 2 * third], launches[2 * third :][::-1]
    assert by_triton == first == kept
    assert len({one.build for one in kept}) > 10


def test_a_hook_hears_of_every_launch(found: Found) -> None:
    heard, launches = found["hooked"]
    assert heard == [0, 2, 2]
    assert len(launches) == 6


def test_a_build_stays_loaded_when_triton_forgets_it(found: Found) -> None:
    """Unloaded, its function would be launched all the same."""
    loaded, launches = found["forgotten"]
    assert loaded
    assert all(loaded)
    first, kept = launches
    assert first == kept


def test_the_interpreter_leaves_nothing_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors of a GPU, too, every launch is its own."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    weight = torch.randn(40)
    for num_rows in (3, 5):
        x, y = torch.randn(num_rows, 40), torch.empty(num_rows, 40)
        rmsnorm(x, weight, 1e-6, y)
        assert_close(y, reference.rmsnorm(x.double(), weight.double(), 1e-6))


def test_what_is_compiled_for_the_gates_is_what_triton_compiles(found: Found) -> None:
    assert found["specializations"][0] == {}


@pytest.mark.slow(reason="compiles all launches")
@pytest.mark.timeout(1800)
def test_every_launch_that_is_shipped() -> None:
    names = [name for name in SHIPPED if "-tma" not in name]
    (_, launches), (differing, _) = stub.run(("shipped", names), ("specializations", names))
    check_kept(names, launches)
    assert differing == {}
