"""What is wanted of an H200, figure by figure, and what was measured.

Targets of steps and prompts are those that predictions are held against, too; those of single kernels are what they are
built for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .prediction import WANTED

CHIP = "H200"


@dataclass(frozen=True)
class Figure:
    """One number among the results: a column of the row of a table that has these values."""

    stage: str
    table: str
    column: str
    row: Mapping[str, Any]

    def of(self, results: dict[str, dict[str, Any]]) -> float | None:
        """None: it has not been measured."""
        for row in results.get(self.stage, {}).get(self.table, []):
            if all(row.get(name) == value for name, value in self.row.items()):
                value = row.get(self.column)
                return None if value is None else float(value)
        return None


@dataclass(frozen=True)
class Target:
    """At least, or at most, so much."""

    what: str
    figure: Figure
    at_least: float | None = None
    at_most: float | None = None

    def verdict(self, results: dict[str, dict[str, Any]], chip: str) -> dict[str, Any]:
        value, met = self.figure.of(results), None
        if value is not None:
            met = value >= self.at_least if self.at_least is not None else value <= (self.at_most or 0.0)
        wanted = f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"
        return {"figure": self.what, "measured": value, "target": wanted, "met": met if CHIP in chip else "—"}


def _step(model: str, batch: int, **limits: float) -> Target:
    column, unit = ("step, ms", "ms") if "at_most" in limits else ("share", "share of the limit")
    figure = Figure("steps", "steps", column, {"model": model, "batch": batch})
    return Target(f"decode step of {model}, batch {batch}, {unit}", figure, **limits)


def _small(kernel: str, case: str, column: str, **limits: float) -> Target:
    return Target(
        f"{kernel}, {case}, {column}", Figure("small", "small", column, {"kernel": kernel, "case": case}), **limits
    )


def _capability(case: str, batch: int, at_most: float) -> Target:
    figure = Figure("capabilities", "capability steps", "ratio", {"case": case, "batch": batch})
    return Target(f"{case}, decode step at batch {batch}, by that of the dense model", figure, at_most=at_most)


PROMPT = {"heads": "32x8x128", "chunks": "1 x 8192 of 8192"}
SHARE = "share of bandwidth"

TARGETS = (
    *(
        _step(one.model, one.size, at_least=one.at_least)
        for one in WANTED
        if one.machine == CHIP and one.what == "steps" and one.at_least is not None
    ),
    Target("prefill attention at 8k, TFLOP/s", Figure("prefill", "prefill", "TFLOP/s", PROMPT), at_least=400),
    *(
        Target(
            f"whole prompt of {one.model}, share of the matmul ceiling",
            Figure("prompts", "whole prompts", "share of the matmul ceiling", {"model": one.model, "tokens": one.size}),
            at_least=one.at_least,
        )
        for one in WANTED
        if one.machine == CHIP and one.what == "prompts"
    ),
    Target(
        "idle between steps of Qwen3-0.6B, batch 1, share",
        Figure("idle", "idle", "share", {"model": "Qwen3-0.6B", "batch": 1}),
        at_most=0.1,
    ),
    Target(
        "idle between steps of Llama-3.1-8B, batch 256, share",
        Figure("idle", "idle", "share", {"model": "Llama-3.1-8B", "batch": 256}),
        at_most=0.02,
    ),
    *(
        Target(
            f"offline throughput of Qwen3-0.6B, output tokens/s{aim}",
            Figure("offline", "offline", "output tokens/s", {"model": "Qwen3-0.6B", "way": "as it is"}),
            at_least=rate,
        )
        for rate, aim in ((22000, ""), (28600, ", further on"))
    ),
    _small("step_prep", "256 rows", "us", at_most=3),
    _small("plan_decode", "256 rows", "us", at_most=3),
    _small("sample_topk_topp", "32 x 151936", "us", at_most=25),
    _small("rmsnorm", "8192 x 4096", SHARE, at_least=0.85),
    _small("qknorm_rope_kv", "8192 x 32x8x128", SHARE, at_least=0.8),
    _small("activation_mul", "8192 x 14336", SHARE, at_least=0.85),
    _small("kv_copy", "64 blocks of 28 layers", SHARE, at_least=0.85),
    Target(
        "decode attention, batch 32 of 4096, share of bandwidth",
        Figure("decode", "decode", SHARE, {"heads": "32x8x128", "batch": 32, "context": "uniform 4096"}),
        at_least=0.85,
    ),
    Target(
        "LM head and draw of Qwen3-0.6B, 1 row, share of bandwidth",
        Figure("head", "head", SHARE, {"model": "Qwen3-0.6B", "rows": 1}),
        at_least=0.88,
    ),
    _capability("experts (Qwen3-MoE)", 1, at_most=1.3),
)


def verdicts(results: dict[str, dict[str, Any]], chip: str) -> list[dict[str, Any]]:
    """All of them; "met" is None for what has not been measured, and a dash on another GPU."""
    return [target.verdict(results, chip) for target in TARGETS]
