"""Products of few rows: our fused kernel against cuBLAS with the same work before and behind it, for the layers of the models.

Weights come from memory, as they do in a model: as many copies take turns as do not fit into the second-level cache. Says up
to how many rows the fused kernel is to be used (MAX_ROWS), and, where it searches, which configuration is the fastest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from actorllm_kernels.configs import trying
from actorllm_kernels.rmsnorm import rmsnorm
from actorllm_kernels.silu_mul import activation_mul
from actorllm_kernels.skinny_gemm import skinny_gemm

from .clock import Bench
from .inputs import bf16
from .models import Shape

ROWS = (1, 2, 4, 8, 16, 32, 64)
CACHE_BYTES = 120 * 2**20
"""More than twice the second-level cache of an H200."""


class Product:
    """One product of a layer with what stands before and behind it, by our kernel and by cuBLAS."""

    def __init__(self, name: str, outputs: int, inputs: int, has_bias: bool, bench: Bench) -> None:
        device, self.name = bench.device, name
        self.is_gated, self.has_norm, self.has_residual = (
            name == "gate_up",
            name in ("qkv", "gate_up"),
            name in ("o", "down"),
        )
        self.outputs, self.inputs = (outputs // 2 if self.is_gated else outputs), inputs
        self.num_bytes = 2 * outputs * inputs
        copies = bench.pick(max(2, -(-CACHE_BYTES // self.num_bytes)), 1)
        self.weights = [bf16(outputs, inputs, device=device, scale=inputs**-0.5) for _ in range(copies)]
        self.norm = bf16(inputs, device=device)
        self.bias = bf16(outputs, device=device) if has_bias and name == "qkv" else None
        self.device, self.pdl = device, bench.pdl

    def calls(self, rows: int) -> tuple[list[Callable[[], None]], list[Callable[[], None]]]:
        """Ours and cuBLAS's, one per copy of the weights."""
        x, y = bf16(rows, self.inputs, device=self.device), bf16(rows, self.outputs, device=self.device)
        normed = torch.empty_like(x)

        def ours(weight: torch.Tensor) -> None:
            skinny_gemm(
                x,
                weight,
                y,
                norm=self.norm if self.has_norm else None,
                bias=self.bias,
                residual=y if self.has_residual else None,
                activation="silu" if self.is_gated else "",
                pdl=self.pdl,
            )

        def theirs(weight: torch.Tensor) -> None:
            given = x
            if self.has_norm:
                rmsnorm(x, self.norm, 1e-6, normed)
                given = normed
            out = F.linear(given, weight, self.bias)
            if self.is_gated:
                activation_mul(out, y)
            elif self.has_residual:
                y.add_(out)

        return [lambda w=w: ours(w) for w in self.weights], [lambda w=w: theirs(w) for w in self.weights]  # type: ignore[misc]


def run(bench: Bench, shapes: list[Shape], bandwidth: float) -> dict[str, Any]:
    rows = []
    for shape in shapes:
        for name, outputs, inputs in shape.linears:
            product = Product(name, outputs, inputs, shape.has_bias, bench)
            for count in bench.pick(ROWS, (1, 3)):
                ours, theirs = (bench.seconds(calls) for calls in product.calls(count))
                rows.append(
                    {
                        "model": shape.name,
                        "product": name,
                        "weight": f"{outputs}x{inputs}",
                        "rows": count,
                        "fused, us": ours * 1e6,
                        "cuBLAS and others, us": theirs * 1e6,
                        "ratio": ours / theirs,
                        "share of bandwidth": product.num_bytes / ours / bandwidth,
                    }
                )
            del product
            bench.empty_cache()
    return {"products": rows, "max_rows": max_rows(rows)}


def width_of(row: dict[str, Any]) -> str:
    """The shape class of the table."""
    outputs = int(row["weight"].split("x")[0]) // (2 if row["product"] == "gate_up" else 1)
    width = "narrow" if outputs < 2048 else "medium" if outputs < 8192 else "wide"
    return f"{width}-gated" if row["product"] == "gate_up" else width


def max_rows(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Up to how many rows the fused kernel is the faster one in every product of its class; 0: never."""
    slower: dict[str, list[int]] = {}
    for row in rows:
        slower.setdefault(width_of(row), []).extend([row["rows"]] if row["ratio"] > 1.02 else [])
    measured = sorted({row["rows"] for row in rows})
    return {
        width: max((count for count in measured if count < min(lost, default=10**9)), default=0)
        for width, lost in slower.items()
    }


def search(bench: Bench, shape: Shape) -> dict[str, Any]:
    """The fastest blocks, warps and stages for each product of a model, at 1 and at 32 rows."""
    rows = []
    for name, outputs, inputs in shape.linears:
        product = Product(name, outputs, inputs, shape.has_bias, bench)
        for count in bench.pick((1, 32), (1,)):
            for block_n, block_k, warps, stages in bench.pick(
                [*itertools.product((16, 32, 64), (128, 256), (4,), (3, 4)), (64, 64, 4, 5), (128, 64, 8, 4)],
                [(16, 32, 4, 2)],
            ):
                config = {"BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": warps, "num_stages": stages}
                try:
                    with trying("skinny_gemm", **config):
                        seconds = bench.seconds(product.calls(count)[0])
                except Exception as problem:  # does not fit: too much shared memory, or too many registers
                    print(f"  {name} {count} {config}: {type(problem).__name__}", flush=True)
                    continue
                rows.append(
                    {
                        "model": shape.name,
                        "product": name,
                        "weight": f"{outputs}x{inputs}",
                        "rows": count,
                        "us": seconds * 1e6,
                        **config,
                    }
                )
        del product
        bench.empty_cache()
    best = {}
    for row in rows:
        key = f"{row['product']} {row['weight']} {row['rows']}"
        if key not in best or row["us"] < best[key]["us"]:
            best[key] = row
    return {"best": list(best.values()), "tried": rows}


def search_all(bench: Bench, shapes: list[Shape]) -> dict[str, Any]:
    """`search` over several models."""
    found = [search(bench, shape) for shape in shapes]
    return {
        "best": [row for one in found for row in one["best"]],
        "tried": [row for one in found for row in one["tried"]],
    }
