"""Kernels under the sanitizer, at the tiles and pages that are shipped; and the sanitizer against planted mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actorllm_kernels.attn_decode import takes_packed
from actorllm_kernels.skinny_gemm import SplitScratch
from tests.effort import examples
from tests.kernels.cases import (
    draw_filtered,
    run_decode,
    run_latent_decode,
    run_latent_prefill,
    run_prefill,
    run_product,
)
from tests.kernels.sampling import make_state, on_the_cpu
from tests.kernels.sanitizer import sanitized

pytestmark = pytest.mark.timeout(1800)

EDGES = [0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 300]
VOCABULARIES = [1, 31, 257, 4097, 32_001, 151_936, 262_144][: examples(4, 7)]
PROFILE = settings(
    deadline=None,
    max_examples=examples(8, 200),
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@PROFILE
@given(
    lengths=st.lists(st.sampled_from(EDGES), min_size=1, max_size=5),
    programs=st.sampled_from([1, 2, 7, 33]),
    heads=st.sampled_from([(1, 1), (2, 3), (4, 1), (7, 2), (17, 1)]),
    dim=st.sampled_from([18, 64, 80, 128]),
    q_len=st.sampled_from([1, 1, 4]),
    window=st.sampled_from([0, 0, 1, 64, 65]),
    how=st.sampled_from([{}, {"softcap": 30.0}, {"has_sinks": True}]),
    packed=st.sampled_from(["", "rope", "norm"]),
    tile=st.sampled_from([32, 64]),
    seed=st.integers(0, 1000),
)
def test_decode_attention(
    lengths: list[int], heads: tuple[int, int], q_len: int, how: dict[str, Any], packed: str, seed: int, **shape: Any
) -> None:
    group, num_kv_heads = heads
    with sanitized(seed) as sanitizer:
        run_decode(
            [max(n, q_len) if n else 0 for n in lengths],
            group=group,
            num_kv_heads=num_kv_heads,
            q_len=q_len,
            packed=packed if q_len == 1 and takes_packed(shape["dim"], group, torch.float32) else "",
            page=64,
            **how,
            **shape,
        )
    assert sanitizer.findings == []


@PROFILE
@given(
    chunks=st.lists(
        st.sampled_from([(1, 1), (1, 65), (63, 63), (64, 64), (65, 193), (130, 130)]), min_size=1, max_size=3
    ),
    group=st.sampled_from([1, 2, 7]),
    dim=st.sampled_from([18, 64, 128]),
    window=st.sampled_from([0, 1, 65]),
    tile=st.sampled_from([32, 64]),
    block_m=st.sampled_from([64, 128]),
    seed=st.integers(0, 1000),
)
def test_prefill_attention(seed: int, **shape: Any) -> None:
    with sanitized(seed) as sanitizer:
        run_prefill(page=64, **shape)
    assert sanitizer.findings == []


@PROFILE
@given(
    lengths=st.lists(st.sampled_from(EDGES), min_size=1, max_size=4),
    programs=st.sampled_from([1, 2, 7, 33]),
    heads=st.sampled_from([(1, 1), (6, 3), (5, 5)]),
    sizes=st.sampled_from([(12, 8), (48, 16)]),
    seed=st.integers(0, 1000),
)
def test_decode_attention_over_latents(
    lengths: list[int], programs: int, heads: tuple[int, int], sizes: tuple[int, int], seed: int
) -> None:
    (num_heads, group), (rank, rotary) = heads, sizes
    with sanitized(seed) as sanitizer:
        run_latent_decode(
            lengths, programs, num_heads=num_heads, group=group, rank=rank, rotary=rotary, page=64, tile=32
        )
    assert sanitizer.findings == []


@PROFILE
@given(
    chunks=st.lists(st.sampled_from([(1, 1), (1, 65), (63, 63), (64, 64), (65, 193)]), min_size=1, max_size=3),
    num_heads=st.sampled_from([1, 6, 20]),
    sizes=st.sampled_from([(12, 8), (48, 16)]),
    seed=st.integers(0, 1000),
)
def test_prefill_attention_over_latents(
    chunks: list[tuple[int, int]], num_heads: int, sizes: tuple[int, int], seed: int
) -> None:
    rank, rotary = sizes
    with sanitized(seed) as sanitizer:
        run_latent_prefill(chunks, num_heads=num_heads, rank=rank, rotary=rotary, block_m=16, page=64, tile=32)
    assert sanitizer.findings == []


@PROFILE
@given(
    num_rows=st.sampled_from([1, 5, 17, 64]),
    num_outputs=st.sampled_from([16, 33, 40, 70]),
    num_inputs=st.sampled_from([1, 127, 129, 130, 520]),
    what=st.sampled_from([("", ""), ("residual", ""), ("norm bias", ""), ("norm", "silu")]),
    split=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 1000),
)
def test_products(
    num_rows: int, num_outputs: int, num_inputs: int, what: tuple[str, str], split: int, seed: int
) -> None:
    scratch = SplitScratch.empty(torch.device("cpu"))
    scratch.partials.fill_(torch.nan)
    with sanitized(seed) as sanitizer:
        run_product(num_rows, num_outputs, num_inputs, *what, scratch=scratch, split=split)
    assert sanitizer.findings == []
    assert not scratch.counters.any()


@settings(PROFILE, max_examples=examples(8, 30))  # of 262,144 logits, half a minute each in the interpreter
@given(
    vocab_size=st.sampled_from(VOCABULARIES),
    top_k=st.sampled_from([0, 1, 20, 10**6]),
    top_p=st.sampled_from([1e-38, 1e-6, 0.5, 0.9999999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-30, 0.1]),
    kind=st.sampled_from(["plain", "flat", "ties", "one"]),
    seed=st.integers(0, 1000),
)
def test_filters(vocab_size: int, top_k: int, top_p: float, min_p: float, kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    logits = 3 * torch.randn(2, vocab_size)
    if kind == "flat":
        logits = torch.ones(2, vocab_size)
    elif kind == "ties":
        logits = logits.round()
    elif kind == "one":
        logits[:, 1:] = -torch.inf
    state, rows = make_state(3, seed=seed), torch.tensor([2, 0]).int()
    columns = (np.full(2, top_k, np.int32), np.full(2, top_p, np.float32), np.full(2, min_p, np.float32))
    expected, is_clear = on_the_cpu(logits, state, rows, *columns)
    with sanitized(seed) as sanitizer:
        tokens, is_finite = draw_filtered(logits, rows, state, columns)
    assert sanitizer.findings == []
    assert is_finite == [1, 1]
    assert [t for t, clear in zip(tokens, is_clear, strict=True) if clear] == expected[is_clear].tolist()


# Planted mistakes -----------------------------------------------------------------------------------------------------


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, AHEAD: tl.constexpr, IS_MASKED: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if IS_MASKED:
        x = tl.load(x_ptr + i + AHEAD, mask=i + AHEAD < n, other=0.0)
    else:
        x = tl.load(x_ptr + i + AHEAD)
    tl.store(y_ptr + i, x, mask=i < n)


@triton.jit
def sum_kernel(parts_ptr, count_ptr, y_ptr, NUM: tl.constexpr, COUNTS_FIRST: tl.constexpr, COUNTS: tl.constexpr):
    """Every program leaves a number, and the last one adds them up."""
    program = tl.program_id(0)
    arrived = NUM - 1
    if COUNTS_FIRST:
        arrived = tl.atomic_add(count_ptr, 1, sem="acq_rel")
    tl.store(parts_ptr + program, 1.0)
    if COUNTS and not COUNTS_FIRST:
        arrived = tl.atomic_add(count_ptr, 1, sem="acq_rel")
    if arrived == NUM - 1:
        total = tl.load(parts_ptr + tl.arange(0, NUM))
        tl.store(y_ptr + tl.arange(0, 1), tl.sum(total, 0) + tl.zeros([1], tl.float32))


def test_an_honest_copy_is_clean() -> None:
    with sanitized() as sanitizer:
        copy_kernel[(4,)](torch.zeros(61), torch.zeros(61), 61, BLOCK=16, AHEAD=0, IS_MASKED=True)
    assert sanitizer.findings == []


def test_one_behind_the_end_of_a_view_is_found() -> None:
    with sanitized() as sanitizer:
        copy_kernel[(4,)](torch.zeros(256)[:63], torch.zeros(64), 64, BLOCK=16, AHEAD=0, IS_MASKED=False)
    assert sanitizer.findings == ["copy_kernel: 1 addresses of a read are outside of every tensor"]


@pytest.mark.parametrize("seed", range(4))
def test_a_shift_in_place_is_found_in_any_order(seed: int) -> None:
    x = torch.zeros(64)
    with sanitized(seed) as sanitizer:
        copy_kernel[(4,)](x, x, 64, BLOCK=16, AHEAD=1, IS_MASKED=True)
    assert any("are not ordered" in finding for finding in sanitizer.findings)


def test_an_address_between_two_numbers_is_found() -> None:
    bytes_of = torch.zeros(65 * 4 + 2, dtype=torch.uint8)
    x = torch.frombuffer(bytes_of.numpy(), dtype=torch.float32, offset=2, count=64)
    with sanitized() as sanitizer:
        copy_kernel[(4,)](x, torch.zeros(64), 64, BLOCK=16, AHEAD=0, IS_MASKED=True)
    assert "copy_kernel: addresses of a read are no multiples of 4" in sanitizer.findings


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("counts_first", "counts"), [(False, True), (True, True), (False, False)])
def test_the_last_program_to_count_sees_what_was_stored_before(counts_first: bool, counts: bool, seed: int) -> None:
    parts, count, y = torch.zeros(4), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    with sanitized(seed) as sanitizer:
        sum_kernel[(4,)](parts, count, y, NUM=4, COUNTS_FIRST=counts_first, COUNTS=counts)
    is_right = counts and not counts_first
    assert (sanitizer.findings == []) == is_right
    if is_right:
        assert y.item() == 4
