"""Figures and tables of reports as files for papers."""

from __future__ import annotations

import re
import sys
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbformat
import pytest
from nbclient import NotebookClient

from actorllm import cli
from actorllm.errors import ConfigError
from actorllm.slo.experiments import Scenario, Sweep, SweepResults, Variant
from actorllm.slo.report import results_csv, sweep_page
from actorllm.slo.report.charts import LABEL, Range, in_lines, ranges
from actorllm.slo.report.export import figures_of, latex_table, parquet_of, pdf_of
from actorllm.types.objective import READINGS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export") / "sweep.jsonl"


@pytest.fixture(scope="module")
def results(store: Path) -> SweepResults:
    scenario = Scenario(workload="synthetic", num_requests=60, mix="ls_a:0.5:ttft=1,tpot=0.1 be:0.5:e2e=60")
    variants = [Variant.parse("fcfs@512"), Variant.parse("edf@512")]
    return Sweep(scenario, variants, range(2)).run(rates=[1.0, 3.0], targets=[0.9], num_processes=0, store=store)


@pytest.fixture(scope="module")
def figures(results: SweepResults) -> dict[str, str]:
    return dict(figures_of(sweep_page(results)))


def test_every_figure_of_the_page_stands_alone(results: SweepResults, figures: dict[str, str]) -> None:
    html = sweep_page(results)
    charts = [part for part in re.findall(r"<figure>.*?</figure>", html, re.DOTALL) if 'role="img"' in part]
    assert len(figures) == len(charts) > 5
    for name, svg in figures.items():
        assert re.fullmatch(r"[a-z0-9-]+", name)
        root = ElementTree.fromstring(svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(--" not in svg
        assert "class=" not in svg, "no sheet of styles is needed"
        assert 'fill="#ffffff"' in svg, "it is as on the light page"
    texts = " ".join(text for svg in figures.values() for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg))
    assert "fcfs@512" in texts, "with its legend"
    assert "requests per second" in texts


def test_a_pdf_has_the_same_texts(figures: dict[str, str]) -> None:
    pytest.importorskip("fpdf", reason="needs actorllm[lab]")
    for svg in figures.values():
        pdf = pdf_of(svg)
        assert pdf.startswith(b"%PDF")
        streams = [
            zlib.decompress(part)
            for part in re.findall(rb"stream\n(.*?)\nendstream", pdf, re.DOTALL)
            if part[:1] == b"x"
        ]
        drawn = b"".join(streams)
        shown = re.findall(rb"\((.*?)\) Tj", drawn)
        texts = [text for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg) if text.strip()]
        assert len(shown) == len(texts)
        assert drawn.count(b" m\n") + drawn.count(b" m ") + drawn.count(b" re") > 3, "lines, paths and rectangles"
    assert pdf_of(svg) == pdf_of(svg), "made twice it is the same file"


def test_a_parquet_table_is_the_csv(results: SweepResults) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs actorllm[lab]")
    import io

    csv = results_csv(results)
    table = parquet.read_table(io.BytesIO(parquet_of(csv)))
    assert table.num_rows == len(results.records)
    assert table.column_names == csv.splitlines()[0].split(",")
    assert set(table["policy"].to_pylist()) == {"fcfs@512", "edf@512"}
    assert sorted(set(table["rate"].to_pylist()))[:1] == [1.0]


def test_a_table_for_latex(results: SweepResults) -> None:
    text = latex_table(results)
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")]
    assert body.count(r"\\") == 2
    assert all(line.count("&") == 2 for line in body.splitlines()[1:-1])
    assert text.count(r"\begin{tabular}{lrr}") == text.count(r"\end{tabular}") == 1
    uncommented = re.sub(r"(?m)^%.*$", "", text)
    for mark in (r"$^\dagger$", r"$^\ddagger$", "$<$", "$>$"):
        uncommented = uncommented.replace(mark, "")
    assert not re.search(r"(?<!\\)[%#_$<>](?!\^)", uncommented), "what LaTeX reads is escaped"


def test_a_table_for_latex_says_what_is_not_known(results: SweepResults) -> None:
    """A bound that lies beyond what was simulated is none in a paper either, and neither is a short run a growing backlog."""
    lowest = [record for record in results.records if record["rate"] == 1.0]
    results = SweepResults.of_records(results.scenario, lowest, results.stamp, (0.9,))
    searched = [results.max_rate(label, 0.9, reading) for label in results.labels() for reading in READINGS]
    found = [rate for rate in searched if rate is not None]
    assert any(rate.verdict == "short" for rate in found)
    assert any(rate.band.low_is_open or rate.band.high_is_open or not rate.is_bounded for rate in found)
    text = latex_table(results)
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")]
    num_open = sum(rate.band.low_is_open + rate.band.high_is_open + (not rate.is_bounded) for rate in found)
    assert body.count("$<$") + body.count("$>$") == num_open + searched.count(None)
    assert body.count(r"$^\ddagger$") == sum(rate.verdict == "short" for rate in found)
    assert body.count(r"$^\dagger$") == sum(rate.verdict == "growing" for rate in found)
    assert f"; {len(results.seeds)} seed{'s' * (len(results.seeds) > 1)}. " in text
    one = SweepResults.of_records(results.scenario, [r for r in lowest if r["seed"] == 0], results.stamp, (0.9,))
    assert "; 1 seed. " in latex_table(one)


def test_the_command_writes_them(
    store: Path, results: SweepResults, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["report", str(store), "--output", str(tmp_path / "page.html"), "--latex", str(tmp_path / "t.tex")]
    assert cli.main([*arguments, "--figures", str(tmp_path / "figures")]) == 0
    assert "figures: " in capsys.readouterr().out
    assert len(list((tmp_path / "figures").glob("*.svg"))) > 5
    assert (tmp_path / "t.tex").read_text() == latex_table(results)
    assert cli.main([*arguments, "--figures", str(tmp_path / "figures"), "--formats", "png"]) != 0
    assert "must be svg, pdf, or both" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "package"), [("--parquet", "pyarrow"), ("--figures", "fpdf")])
def test_what_is_not_installed_is_named_before_anything_is_made(
    store: Path, results: SweepResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    option: str, package: str,
) -> None:  # fmt: skip
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    page = tmp_path / "page.html"
    arguments: list[Any] = [
        "report",
        str(store),
        "--output",
        str(page),
        option,
        str(tmp_path / "x"),
        "--formats",
        "pdf",
    ]
    assert cli.main(arguments) != 0
    assert f"needs the package {package}: pip install 'actorllm[lab]'" in capsys.readouterr().err
    assert not page.exists()
    with pytest.raises(ConfigError, match=r"actorllm\[lab\]"):
        parquet_of("a\n1\n") if package == "pyarrow" else pdf_of("<svg/>")


def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples" / "paper_figure.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("NUM_REQUESTS = 300", "NUM_REQUESTS = 40").replace("4.0]", "]")
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    files = {path.name for path in (tmp_path / "figures").iterdir()}
    assert "points.csv" in files
    assert sum(name.endswith(".svg") for name in files) > 5
    assert any("image/svg+xml" in str(cell.get("outputs")) for cell in notebook.cells)


@pytest.mark.parametrize(
    "label",
    [
        "edf@512",
        "qoserve,anchor=first,alpha=0.0005,relegates=off@2048+past-future",
        "my_module:APolicyWhoseNameIsLongerThanALine@512",
    ],
)
def test_labels_are_whole(label: str) -> None:
    parts = in_lines(label, LABEL)
    assert "".join(parts) == label
    assert all(0 < len(part) <= LABEL for part in parts)
    chart = ranges([(label, [(0, Range(1.0, 0.5, 2.0, ""))])], "rates", "requests per second")
    texts = re.findall(r'class="row"[^>]*>([^<]*)<', chart)
    assert "".join(texts) == label
    rows = [(3 * label, [(0, Range(1.0, 0.5, 2.0, ""))])] * 2
    at = [float(y) for y in re.findall(r'y="([\d.]+)" class="row"', ranges(rows, "", ""))]
    assert min(after - before for before, after in pairwise(at)) > 13, "nor do labels of neighbours lie on each other"
