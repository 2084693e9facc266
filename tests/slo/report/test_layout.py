"""Pages on a phone, on paper and in the dark: what the sheet of styles and the marks guarantee, and what a browser says of them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from actorllm.scheduling.cost_model import preset
from actorllm.slo.experiments import Point, Scenario, Sweep, SweepResults, Variant
from actorllm.slo.experiments.point import watched_run
from actorllm.slo.experiments.stamp import stamp
from actorllm.slo.report import run_page, sweep_page
from actorllm.slo.report.leaderboard_page import leaderboard_page
from tests.server.browser import PROGRAM, Browser

PHONE, PAPER = 390, 680
"""Pixels: of a phone, and of A4 between its margins."""
LONG = "my_module:APolicyWhoseNameIsLongerThanAPhone,anchor=first,alpha=0.0005,relegates=off@2048+past-future"


class Rule(NamedTuple):
    """What a sheet says of a selector; media: when."""

    media: str
    selector: str
    values: dict[str, str]

    def is_of(self, kind: str, width: int, is_dark: bool) -> bool:
        conditions = {
            "": True,
            "print": kind == "print",
            "(max-width: 560px)": width <= 560,
            "screen and (prefers-color-scheme: dark)": kind == "screen" and is_dark,
        }
        return conditions[self.media]

    @property
    def specificity(self) -> tuple[int, int]:
        parts = re.sub(r"\[[^]]*\]", "[]", self.selector)
        return len(re.findall(r"[.:[]", parts)), len(re.findall(r"(?:^|\s)[a-z]", parts))


def rules(html: str) -> list[Rule]:
    """In the order in which they stand."""
    sheet = html.partition("<style>")[2].partition("</style>")[0]
    found = []
    for media, inner, selectors, body in re.findall(
        r"@media ([^{]*)\{((?:[^{}]*\{[^{}]*\})*)[^{}]*\}|([^{}@]+)\{([^{}]*)\}", sheet
    ):
        for some, values in re.findall(r"([^{}]+)\{([^{}]*)\}", inner) if media else [(selectors, body)]:
            pairs = (one.partition(":") for one in values.split(";") if ":" in one)
            told = {name.strip(): value.strip() for name, _, value in pairs}
            found += [Rule(media.strip(), selector.strip(), told) for selector in some.split(",")]
    return found


def style(
    html: str, *selectors: str, kind: str = "screen", width: int = PHONE, is_dark: bool = False
) -> dict[str, str]:
    """What applies to an element that these selectors match, and no other that the sheet has."""
    mine = [rule for rule in rules(html) if rule.selector in selectors and rule.is_of(kind, width, is_dark)]
    found: dict[str, str] = {}
    for rule in sorted(mine, key=lambda rule: rule.specificity):
        found |= rule.values
    return found


class Marks(HTMLParser):
    """Of charts, tables and texts: the classes and tags around them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.around: list[tuple[str, dict[str, str | None]]] = []
        self.found: list[tuple[str, dict[str, str | None], set[str]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        names = {name for name, _ in self.around} | {str(more["class"]) for _, more in self.around if "class" in more}
        self.found.append((tag, given, names))
        if tag not in {"meta", "br", "hr", "link", "img", "input"}:
            self.around.append((tag, given))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        self.around.pop()


@pytest.fixture(scope="module")
def results() -> SweepResults:
    scenario = Scenario(workload="synthetic", num_requests=60, tenants=(1.0, 3.0))
    variants = [Variant.parse("fcfs@512"), Variant.parse("edf@512", LONG)]
    return Sweep(scenario, variants, (0, 1)).run(
        rates=(3.0, 5.0), scales=(1.0, 0.5, 2.0), scale_rates=(5.0,), targets=(0.9,), num_processes=0
    )


@pytest.fixture(scope="module")
def pages(results: SweepResults) -> dict[str, str]:
    point = Point(scenario=results.scenario, variant=results.variants[1], rate=3.0)
    run, journal = watched_run(point)
    model = preset("a100-llama-3-8b")
    return {
        "sweep": sweep_page(results),
        "leaderboard": leaderboard_page(results),
        "run": run_page(LONG, run.timeline, run.workload, journal, model, stamp(), notes=[f"{LONG} is a name."]),
    }


KINDS = ("sweep", "leaderboard", "run")
CHART = ("svg", 'svg[role="img"]')
WIDE_CHART = (*CHART, 'svg[viewBox^="0 0 1060"]')


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_wider_than_a_phone_but_what_scrolls_within_its_own_box(pages: dict[str, str], kind: str) -> None:
    html = pages[kind]
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    assert style(html, "figure")["overflow-x"] == style(html, ".wide")["overflow-x"] == "auto"
    # Lengths of the sheet: charts are as wide as one can read them, in boxes that scroll.
    padding = 2 * 14
    assert style(html, "main")["padding"] == "20px 14px"
    for rule in rules(html):
        if not rule.is_of("screen", PHONE, False) or rule.selector in WIDE_CHART:
            continue
        effective = style(html, rule.selector)
        for name in ("width", "min-width", "grid-template-columns", "flex-basis"):
            lengths = [float(length) for length in re.findall(r"([\d.]+)px", effective.get(name, ""))]
            assert max(lengths, default=0.0) <= PHONE - padding, rule
    # Texts break anywhere: labels of policies have no blanks. Cells do not, and neither leaves its box.
    assert style(html, "main")["overflow-wrap"] == "anywhere"
    assert style(html, "pre")["white-space"] == "pre-wrap"
    assert {rule.selector for rule in rules(html) if rule.values.get("white-space") == "nowrap"} == {"th", "td"}
    assert style(html, ".legend")["flex-wrap"] == style(html, "nav")["flex-wrap"] == "wrap"
    found = Marks(html).found
    for tag, given, around in found:
        assert "style" not in given
        if "svg" not in around and tag != "svg":
            assert "width" not in given
        if tag == "svg" and given.get("role") == "img":
            assert "figure" in around
        assert tag != "table" or "wide" in around
    assert sum(tag == "table" for tag, _, _ in found) > 2
    assert sum(tag == "svg" for tag, _, _ in found) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_charts_can_be_read_on_a_phone(pages: dict[str, str], kind: str) -> None:
    """Their letters have 9 pixels at least: a chart is not made as narrow as the phone is."""
    html = pages[kind]
    size = float(style(html, "svg text")["font"].partition("px")[0])
    for tag, given, _ in Marks(html).found:
        if tag == "svg" and given.get("role") == "img":
            width = float(str(given["viewbox"]).split()[2])
            selectors = WIDE_CHART if str(given["viewbox"]).startswith("0 0 1060") else CHART
            least = float(style(html, *selectors)["min-width"].removesuffix("px"))
            assert size * max(least, PHONE - 28) / width >= 9, given["viewbox"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [PAPER, 420])
def test_nothing_is_cut_off_on_paper(pages: dict[str, str], kind: str, width: int) -> None:
    """Nothing scrolls there, and what is folded is left out."""
    html = pages[kind]
    for selectors in (CHART, WIDE_CHART):
        chart = style(html, *selectors, kind="print", width=width)
        assert (chart["width"], chart["min-width"]) == ("100%", "0")
    assert style(html, ".wide", kind="print", width=width)["overflow"] == "visible"
    cell = style(html, "th", "td", kind="print", width=width)
    assert (cell["white-space"], cell["overflow-wrap"]) == ("normal", "break-word")
    assert style(html, "td", "td:first-child", kind="print", width=width)["overflow-wrap"] == "anywhere"
    assert style(html, ".name", kind="print", width=width)["overflow-wrap"] == "anywhere"
    assert style(html, "details:not([open])", kind="print", width=width)["display"] == "none"
    assert style(html, "figure", kind="print", width=width)["break-inside"] == "avoid"
    on_paper = style(html, ":root", kind="print", width=width, is_dark=True)
    assert on_paper == style(html, ":root", kind="print", width=width)
    assert on_paper["--paper"] == "#ffffff"


def test_long_names_are_cells_that_break_on_paper(pages: dict[str, str]) -> None:
    """They stand first in their rows, or say that they are names."""
    cells = [cell for html in pages.values() for row in html.split("<tr>")[1:] for cell in row.split("<td>")[2:]]
    long = [cell for cell in cells if LONG[:40] in cell.partition("</td>")[0]]
    assert long, "the leaderboard has the rank before it"
    assert all('<span class="name">' in cell for cell in long)


def luminance(colour: str) -> float:
    """Relative, of #rrggbb (WCAG 2)."""
    shares = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


@pytest.mark.parametrize("is_dark", [False, True])
def test_texts_and_lines_stand_out_in_both_themes(pages: dict[str, str], is_dark: bool) -> None:
    html = pages["sweep"]
    colours = {name: value for name, value in style(html, ":root", is_dark=is_dark).items() if name.startswith("--")}
    paper = luminance(colours["--paper"])
    least = {"--ink": 7.0, "--soft": 4.5, "--good": 4.5, "--bad": 4.5, "--warn": 4.5}
    least |= {f"--c{number}": 3.0 for number in range(8)}
    for name, ratio in least.items():
        high, low = sorted((paper, luminance(colours[name])), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= ratio, name
    light = style(html, ":root")
    if is_dark:
        assert all(colours[name] != light[name] for name in least), "each has a colour for the dark"
    # All colours are those of the theme.
    sheet = [rule for rule in rules(html) if rule.selector != ":root"]
    assert not any("#" in value for rule in sheet for value in rule.values.values())
    assert not re.search(r'(?:fill|stroke)="#', html)


def test_a_sheet_is_read_as_a_browser_reads_it() -> None:
    html = (
        "<style>a { min-width: 1px; color: red } .b { min-width: 2px }\n@media print { a { min-width: 3px; } .b { margin: 0; } }"
        '@media (max-width: 560px) { a, a[role="x"] { min-width: 4px; } }</style>'
    )
    assert style(html, "a", width=900) == {"min-width": "1px", "color": "red"}
    assert style(html, "a", ".b", width=900)["min-width"] == "2px", "a class is more specific"
    assert style(html, "a", kind="print", width=900)["min-width"] == "3px"
    assert style(html, "a")["min-width"] == "4px"
    assert style(html, "a", ".b", 'a[role="x"]')["min-width"] == "4px", "of equal ones the last"


CELLS = [(kind, width, is_dark) for kind in KINDS for width in (1280, PHONE, 320) for is_dark in (False, True)]


@pytest.mark.slow(reason="starts a browser, which few machines have")
@pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium: apt-get install chromium")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "width", "is_dark"), CELLS)
def test_a_browser_scrolls_no_page_sideways(
    pages: dict[str, str], kind: str, width: int, is_dark: bool, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(pages[kind], encoding="utf-8")
    with Browser(width, 800, is_dark) as browser:
        browser.open(file.as_uri())
        browser.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert browser.value("document.documentElement.scrollWidth") <= width
        left = "Math.min(0, ...[...document.querySelectorAll('text.row')].map((one) => one.getBBox().x))"
        assert browser.value(left) == 0, "labels are whole"
        browser.call("Emulation.setEmulatedMedia", media="print")
        browser.call("Emulation.setDeviceMetricsOverride", width=PAPER, height=900, deviceScaleFactor=1, mobile=False)
        assert browser.value("document.documentElement.scrollWidth") <= PAPER
        assert not browser.errors
