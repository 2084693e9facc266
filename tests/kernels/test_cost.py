"""The model of bytes and latency: what must hold of it whatever a GPU turns out to be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorllm_kernels import configs, cost
from actorllm_kernels.cost import MACHINES, Work, seconds
from actorllm_kernels.launches import record_one
from actorllm_kernels.shipped import SHIPPED

H200 = MACHINES["H200"]


@pytest.fixture(autouse=True)
def interpreter() -> None:
    """Not in this file: launches are recorded."""


@given(
    num_bytes=st.floats(1e3, 1e10),
    flops=st.floats(0, 1e14),
    programs=st.integers(1, 5000),
    resident=st.integers(1, 8),
    ahead=st.floats(1e3, 1e5),
)
def test_no_launch_beats_the_memory_or_the_matrix_units(
    num_bytes: float, flops: float, programs: int, resident: int, ahead: float
) -> None:
    work = Work(num_bytes, flops, programs, resident, ahead)
    taken = seconds(work, H200)
    assert taken >= num_bytes / H200.bandwidth
    assert taken >= flops / H200.flops
    assert seconds(replace(work, prefetched=num_bytes), H200) <= taken
    assert seconds(work, replace(H200, latency_s=2 * H200.latency_s)) >= taken * (1 - 1e-9)


def test_few_bytes_under_way_are_slow() -> None:
    """A weight of 4 MiB by 64 programs with 12 KiB each: 0.98 TB/s, and not 4.2."""
    work = Work(4 << 20, 0, 64, 3, 12288, serial=0)
    assert (4 << 20) / (seconds(work, H200) - H200.launch_s) == pytest.approx(64 * 12288 / H200.latency_s)
    assert seconds(replace(work, programs=256), H200) < seconds(work, H200)


def test_a_last_wave_that_is_nearly_empty_costs_what_its_arithmetic_costs() -> None:
    one, more = (seconds(Work(0, 1e12 * n / 132, n, 1, serial=0), H200) - H200.launch_s for n in (132, 133))
    assert more == pytest.approx(2 * one, rel=0.01)


@pytest.mark.parametrize(("name", "fits"), [
    ("skinny_gemm-16-1280x2048-norm-bias-pdl", 8),
    ("lm_head_sample-16-151936x1024-pdl", 2),
    ("lm_head_sample-32-151936x1024-pdl", 2),
    ("attn_decode-256-32x8x128-pdl", 2),
    ("attn_decode-256-48x1x128-pdl", 2),
])  # fmt: skip
def test_programs_of_a_multiprocessor_are_those_that_the_compiler_lets_be(name: str, fits: int) -> None:
    """fits: as `gates --show` says, of both versions of Triton."""
    assert cost.of_launch(record_one(SHIPPED[name], "sm_90"), H200).resident == fits


def test_configurations_are_ranked() -> None:
    """More stages have more under way; few wide tiles are split so often that adding them up takes longer."""

    def predicted(name: str, kernel: str, **config: int) -> float:
        with configs.trying(kernel, **config):
            launch = record_one(SHIPPED[name], "sm_90")
        return seconds(cost.of_launch(launch, H200, kv_tokens=32 * 1024), H200)

    narrow = "skinny_gemm-16-1024x3072-residual-pdl"
    assert predicted(narrow, "skinny_gemm", num_stages=4) < predicted(narrow, "skinny_gemm", num_stages=2)
    assert predicted(narrow, "skinny_gemm", BLOCK_N=16) < predicted(narrow, "skinny_gemm", BLOCK_N=256, BLOCK_K=32)


def test_every_machine_is_plausible() -> None:
    for machine in MACHINES.values():
        assert 1e12 < machine.bandwidth < 1e13
        assert machine.dependent_s < machine.launch_s
        assert not math.isnan(seconds(Work(), machine))
