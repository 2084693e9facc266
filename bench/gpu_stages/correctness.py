"""Every kernel as it is compiled for this GPU, in bfloat16, against its reference in float64.

A kernel that is wrong here is wrong for every model, and no figure after this one counts. So only what the engine launches
is here: a build that is yet to show its use has a stage of its own (`attention.descriptors`). Errors are those of bfloat16: a few
units in the last place of the result. Tokens must be those of the CPU's sampler wherever its margin says that there is only
one right choice.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from actorllm.model.sampler import Sampler, SamplingColumns
from actorllm_kernels import reference
from actorllm_kernels.attn_decode import attn_decode, division, takes_packed
from actorllm_kernels.attn_prefill import attn_prefill, query_tiles, tokens_per_tile
from actorllm_kernels.edit_logits import Edits, Penalties, edit_logits
from actorllm_kernels.embed import embed
from actorllm_kernels.kv_clear import kv_clear
from actorllm_kernels.kv_copy import kv_copy
from actorllm_kernels.lm_head_sample import lm_head_sample
from actorllm_kernels.plan_decode import plan_decode
from actorllm_kernels.qknorm_rope_kv import qknorm_rope_kv
from actorllm_kernels.rmsnorm import rmsnorm
from actorllm_kernels.sample_pick import Offers, SamplingState, sample_pick
from actorllm_kernels.sample_topk_topp import FilterScratch, FilterState, sample_topk_topp, tile_maxima
from actorllm_kernels.silu_mul import ACTIVATIONS, activation_mul
from actorllm_kernels.skinny_gemm import SplitScratch, skinny_gemm
from actorllm_kernels.step_prep import step_prep
from actorllm_kernels.top_logprobs import top_logprobs

from . import apart
from .clock import Bench
from .inputs import I32, Paged, bf16, state_table

TOLERANCE = 3e-2
"""Of a bfloat16 result, relative to 1 + its size."""
ATTENTION_TOLERANCE = 5e-2
"""Relative to the root mean square of the row, of which the largest of its values is about five times as much: what attention
gives is small. A key that is left out changes far more (see `Paged.sharpen`)."""
MARGIN = 1e-3
"""Choices that are closer than this may differ: products of bfloat16 are summed in another order."""

COMPILING_S = 240.0
"""What is not compiled by then is compiled by the checks."""

Check = Callable[[Bench], float]


def run(bench: Bench) -> dict[str, Any]:
    if not bench.is_check:
        apart.share_out(compile_share, apart.num_processes(), COMPILING_S, bench)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for name, check, limit in checks(bench):
        error, why = float("nan"), ""
        try:
            error = check(bench)
        except Exception as problem:
            why = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
            traceback.print_exc()
        is_right = error <= limit
        rows.append({"kernel": name, "error": error, "limit": limit, "right": is_right, "problem": why})
        print(f"  {name}: {'ok' if is_right else 'WRONG ' + why} ({error:.2e})", flush=True)
        try:
            bench.synchronize()
        except Exception as problem:  # the GPU is lost: no later check would mean anything
            rows[-1] |= {"right": False, "problem": why or f"{type(problem).__name__}: the GPU was lost in it"}
            break
    wrong = [row["kernel"] for row in rows if not row["right"]]
    return {"checks": rows, "num_wrong": len(wrong), "wrong": f"wrong kernels: {', '.join(wrong)}" if wrong else ""}


def compile_share(first: int, count: int, bench: Bench) -> None:
    """Go through every `count`-th check, so that its kernels are in Triton's cache. What it finds is found again."""
    logging.disable(logging.CRITICAL)
    for _, check, _ in itertools.islice(checks(bench), first, None, count):
        with contextlib.suppress(Exception):
            check(bench)


def checks(bench: Bench) -> Iterator[tuple[str, Check, float]]:
    """Name, what gives the error, and the largest that is right."""
    big = not bench.is_check
    for size in (1024, 4096) if big else (96,):
        yield f"rmsnorm {size}", partial(check_rmsnorm, size), TOLERANCE
    for activation in ACTIVATIONS:
        yield f"activation_mul {activation}", partial(check_activation, activation), TOLERANCE
    heads_of_qk = ((16, 8, 128, True), (32, 8, 64, False), (12, 2, 80, True)) if big else ((4, 2, 32, True),)
    for heads, kv_heads, dim, has_norm in heads_of_qk:
        name = f"qknorm_rope_kv {heads}x{kv_heads}x{dim}"
        yield name, partial(check_qknorm, heads, kv_heads, dim, has_norm), TOLERANCE
    yield "embed", check_embed, 0.0
    yield "kv_copy", check_kv_copy, 0.0
    yield "kv_clear", check_kv_clear, 0.0
    yield "step_prep", check_step_prep, 0.0
    page = 64
    lens = (0, 1, page - 1, page, page + 1, 700, 3001, 33, 12) if big else (0, 1, page + 1)
    for shape, q_len, what in variants(bench):
        name = " ".join(["x".join(map(str, shape)), *([f"q_len {q_len}"] if q_len > 1 else []), *what])
        some = tuple(n for n in lens if n == 0 or n >= q_len)
        yield f"attn_decode {name}", partial(check_decode, shape, some, q_len, what), ATTENTION_TOLERANCE
        if q_len == 1 and not what.get("packed"):
            yield f"attn_prefill {name}", partial(check_prefill, shape, what), ATTENTION_TOLERANCE
    if big:
        yield (
            "attn_decode in a large pool",
            partial(check_decode, (32, 8, 128), (700, 3001), 1, LARGE),
            ATTENTION_TOLERANCE,
        )
        yield "attn_prefill in a large pool", partial(check_prefill, (32, 8, 128), LARGE), ATTENTION_TOLERANCE
    for rows, outputs, inputs, what in products(bench):
        name = f"skinny_gemm {rows} {outputs}x{inputs} {what}".rstrip()
        yield name, partial(check_gemm, rows, outputs, inputs, what), TOLERANCE
    vocab, size = (151936, 1024) if big else (600, 64)
    for rows in (1, 16, 33, 64) if big else (3,):
        yield f"lm_head_sample {rows}", partial(check_head, rows, vocab, size), 0.0
    for has_masks in (False, True):
        name = "sample_topk_topp with masks" if has_masks else "sample_topk_topp"
        yield name, partial(check_filters, 32 if big else 3, vocab, has_masks), 0.0
    yield "edit_logits", partial(check_edits, vocab), 1e-5
    yield "top_logprobs", partial(check_logprobs, vocab), 1e-4


LARGE = {"first_block": 17000}
"""Blocks that lie behind the first 2^31 elements of a pool of 8 x 128."""

Variant = tuple[tuple[int, int, int], int, dict[str, Any]]


def variants(bench: Bench) -> list[Variant]:
    """Of attention: heads, key-value heads and head size; new tokens per sequence; what else."""
    if bench.is_check:
        window = {"window": 20, "has_sinks": True}
        return [
            ((4, 2, 32), 1, {}),
            ((4, 2, 32), 1, {"packed": True}),
            ((4, 2, 32), 1, window),
            ((4, 2, 32), 4, window),
            ((18, 1, 32), 1, {}),
        ]
    plain = (
        (16, 8, 128), (32, 8, 128), (32, 8, 64), (12, 2, 128), (28, 4, 128), (32, 8, 80), (32, 8, 96), (8, 4, 256), (6, 2, 32),
        (48, 1, 128), (40, 2, 64), (24, 1, 256), (20, 1, 32),
    )  # fmt: skip
    return [
        *((shape, 1, {}) for shape in plain),
        *(
            (shape, 1, {"packed": True})
            for shape in plain
            if takes_packed(shape[2], shape[0] // shape[1], torch.bfloat16)
        ),
        ((32, 8, 128), 1, {"window": 300}),
        ((8, 4, 256), 1, {"window": 300, "softcap": 50.0}),
        ((64, 8, 64), 1, {"window": 128, "has_sinks": True}),
        ((32, 8, 128), 2, {}),
        ((32, 8, 128), 4, {"window": 300}),
        ((64, 8, 64), 3, {"window": 65, "has_sinks": True}),
        ((28, 4, 128), 4, {"softcap": 50.0}),
    ]


def products(bench: Bench) -> Iterator[tuple[int, int, int, str]]:
    """Rows, outputs, inputs and what is fused, for `skinny_gemm`."""
    if bench.is_check:
        yield from ((2, 48, 96, "norm residual"), (3, 32, 64, "norm bias silu"), (2, 32, 64, "bias gelu_tanh"))
        return
    yield from (
        (1, 4096, 1024, "norm"),
        (16, 1024, 3072, "residual"),
        (16, 2048, 1536, "norm bias"),
        (32, 6144, 4096, "norm residual"),
        (33, 8960, 1536, "bias"),
        (64, 14336, 4096, "norm silu"),
        (7, 1536, 8960, "norm bias gelu"),
        (5, 3072, 1024, "norm gelu_tanh"),
    )


def off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, relative to 1 + the value; NaN counts as infinite."""
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    error = ((actual - expected).abs() / (1 + expected.abs())).nan_to_num(nan=float("inf"))
    return float(error.max()) if error.numel() else 0.0


def off_by_row(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, relative to the root mean square of its row; NaN counts as infinite."""
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    size = expected.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-3)
    error = ((actual - expected).abs() / size).nan_to_num(nan=float("inf"))
    return float(error.max()) if error.numel() else 0.0


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().double()


def check_rmsnorm(size: int, bench: Bench) -> float:
    x, residual = (bf16(33 if not bench.is_check else 3, size, device=bench.device) for _ in range(2))
    weight = (1 + bf16(size, device=bench.device) / 4).to(torch.bfloat16)
    total = wide((x.float() + residual.float()).to(torch.bfloat16))
    y = torch.empty_like(x)
    rmsnorm(x, weight, 1e-6, y, residual)
    return max(off(residual, total), off(y, reference.rmsnorm(total, wide(weight), 1e-6)))


def check_activation(activation: str, bench: Bench) -> float:
    x = bf16(33 if not bench.is_check else 2, 2 * bench.pick(3072, 80), device=bench.device, scale=3)
    y = torch.empty(len(x), x.shape[1] // 2, dtype=x.dtype, device=bench.device)
    activation_mul(x, y, activation)
    return off(y, reference.activation_mul(wide(x), activation))


def check_qknorm(heads: int, kv_heads: int, dim: int, has_norm: bool, bench: Bench) -> float:
    count, page, worst = bench.pick(40, 4), 64, 0.0
    positions = torch.randint(0, 1000, (count,), dtype=I32)
    slots = torch.randperm(4 * page)[:count]
    slots[1] = -1
    angles = torch.outer(torch.arange(1000.0), 10000.0 ** (-torch.arange(dim // 2) / (dim // 2)))
    cos, sin = angles.cos(), angles.sin()
    device = bench.device
    qkv = bf16(count, (heads + 2 * kv_heads) * dim, device=device)
    norms = tuple((1 + bf16(dim, device=device) / 4).to(torch.bfloat16) for _ in range(2)) if has_norm else None
    q = torch.empty(count, heads, dim, dtype=torch.bfloat16, device=device)
    pool = bf16(4, 2, kv_heads, page, dim, device=device)
    expected = wide(pool)
    qknorm_rope_kv(
        qkv,
        positions.to(device),
        slots.to(device),
        cos.to(device),
        sin.to(device),
        q,
        pool[:, 0],
        pool[:, 1],
        norms,
        1e-6,
    )
    queries, keys, values = wide(qkv).view(count, -1, dim).split((heads, kv_heads, kv_heads), 1)
    weights = [wide(norm) for norm in norms] if norms else [None, None]
    where, c, s = positions.long(), cos.double(), sin.double()
    worst = off(q, reference.qknorm_rope(queries, where, c, s, weights[0]))
    reference.write_pages(expected[:, 0], slots, reference.qknorm_rope(keys, where, c, s, weights[1]))
    reference.write_pages(expected[:, 1], slots, values)
    return max(worst, off(pool, expected))


def check_embed(bench: Bench) -> float:
    weight, ids = bf16(500, bench.pick(4096, 80), device=bench.device), torch.tensor([499, 0, -1, 500, 3], dtype=I32)
    y = torch.empty(5, weight.shape[1], dtype=weight.dtype, device=bench.device)
    embed(ids.to(bench.device), weight, y)
    return off(y, reference.embed(ids.long(), wide(weight)))


def check_kv_copy(bench: Bench) -> float:
    pool = bf16(2, 9, 2, 8, 64, 128 if not bench.is_check else 4, device=bench.device)
    expected = reference.copy_pages(pool.cpu(), [1, 8, 1], [0, 2, 7])
    kv_copy(pool, np.array([1, 8, 1], np.int32), np.array([0, 2, 7], np.int32))
    return off(pool, expected)


def check_kv_clear(bench: Bench) -> float:
    layers, heads, dim = bench.pick((28, 8, 128), (2, 2, 4))
    pool = bf16(layers, 9, 2, heads, 64, dim, device=bench.device)
    slots, is_finite = [3, 64, 127, -1, 500, 9], [True, False, False, False, False, True]
    expected = reference.clear_pages(pool.cpu(), slots, is_finite)
    kv_clear(pool, torch.tensor(slots).to(bench.device), torch.tensor(is_finite, dtype=I32).to(bench.device))
    return off(pool, expected)


def check_step_prep(bench: Bench) -> float:
    count, page = bench.pick(256, 9), 64
    last, computed = torch.randint(0, 1000, (count,), dtype=I32), torch.randint(0, 300, (count,), dtype=I32)
    table, rows = torch.randperm(count * 6).to(I32).view(count, 6), torch.randperm(count).to(I32)
    rows[0] = -1
    lists = last.tolist(), computed.tolist(), table.tolist()
    expected = [reference.step_prep(slot, *lists, page) for slot in rows.tolist()]
    device = bench.device
    ids, positions, lens = (torch.zeros(count, dtype=I32, device=device) for _ in range(3))
    kv_slots = torch.zeros(count, dtype=torch.int64, device=device)
    step_prep(
        rows.to(device), last.to(device), computed.to(device), table.to(device), page, ids, positions, kv_slots, lens
    )
    columns = zip(ids.tolist(), positions.tolist(), kv_slots.tolist(), lens.tolist(), strict=True)
    return float(sum(reference.StepRow(*row) != want for row, want in zip(columns, expected, strict=True)))


@dataclass(frozen=True)
class Packed:
    """Rows of queries, key and value as a product leaves them, for the last token of every sequence of a cache."""

    rows: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor]
    norms: tuple[torch.Tensor, torch.Tensor]
    queries: torch.Tensor
    """As attention is to see them."""
    new: torch.Tensor
    """float64 [num_rows, 2, num_kv_heads, head_dim]: the keys and values that are to be stored."""

    @classmethod
    def behind(cls, q: torch.Tensor, cache: Paged) -> Packed:
        """With these queries, and random keys and values."""
        (count, heads, dim), kv_heads, device = q.shape, cache.keys.shape[1], q.device
        rows = torch.cat((q, bf16(count, 2 * kv_heads, dim, device=device)), 1)
        angles = torch.outer(torch.arange(4096.0), 10000.0 ** (-torch.arange(dim // 2) / (dim // 2)))
        cos, sin = angles.cos(), angles.sin()
        norm_q, norm_k = ((1 + bf16(dim, device=device) / 4).to(torch.bfloat16) for _ in range(2))
        queries, keys, values = wide(rows).split((heads, kv_heads, kv_heads), 1)
        where = (cache.seq_lens.cpu().long() - 1).clamp(min=0)
        queries = reference.qknorm_rope(queries, where, cos.double(), sin.double(), wide(norm_q))
        keys = reference.qknorm_rope(keys, where, cos.double(), sin.double(), wide(norm_k))
        return cls(
            rows.flatten(1),
            (cos.to(device), sin.to(device)),
            (norm_q, norm_k),
            queries.to(torch.bfloat16),
            torch.stack((keys, values), 1),
        )

    def off(self, cache: Paged) -> float:
        """The largest error of what was stored."""
        worst = 0.0
        for i, n in enumerate(cache.seq_lens.tolist()):
            if n:
                stored = torch.stack([wide(part)[-1] for part in cache.sequence(i)])
                worst = max(worst, off_by_row(stored, self.new[i]))
        return worst


def check_decode(
    shape: tuple[int, int, int], lens: tuple[int, ...], q_len: int, what: dict[str, Any], bench: Bench
) -> float:
    heads, kv_heads, dim = shape
    device, group = bench.device, heads // kv_heads
    window, softcap = what.get("window", 0), what.get("softcap", 0.0)
    cache = Paged.make(lens, kv_heads, dim, 64, device, first_block=what.get("first_block", 0)).sharpen(window)
    programs, tile = division(device, dim, q_len * group)
    programs = bench.pick(programs, 3)
    sinks = bf16(heads, device=device) if what.get("has_sinks") else None
    q = bf16(len(lens) * q_len, heads, dim, device=device, scale=2)
    out = torch.full_like(q, float("nan"))
    ends, quota = (torch.zeros(n, dtype=I32, device=device) for n in (len(lens) + 1, 1))
    partials, lse = (torch.zeros(2 * programs, q_len * group, *extra, device=device) for extra in ((dim,), ()))
    packed = Packed.behind(q, cache) if what.get("packed") else None
    arrivals = torch.zeros(len(lens) * kv_heads, dtype=I32, device=device)
    plan_decode(cache.seq_lens, ends, quota, programs, kv_heads, tile=tile, q_len=q_len, window=window)
    attn_decode(
        q if packed is None else packed.rows,
        cache.keys, cache.values, cache.rows, cache.table, cache.seq_lens, ends, quota, arrivals, out, partials, lse, dim**-0.5,
        window=window, softcap=softcap, sinks=sinks, programs=programs, tile=tile,
        **({} if packed is None else {"rope": packed.rope, "norms": packed.norms}),
    )  # fmt: skip
    worst = 0.0
    if packed is not None:
        q, worst = packed.queries, packed.off(cache)
    for i, n in enumerate(lens):
        tokens = slice(i * q_len, (i + 1) * q_len)
        expected = torch.zeros(q_len, heads, dim)
        if n:
            keys, values = (wide(x) for x in cache.sequence(i))
            far = None if sinks is None else wide(sinks)
            expected = reference.attention(
                wide(q[tokens]), keys, values, dim**-0.5, window=window, softcap=softcap, sinks=far
            )
        worst = max(worst, off_by_row(out[tokens], expected))
    return worst


def check_prefill(shape: tuple[int, int, int], what: dict[str, Any], bench: Bench) -> float:
    heads, kv_heads, dim = shape
    device, group, by_tma = bench.device, heads // kv_heads, what.get("by_tma", False)
    chunks = ((1, 1), (130, 130), (300, 1000), (7, 71), (40, 41)) if not bench.is_check else ((5, 5), (7, 71))
    counts, lens = (np.array(column, np.int32) for column in zip(*chunks, strict=True))
    window, softcap = what.get("window", 0), what.get("softcap", 0.0)
    cache = Paged.make(lens.tolist(), kv_heads, dim, 64, device, first_block=what.get("first_block", 0)).sharpen(window)
    sinks = bf16(heads, device=device) if what.get("has_sinks") else None
    q = bf16(int(counts.sum()), heads, dim, device=device, scale=2)
    out = torch.full_like(q, float("nan"))
    starts = np.concatenate(([0], counts.cumsum())).astype(np.int32)
    tiles = query_tiles(counts, lens, tokens_per_tile(group, dim, device, by_tma))
    given = q.view(len(q), kv_heads, group, dim).transpose(0, 1).contiguous() if by_tma else q
    attn_prefill(
        given, cache.keys, cache.values, cache.rows, cache.table, cache.seq_lens, torch.from_numpy(starts).to(device),
        torch.from_numpy(tiles).to(device), out, dim**-0.5, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    worst = 0.0
    for i in range(len(chunks)):
        tokens = slice(starts[i], starts[i + 1])
        keys, values = (wide(x) for x in cache.sequence(i))
        far = None if sinks is None else wide(sinks)
        expected = reference.attention(
            wide(q[tokens]), keys, values, dim**-0.5, window=window, softcap=softcap, sinks=far
        )
        worst = max(worst, off_by_row(out[tokens], expected))
    return worst


def check_gemm(rows: int, outputs: int, inputs: int, what: str, bench: Bench) -> float:
    """what: norm, bias, residual, or an activation; those that are fused."""
    device, parts = bench.device, what.split()
    activation = next((part for part in parts if part in ACTIVATIONS), "")
    x, y = bf16(rows, inputs, device=device), bf16(rows, outputs, device=device)
    num_rows = outputs * (2 if activation else 1)
    weight = bf16(num_rows, inputs, device=device, scale=inputs**-0.5)
    given = {
        "norm": 1 + bf16(inputs, device=device).float() / 4,
        "bias": bf16(num_rows, device=device),
        "residual": y,
    }
    given = {name: tensor for name, tensor in given.items() if name in parts}
    fused = {name: wide(tensor) for name, tensor in given.items()}
    expected = reference.fused_linear(wide(x), wide(weight), **fused, activation=activation)
    skinny_gemm(x, weight, y, **given, activation=activation, scratch=SplitScratch.empty(device))
    return off(y, expected)


def check_head(rows: int, vocab: int, size: int, bench: Bench) -> float:
    """How many tokens are not the CPU's although it is clear which is right; and rows that are said not to be finite."""
    device = bench.device
    x, weight = bf16(rows, size, device=device), bf16(vocab, size, device=device, scale=3 * size**-0.5)
    norm = (1 + bf16(size, device=device) / 4).to(torch.bfloat16)
    state, slots = state_table(rows + 5, device, num_greedy=2), torch.randperm(rows + 5)[:rows].to(I32)
    scaled = (x.float() * norm.float()).to(torch.bfloat16).double()
    logits = scaled @ weight.double().T * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-6)
    expected, is_clear = on_the_cpu(logits.cpu(), state, slots)
    tokens, is_finite = (torch.zeros(rows, dtype=I32, device=device) for _ in range(2))
    offers = Offers.empty(rows, vocab, device)
    lm_head_sample(x, weight, slots.to(device), state, offers, norm=norm)
    sample_pick(offers, slots.to(device), state, tokens, is_finite)
    return float(((tokens.cpu().numpy() != expected) & is_clear).sum() + (is_finite == 0).sum().item())


def on_the_cpu(
    logits: torch.Tensor, state: SamplingState, slots: torch.Tensor, filters: FilterState | None = None
) -> tuple[Any, Any]:
    """Tokens, and where the margin is large enough for them to be the only right ones."""
    at, count = slots.long(), len(slots)
    column = {
        name: getattr(state, name).cpu()[at].numpy() for name in ("temperature", "seed", "sample_index", "token_index")
    }
    columns = SamplingColumns(
        temperature=column["temperature"],
        top_k=np.zeros(count, np.int32) if filters is None else filters.top_k.cpu()[at].numpy(),
        top_p=np.ones(count, np.float32) if filters is None else filters.top_p.cpu()[at].numpy(),
        min_p=np.zeros(count, np.float32) if filters is None else filters.min_p.cpu()[at].numpy(),
        seeds=column["seed"].view(np.uint64),
        sample_index=column["sample_index"],
        token_index=column["token_index"],
    )
    tokens, margins = Sampler(logits.shape[1]).sample_with_margin(logits.float(), columns)
    return tokens, margins > MARGIN


def check_filters(rows: int, vocab: int, has_masks: bool, bench: Bench) -> float:
    """has_masks: two of three rows may choose only what a bit mask allows."""
    device = bench.device
    logits = torch.randn(rows, vocab, device=device) * 3
    masks = mask_rows = None
    allowed = torch.ones(rows, vocab, dtype=torch.bool)
    if has_masks:
        bits = torch.rand(2, -(-vocab // 32), 32) < 0.3
        masks = torch.from_numpy(np.packbits(bits.numpy(), axis=-1, bitorder="little").view(np.int32)[..., 0].copy())
        mask_rows = torch.arange(rows, dtype=I32) % 3 - 1
        for i, mask in enumerate(mask_rows.tolist()):
            if mask >= 0:
                allowed[i] = bits[mask].flatten()[:vocab]
        masks, mask_rows = masks.to(device), mask_rows.to(device)
    state, slots = state_table(rows, device, num_greedy=1), torch.randperm(rows).to(I32)
    filters = FilterState(
        torch.randint(0, 50, (rows,), dtype=I32).to(device),
        (0.5 + torch.rand(rows) / 2).to(device),
        (torch.rand(rows) / 100).to(device),
    )
    expected, is_clear = on_the_cpu(logits.cpu().masked_fill(~allowed, -torch.inf), state, slots, filters)
    offers, scratch = Offers.empty(rows, vocab, device), FilterScratch.empty(rows, vocab, device)
    tokens, is_finite = (torch.zeros(rows, dtype=I32, device=device) for _ in range(2))
    sample_topk_topp(logits, slots.to(device), state, filters, scratch, offers, masks, mask_rows)
    sample_pick(offers, slots.to(device), state, tokens, is_finite)
    return float(((tokens.cpu().numpy() != expected) & is_clear).sum() + (is_finite == 0).sum().item())


def check_edits(vocab: int, bench: Bench) -> float:
    rows, count = 4, bench.pick(500, 20)
    logits = torch.randn(rows, vocab)
    where = torch.randperm(rows * vocab)[:count]
    row, id = (where // vocab).to(I32), (where % vocab).to(I32)
    bias, times = torch.randn(count), torch.randint(-1, 4, (count,), dtype=I32)
    presence, frequency, repetition = (torch.rand(rows) + extra for extra in (0, 0, 1))
    expected = logits.double()
    for j in range(count):
        i, k = int(row[j]), int(id[j])
        penalties = (float(presence[i]), float(frequency[i]), float(repetition[i]))
        expected[i, k] = reference.edit_logit(float(logits[i, k]), float(bias[j]), int(times[j]), *penalties)
    device = bench.device
    on_device = logits.to(device)
    edits = Edits(*(column.to(device) for column in (row, id, bias, times)))
    edit_logits(on_device, edits, Penalties(*(column.to(device) for column in (presence, frequency, repetition))))
    return off(on_device, expected)


def check_logprobs(vocab: int, bench: Bench) -> float:
    rows, num_top = bench.pick(32, 2), bench.pick(20, 3)
    device = bench.device
    logits, tokens = torch.randn(rows, vocab, device=device), torch.randint(0, vocab, (rows,), dtype=I32).to(device)
    scratch = FilterScratch.empty(rows, vocab, device)
    ids = torch.zeros(rows, num_top + 1, dtype=I32, device=device)
    logprobs, ranks = torch.zeros(rows, num_top + 1, device=device), torch.zeros(rows, dtype=I32, device=device)
    tile_maxima(logits, scratch, has_mass=True)
    top_logprobs(logits, tokens, scratch, ids, logprobs, ranks)
    worst = 0.0
    for i in range(rows):
        want_ids, want, rank = reference.top_logprobs(logits[i].cpu().double(), int(tokens[i]), num_top)
        if ids[i].tolist() != want_ids or int(ranks[i]) != rank:
            return float("inf")
        worst = max(worst, off(logprobs[i], want))
    return worst
