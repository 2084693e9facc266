"""What the machine can do: memory bandwidth by size, bfloat16 products, and the cost of one more launch in a graph and outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.launcher import launch

from .clock import Bench


@triton.jit
def read_kernel(x_ptr, y_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Every program reads STEPS blocks and writes one number."""
    first = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(STEPS):
        at = first + step * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < SIZE, other=0.0)
    tl.store(y_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def nothing_kernel(x_ptr, PDL: tl.constexpr):
    """One word read and written by one program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tl.store(x_ptr, tl.load(x_ptr) + 1.0)


def run(bench: Bench) -> dict[str, Any]:
    bandwidth, matmul = [], []
    for megabytes in bench.pick((8, 32, 128, 512, 2048), (1,)):
        bandwidth.append({"MB": megabytes, **rates(bench, megabytes * 2**20 // 4)})
        bench.empty_cache()
    for size in bench.pick((2048, 4096, 8192, 16384), (64,)):
        matmul.append({"M = N = K": size, "TFLOP/s": products_per_s(bench, size) / 1e12})
        bench.empty_cache()

    word, chain = torch.zeros(1, device=bench.device), bench.pick(200, 3)

    def nodes(pdl: bool) -> None:
        options = {"launch_pdl": True} if pdl and not bench.is_check else {}
        for _ in range(chain):
            nothing_kernel[(1,)](word, PDL=pdl and not bench.is_check, **options)

    nodes_us = {
        "us per node": bench.seconds(lambda: nodes(False)) / chain * 1e6,
        "us per dependent node": bench.seconds(lambda: nodes(True)) / chain * 1e6,
    }
    launches_us = {
        "us per launch by Triton": host_seconds(bench, lambda: nothing_kernel[(1,)](word, PDL=False)) * 1e6,
        "us per launch as kept": host_seconds(bench, lambda: launch(nothing_kernel, (1,), (word,), PDL=False)) * 1e6,
    }
    large = [row for row in bandwidth if row["MB"] >= bench.pick(512, 1)]  # less may be in the second-level cache
    return {
        "bandwidth": bandwidth,
        "matmul": matmul,
        "nodes": [nodes_us],
        "launches": [launches_us],
        "read_bytes_per_s": max(row["read, GB/s"] for row in large) * 1e9,
        "flops": max(row["TFLOP/s"] for row in matmul) * 1e12,
    }


def host_seconds(bench: Bench, once: Callable[[], Any]) -> float:
    """Of the host, for one launch outside of a graph: the best of some rounds, each too short to fill the queue of launches."""
    rounds, count = bench.pick((20, 200), (1, 2))
    taken = []
    for _ in range(rounds):
        bench.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            once()
        taken.append((time.perf_counter() - began) / count)
    return min(taken)


def rates(bench: Bench, count: int) -> dict[str, float]:
    """Reading, writing and copying so many float32, bytes/s; a copy counts twice."""
    x, y = (torch.zeros(count, device=bench.device) for _ in range(2))
    block, steps = 4096, 8
    programs = triton.cdiv(count, block * steps)
    sums = torch.zeros(programs, device=bench.device)
    times = {
        "read": bench.seconds(lambda: read_kernel[(programs,)](x, sums, SIZE=count, BLOCK=block, STEPS=steps)),
        "write": bench.seconds(lambda: y.fill_(1.0)),
        "copy": bench.seconds(lambda: y.copy_(x)),
    }
    return {
        f"{what}, GB/s": (2 if what == "copy" else 1) * 4 * count / seconds / 1e9 for what, seconds in times.items()
    }


def products_per_s(bench: Bench, size: int) -> float:
    """FLOP/s of a square product in bfloat16."""
    a, b, c = (torch.randn(size, size, device=bench.device).to(torch.bfloat16) for _ in range(3))
    return 2 * size**3 / bench.seconds(lambda: torch.mm(a, b, out=c))
