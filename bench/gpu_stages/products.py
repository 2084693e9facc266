"""Products of few rows: our fused kernel against cuBLAS with the same work before and behind it, for the layers of the models.

Weights come from memory, as they do in a model: as many copies take turns as do not fit into the second-level cache. Searches find
which configurations are the fastest: of `gemv`, which takes one row, and of `skinny_gemm`, which takes a few of narrow products.
The latter also says up to how many (MAX_ROWS).
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import torch

from actorllm.model.cuda import ops
from actorllm_kernels import gemv
from actorllm_kernels.configs import trying
from actorllm_kernels.skinny_gemm import NARROW, SplitScratch

from .clock import Bench, Call
from .inputs import bf16
from .models import Shape
from .search import Case, choose, measure, result

ROWS = (1, 2, 4, 8, 16, 32, 64)
CACHE_BYTES = 120 * 2**20
"""More than twice the second-level cache of an H200."""


class Product:
    """One product of a layer with what stands before and behind it, by our kernel and by cuBLAS."""

    def __init__(self, shape: Shape, name: str, outputs: int, inputs: int, bench: Bench) -> None:
        """outputs: rows of the weight."""
        device, self.model, self.name = bench.device, shape.name, name
        self.is_gated, self.has_norm, self.has_residual = (
            name == "gate_up",
            name in ("qkv", "gate_up"),
            name in ("o", "down"),
        )
        self.num_rows, self.inputs = outputs, inputs
        self.outputs = outputs // 2 if self.is_gated else outputs
        self.num_bytes = 2 * outputs * inputs
        copies = bench.pick(max(2, -(-CACHE_BYTES // self.num_bytes)), 1)
        self.weights = [bf16(outputs, inputs, device=device, scale=inputs**-0.5) for _ in range(copies)]
        self.norm = bf16(inputs, device=device).float()
        self.bias = bf16(outputs, device=device) if shape.has_bias and name == "qkv" else None
        self.scratch = SplitScratch.empty(device)
        self.device, self.pdl = device, bench.pdl

    @property
    def label(self) -> str:
        return f"{self.model} {self.name} {self.num_rows}x{self.inputs}"

    @property
    def is_narrow(self) -> bool:
        """Whether `skinny_gemm` may take several rows of it."""
        return self.outputs < NARROW

    def calls(self, rows: int) -> tuple[list[Call], list[Call]]:
        """Ours and cuBLAS's, one per copy of the weights: both as `decoder.ResidualStream` launches them.

        With cuBLAS, what a product adds to the stream is added by the norm behind it.
        """
        x, y = bf16(rows, self.inputs, device=self.device), bf16(rows, self.outputs, device=self.device)
        stream, delta, normed = (torch.zeros_like(x) for _ in range(3))
        packed = bf16(rows, 2 * self.outputs, device=self.device)

        def ours(weight: torch.Tensor) -> None:
            ops.skinny_gemm(
                x,
                weight,
                y,
                norm=self.norm if self.has_norm else None,
                bias=self.bias,
                residual=y if self.has_residual else None,
                activation="silu" if self.is_gated else "",
                scratch=self.scratch,
                pdl=self.pdl,
            )

        def theirs(weight: torch.Tensor) -> None:
            if self.has_residual:
                ops.linear(x, weight, y)
                return
            ops.rmsnorm(delta, self.norm, 1e-6, normed, stream, pdl=self.pdl)
            ops.linear(normed, weight, packed if self.is_gated else y, self.bias)
            if self.is_gated:
                ops.activation_mul(packed, y, pdl=self.pdl)

        return [partial(ours, weight) for weight in self.weights], [partial(theirs, weight) for weight in self.weights]


def run(bench: Bench, shapes: list[Shape], bandwidth: float) -> dict[str, Any]:
    """By the table as it is."""
    rows = []
    for shape in shapes:
        for name, outputs, inputs in shape.linears:
            rows += compare(bench, Product(shape, name, outputs, inputs, bench), bandwidth)
            bench.empty_cache()
    return {"products": rows, "max_rows": max_rows([row for row in rows if row["class"] == "*" and row["rows"] > 1])}


def compare(bench: Bench, product: Product, bandwidth: float) -> list[dict[str, Any]]:
    """A row for every number of rows."""
    rows = []
    for count in bench.pick(ROWS, (1, 3)):
        ours, theirs = (bench.seconds(calls) for calls in product.calls(count))
        rows.append(
            {
                "model": product.model,
                "product": product.name,
                "class": "*" if product.is_narrow else "wide",
                "weight": f"{product.num_rows}x{product.inputs}",
                "rows": count,
                "fused, us": ours * 1e6,
                "cuBLAS and others, us": theirs * 1e6,
                "ratio": ours / theirs,
                "share of bandwidth": product.num_bytes / ours / bandwidth,
            }
        )
    return rows


def max_rows(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Up to how many rows the fused kernel is the faster one in every product of its class; 0: never."""
    slower: dict[str, list[int]] = {}
    for row in rows:
        slower.setdefault(row["class"], []).extend([row["rows"]] if row["ratio"] > 1.02 else [])
    measured = sorted({row["rows"] for row in rows})
    return {
        width: max((count for count in measured if count < min(lost, default=10**9)), default=0)
        for width, lost in slower.items()
    }


def search(bench: Bench, shapes: list[Shape], bandwidth: float) -> dict[str, Any]:
    """Of `skinny_gemm`: blocks, warps and stages; whether weights are asked for ahead, and up to how many rows it is used."""
    products = [product for product in _products(bench, shapes) if product.is_narrow]
    cases = [
        Case(f"{product.label}, {count} rows", "*", partial(_ours, product, count))
        for product in products
        for count in bench.pick((2, 16), (2,))
    ]
    tried = measure(bench, "skinny_gemm", cases, candidates(bench))
    chosen = choose(tried, ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages"))
    by_prefetch: dict[int, list[dict[str, Any]]] = {}
    for ahead in (1, 0):
        for product in products:
            with trying("skinny_gemm", **chosen["*"], PREFETCH=ahead):
                found = compare(bench, product, bandwidth)
            by_prefetch.setdefault(ahead, []).extend(row for row in found if row["rows"] > 1)
    cost = {ahead: sum(math.log(row["ratio"]) for row in rows) for ahead, rows in by_prefetch.items()}
    best = min((1, 0), key=lambda ahead: cost[ahead])
    chosen["*"] |= {"PREFETCH": best, "MAX_ROWS": max_rows(by_prefetch[best]).get("*", 0)}
    return {**result("skinny_gemm", tried, chosen), "with prefetch": by_prefetch[1], "without prefetch": by_prefetch[0]}


def search_one_row(bench: Bench, shapes: list[Shape]) -> dict[str, Any]:
    """Of `gemv`: outputs and columns of a program, warps; by whether all programs are there at once."""
    cases = [
        Case(product.label, gemv.shape_class(product.outputs, product.inputs, bench.device), partial(_ours, product, 1))
        for product in _products(bench, shapes)
    ]
    names = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
    found = bench.pick(
        ((1, 2048, 4), (2, 1024, 4), (2, 2048, 4), (4, 512, 2), (4, 1024, 4), (4, 2048, 8), (8, 1024, 4)), ((2, 64, 4),)
    )
    rows = measure(bench, "gemv", cases, [dict(zip(names, (*one, 1), strict=True)) for one in found])
    return result("gemv", rows, choose(rows, names))


def _products(bench: Bench, shapes: list[Shape]) -> list[Product]:
    return [
        Product(shape, name, outputs, inputs, bench)
        for shape in shapes[: bench.pick(None, 1)]
        for name, outputs, inputs in shape.linears
    ]


def candidates(bench: Bench) -> list[dict[str, int]]:
    found = bench.pick([*itertools.product((16, 32, 64), (128, 256), (1, 2, 4), (3, 4))], [(16, 32, 4, 2)])
    return [dict(zip(("BLOCK_N", "BLOCK_K", "num_warps", "num_stages"), one, strict=True)) for one in found]


def _ours(product: Product, count: int) -> list[Call]:
    return product.calls(count)[0]
