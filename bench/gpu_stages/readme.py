"""Puts measured figures into the table of kernels/README.md: the last column, one row per file."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from .record import ROOT
from .targets import PROMPT, SHARE, Figure

README = ROOT / "kernels" / "README.md"
NOTE = "Measured on a GPU: "
"""How the paragraph begins that says where the figures are from."""


def _small(kernel: str, case: str, column: str = SHARE) -> tuple[Figure, str]:
    return Figure("small", "small", column, {"kernel": kernel, "case": case}), case


FIGURES: dict[str, tuple[Figure, str]] = {
    "step_prep.py": _small("step_prep", "256 rows", "us"),
    "embed.py": _small("embed", "8192 x 4096"),
    "rmsnorm.py": _small("rmsnorm", "8192 x 4096"),
    "qknorm_rope_kv.py": _small("qknorm_rope_kv", "8192 x 32x8x128"),
    "plan_decode.py": _small("plan_decode", "256 rows", "us"),
    "attn_decode.py": (
        Figure("decode", "decode", SHARE, {"heads": "32x8x128", "batch": 32, "context": "uniform 4096"}),
        "batch 32, context 4096",
    ),
    "attn_prefill.py": (
        Figure("prefill", "prefill", "share of the matmul ceiling", PROMPT),
        "8192 tokens, of the matmul ceiling",
    ),
    "silu_mul.py": _small("activation_mul", "8192 x 14336"),
    "skinny_gemm.py": (
        Figure("products", "products", SHARE, {"model": "Llama-3.1-8B", "product": "gate_up", "rows": 1}),
        "1 row, gate and up of Llama-3.1-8B",
    ),
    "lm_head_sample.py": (
        Figure("head", "head", SHARE, {"model": "Llama-3.1-8B", "rows": 1}),
        "1 row of Llama-3.1-8B, with sample_pick",
    ),
    "edit_logits.py": _small("edit_logits", "32 x 151936", "us"),
    "sample_topk_topp.py": _small("sample_topk_topp", "32 x 151936", "us"),
    "nucleus.py": _small("find_cutoffs", "32 x 151936, top_p alone", "us"),
    "sample_pick.py": _small("sample_pick", "32 x 151936", "us"),
    "top_logprobs.py": _small("top_logprobs", "32 x 151936", "us"),
    "kv_clear.py": _small("kv_clear", "256 rows", "us"),
    "kv_copy.py": _small("kv_copy", "64 blocks of 28 layers"),
}
"""By file, the figure that stands for it, and at which size."""


def write_readme(results: dict[str, dict[str, Any]], chip: str, file: Path = README) -> list[str]:
    """The rows that were changed; those of which nothing has been measured stay."""
    lines = file.read_text().split("\n")
    changed = []
    for i, line in enumerate(lines):
        name = line.split("`")[1] if line.startswith("| `") else ""
        if name not in FIGURES:
            continue
        figure, case = FIGURES[name]
        value = figure.of(results)
        if value is None:
            continue
        shown = f"{value:.1f} us" if figure.column == "us" else f"{value:.0%}"
        lines[i] = " | ".join([*line.removesuffix(" |").split(" | ")[:-1], f"{shown} ({case})"]) + " |"
        if lines[i] != line:
            changed.append(lines[i])
    if changed:
        at = next(i for i, line in enumerate(lines) if line.startswith(NOTE))
        end = lines.index("", at)
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        lines[at:end] = [
            f"{NOTE}{chip}, {date}, by `bench/gpu.py`. Shares are of the bandwidth that this machine was found to have, or of its",
            "matmul ceiling where the column says so; a time where a kernel is too small to move much.",
        ]
        file.write_text("\n".join(lines))
    return changed
