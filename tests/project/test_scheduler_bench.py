"""`bench/scheduler.py --against`: the steps of another tree are measured in turns with those of this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

OTHER = """
class Driver:
    def __init__(self, running, churn, is_caching):
        self.running = running

    def step(self):
        return float(self.running)
"""
"""A script of another tree whose steps say that they take so many seconds."""


def test_the_ratios_to_another_tree_are_written(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "scheduler.py").write_text(OTHER)
    written = tmp_path / "found.json"
    size = ["--running", "4", "--rounds", "1", "--steps", "2", "--bursts", "3"]
    command = [sys.executable, str(ROOT / "bench" / "scheduler.py"), *size]
    subprocess.run(
        [*command, "--against", str(tmp_path), "--json", str(written)], check=True, stdout=subprocess.DEVNULL
    )
    found = json.loads(written.read_text())
    assert {row["running"] for row in found["rows"]} == {4}
    rows = found["against"]["rows"]
    assert [row["load"] for row in rows] == [row["load"] for row in found["rows"]]
    assert [row["other ms"] for row in rows] == [4000.0] * 3
    for row in rows:
        assert 0 < row["this ms"] < row["other ms"]
        assert row["ratio"] < 1
