"""Where and with what a result was made."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Any

from actorllm import __version__
from actorllm.slo.experiments.point import code_digest
from actorllm.types.processor import processor_name

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
        "machine": f"{platform.machine()}, {processor_name()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}",
    }
