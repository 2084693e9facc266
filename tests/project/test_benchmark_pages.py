"""The pages of figures: generated, complete, and true of the code that they name. Nothing is measured here."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import fidelity  # noqa: E402
import report  # noqa: E402
import ring  # noqa: E402
import run_all  # noqa: E402

import docs  # noqa: E402

sys.path.remove(str(ROOT / "bench"))


def benchmarks() -> set[str]:
    """The scripts that write a result."""
    scripts = {file.stem for file in (ROOT / "bench").glob("*.py") if '"--json"' in file.read_text()}
    return scripts - {"report", "run_all"}


@pytest.mark.parametrize(
    "page", ["docs/benchmarks.md", "docs/reliability.md", "docs/slo.md", "docs/compatibility.md", "README.md"]
)
def test_pages_are_what_the_results_give(page: str) -> None:
    generated = docs.generate(ROOT / "bench" / "results")[page]
    assert (ROOT / page).read_text() == generated, "run `python bench/docs.py`"


def test_every_benchmark_has_a_place_on_a_page() -> None:
    assert {*docs.ORDER, *docs.RELIABILITY, *docs.EMBEDDED, "gpu"} == benchmarks()
    for further, script in docs.FURTHER.items():
        assert script in docs.RELIABILITY
        assert f"\n## {further}\n" in docs.generate(ROOT / "bench" / "results")["docs/reliability.md"]
        assert (ROOT / "bench" / "results" / f"{further}.json").is_file()


def test_what_make_bench_leaves_out_is_said() -> None:
    assert {bench.name for bench in run_all.BENCHES} == benchmarks() - set(docs.LEFT_OUT)
    for name in docs.LEFT_OUT:
        assert f"`{name}`" in docs.HEAD
        assert f"`{name}`" in (ROOT / "README.md").read_text()


def test_a_result_that_is_missing_stands_there_as_not_measured(tmp_path: Path) -> None:
    pages = docs.generate(tmp_path)
    for name in docs.ORDER:
        section = pages["docs/benchmarks.md"].split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert "Not measured yet." in section
    assert pages["README.md"].count("| not measured |") >= len(docs.FIGURES)


def test_every_figure_of_the_readme_was_measured() -> None:
    assert "not measured" not in docs.figures(ROOT / "bench" / "results")


def test_a_ratio_is_that_of_the_two_medians_beside_it() -> None:
    ours, theirs = [1.0, 5.0, 3.0], [1.0, 2.0, 9.0]
    assert report.ratio(ours, theirs) == statistics.median(ours) / statistics.median(theirs) == 1.5
    assert report.ratio(ours, None) is None
    quantities = {quantity for quantity, *_ in ring.TARGETS}
    quantities |= {"4 readers 4 KiB over 4 rings, messages/s", "idle, % of a core per process"}
    rounds = [
        {quantity: {ring.RING: a, ring.ZMQ: b, ring.BLOCKING: b} for quantity in quantities}
        for a, b in zip(ours, theirs, strict=True)
    ]
    ratios = {row["ring against"]: row["ratio"] for row in ring.compare(rounds)}
    assert all(ratios[f"{quantity} / {other}"] == 1.5 for quantity, other, *_ in ring.TARGETS)


def test_a_comparison_of_nothing_is_not_met() -> None:
    assert docs.verdict({"pairs apart": 0, "ranked alike": 0, "target": "all", "met": True}) == "not tested"
    assert docs.verdict({"pairs apart": 6, "ranked alike": 6, "target": "all", "met": True}) == "met"
    assert docs.verdict({"pairs apart": 6, "ranked alike": 5, "target": "all", "met": False}) == "**missed**"
    assert fidelity.verdict_on_ranking(0, 0, 3) == "not tested"
    assert fidelity.verdict_on_ranking(11, 11, 3) == "not tested", "too few pairs lie apart"
    assert fidelity.verdict_on_ranking(12, 12, 1) == "not tested", "one round shows nothing"
    assert fidelity.verdict_on_ranking(12, 12, 3) is True
    assert fidelity.verdict_on_ranking(20, 19, 3) is True, "a tau of 0.9"
    assert fidelity.verdict_on_ranking(12, 11, 3) is False


def test_within_noise_is_not_met() -> None:
    assert docs.verdict({"error": "12.6%, 13.4%", "target": "≤ 8%", "met": True}) == "within noise"
    assert docs.verdict({"error": "+7.9%", "target": "≤ 8%", "met": True}) == "met"
    assert fidelity.verdict(0.07, 0.08, 0.5) is True
    assert fidelity.verdict(0.13, 0.08, 0.126) == "within noise"
    assert fidelity.verdict(0.30, 0.08, 0.126) is False
    assert fidelity.verdict(0.30, 0.08, 0.4) == "too noisy"


def test_policies_lie_apart_by_what_differs_within_rounds() -> None:
    """The machine is twice as fast in one round as in another, and one policy is a tenth faster than the other in each of them."""
    slow, fast = [100.0, 210.0, 160.0, 120.0], [90.0, 188.0, 145.0, 107.0]
    seen = fidelity.differences("mean TTFT, ms", slow, fast)
    assert fidelity.lie_apart(seen)
    assert fidelity.lie_apart(-seen)
    assert not fidelity.lie_apart(seen[:1]), "one round shows nothing"
    assert not fidelity.lie_apart(fidelity.differences("mean TTFT, ms", slow, slow))
    assert not fidelity.lie_apart(fidelity.differences("mean TTFT, ms", slow, [90.0, 230.0, 150.0, 125.0]))
    assert fidelity.lie_apart(fidelity.differences("good by deadline", [0.9, 0.8], [0.5, 0.4])), (
        "the same in each round"
    )
    assert not fidelity.lie_apart(fidelity.differences("good by deadline", [0.9, 0.8], [0.5, 0.7]))


def test_the_mean_of_a_kind_of_step_is_judged_beside_single_steps() -> None:
    """Steps that vary by half are told well in the mean; a machine that was slower in one run is noise."""
    rng = np.random.default_rng(1)
    told = [np.full(4000, 0.004)] * 2
    varied = [0.004 * rng.uniform(0.5, 1.5, 4000) for _ in range(2)]
    row = fidelity.mean_row("decode steps", varied, told)
    assert (row["met"], row["target"]) == (True, "≤ 8%")
    assert row["live 1"] == pytest.approx(4.0, rel=0.03)
    assert fidelity.mean_row("decode steps", [1.3 * run for run in varied], told)["met"] is False
    assert fidelity.mean_row("decode steps", [varied[0], 1.22 * varied[1]], told)["met"] == "within noise"
    model = fidelity.LinearModel((), residuals=(0.5, 1.0, 2.5))
    assert fidelity.drawn_mean(model) == pytest.approx(1.25), "as values between the quantiles are drawn"


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@localhost", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_result_says_of_which_code_it_is(tmp_path: Path) -> None:
    for folder in ("actorllm", "kernels", "bench/results", "docs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").touch()
    assert report.code(tmp_path) == {}
    git(tmp_path, "init")
    assert report.code(tmp_path) == {}, "no commit yet"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    found = {"commit": git(tmp_path, "rev-parse", "HEAD")[:12], "dirty": False}
    assert report.code(tmp_path) == found
    assert report.code(tmp_path / "docs") == {}, "a folder in the repository of something else"
    (tmp_path / "bench" / "results" / "file").write_text("a result of the same run")
    (tmp_path / "docs" / "file").write_text("a page")
    assert report.code(tmp_path) == found
    (tmp_path / "actorllm" / "new").touch()
    assert report.code(tmp_path) == found | {"dirty": True}


def test_the_page_says_of_which_code_a_result_is() -> None:
    environment = {"date": "2030-01-02", "processor": "Abacus", "cores": 3}
    assert docs.circumstances({"environment": environment}) == "2030-01-02, Abacus, 3 cores."
    environment |= {"commit": "0123456789ab", "dirty": False}
    assert docs.circumstances({"environment": environment}) == "2030-01-02, Abacus, 3 cores, commit 0123456789ab."
    environment["dirty"] = True
    assert "commit 0123456789ab with changes." in docs.circumstances({"environment": environment})


def test_what_is_said_of_claims_is_what_was_measured() -> None:
    """The table of claims in docs/slo_advanced.md has a word for each verdict of the table in docs/benchmarks.md."""
    rows = json.loads((ROOT / "bench" / "results" / "policies.json").read_text())["claims"]
    words = {"yes", "no", "less", "more", "within the band", "not told apart", "not tested"}
    page = (ROOT / "docs" / "slo_advanced.md").read_text().split("## What papers claim\n")[1].split("\n## ")[0]
    told = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    held = 0
    for name, _, claim, measured in told:
        verdicts = {row["reproduced"] for row in rows if claim.strip('"') in row["sentence"]}
        if not verdicts:
            continue
        held += 1
        beginnings = {part.strip() for part in re.split("[,;:]| on | than | for | from ", measured)}
        assert verdicts == words & beginnings, f"{name}: {measured!r}"
    assert held >= 8
