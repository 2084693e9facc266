"""What the stages found, as Markdown for people and as entries of the kernels' table of configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from report import cell

from actorllm_kernels import configs

from .targets import CHIP

TITLES = {
    "ceilings": "What the machine can do",
    "correctness": "Kernels against their references, bfloat16",
    "products": "Products of few rows",
    "quantized": "Products with weights of 8 and 4 bits",
    "decode": "Decode attention",
    "prefill": "Prefill attention",
    "head": "LM head, draw, filters",
    "steps": "Decode steps of whole models",
    "prompts": "Prompts through whole models",
    "small": "Small kernels",
    "order": "Dependent launches give the tokens of plain ones",
    "offline": "Offline throughput, the workload of nano-vllm",
    "latency": "A serving run: latencies of requests that come together",
    "capabilities": "Models and options beside plain bfloat16",
    "idle": "Between two steps",
    "start": "The start, until the first token",
    "sleep": "Engines that sleep and wake",
    "ablations": "What each trick of a step is worth",
    "peers": "transformers on the same GPU",
    "descriptors": "Prefill attention by descriptors, a build that is not in use",
    "search-products": "Configurations tried: products",
    "search-decode": "Configurations tried: decode attention",
    "search-prefill": "Configurations tried: prefill attention",
    "search-head": "Configurations tried: LM head",
    "search-norm": "Configurations tried: norm",
}
HIDDEN = ("tried", "wrong")
"""What only the JSON has."""
TABLE = Path(configs.__file__).with_name("configs.json")


def markdown(result: dict[str, Any], missing: list[str]) -> str:
    """The whole result; says what has not been measured."""
    place = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in place["versions"].items())
    lines = ["# GPU", "", f"{place['date']}, {place['chip']}. {versions}.", ""]
    if missing:
        lines += [f"Not measured: {', '.join(missing)}.", ""]
    if problems := [f"- {row['stage']}: {row['problem']}" for row in result["stages"] if row["problem"]]:
        lines += ["What went wrong:", "", *problems, ""]
    lines += ["## Verdict", "", *(f"- {line}" for line in result["verdict"]), ""]
    if result["beside"]:
        lines += ["## Measured beside predicted", "", *_table(result["beside"]), ""]
    lines += [f"## What is wanted of an {CHIP}", "", *_table(result["targets"]), ""]
    for name, title in TITLES.items():
        if name not in result:
            continue
        lines += [f"## {title}", ""]
        for key, value in result[name].items():
            if key in HIDDEN:
                continue
            if isinstance(value, list) and value:
                lines += [*_table(value), ""]
            elif isinstance(value, dict):
                lines += [key, "", *_table([{"class": name, **_columns(one)} for name, one in value.items()]), ""]
            elif not isinstance(value, list):
                lines += [f"{key}: {cell(value)}", ""]
    return "\n".join(lines)


def predicted(machine: str, found: dict[str, list[dict[str, Any]]]) -> str:
    """What `--predict` prints."""
    lines = [f"# Predicted for an {machine}", "", "By a model of bytes and latency; nothing here was measured.", ""]
    for what, rows in found.items():
        lines += [f"## {what.capitalize()}", "", *_table(rows), ""]
    return "\n".join(lines)


def _columns(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"value": value}


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    body = ["| " + " | ".join(cell(row.get(column, "—")) for column in columns) + " |" for row in rows]
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *body]


def write_configs(results: dict[str, dict[str, Any]], file: Path = TABLE, architecture: str | None = None) -> list[str]:
    """Puts what was found best into configs.json, for the architecture of this GPU; returns what was changed."""
    if architecture is None:
        architecture = configs.architecture_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    table = json.loads(file.read_text())
    changes = []
    for kernel, by_class in found(results).items():
        entries = table[kernel]
        for shape_class, config in by_class.items():
            parts = (architecture, configs.REFINES.get(architecture, "*"), "*")
            base = next((entries[part][shape_class] for part in parts if shape_class in entries.get(part, {})), None)
            if base is None:
                raise ValueError(
                    f"{file.name} has no entry of {kernel} for {architecture}, shape class {shape_class!r}"
                )
            merged = {**base, **config}
            if merged != base:
                entries.setdefault(architecture, {})[shape_class] = merged
                changes.append(f"{kernel} {architecture} {shape_class}: {base} -> {merged}")
    if changes:
        file.write_text(_compact(table))
    return changes


def found(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, dict[str, int]]]:
    """Kernel -> shape class -> what a search has chosen; up to how many rows without one is what the table itself gives."""
    best: dict[str, dict[str, dict[str, int]]] = {}
    for shape_class, rows in results.get("products", {}).get("max_rows", {}).items():
        best.setdefault("skinny_gemm", {})[shape_class] = {"MAX_ROWS": rows}
    for stage, result in results.items():
        if stage.startswith("search-"):
            for shape_class, config in result["chosen"].items():
                best.setdefault(result["kernel"], {}).setdefault(shape_class, {}).update(config)
    return best


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
