"""Figures and tables of reports for papers: SVG and PDF files, Parquet, and a LaTeX table.

    for name, svg in figures_of(html):           the charts of a page, each a file that stands alone
        Path(f"{name}.svg").write_text(svg)
        Path(f"{name}.pdf").write_bytes(pdf_of(svg))
    parquet_of(results_csv(results))
    latex_table(results)

A figure has the colours of the light page as attributes, so any program draws it as the page does. PDF and Parquet need
`actorllm[lab]`, which is imported where it is used.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import unescape
from typing import Any
from xml.etree import ElementTree

from actorllm.errors import ConfigError
from actorllm.slo.experiments.comparison import sustained_rate
from actorllm.slo.experiments.sweep import TARGETS, MaxRate, SweepResults
from actorllm.slo.report.charts import number
from actorllm.slo.report.lead import READS
from actorllm.types.objective import READINGS

SVG = "http://www.w3.org/2000/svg"
MARGIN = 8
"""Around a figure, in pixels of its viewBox; labels may stand out."""
LINE = 22
"""Of a legend."""
FONT = "Helvetica, Arial, sans-serif"
SIZES = {"label": 12.0, "row": 12.5, "cell": 12.0}
OPACITY = {"opacity", "fill-opacity", "stroke-opacity"}
NAMES = 60
"""Characters of a file's name."""


def figures_of(html: str) -> Iterator[tuple[str, str]]:
    """Of a page of this package: a name for each figure, made of its section and caption, and its SVG."""
    styles = _styles(html)
    taken: dict[str, int] = {}
    for section in re.findall(r"<section\b.*?</section>", html, re.DOTALL):
        title = re.search(r"<h2>(.*?)</h2>", section, re.DOTALL)
        shared: list[str] = []
        for part in re.findall(r'<ul class="legend">.*?</ul>|<figure>.*?</figure>', section, re.DOTALL):
            if part.startswith("<ul"):
                shared = _legend_of(part)
                continue
            own = re.search(r'<ul class="legend">.*?</ul>', part, re.DOTALL)
            chart = re.search(r'<svg viewBox="[^"]*" role="img".*?</svg>', part, re.DOTALL)
            if chart is None:
                continue
            caption = re.search(r"<figcaption>(.*?)</figcaption>", part, re.DOTALL)
            told = _plain(caption[1]) if caption else _plain(title[1] if title else "figure")
            words = f"{_plain(title[1]) if title else ''} {told if caption else ''}".lower()
            name = re.sub(r"[^a-z0-9]+", "-", words).strip("-")[:NAMES].rstrip("-") or "figure"
            taken[name] = taken.get(name, 0) + 1
            name = name if taken[name] == 1 else f"{name}-{taken[name]}"
            entries = _legend_of(own[0]) if own else shared
            there = _classes(chart[0])
            yield name, _standalone(chart[0], [one for one in entries if _classes(one) & there], styles, told)


def _plain(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", html)).strip()


def _legend_of(html: str) -> list[str]:
    """The entries: the SVG of each, and its text."""
    return re.findall(r"<li>(.*?)</li>", html, re.DOTALL)


def _classes(svg: str) -> set[str]:
    """Of marks: what a legend and its chart have in common."""
    return {name for names in re.findall(r'class="([^"]*)"', svg) for name in names.split()} - {"hollow"}


def _styles(html: str) -> dict[str, dict[str, str]]:
    """Attributes by class, of the light theme; "" are those of any text."""
    sheet = re.sub(
        r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", html.partition("<style>")[2].partition("</style>")[0]
    )
    colours = dict(re.findall(r"--(\w+):\s*(#[0-9a-fA-F]{6})", sheet))
    found: dict[str, dict[str, str]] = {}
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", sheet):
        values = {
            name.strip(): re.sub(r"var\(--(\w+)\)", lambda match: colours.get(match[1], "#000000"), value.strip())
            for name, _, value in (one.partition(":") for one in body.split(";"))
            if name.strip() in {"fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", *OPACITY}
        }
        for selector in selectors.split(","):
            match = re.fullmatch(r"(?:svg text)?(?:\.(\w+))?", selector.strip())
            if match is not None and selector.strip():
                found.setdefault(match[1] or "", {}).update(values)
    return found


def _standalone(chart: str, legend: list[str], styles: Mapping[str, dict[str, str]], told: str) -> str:
    """With attributes in the place of classes, and the legend below."""
    root = ElementTree.fromstring(chart)
    _, _, width, height = (float(value) for value in root.attrib["viewBox"].split())
    total = height + LINE * len(legend)
    out = ElementTree.Element(
        "svg",
        {
            "xmlns": SVG,
            "viewBox": f"{-MARGIN} {-MARGIN} {width + 2 * MARGIN:g} {total + 2 * MARGIN:g}",
            "width": f"{width + 2 * MARGIN:g}",
            "height": f"{total + 2 * MARGIN:g}",
            "font-family": FONT,
        },
    )
    ElementTree.SubElement(out, "title").text = told
    page = {
        "x": f"{-MARGIN}",
        "y": f"{-MARGIN}",
        "width": f"{width + 2 * MARGIN:g}",
        "height": f"{total + 2 * MARGIN:g}",
    }
    ElementTree.SubElement(out, "rect", {**page, "fill": "#ffffff"})
    for child in root:
        out.append(_styled(child, styles))
    for position, entry in enumerate(legend):
        top = height + LINE * position
        mark = re.search(r"<svg.*?</svg>", entry, re.DOTALL)
        group = ElementTree.SubElement(out, "g", {"transform": f"translate(52 {top:g})"})
        if mark is not None:
            for child in ElementTree.fromstring(mark[0]):
                group.append(_styled(child, styles))
        text = {"x": "42", "y": "11", "font-size": "12", "fill": "#1b1f24"}
        ElementTree.SubElement(group, "text", text).text = _plain(re.sub(r"<svg.*?</svg>", "", entry, flags=re.DOTALL))
    return ElementTree.tostring(out, encoding="unicode")


def _styled(element: ElementTree.Element, styles: Mapping[str, dict[str, str]]) -> ElementTree.Element:
    attributes = {name: value for name, value in element.attrib.items() if name != "class"}
    classes = element.attrib.get("class", "").split()
    if element.tag == "text":
        size = next((SIZES[name] for name in classes if name in SIZES), 11.5)
        attributes = {"font-size": f"{size:g}", **styles.get("", {}), **attributes}
    for name in classes:
        for key, value in styles.get(name, {}).items():
            if key in element.attrib:  # what a chart says itself counts
                continue
            attributes[key] = value
    found = ElementTree.Element(element.tag, attributes)
    found.text = element.text
    for child in element:
        found.append(_styled(child, styles))
    return found


# PDF ---------------------------------------------------------------------------------------------------------------------


def _needs(package: str, what: str) -> Any:
    """The package of the extra. Raises ConfigError naming it."""
    try:
        return __import__(package, fromlist=["_"])
    except ImportError as error:
        top = package.partition(".")[0]
        raise ConfigError(f"{what} needs the package {top}: pip install 'actorllm[lab]'") from error


def check_installed(*, has_pdf: bool, has_parquet: bool) -> None:
    """Raises ConfigError naming the extra, before anything is computed for what cannot be written."""
    if has_pdf:
        _needs("fpdf", "a PDF")
    if has_parquet:
        _needs("pyarrow.parquet", "Parquet")


def pdf_of(svg: str) -> bytes:
    """A page of one figure, as large as it is (a pixel is a point). svg: of `figures_of`. Raises ConfigError without the extra."""
    fpdf = _needs("fpdf", "a PDF")
    root = ElementTree.fromstring(svg)
    left, top, width, height = (float(value) for value in root.attrib["viewBox"].split())
    pdf = fpdf.FPDF(unit="pt", format=(width, height))
    pdf.set_auto_page_break(False)
    pdf.set_margin(0)
    pdf.set_creation_date(datetime(2000, 1, 1, tzinfo=UTC))  # made twice it is the same file
    pdf.core_fonts_encoding = "windows-1252"
    pdf.add_page()
    _Canvas(pdf).draw(root, -left, -top)
    return bytes(pdf.output())


class _Canvas:
    """Draws what charts are made of: lines, rectangles, circles, paths of straight pieces, and texts."""

    def __init__(self, pdf: Any) -> None:
        self._pdf = pdf

    def draw(self, element: ElementTree.Element, dx: float, dy: float) -> None:
        """An element and what is in it, moved by so much."""
        tag = element.tag.rpartition("}")[2]
        if moved := re.match(r"translate\(([-\d.]+) ([-\d.]+)\)", element.attrib.get("transform", "")):
            dx, dy = dx + float(moved[1]), dy + float(moved[2])
        if tag in ("line", "rect", "circle", "path"):
            self._shape(tag, element.attrib, dx, dy)
        elif tag == "text" and element.text:
            self._text(element.text, element.attrib, dx, dy)
        for child in element:
            self.draw(child, dx, dy)

    def _shape(self, tag: str, given: Mapping[str, str], dx: float, dy: float) -> None:
        fill, stroke = given.get("fill", "none" if tag == "line" else "#000000"), given.get("stroke", "none")
        has_fill, has_stroke = fill != "none", stroke != "none"
        if not has_fill and not has_stroke:
            return
        # How: opacity lasts as long as the context, and so do colours and dashes.
        style = ("D" if has_stroke else "") + ("F" if has_fill else "")
        pdf = self._pdf
        whole = float(given.get("opacity", 1))
        with pdf.local_context(
            fill_opacity=whole * float(given.get("fill-opacity", 1)),
            stroke_opacity=whole * float(given.get("stroke-opacity", 1)),
        ):
            if has_fill:
                pdf.set_fill_color(*_rgb(fill))
            if has_stroke:
                pdf.set_draw_color(*_rgb(stroke))
                pdf.set_line_width(float(given.get("stroke-width", 1)))
                dash = [float(value) for value in given.get("stroke-dasharray", "").replace(",", " ").split()]
                if dash:
                    pdf.set_dash_pattern(dash=dash[0], gap=dash[1])
            # What: paths of a chart have straight pieces only.
            if tag == "line":
                x1, y1, x2, y2 = (float(given[name]) for name in ("x1", "y1", "x2", "y2"))
                pdf.line(x1 + dx, y1 + dy, x2 + dx, y2 + dy)
            elif tag == "rect":
                x, y, width, height = (float(given.get(name, 0)) for name in ("x", "y", "width", "height"))
                pdf.rect(x + dx, y + dy, width, height, style=style)
            elif tag == "circle":
                x, y, radius = (float(given[name]) for name in ("cx", "cy", "r"))
                pdf.ellipse(x + dx - radius, y + dy - radius, 2 * radius, 2 * radius, style=style)
            else:
                for points, is_closed in _pieces(given["d"]):
                    pdf.polyline([(x + dx, y + dy) for x, y in points], polygon=is_closed, style=style)

    def _text(self, text: str, given: Mapping[str, str], dx: float, dy: float) -> None:
        pdf = self._pdf
        pdf.set_font("helvetica", size=float(given.get("font-size", 11.5)))
        pdf.set_text_color(*_rgb(given.get("fill", "#000000")))
        shown = text.encode("cp1252", "replace").decode("cp1252")
        x, y = float(given["x"]) + dx, float(given["y"]) + dy
        anchor = given.get("text-anchor", "start")
        x -= pdf.get_string_width(shown) * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
        turned = re.match(r"rotate\(([-\d.]+) ([-\d.]+) ([-\d.]+)\)", given.get("transform", ""))
        if turned is None:
            pdf.text(x, y, shown)
            return
        with pdf.rotation(-float(turned[1]), float(turned[2]) + dx, float(turned[3]) + dy):
            pdf.text(x, y, shown)


def _rgb(colour: str) -> tuple[int, int, int]:
    value = int(colour.lstrip("#"), 16) if re.fullmatch(r"#[0-9a-fA-F]{6}", colour) else 0
    return value >> 16, value >> 8 & 255, value & 255


def _pieces(path: str) -> Iterator[tuple[list[tuple[float, float]], bool]]:
    """The corners of each piece of a path of straight lines, and whether it is closed."""
    points: list[tuple[float, float]] = []
    is_closed = False
    for command, text in re.findall(r"([MLHVvhZz])([^MLHVvhZz]*)", path):
        values = [float(value) for value in re.findall(r"-?[\d.]+(?:e-?\d+)?", text)]
        if command == "M":
            if points:
                yield points, is_closed
            points, is_closed = [(values[0], values[1])], False
        elif command in "Zz":
            is_closed = True
        elif command == "L":
            points.append((values[0], values[1]))
        else:
            x, y = points[-1]
            ahead = {"H": (values[0], y), "V": (x, values[0]), "h": (x + values[0], y), "v": (x, y + values[0])}
            points.append(ahead[command])
    if points:
        yield points, is_closed


# Tables ------------------------------------------------------------------------------------------------------------------


def parquet_of(csv: str) -> bytes:
    """A table that `results_csv` or `requests_csv` wrote, with typed columns. Raises ConfigError without the extra."""
    reader, writer = _needs("pyarrow.csv", "Parquet"), _needs("pyarrow.parquet", "Parquet")
    table = reader.read_csv(io.BytesIO(csv.encode()))
    out = io.BytesIO()
    writer.write_table(table, out)
    return out.getvalue()


def latex_table(results: SweepResults) -> str:
    """The highest rate of each variant with its band, for `booktabs`. What is not known for certain is marked, as on the page."""
    targets = results.targets or tuple(
        t for t in TARGETS if any(results.max_rate(x, t, r) for x in results.labels() for r in READINGS)
    )
    kinds = [(target, reading) for target in targets[:2] for reading in READINGS]
    head = " & ".join(["Policy", *(f"{100 * target:g}\\,\\% {_tex(READS[reading])}" for target, reading in kinds)])
    rows = []
    for label in results.labels():
        found = [sustained_rate(results, label, target, reading) for target, reading in kinds]
        cells = [_tex_rate(one, results.rates(label)) for one in found]
        rows.append(" & ".join([_tex(label), *cells]) + r" \\")
    about = _tex(f"{results.scenario.describe()}; {results.describe_seeds()}")
    return "\n".join(
        [
            f"% Highest rate in requests/s at which the worst class keeps its promises, 95 % bands. {results.scenario.describe()}",
            r"\begin{tabular}{l" + "r" * len(kinds) + "}",
            r"\toprule",
            head + r" \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            rf"\multicolumn{{{len(kinds) + 1}}}{{l}}{{\footnotesize {about}. {NOTES}}} \\",
            r"\end{tabular}",
            "",
        ]
    )


NOTES = (
    r"$^\dagger$ without rates at which the backlog grew. $^\ddagger$ too short to see whether it did. "
    r"$<$, $>$ beyond the rates that were simulated."
)
MARKS = {"growing": r"$^\dagger$", "short": r"$^\ddagger$"}


def _tex_rate(found: MaxRate | None, rates: Sequence[float]) -> str:
    """rates: those that were simulated."""
    if found is None:
        return _tex_bound(f"< {number(rates[0])}") if rates else "--"
    mark = "".join(MARKS[caveat] for caveat in found.caveats)
    more = "" if found.is_bounded else "> "
    return _tex_bound(f"{more}{number(found.rate)}{mark} [{', '.join(found.band.ends(number))}]")


def _tex_bound(text: str) -> str:
    """With the signs of open bounds in a mode of LaTeX that shows them in every font."""
    return text.replace("< ", "$<$\\,").replace("> ", "$>$\\,")


def _tex(text: str) -> str:
    """Plain text in LaTeX."""
    names = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(names.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)
