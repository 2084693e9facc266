"""The kernels that nothing else measures alone: how much of the bandwidth those reach that move much, how long the others take.

Where data count, as many copies take turns as do not fit into the second-level cache; what a step has just written, its small
kernels find there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from actorllm_kernels.attn_decode import division
from actorllm_kernels.edit_logits import Edits, Penalties, edit_logits
from actorllm_kernels.embed import embed
from actorllm_kernels.kv_clear import kv_clear
from actorllm_kernels.kv_copy import launch_kv_copy
from actorllm_kernels.plan_decode import plan_decode
from actorllm_kernels.qknorm_rope_kv import qknorm_rope_kv
from actorllm_kernels.rmsnorm import rmsnorm
from actorllm_kernels.sample_pick import Offers, sample_pick
from actorllm_kernels.sample_topk_topp import FilterScratch, FilterState, find_cutoffs, sample_topk_topp, tile_maxima
from actorllm_kernels.silu_mul import activation_mul
from actorllm_kernels.step_prep import step_prep
from actorllm_kernels.top_logprobs import top_logprobs

from .clock import Bench, Call
from .inputs import I32, bf16, state_table
from .search import Case, choose, measure, result

COLD_BYTES = 200 * 2**20
PAGE = 64


@dataclass(frozen=True)
class Small:
    """A kernel at one size. num_bytes: what it must move; None where that is not what takes its time."""

    kernel: str
    case: str
    calls: Sequence[Call]
    num_bytes: int | None = None


def run(bench: Bench, bandwidth: float) -> dict[str, Any]:
    rows = []
    for make in (
        _step_prep,
        _embed,
        _rmsnorm,
        _qknorm,
        _plan,
        _activation,
        _sampling,
        _logits,
        _clear,
        _copy,
    ):
        for small in make(bench):
            seconds = bench.seconds(small.calls)
            row: dict[str, Any] = {"kernel": small.kernel, "case": small.case, "us": seconds * 1e6}
            if small.num_bytes is not None:
                rate = small.num_bytes / seconds
                row |= {"GB/s": rate / 1e9, "share of bandwidth": rate / bandwidth}
            rows.append(row)
        bench.empty_cache()
    return {"small": rows}


def _copies(bench: Bench, num_bytes: int) -> int:
    return bench.pick(max(2, -(-COLD_BYTES // num_bytes)), 1)  # type: ignore[no-any-return]


def _step_prep(bench: Bench) -> Iterator[Small]:
    rows, device = bench.pick(256, 3), bench.device
    slots, last, computed = (torch.zeros(rows, dtype=I32, device=device) for _ in range(3))
    slots.copy_(torch.arange(rows))
    table = torch.zeros(rows, 4096, dtype=I32, device=device)  # every call is a token more
    ids, positions, lens = (torch.zeros(rows, dtype=I32, device=device) for _ in range(3))
    kv_slots = torch.zeros(rows, dtype=torch.int64, device=device)
    call = partial(step_prep, slots, last, computed, table, PAGE, ids, positions, kv_slots, lens, pdl=bench.pdl)
    yield Small("step_prep", f"{rows} rows", [call])


def _embed(bench: Bench) -> Iterator[Small]:
    tokens, size, vocab = bench.pick((8192, 4096, 128256), (3, 32, 50))
    weight = bf16(vocab, size, device=bench.device)

    def call() -> Call:
        ids = torch.randint(0, vocab, (tokens,), dtype=I32).to(bench.device)
        return partial(embed, ids, weight, bf16(tokens, size, device=bench.device), pdl=bench.pdl)

    num_bytes = 4 * tokens * size
    yield Small("embed", f"{tokens} x {size}", [call() for _ in range(_copies(bench, num_bytes))], num_bytes)


def norm_calls(bench: Bench, tokens: int, size: int) -> list[Call]:
    """With the residual added, as in a layer."""
    weight = bf16(size, device=bench.device)

    def call() -> Call:
        x, residual = (bf16(tokens, size, device=bench.device) for _ in range(2))
        return partial(rmsnorm, x, weight, 1e-6, torch.empty_like(x), residual, pdl=bench.pdl)

    return [call() for _ in range(_copies(bench, 8 * tokens * size))]


def _rmsnorm(bench: Bench) -> Iterator[Small]:
    for tokens, size in bench.pick(((256, 4096), (8192, 1024), (8192, 4096)), ((3, 32),)):
        yield Small("rmsnorm", f"{tokens} x {size}", norm_calls(bench, tokens, size), 8 * tokens * size)


def _qknorm(bench: Bench) -> Iterator[Small]:
    heads, kv_heads, dim = shape = bench.pick((32, 8, 128), (4, 2, 32))
    width = (heads + 2 * kv_heads) * dim
    for tokens in bench.pick((32, 8192), (3,)):
        case = f"{tokens} x {'x'.join(map(str, shape))}"
        yield Small("qknorm_rope_kv", case, _qknorm_calls(bench, tokens, shape), 4 * tokens * width)


def _qknorm_calls(bench: Bench, tokens: int, shape: tuple[int, int, int]) -> list[Call]:
    """All tokens are written to the cache, with norms of heads."""
    (heads, kv_heads, dim), device = shape, bench.device
    width = (heads + 2 * kv_heads) * dim
    norms = bf16(dim, device=device), bf16(dim, device=device)
    positions = torch.arange(tokens, dtype=I32, device=device)
    slots = torch.arange(tokens, dtype=torch.int64, device=device)
    angles = torch.rand(tokens, dim // 2, device=device)

    def call() -> Call:
        qkv, q = bf16(tokens, width, device=device), bf16(tokens, heads, dim, device=device)
        pool = bf16(-(-tokens // PAGE), 2, kv_heads, PAGE, dim, device=device)
        keys, values = pool[:, 0], pool[:, 1]
        return partial(
            qknorm_rope_kv, qkv, positions, slots, angles, angles, q, keys, values, norms, pdl=bench.pdl
        )  # fmt: skip

    return [call() for _ in range(_copies(bench, 4 * tokens * width))]


def _plan(bench: Bench) -> Iterator[Small]:
    rows = bench.pick(256, 3)
    lens = torch.full((rows,), 1024, dtype=I32, device=bench.device)
    ends, quota = (torch.zeros(n, dtype=I32, device=bench.device) for n in (rows + 1, 1))
    programs, tile = division(bench.device, 128, 4)
    call = partial(plan_decode, lens, ends, quota, programs, 8, tile=tile, pdl=bench.pdl)
    yield Small("plan_decode", f"{rows} rows", [call])


def _activation(bench: Bench) -> Iterator[Small]:
    for tokens, size in bench.pick(((256, 14336), (8192, 14336)), ((3, 32),)):

        def call(tokens: int = tokens, size: int = size) -> Call:
            x, y = bf16(tokens, 2 * size, device=bench.device), bf16(tokens, size, device=bench.device)
            return partial(activation_mul, x, y, pdl=bench.pdl)

        num_bytes = 6 * tokens * size
        yield Small(
            "activation_mul", f"{tokens} x {size}", [call() for _ in range(_copies(bench, num_bytes))], num_bytes
        )


def _sampling(bench: Bench) -> Iterator[Small]:
    """Logits are in the second-level cache, as they are behind the product that made them."""
    rows, vocab = bench.pick((32, 151936), (2, 600))
    device, case = bench.device, f"{rows} x {vocab}"
    logits, slots = torch.randn(rows, vocab, device=device), torch.arange(rows, dtype=I32, device=device)
    state, offers = state_table(rows, device), Offers.empty(rows, vocab, device)
    scratch = FilterScratch.empty(rows, vocab, device)
    values = ((50, I32), (0.9, torch.float32), (0.05, torch.float32))
    filters = FilterState(*(torch.full((rows,), value, device=device, dtype=kind) for value, kind in values))
    tokens, is_finite, ranks = (torch.zeros(rows, dtype=I32, device=device) for _ in range(3))
    filtered = partial(sample_topk_topp, logits, slots, state, filters, scratch, offers)
    yield Small("sample_topk_topp", case, [filtered])
    alone = FilterState(torch.zeros_like(filters.top_k), filters.top_p, torch.zeros_like(filters.min_p))
    yield Small("find_cutoffs", f"{case}, top_p alone", [partial(find_cutoffs, logits, slots, state, alone, scratch)])
    yield Small("sample_pick", case, [partial(sample_pick, offers, slots, state, tokens, is_finite, pdl=bench.pdl)])
    num_top = bench.pick(20, 3)
    ids = torch.zeros(rows, num_top + 1, dtype=I32, device=device)
    logprobs = torch.zeros(rows, num_top + 1, device=device)

    def reported() -> None:
        tile_maxima(logits, scratch, has_mass=True)
        top_logprobs(logits, tokens, scratch, ids, logprobs, ranks)

    yield Small("top_logprobs", case, [reported])


def _logits(bench: Bench) -> Iterator[Small]:
    rows, vocab, count = bench.pick((32, 151936, 4096), (2, 600, 20))
    device = bench.device
    where = torch.randperm(rows * vocab)[:count]
    columns = (where // vocab).to(I32), (where % vocab).to(I32), torch.zeros(count), torch.ones(count, dtype=I32)
    edits = Edits(*(column.to(device) for column in columns))
    penalties = Penalties(*(torch.full((rows,), value, device=device) for value in (0.1, 0.1, 1.1)))
    call = partial(edit_logits, torch.randn(rows, vocab, device=device), edits, penalties)
    yield Small("edit_logits", f"{rows} x {vocab}", [call])


def _clear(bench: Bench) -> Iterator[Small]:
    """With nothing to clear, as in nearly every step."""
    rows, layers = bench.pick((256, 36), (3, 2))
    pool = torch.zeros(layers, rows, 2, 8, PAGE, bench.pick(128, 4), dtype=torch.bfloat16, device=bench.device)
    slots = torch.arange(rows, dtype=torch.int64, device=bench.device) * PAGE
    is_finite = torch.ones(rows, dtype=I32, device=bench.device)
    yield Small("kv_clear", f"{rows} rows", [partial(kv_clear, pool, slots, is_finite, pdl=bench.pdl)])


def _copy(bench: Bench) -> Iterator[Small]:
    pairs, layers = bench.pick((64, 28), (2, 2))
    pool = bf16(layers, 2 * pairs, 2, 8, PAGE, bench.pick(128, 4), device=bench.device)
    which = torch.randperm(2 * pairs).to(I32).view(pairs, 2).to(bench.device)
    call: Callable[[], None] = partial(launch_kv_copy, pool, which)
    yield Small("kv_copy", f"{pairs} blocks of {layers} layers", [call], 2 * pool.numel())


def search_norm(bench: Bench) -> dict[str, Any]:
    """Warps of the norm."""
    cases = [
        Case(f"{tokens} x {size}", "small" if size <= 2048 else "*", partial(norm_calls, bench, tokens, size))
        for size in bench.pick((1024, 2048, 4096), (32,))
        for tokens in bench.pick((8, 256, 8192), (3,))
    ]
    rows = measure(bench, "rmsnorm", cases, [{"num_warps": warps} for warps in bench.pick((1, 2, 4, 8, 16), (4,))])
    return result("rmsnorm", rows, choose(rows, ("num_warps",)))
