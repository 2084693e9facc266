from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from actorllm_kernels import reference
from actorllm_kernels.float8 import FLOAT8_SCALE, narrowed, widened
from actorllm_kernels.qknorm_rope_kv import qknorm_rope_kv
from tests.effort import each_value
from tests.kernels.closeness import DTYPES, assert_close


def run(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    has_norm: bool,
    by_head: bool = False,
) -> None:
    page = 16
    positions = torch.tensor([0, 5, 31, 2], dtype=torch.int32)
    slots = torch.tensor([3 * page + 1, 0, -1, 2 * page - 1], dtype=torch.int64)
    angles = torch.outer(torch.arange(32.0), 100.0 ** (-torch.arange(dim // 2) / (dim // 2)))
    cos, sin = angles.cos(), angles.sin()
    qkv = torch.randn(4, num_heads + 2 * num_kv_heads, dim).to(dtype)
    norms = (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)) if has_norm else None
    shape = (num_kv_heads, 4, num_heads // num_kv_heads, dim) if by_head else (4, num_heads, dim)
    q = torch.full(shape, torch.nan, dtype=dtype)
    pool = torch.randn(5, 2, num_kv_heads, page, dim).to(dtype)  # keys and values of a block side by side
    keys, values = pool[:, 0], pool[:, 1]
    expected = pool.double()
    qknorm_rope_kv(qkv.view(4, -1), positions, slots, cos, sin, q, keys, values, norms, 1e-6)

    x = qkv.double()
    queries, key_rows, value_rows = x.split((num_heads, num_kv_heads, num_kv_heads), 1)
    weights = [weight.double() for weight in norms] if norms else [None, None]
    c, s, where = cos.double(), sin.double(), positions.long()
    if by_head:
        q = q.transpose(0, 1).reshape(4, num_heads, dim)
    assert_close(q, reference.qknorm_rope(queries, where, c, s, weights[0]), 2)
    reference.write_pages(expected[:, 0], slots, reference.qknorm_rope(key_rows, where, c, s, weights[1]))
    reference.write_pages(expected[:, 1], slots, value_rows)
    assert_close(pool, expected, 2)
    untouched = torch.ones(5, page, dtype=torch.bool)
    for slot in slots[slots >= 0].tolist():
        untouched[slot // page, slot % page] = False
    untouched = untouched[:, None, None, :].expand(5, 2, num_kv_heads, page)
    assert torch.equal(pool.double()[untouched], expected[untouched])


@pytest.mark.parametrize(("has_norm", "dtype"), each_value([False, True], DTYPES))
def test_agrees_with_the_reference(dtype: torch.dtype, has_norm: bool) -> None:
    run(dtype, 4, 2, 64, has_norm)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(1, 1, 80), (5, 1, 96), (7, 1, 128), (8, 8, 256)])
def test_head_sizes_and_groups(num_heads: int, num_kv_heads: int, dim: int) -> None:
    run(torch.float32, num_heads, num_kv_heads, dim, True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_of_floats_of_8_bits_has_the_codes_of_what_another_would_hold(dtype: torch.dtype) -> None:
    page, dim = 16, 64
    positions, slots = torch.tensor([0, 3, 31], dtype=torch.int32), torch.tensor([page + 1, -1, 5])
    qkv = torch.randn(3, 8 * dim).mul_(torch.logspace(-4, 3, 8 * dim)).to(dtype)  # subnormal, and more than 448
    cos, sin = torch.randn(32, dim // 2), torch.randn(32, dim // 2)
    q = torch.zeros(3, 4, dim, dtype=dtype)
    wide, codes = torch.zeros(2, 2, 2, page, dim, dtype=dtype), torch.zeros(2, 2, 2, page, dim, dtype=torch.uint8)
    for pool in (wide, codes):
        qknorm_rope_kv(qkv, positions, slots, cos, sin, q, pool[:, 0], pool[:, 1])
    assert torch.equal(codes, reference.float8_codes(wide))
    assert (reference.float8_numbers(codes).abs() == 448).any()


@triton.jit
def there_and_back(x_ptr, codes_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    codes = narrowed(tl.load(x_ptr + at))
    tl.store(codes_ptr + at, codes)
    tl.store(y_ptr + at, widened(codes, True, tl.float32))


def test_floats_of_8_bits_are_the_nearest() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F]  # NaN
    numbers = reference.float8_numbers(every)
    middles = (numbers[:-1] + numbers[1:]) / 2
    beside = torch.cat([middles.nextafter(torch.tensor(s)) for s in (torch.inf, -torch.inf)])
    beyond = torch.tensor([1e9, torch.inf, -torch.inf, torch.nan, 448.1, -1e30, 1e-30, -0.0])
    given = torch.cat((numbers, middles, beside, beyond))
    x = torch.zeros(2048)
    x[: len(given)] = given
    codes, y = torch.zeros(2048, dtype=torch.uint8), torch.zeros(2048)
    there_and_back[(1,)](x, codes, y, 2048)
    expected = reference.float8_codes(x)
    signless = x.isnan()  # the sign of a NaN is nothing
    assert torch.equal(codes[~signless], expected[~signless])
    assert (codes[signless] & 0x7F == 0x7E).all()
    assert torch.equal(y[~signless] * FLOAT8_SCALE, reference.float8_numbers(expected)[~signless])


def test_queries_head_by_head() -> None:
    run(torch.float32, 6, 2, 64, True, by_head=True)
