"""`bench/simulation.py --against`: runs of another tree are measured in turns with those of this one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import simulation

OTHER = """
import time
from types import SimpleNamespace

RATE, EngineShape, preset = 3.0, SimpleNamespace, str
clock = [0.0]
time.process_time = lambda: clock[0]

def conversations(num, trace):
    return SimpleNamespace(at_rate=lambda rate: num)

def simulate(workload, shape, model, *, num_replicas, **arguments):
    clock[0] += workload * num_replicas
    return SimpleNamespace(num_steps=10, num_steps_skipped=4)
"""
"""A script of another tree whose requests say that each takes a second of CPU on every replica."""


def test_the_ratios_to_another_tree(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "simulation.py").write_text(OTHER)
    one, many, *sessions = simulation.compare(tmp_path, 12, 1, None)
    assert [row["requests"] for row in (one, many)] == ["one replica", "64 replicas, least-load"]
    assert (one["µs of those"], many["µs of those"]) == (1e6, 64e6)
    for row in (one, many):
        assert 0 < row["µs a request"] < row["µs of those"]
        assert row["met"]
    assert [row["µs of those"] for row in sessions] == [one["µs of those"], one["µs a request"]]
    assert sessions[0]["µs a request"] == sessions[1]["µs a request"] > 0


def test_a_tree_that_cannot_simulate_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "simulation.py").write_text("raise SystemExit(3)")
    peer = simulation.Peer(tmp_path)
    with pytest.raises(RuntimeError, match="ended with 3"):
        peer.run("one", 12, None)
