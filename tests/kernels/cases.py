"""Kernels on made-up inputs, held against `reference`; pages, tiles and blocks are small unless a test says otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm_kernels import reference
from actorllm_kernels.attn_decode import attn_decode
from actorllm_kernels.attn_prefill import attn_prefill, query_tiles
from actorllm_kernels.latent_decode import largest_divisor, latent_decode
from actorllm_kernels.latent_prefill import latent_prefill
from actorllm_kernels.plan_decode import plan_decode
from actorllm_kernels.sample_pick import Offers, SamplingState, sample_pick
from actorllm_kernels.sample_topk_topp import FilterScratch, FilterState, sample_topk_topp
from actorllm_kernels.skinny_gemm import SplitScratch, skinny_gemm
from tests.kernels.closeness import DTYPES, assert_close
from tests.kernels.paged import Paged

Columns = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]


def packed_rows(q: torch.Tensor, cache: Paged, has_norm: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """Rows with these queries and some keys and values behind them, and what is to be done with them."""
    (num_rows, _, dim), num_kv_heads = q.shape, cache.keys.shape[1]
    new = torch.randn(num_rows, 2 * num_kv_heads, dim).to(q.dtype)
    angles = torch.outer(
        torch.arange(max(1, int(cache.seq_lens.max()))).float(), 100.0 ** (-torch.arange(dim // 2) / (dim // 2))
    )
    how: dict[str, Any] = {"rope": (angles.cos(), angles.sin())}
    if has_norm:
        how["norms"] = tuple((1 + torch.randn(dim) / 4).to(q.dtype) for _ in range(2))
    return torch.cat((q, new), 1).view(num_rows, -1), how


def check_stored(
    packed: torch.Tensor,
    cache: Paged,
    before: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The new keys and values, and nothing else, are in the cache. Returns the queries that attention should have seen.

    before: keys and values as they were.
    """
    num_kv_heads, page, dim = cache.keys.shape[1:]
    heads = packed.double().view(len(packed), -1, dim)
    positions = (cache.seq_lens.long() - 1).clamp(min=0)
    slots = cache.table[cache.rows.long(), positions // page] * page + positions % page
    slots[cache.seq_lens == 0] = -1
    weights = [None, None] if norms is None else [norm.double() for norm in norms]
    angles = rope[0].double(), rope[1].double()
    queries = reference.qknorm_rope(heads[:, : -2 * num_kv_heads], positions, *angles, weights[0])
    new_keys = reference.qknorm_rope(heads[:, -2 * num_kv_heads : -num_kv_heads], positions, *angles, weights[1])
    for pages, found, new in zip(before, (cache.keys, cache.values), (new_keys, heads[:, -num_kv_heads:]), strict=True):
        expected = pages.double()
        reference.write_pages(expected, slots, new)
        assert_close(found, expected)
        is_new = torch.zeros(len(pages), page, dtype=torch.bool)
        is_new[slots[slots >= 0] // page, slots[slots >= 0] % page] = True
        assert torch.equal(found.transpose(1, 2)[~is_new], pages.transpose(1, 2)[~is_new])
    return queries.to(packed.dtype)


def run_decode(
    seq_lens: list[int],
    programs: int,
    *,
    group: int = 2,
    num_kv_heads: int = 2,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    q_len: int = 1,
    window: int = 0,
    skipped: int = 0,
    softcap: float = 0.0,
    has_sinks: bool = False,
    packed: str = "",
    is_float8: bool = False,
    page: int = 32,
    tile: int = 16,
) -> None:
    """packed: "rope" or "norm", for rows of queries, key and value that are yet to be rotated, or normed and rotated."""
    cache = Paged.make(seq_lens, num_kv_heads, dim, page, dtype, is_float8)
    num_rows, num_heads, scale = len(seq_lens), group * num_kv_heads, dim**-0.5
    q = 2 * torch.randn(num_rows * q_len, num_heads, dim).to(dtype)
    given, how = packed_rows(q, cache, packed == "norm") if packed else (q, {})
    before = torch.stack((cache.keys, cache.values))
    sinks = torch.randn(num_heads) if has_sinks else None
    out = torch.full_like(q, torch.nan)
    ends, quota = torch.zeros(num_rows + 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    arrivals = torch.zeros(num_rows * num_kv_heads, dtype=torch.int32)
    partials = torch.full((2 * programs, q_len * group, dim), torch.nan)
    partial_lse = torch.full((2 * programs, q_len * group), torch.nan)
    plan_decode(cache.seq_lens, ends, quota, programs, num_kv_heads, q_len=q_len, window=window, tile=tile)
    attn_decode(
        given,
        cache.keys,
        cache.values,
        cache.rows,
        cache.table,
        cache.seq_lens,
        ends,
        quota,
        arrivals,
        out,
        partials,
        partial_lse,
        scale,
        window=window,
        skipped=skipped,
        softcap=softcap,
        sinks=sinks,
        programs=programs,
        tile=tile,
        **how,
    )
    assert not arrivals.any(), "the next launch would merge too early"
    if packed:
        q = check_stored(given, cache, before, **how)
    for i, n in enumerate(seq_lens):
        tokens = slice(i * q_len, (i + 1) * q_len)
        if n == 0:
            assert not out[tokens].any()
            continue
        expected = reference.attention(
            q[tokens].double(),
            *cache.sequence(i),
            scale,
            window=window,
            skipped=skipped,
            softcap=softcap,
            sinks=None if sinks is None else sinks.double(),
        )
        assert_close(out[tokens], expected)


def run_prefill(
    chunks: list[tuple[int, int]],
    *,
    group: int = 2,
    num_kv_heads: int = 1,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    skipped: int = 0,
    softcap: float = 0.0,
    has_sinks: bool = False,
    block_m: int = 32,
    by_tma: bool = False,
    is_float8: bool = False,
    page: int = 32,
    tile: int = 16,
) -> None:
    counts, seq_lens = (np.array(column, np.int32) for column in zip(*chunks, strict=True))
    cache = Paged.make(seq_lens.tolist(), num_kv_heads, dim, page, dtype, is_float8)
    num_heads, scale = group * num_kv_heads, dim**-0.5
    q = 2 * torch.randn(int(counts.sum()), num_heads, dim).to(dtype)
    sinks = torch.randn(num_heads) if has_sinks else None
    out = torch.full_like(q, torch.nan)
    starts = np.concatenate(([0], counts.cumsum())).astype(np.int32)
    attn_prefill(
        q.view(len(q), num_kv_heads, group, dim).transpose(0, 1).contiguous() if by_tma else q,
        cache.keys,
        cache.values,
        cache.rows,
        cache.table,
        cache.seq_lens,
        torch.from_numpy(starts),
        torch.from_numpy(query_tiles(counts, seq_lens, block_m // group)),
        out,
        scale,
        window=window,
        skipped=skipped,
        softcap=softcap,
        sinks=sinks,
        block_m=block_m,
        tile=tile,
    )
    for i in range(len(chunks)):
        tokens = slice(starts[i], starts[i + 1])
        expected = reference.attention(
            q[tokens].double(),
            *cache.sequence(i),
            scale,
            window=window,
            skipped=skipped,
            softcap=softcap,
            sinks=None if sinks is None else sinks.double(),
        )
        assert_close(out[tokens], expected)


def run_latent_decode(
    seq_lens: list[int],
    programs: int,
    *,
    num_heads: int = 4,
    group: int = 2,
    rank: int = 48,
    rotary: int = 16,
    skipped: int = 0,
    dtype: torch.dtype = torch.float32,
    page: int = 32,
    tile: int = 16,
) -> None:
    """group: heads of a program; it divides their number."""
    cache = Paged.make(seq_lens, 1, rank + rotary, page, dtype)
    num_rows, num_groups, scale = len(seq_lens), num_heads // group, (rank + rotary) ** -0.5
    q = 2 * torch.randn(num_rows, num_heads, rank + rotary).to(dtype)
    out = torch.full((num_rows, num_heads, rank), torch.nan, dtype=dtype)
    ends, quota = torch.zeros(num_rows + 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    arrivals = torch.zeros(num_rows * num_groups, dtype=torch.int32)
    partials = torch.full((2 * programs, group, rank), torch.nan)
    partial_lse = torch.full((2 * programs, group), torch.nan)
    plan_decode(cache.seq_lens, ends, quota, programs, num_groups, tile=tile)
    latent_decode(
        q,
        cache.keys[:, 0],
        cache.rows,
        cache.table,
        cache.seq_lens,
        ends,
        quota,
        arrivals,
        out,
        partials,
        partial_lse,
        scale,
        skipped=skipped,
        programs=programs,
        tile=tile,
    )
    assert not arrivals.any(), "the next launch would merge too early"
    for i, n in enumerate(seq_lens):
        if n == 0:
            assert not out[i].any()
            continue
        rows, _ = cache.sequence(i)
        query = q[i : i + 1].double()
        assert_close(out[i : i + 1], reference.latent_attention(query, rows[:, 0], rank, scale, skipped=skipped))


def run_latent_prefill(
    chunks: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    rank: int = 48,
    rotary: int = 16,
    skipped: int = 0,
    dtype: torch.dtype = torch.float32,
    block_m: int = 32,
    page: int = 32,
    tile: int = 16,
) -> None:
    counts, seq_lens = (np.array(column, np.int32) for column in zip(*chunks, strict=True))
    cache = Paged.make(seq_lens.tolist(), 1, rank + rotary, page, dtype)
    scale = (rank + rotary) ** -0.5
    q = 2 * torch.randn(int(counts.sum()), num_heads, rank + rotary).to(dtype)
    out = torch.full((len(q), num_heads, rank), torch.nan, dtype=dtype)
    starts = np.concatenate(([0], counts.cumsum())).astype(np.int32)
    tokens_of_program = block_m // largest_divisor(num_heads, block_m)
    latent_prefill(
        q,
        cache.keys[:, 0],
        cache.rows,
        cache.table,
        cache.seq_lens,
        torch.from_numpy(starts),
        torch.from_numpy(query_tiles(counts, seq_lens, tokens_of_program)),
        out,
        scale,
        skipped=skipped,
        block_m=block_m,
        tile=tile,
    )
    for i in range(len(chunks)):
        tokens, (rows, _) = slice(starts[i], starts[i + 1]), cache.sequence(i)
        queries = q[tokens].double()
        assert_close(out[tokens], reference.latent_attention(queries, rows[:, 0], rank, scale, skipped=skipped))


def run_product(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    what: str = "",
    activation: str = "",
    dtype: torch.dtype = DTYPES[0],
    scratch: SplitScratch | None = None,
    split: int | None = None,
) -> torch.Tensor:
    outputs = 2 * num_outputs if activation else num_outputs
    x, weight = (
        torch.randn(num_rows, num_inputs).to(dtype),
        (torch.randn(outputs, num_inputs) / num_inputs**0.5).to(dtype),
    )
    given = {
        "norm": (1 + torch.randn(num_inputs) / 4).to(dtype),
        "bias": torch.randn(outputs).to(dtype),
        "residual": torch.randn(num_rows, num_outputs).to(dtype),
    }
    given = {name: tensor for name, tensor in given.items() if name in what}
    wide = {name: tensor.double() for name, tensor in given.items()}
    expected = reference.fused_linear(x.double(), weight.double(), activation=activation, **wide)
    y = given.get("residual", torch.full((num_rows, num_outputs), torch.nan, dtype=dtype))
    skinny_gemm(x, weight, y, activation=activation, scratch=scratch, split=split, **given)
    assert_close(y, expected)
    return y


def draw_filtered(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: SamplingState,
    columns: Columns,
    *masks: torch.Tensor,
) -> tuple[list[int], list[int]]:
    """Tokens and is_finite. columns: top_k, top_p, min_p by row; masks: as the launcher's, with their rows."""
    num_rows, vocab_size = logits.shape
    by_slot = [torch.zeros(len(state.seed), dtype=kind) for kind in (torch.int32, torch.float32, torch.float32)]
    for column, values in zip(by_slot, columns, strict=True):
        column[rows[rows >= 0].long()] = torch.from_numpy(values)[rows >= 0]
    offers = Offers.empty(num_rows, vocab_size, logits.device)
    scratch = FilterScratch.empty(num_rows, vocab_size, logits.device)
    tokens, is_finite = torch.full((num_rows,), -7, dtype=torch.int32), torch.full((num_rows,), -7, dtype=torch.int32)
    sample_topk_topp(logits, rows, state, FilterState(*by_slot), scratch, offers, *masks)
    sample_pick(offers, rows, state, tokens, is_finite)
    return tokens.tolist(), is_finite.tolist()
