"""`actorllm leaderboard`: every policy that ships is on it, it goes on where it was, and only bands give ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorllm import cli
from actorllm.cli.leaderboard import ENTRIES
from actorllm.scheduling.policy import POLICIES, REGISTRY
from actorllm.slo.experiments import Variant
from actorllm.slo.experiments.comparison import Sustained
from actorllm.slo.report import leaderboard_page as module


def test_every_policy_that_ships_is_on_it() -> None:
    entered = {Variant.parse(text).policy for text in ENTRIES.values()}
    assert entered == {name for name in POLICIES if REGISTRY.path(name) == name}
    told = [module.about(Variant.parse(text)) for text in ENTRIES.values()]
    assert all(len(text) > 20 for text in told)
    assert told[list(ENTRIES).index("slidingserve")].startswith("SlidingServe (arXiv 2606.05933)"), "knobs or not"


def test_it_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, page = tmp_path / "lb.jsonl", tmp_path / "lb.html"
    arguments = [
        "leaderboard", "--workload", "synthetic", "--num-requests", "40", "--seeds", "1", "--num-processes", "0",
        "--policies", "fcfs@512", "--also", "edf@512", "--results", str(results), "--report", str(page),
    ]  # fmt: skip
    assert cli.main(arguments) == 0
    kept = results.read_bytes()
    lines = kept.splitlines(keepends=True)
    results.write_bytes(b"".join(lines[: len(lines) // 2]))
    first = page.read_text()
    capsys.readouterr()
    assert cli.main(arguments) == 0
    assert sorted(results.read_bytes().splitlines()) == sorted(kept.splitlines())
    assert page.read_text().count("<tr>") == first.count("<tr>")
    out = capsys.readouterr().out
    assert "RANK" in out
    assert "fcfs@512" in out
    assert "First come, first served" in first
    assert ", 1 seed, " in first
    assert cli.main([*arguments[:-2], "--report", str(results)]) == 2
    capsys.readouterr()
    # Results of another version of the scheduler or the simulator stay, and that is told: here and where they are read.
    last = re.sub(rb'"code":"\w+"', b'"code":"before"', lines[-1])
    results.write_bytes(b"".join([*lines[:-1], last]))
    assert cli.main(arguments) == 0
    assert "1 points were made by other code than this" in capsys.readouterr().err
    assert cli.main(["report", str(results), "--output", str(page)]) == 0
    assert "the points were made by different code (" in capsys.readouterr().err
    assert "1 by before" in page.read_text()


def test_bands_that_overlap_share_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three policies one is shown to be better than one other, and nothing else is shown."""
    spread = np.linspace(0.9, 1.1, 200)
    draws = {"a": 3.0 * spread, "b": 2.8 * spread, "c": 2.0 * spread}

    def sustained(_: Any, label: str, *more: Any) -> Sustained:
        mine = draws[label]
        mid = float(mine.mean())
        return Sustained(label, mid, mid * 1.01, 1.0, "stationary", None, mine, mine * 1.01)

    class Results:
        def labels(self) -> list[str]:
            return ["c", "b", "a"]

    monkeypatch.setattr(module, "sustained", sustained)
    found = [(place.rank, place.label) for place in module.places(Results(), 0.9, "deadline")]  # type: ignore[arg-type]
    draws["b"] = draws["b"][::-1]
    shuffled = [(place.rank, place.label) for place in module.places(Results(), 0.9, "deadline")]  # type: ignore[arg-type]
    assert found == [(1, "a"), (2, "b"), (3, "c")], "the same requests make b worse in each draw"
    assert shuffled == [(1, "a"), (1, "b"), (3, "c")], "their draws lie on both sides"


def test_of_one_rank_no_policy_is_shown_to_be_better_than_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a is better than b is shown, and that b is better than c. That a is better than c is not."""
    none = np.ones(3)

    class Results:
        def labels(self) -> list[str]:
            return ["c", "b", "a", "d"]

    def sustained(_: Any, label: str, *more: Any) -> Sustained:
        return Sustained(label, 1.0, 1.0, 1.0, "stationary", None, none, none)

    monkeypatch.setattr(module, "sustained", sustained)
    monkeypatch.setattr(module, "is_better", lambda one, other: one.label + other.label in ("ab", "bc"))
    found = [(place.rank, place.label) for place in module.places(Results(), 0.9, "deadline")]  # type: ignore[arg-type]
    assert found == [(1, "a"), (1, "d"), (2, "b"), (3, "c")]
