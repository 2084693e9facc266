"""Attention over the paged cache: what share of the bandwidth decode reaches, what throughput prefill.

Beside torch's own: SDPA on keys and values that lie in one piece (no pages: easier), and FlexAttention for prefill. Decode is
measured over uniform and skewed batches, and for several numbers of programs per multiprocessor, of which the table of
configurations has one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton

from actorllm_kernels.attn_decode import attn_decode, division
from actorllm_kernels.attn_prefill import attn_prefill, query_tiles, tokens_per_tile
from actorllm_kernels.plan_decode import plan_decode

from .clock import Bench, Call
from .correctness import ATTENTION_TOLERANCE, check_prefill
from .inputs import I32, Paged, bf16
from .search import Case, choose, measure, result

PAGE = 64
HEADS = ((16, 8, 128), (32, 8, 128), (32, 8, 64))
"""Of Qwen3-0.6B, of both 8B models, and of Llama-3.2-1B."""
MAX_BYTES = 12 * 2**30
COLD_BYTES = 200 * 2**20
REGISTERS = 65536
"""Of a multiprocessor, 32 bits each."""


class DecodeCase:
    """One layer's decode attention of a batch, over as many caches in turns as do not fit into the second-level cache."""

    def __init__(self, lens: list[int], shape: tuple[int, int, int], bench: Bench) -> None:
        _, kv_heads, dim = shape
        self.bench, self.shape, self.lens = bench, shape, lens
        self.num_bytes = sum(lens) * bytes_per_token(shape)
        copies = bench.pick(max(1, -(-COLD_BYTES // self.num_bytes)), 1)
        self.caches = [Paged.make(lens, kv_heads, dim, PAGE, bench.device) for _ in range(copies)]

    @property
    def name(self) -> str:
        return f"{'x'.join(map(str, self.shape))}, batch {len(self.lens)}, context {self.lens[0]}"

    def calls(self) -> list[Call]:
        """One call per cache; the plan is made once per step, not per layer."""
        heads, kv_heads, dim = self.shape
        device, count, group = self.bench.device, len(self.lens), heads // kv_heads
        programs, tile = division(device, dim, group)
        programs = self.bench.pick(programs, 3)
        q, pdl = bf16(count, heads, dim, device=device), self.bench.pdl
        out = torch.empty_like(q)
        ends, quota = (torch.zeros(n, dtype=I32, device=device) for n in (count + 1, 1))
        partials, lse = (torch.zeros(2 * programs, group, *extra, device=device) for extra in ((dim,), ()))
        arrivals = torch.zeros(count * kv_heads, dtype=I32, device=device)
        plan_decode(self.caches[0].seq_lens, ends, quota, programs, kv_heads, tile=tile)

        def call(cache: Paged) -> None:
            attn_decode(
                q, cache.keys, cache.values, cache.rows, cache.table, cache.seq_lens, ends, quota, arrivals, out, partials, lse,
                dim**-0.5, programs=programs, tile=tile, pdl=pdl,
            )  # fmt: skip

        return [partial(call, cache) for cache in self.caches]

    def sdpa_seconds(self) -> float:
        """torch's attention on keys and values in one piece, for sequences of one length."""
        heads, kv_heads, dim = self.shape
        shape = (len(self.lens), kv_heads, self.lens[0], dim)
        q = bf16(len(self.lens), heads, 1, dim, device=self.bench.device)

        def call(keys: torch.Tensor, values: torch.Tensor) -> None:
            F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

        pairs = [[bf16(*shape, device=self.bench.device) for _ in range(2)] for _ in self.caches]
        return self.bench.seconds([partial(call, *pair) for pair in pairs])


def bytes_per_token(shape: tuple[int, int, int]) -> int:
    """Keys and values of one token in one layer."""
    return 2 * shape[1] * shape[2] * 2


def shapes(bench: Bench) -> Sequence[tuple[int, int, int]]:
    """Query heads, key-value heads, head size."""
    return bench.pick(HEADS, ((4, 2, 32),))  # type: ignore[no-any-return]


def batches(bench: Bench) -> list[tuple[str, list[int]]]:
    if bench.is_check:
        return [("uniform", [70, 70]), ("skewed", [130, 5])]
    uniform = [
        ("uniform", [context] * batch) for batch in (1, 8, 32, 64, 128, 256) for context in (256, 1024, 4096, 32768)
    ]
    return [*uniform, ("skewed", [65536, *[4096] * 15]), ("skewed", [32768, *[512] * 63])]


def decode(bench: Bench, bandwidth: float) -> dict[str, Any]:
    rows = []
    for shape, (kind, lens) in itertools.product(shapes(bench), batches(bench)):
        if sum(lens) * bytes_per_token(shape) > MAX_BYTES:
            continue
        case = DecodeCase(lens, shape, bench)
        seconds = bench.seconds(case.calls())
        row = {
            "heads": "x".join(map(str, shape)),
            "batch": len(lens),
            "context": f"{kind} {lens[0]}",
            "MB": case.num_bytes / 1e6,
            "us": seconds * 1e6,
            "GB/s": case.num_bytes / seconds / 1e9,
            "share of bandwidth": case.num_bytes / seconds / bandwidth,
        }
        if kind == "uniform":
            row["torch SDPA, us"] = case.sdpa_seconds() * 1e6
        rows.append(row)
        del case
        bench.empty_cache()
    return {"decode": rows}


def search_decode(bench: Bench) -> dict[str, Any]:
    """Programs per multiprocessor, tiles of keys, stages of the pipeline, warps."""
    batches = bench.pick(([1024] * 32, [1024] * 256, [8192] * 8, [1024]), ([70, 3],))
    found = [
        DecodeCase(lens, shape, bench)
        for shape in shapes(bench)
        for lens in batches
        if sum(lens) * bytes_per_token(shape) <= MAX_BYTES
    ]
    cases = [Case(case.name, f"d{triton.next_power_of_2(case.shape[2])}", case.calls, sum(case.lens)) for case in found]
    rows = measure(bench, "attn_decode", cases, decode_candidates(bench))
    names = ("PER_SM", "TILE", "num_warps", "num_stages", "maxnreg")
    return result("attn_decode", rows, choose(rows, names))


def decode_candidates(bench: Bench) -> list[dict[str, int]]:
    """As many registers as let the programs of a multiprocessor be there at once."""
    found = bench.pick(
        itertools.product((1, 2, 3, 4), ((64, 5, 4), (64, 6, 4), (32, 5, 4), (32, 6, 4), (64, 5, 2))),
        [(1, (64, 5, 4)), (2, (32, 5, 4))],
    )
    return [
        {
            "PER_SM": per_sm,
            "TILE": tile,
            "num_stages": stages,
            "num_warps": warps,
            "maxnreg": min(255, REGISTERS // (per_sm * warps * 32) // 8 * 8),
        }
        for per_sm, (tile, stages, warps) in found
    ]


def search_prefill(bench: Bench) -> dict[str, Any]:
    """Tiles of queries and keys, warps, stages."""
    chunks = bench.pick(([(8192, 8192)], [(2048, 16384)], [(512, 512)] * 16), ([(70, 70)],))
    candidates = [
        dict(zip(("BLOCK_M", "TILE", "num_warps", "num_stages"), one, strict=True))
        for one in bench.pick(itertools.product((64, 128), (32, 64), (4, 8), (5, 6)), [(64, 32, 4, 5), (128, 64, 8, 5)])
    ]
    cases = [
        Case(
            f"{'x'.join(map(str, shape))}, {len(some)} x {some[0]}",
            f"d{triton.next_power_of_2(shape[2])}",
            partial(_prefill_calls, some, shape, bench),
        )
        for shape in shapes(bench)
        for some in chunks
    ]
    rows = measure(bench, "attn_prefill", cases, candidates)
    return result("attn_prefill", rows, choose(rows, ("BLOCK_M", "TILE", "num_warps", "num_stages")))


def _prefill_calls(chunks: list[tuple[int, int]], shape: tuple[int, int, int], bench: Bench) -> list[Call]:
    return [prefill_call(chunks, shape, False, bench)[0]]


def prefill_call(
    chunks: list[tuple[int, int]], shape: tuple[int, int, int], by_tma: bool, bench: Bench
) -> tuple[Callable[[], None], float]:
    """A call, and its arithmetic; chunks: new tokens and tokens of the sequence with them."""
    heads, kv_heads, dim = shape
    device, group = bench.device, heads // kv_heads
    counts, lens = (np.array(column, np.int32) for column in zip(*chunks, strict=True))
    cache = Paged.make(lens.tolist(), kv_heads, dim, PAGE, device)
    total = int(counts.sum())
    q = bf16(*((kv_heads, total, group, dim) if by_tma else (total, heads, dim)), device=device)
    out = bf16(total, heads, dim, device=device)
    starts = torch.from_numpy(np.concatenate(([0], counts.cumsum())).astype(np.int32)).to(device)
    tiles = torch.from_numpy(query_tiles(counts, lens, tokens_per_tile(group, dim, device, by_tma))).to(device)

    def call() -> None:
        attn_prefill(
            q, cache.keys, cache.values, cache.rows, cache.table, cache.seq_lens, starts, tiles, out, dim**-0.5
        )  # fmt: skip

    seen = sum(new * (n - new) + new * (new + 1) / 2 for new, n in chunks)
    return call, 4 * heads * dim * seen


def prefill(bench: Bench, peak: float) -> dict[str, Any]:
    """peak: FLOP/s of products of matrices."""
    rows = []
    cases = bench.pick(
        [*([(n, n)] for n in (512, 1024, 2048, 4096, 8192, 16384)), [(2048, 16384)], [(1024, 1024)] * 8],
        [[(70, 70)], [(7, 80)]],
    )
    for shape, chunks in itertools.product(shapes(bench), cases):
        new, length = chunks[0]
        row: dict[str, Any] = {"heads": "x".join(map(str, shape)), "chunks": f"{len(chunks)} x {new} of {length}"}
        call, flops = prefill_call(chunks, shape, False, bench)
        seconds = bench.seconds(call)
        rate = flops / seconds
        row |= {"us": seconds * 1e6, "TFLOP/s": rate / 1e12, "share of the matmul ceiling": rate / peak}
        if new == length:
            row |= _torch(bench, len(chunks), shape, length, flops)
        rows.append(row)
        bench.empty_cache()
    return {"prefill": rows}


def descriptors(bench: Bench) -> dict[str, Any]:
    """The build of prefill attention by descriptors, which the engine does not launch: is it right, and the faster one?"""
    if not bench.is_check and torch.cuda.get_device_capability()[0] != 9:
        return {"descriptors": [], "why": "this build is for GPUs of compute capability 9.0"}
    # Descriptors are made on the device, in memory that Triton asks for.
    triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, device=bench.device, dtype=torch.int8))
    rows = []
    for shape in bench.pick(((32, 8, 128), (32, 8, 64)), ((4, 2, 64),)):
        heads = "x".join(map(str, shape))
        error = attempt(heads, partial(check_prefill, shape, {"by_tma": True}, bench))
        right = error is not None and error <= ATTENTION_TOLERANCE
        for length in bench.pick((2048, 8192), (70,)):
            rate = {by_tma: attempt(heads, partial(_rate, bench, length, shape, by_tma)) for by_tma in (False, True)}
            rows.append(
                {
                    "heads": heads,
                    "length": length,
                    "right": right,
                    "error": error,
                    "TFLOP/s": rate[False],
                    "by descriptors, TFLOP/s": rate[True],
                }
            )
        bench.empty_cache()
    return {"descriptors": rows}


def _rate(bench: Bench, length: int, shape: tuple[int, int, int], by_tma: bool) -> float:
    """TFLOP/s of one prompt."""
    call, flops = prefill_call([(length, length)], shape, by_tma, bench)
    return flops / bench.seconds(call) / 1e12


def _torch(bench: Bench, batch: int, shape: tuple[int, int, int], length: int, flops: float) -> dict[str, Any]:
    """What torch's own reach on queries, keys and values in one piece, as many key as query heads."""
    q, k, v = (bf16(batch, shape[0], length, shape[2], device=bench.device) for _ in range(3))
    sdpa = bench.seconds(partial(F.scaled_dot_product_attention, q, k, v, is_causal=True))
    row: dict[str, Any] = {"torch SDPA, TFLOP/s": flops / sdpa / 1e12}
    if not bench.is_check:  # torch.compile on a CPU takes longer than the whole walk
        row["FlexAttention, TFLOP/s"] = attempt("FlexAttention", lambda: flops / _flex_seconds(bench, q, k, v) / 1e12)
    return row


def _flex_seconds(bench: Bench, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # One length after the other would make it compile for any length, and give up fusing after a few.
    torch._dynamo.reset()
    compiled, length = torch.compile(flex_attention, dynamic=False), q.shape[2]
    mask = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, length, length, device="cuda")
    return bench.seconds(lambda: compiled(q, k, v, block_mask=mask))


def attempt(what: str, measure: Callable[[], float]) -> float | None:
    """None: it does not run here, and why is printed."""
    try:
        return measure()
    except Exception as problem:
        print(f"  {what}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
        return None
