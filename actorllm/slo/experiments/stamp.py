"""Where and with what a result was made."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from actorllm import __version__
from actorllm.slo.experiments.point import code_digest

PACKAGES = ("numpy", "torch", "transformers")


def stamp() -> dict[str, Any]:
    """Date, versions and machine; for a report."""
    versions = {"actorllm": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": versions,
        "code": code_digest(),
        "machine": f"{platform.machine()}, {_processor()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown processor"
    )
