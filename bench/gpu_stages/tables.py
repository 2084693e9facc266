"""What the stages found, as Markdown for people and as entries of the kernels' table of configurations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from report import cell

from actorllm_kernels import configs

TITLES = {
    "ceilings": "What the machine can do",
    "correctness": "Kernels against their references, bfloat16",
    "products": "Products of few rows",
    "decode": "Decode attention",
    "prefill": "Prefill attention",
    "head": "LM head, draw, filters",
    "steps": "Decode steps of whole models",
    "prompts": "Prompts through whole models",
    "order": "Dependent launches give the tokens of plain ones",
    "offline": "Offline throughput, the workload of nano-vllm",
    "latency": "Latencies of requests that come together",
    "idle": "Between two steps",
    "start": "The start, until the first token",
    "ablations": "What each trick of a step is worth",
    "peers": "transformers on the same GPU",
    "descriptors": "Prefill attention by descriptors, a build that is not in use",
    "search-products": "Configurations tried: products",
    "search-decode": "Configurations tried: decode attention",
}
HIDDEN = ("tried", "wrong")
"""What only the JSON has."""


def markdown(result: dict[str, Any], missing: list[str]) -> str:
    """The whole result; says what has not been measured."""
    place = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in place["versions"].items())
    lines = ["# GPU", "", f"{place['date']}, {place['chip']}. {versions}.", ""]
    if missing:
        lines += [f"Not measured: {', '.join(missing)}.", ""]
    if problems := [f"- {row['stage']}: {row['problem']}" for row in result["stages"] if row["problem"]]:
        lines += ["What went wrong:", "", *problems, ""]
    for name, title in TITLES.items():
        if name not in result:
            continue
        lines += [f"## {title}", ""]
        for key, value in result[name].items():
            if key in HIDDEN:
                continue
            if isinstance(value, list) and value:
                lines += [*_table(value), ""]
            elif not isinstance(value, list):
                lines += [f"{key}: {cell(value)}", ""]
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    body = ["| " + " | ".join(cell(row.get(column, "—")) for column in columns) + " |" for row in rows]
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *body]


def write_configs(results: dict[str, dict[str, Any]]) -> list[str]:
    """Puts what was found best into configs.json, for the architecture of this GPU; returns what was changed."""
    file = Path(configs.__file__).with_name("configs.json")
    table = json.loads(file.read_text())
    architecture = configs.architecture_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    changes = []
    for kernel, by_class in found(results).items():
        entries = table[kernel]
        for shape_class, config in by_class.items():
            base = entries.get(architecture, {}).get(shape_class) or entries.get("*", {}).get(shape_class)
            if base is None:
                continue
            merged = {**base, **config}
            if merged != base:
                entries.setdefault(architecture, {})[shape_class] = merged
                changes.append(f"{kernel} {architecture} {shape_class}: {base} -> {merged}")
    if changes:
        file.write_text(_compact(table))
    return changes


def found(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, dict[str, int]]]:
    """Kernel -> shape class -> configuration."""
    from .products import width_of

    best: dict[str, dict[str, dict[str, int]]] = {}
    if "search-products" in results:
        best["skinny_gemm"] = choose(
            results["search-products"]["tried"],
            width_of,
            lambda row: f"{row['product']} {row['weight']} {row['rows']}",
            lambda row: row["us"],
            ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages"),
        )
    if "products" in results:
        for shape_class, rows in results["products"]["max_rows"].items():
            best.setdefault("skinny_gemm", {}).setdefault(shape_class, {})["MAX_ROWS"] = rows
    if "search-decode" in results:
        best["attn_decode"] = choose(
            results["search-decode"]["tried"],
            lambda row: f"d{row['heads'].split('x')[2]}",
            lambda row: f"{row['heads']} {row['batch']} {row['context']}",
            lambda row: 1 / row["GB/s"],
            ("PER_SM", "TILE", "num_warps", "num_stages"),
        )
    return best


def choose(
    rows: list[dict[str, Any]], class_of: Any, case_of: Any, cost_of: Any, names: tuple[str, ...]
) -> dict[str, dict[str, int]]:
    """For every class the configuration that loses least against the best of every case, as a geometric mean."""
    least: dict[str, float] = {}
    for row in rows:
        least[case_of(row)] = min(cost_of(row), least.get(case_of(row), math.inf))
    losses: dict[str, dict[tuple[int, ...], list[float]]] = {}
    for row in rows:
        config = tuple(row[name] for name in names)
        losses.setdefault(class_of(row), {}).setdefault(config, []).append(math.log(cost_of(row) / least[case_of(row)]))
    chosen = {}
    for shape_class, by_config in losses.items():
        most = max(map(len, by_config.values()))
        complete = {config: sum(lost) for config, lost in by_config.items() if len(lost) == most}
        chosen[shape_class] = dict(zip(names, min(complete, key=lambda config: complete[config]), strict=True))
    return chosen


def _compact(table: dict[str, Any]) -> str:
    """JSON with one configuration a line, as it is checked in."""
    kernels = []
    for kernel, by_architecture in table.items():
        blocks = []
        for architecture, by_class in by_architecture.items():
            entries = ",\n".join(f"      {json.dumps(name)}: {json.dumps(config)}" for name, config in by_class.items())
            blocks.append(f"    {json.dumps(architecture)}: {{\n{entries}\n    }}")
        kernels.append(f"  {json.dumps(kernel)}: {{\n" + ",\n".join(blocks) + "\n  }")
    return "{\n" + ",\n".join(kernels) + "\n}\n"
