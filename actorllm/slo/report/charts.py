"""Charts as SVG text: lines with bands, ranges, tables in colours, and areas over time.

Colours are variables of the page, so that a chart is right in its light and its dark theme. Series differ by marker and dash,
too, for readers who do not see colours apart and for paper. Every mark has a title that is shown under the mouse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

NUM_COLOURS = 8
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "1 2", "6 2 1 2")
LABEL = 24
"""Characters of a line of a label beside a row: in wide fonts, too, they fit into its 190 pixels."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line: y over x, with a band if low and high are given."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: int = 0
    is_hollow: Sequence[bool] = ()
    """Points that are drawn as outlines."""
    notes: Sequence[str] = ()
    """Of each point, under the mouse."""
    is_large: Sequence[bool] = ()
    """Points whose marks are of full size; not given: all."""


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A horizontal line with a name."""

    at: float
    name: str


def number(value: float) -> str:
    """Three digits, and no zeros that say nothing."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(value: float) -> str:
    return f"{100 * value:.3g}%" if abs(value) >= 1e-5 else "0%"


def ticks(low: float, high: float, num: int = 5) -> list[float]:
    """About so many round values from low to high."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    rough = (high - low) / num
    power = 10 ** math.floor(math.log10(rough))
    step = min((m * power for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - rough))
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(slots=True)
class Plot:
    """A frame with axes; marks are added in pixels of its viewBox."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: int = 520
    height: int = 300
    left: int = 52
    right: int = 12
    top: int = 12
    bottom: int = 40
    is_log_x: bool = False
    parts: list[str] = field(default_factory=list)

    def x(self, value: float) -> float:
        low, high = self.x_range
        if self.is_log_x:
            value, low, high = math.log(value), math.log(low), math.log(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.left + share * (self.width - self.left - self.right), 2)

    def y(self, value: float) -> float:
        low, high = self.y_range
        share = (min(max(value, low), high) - low) / (high - low) if high > low else 0.5
        return round(self.height - self.bottom - share * (self.height - self.top - self.bottom), 2)

    def add(self, text: str) -> None:
        self.parts.append(text)

    def text(self, x: float, y: float, text: str, kind: str = "tick", anchor: str = "middle", more: str = "") -> None:
        self.add(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"{more}>{escape(text)}</text>')

    def axes(
        self,
        x_label: str,
        y_label: str,
        x_format: Callable[[float], str] = number,
        y_format: Callable[[float], str] = number,
        x_ticks: Sequence[float] | None = None,
    ) -> None:
        right, bottom = self.width - self.right, self.height - self.bottom
        for value in ticks(*self.y_range):
            y = self.y(value)
            self.add(f'<line x1="{self.left}" x2="{right}" y1="{y}" y2="{y}" class="grid"/>')
            self.text(self.left - 6, y + 4, y_format(value), anchor="end")
        for value in ticks(*self.x_range, 6) if x_ticks is None else x_ticks:
            self.add(f'<line x1="{self.x(value)}" x2="{self.x(value)}" y1="{bottom}" y2="{bottom + 4}" class="axis"/>')
            self.text(self.x(value), bottom + 16, x_format(value))
        self.add(f'<line x1="{self.left}" x2="{right}" y1="{bottom}" y2="{bottom}" class="axis"/>')
        if x_label:
            self.text((self.left + right) / 2, self.height - 6, x_label, "label")
        if y_label:
            middle = (self.top + bottom) / 2
            self.text(13, middle, y_label, "label", more=f' transform="rotate(-90 13 {middle:.1f})"')

    def svg(self, label: str) -> str:
        head = f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(label, quote=True)}">'
        return f"{head}{''.join(self.parts)}</svg>"


def marker(x: float, y: float, colour: int, is_hollow: bool = False, note: str = "", size: float = 4.0) -> str:
    shape, s = colour % 4, size
    style = f'class="m{colour % NUM_COLOURS}{" hollow" if is_hollow else ""}"'
    title = f"<title>{escape(note)}</title>" if note else ""
    match shape:
        case 0:
            return f'<circle cx="{x}" cy="{y}" r="{s}" {style}>{title}</circle>'
        case 1:
            return f'<rect x="{x - s:.2f}" y="{y - s:.2f}" width="{2 * s}" height="{2 * s}" {style}>{title}</rect>'
        case 2:
            path = f"M{x} {y - 1.25 * s:.2f}L{x + 1.2 * s:.2f} {y + s:.2f}H{x - 1.2 * s:.2f}Z"
        case _:
            path = f"M{x} {y - 1.4 * s:.2f}L{x + 1.4 * s:.2f} {y}L{x} {y + 1.4 * s:.2f}L{x - 1.4 * s:.2f} {y}Z"
    return f'<path d="{path}" {style}>{title}</path>'


def path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


def lines(
    series: Sequence[Series],
    label: str,
    x_label: str,
    y_label: str,
    *,
    y_range: tuple[float, float] | None = None,
    y_format: Callable[[float], str] = number,
    targets: Sequence[ChartLine] = (),
    is_log_x: bool = False,
    has_markers: bool = True,
    width: int = 520,
    height: int = 300,
) -> str:
    """Lines with bands. Nothing but a remark when there is nothing to draw."""
    xs = [x for s in series for x in s.x]
    ys = [y for s in series for y in (*s.y, *s.high) if math.isfinite(y)]
    if not xs or not ys:
        return '<p class="none">nothing to draw</p>'
    found = y_range or (0.0, 1.08 * max(max(ys), 1e-9))
    # A single x has no range; a made-up one puts it in the middle.
    low, high = min(xs), max(xs)
    if low == high:
        low, high = low / 1.5, high * 1.5 or 1.0
    plot = Plot((low, high), found, width, height, is_log_x=is_log_x)
    plot.axes(x_label, y_label, y_format=y_format, x_ticks=sorted(set(xs)) if is_log_x else None)
    # In drawing order: targets, then all bands, then lines and markers above them.
    for target in targets:
        y = plot.y(target.at)
        plot.add(f'<line x1="{plot.left}" x2="{width - plot.right}" y1="{y}" y2="{y}" class="target"/>')
        plot.text(width - plot.right, y - 4, target.name, anchor="end")
    for s in series:
        if len(s.low):
            there = [(plot.x(x), plot.y(v)) for x, v in zip(s.x, s.high, strict=True)]
            back = [(plot.x(x), plot.y(v)) for x, v in zip(s.x, s.low, strict=True)]
            plot.add(f'<path d="{path(there + back[::-1])}Z" class="b{s.colour % NUM_COLOURS}"/>')
    for s in series:
        points = [(plot.x(x), plot.y(y)) for x, y in zip(s.x, s.y, strict=True) if math.isfinite(y)]
        if points:
            dash = DASHES[s.colour % len(DASHES)]
            plot.add(
                f'<path d="{path(points)}" class="l{s.colour % NUM_COLOURS}"'
                f"{f' stroke-dasharray={chr(34)}{dash}{chr(34)}' if dash else ''}/>"
            )
        for i, (x, y) in enumerate(zip(s.x, s.y, strict=True)):
            if has_markers and math.isfinite(y):
                # Columns that a series does not have stand for plain markers of one size.
                hollow = bool(s.is_hollow[i]) if len(s.is_hollow) else False
                note = s.notes[i] if len(s.notes) else f"{s.name}: {number(y)} at {number(x)}"
                size = 4.0 if not len(s.is_large) or s.is_large[i] else 2.4
                plot.add(marker(plot.x(x), plot.y(y), s.colour, hollow, note, size))
    return plot.svg(label)


def legend(names: Sequence[str]) -> str:
    """Markers and dashes with their names, in the order of their colours."""
    items = []
    for colour, name in enumerate(names):
        dash = DASHES[colour % len(DASHES)]
        style = f' stroke-dasharray="{dash}"' if dash else ""
        line = f'<path d="M1 7H33" class="l{colour % NUM_COLOURS}"{style}/>'
        items.append(
            f'<li><svg viewBox="0 0 34 14" aria-hidden="true">{line}{marker(17, 7, colour)}</svg>{escape(name)}</li>'
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


@dataclass(frozen=True, slots=True)
class Range:
    value: float
    low: float
    high: float
    note: str
    is_hollow: bool = False


def ranges(rows: Sequence[tuple[str, Sequence[tuple[int, Range | None]]]], label: str, x_label: str) -> str:
    """A line for each row; on it, marks in a colour with their bands."""
    found = [r for _, marks in rows for _, r in marks if r is not None]
    if not found:
        return '<p class="none">no rate was found</p>'
    left = 200
    named = [in_lines(name, LABEL) for name, _ in rows]
    row_height = max(44, 14 * max(map(len, named)) + 8)
    num_marks = max(len(marks) for _, marks in rows)
    height = 16 + row_height * len(rows) + 44
    plot = Plot((0.0, 1.04 * max(r.high for r in found)), (0.0, 1.0), 1060, height, left=left, top=8)
    right, bottom = plot.width - plot.right, height - plot.bottom
    for value in ticks(*plot.x_range, 8):
        plot.add(f'<line x1="{plot.x(value)}" x2="{plot.x(value)}" y1="8" y2="{bottom}" class="grid"/>')
        plot.text(plot.x(value), bottom + 16, number(value))
    for index, (_, marks) in enumerate(rows):
        middle = 14 + row_height * (index + 0.5)
        parts = named[index]
        for number_of, part in enumerate(parts):
            plot.text(left - 10, round(middle + 4 + 14 * (number_of - (len(parts) - 1) / 2), 1), part, "row", "end")
        if index:
            top = 14 + row_height * index
            plot.add(f'<line x1="8" x2="{right}" y1="{top}" y2="{top}" class="grid"/>')
        for position, (colour, r) in enumerate(marks):
            if r is None:
                continue
            y = round(middle + (position - (num_marks - 1) / 2) * 9, 2)
            plot.add(f'<line x1="{plot.x(r.low)}" x2="{plot.x(r.high)}" y1="{y}" y2="{y}" class="w{colour}"/>')
            plot.add(marker(plot.x(r.value), y, colour, r.is_hollow, r.note))
    plot.text((left + right) / 2, height - 6, x_label, "label")
    return plot.svg(label)


def in_lines(text: str, most: int) -> list[str]:
    """A label in lines of at most so many characters, cut behind commas and before + and @ where it can be."""
    found: list[str] = []
    while len(text) > most:
        cut = max((at + (text[at] == ",") for at in range(1, most) if text[at] in ",+@"), default=most)
        found.append(text[:cut])
        text = text[cut:]
    return [*found, text]


def heat(
    missed: Sequence[Sequence[float | None]],
    notes: Sequence[Sequence[str]],
    row_names: Sequence[str],
    column_names: Sequence[str],
    label: str,
    row_label: str,
    column_label: str,
) -> str:
    """A table of shares: the more of the colour, the more is missed. None: there was nothing."""
    size, left, top = 46, 78, 8
    rows, columns = len(row_names), len(column_names)
    plot = Plot((0, 1), (0, 1), left + size * columns + 6, top + 30 * rows + 46, left=left)
    for r, (cells, texts) in enumerate(zip(missed, notes, strict=True)):
        y = top + 30 * r
        plot.text(left - 6, y + 19, row_names[r], anchor="end")
        for c, (share, note) in enumerate(zip(cells, texts, strict=True)):
            x = left + size * c
            if share is None:
                plot.add(f'<rect x="{x}" y="{y}" width="{size - 2}" height="28" class="empty"/>')
                continue
            plot.add(
                f'<g><title>{escape(note)}</title><rect x="{x}" y="{y}" width="{size - 2}" height="28" class="empty"/>'
                f'<rect x="{x}" y="{y}" width="{size - 2}" height="28" class="heat" fill-opacity="{0.9 * share:.2f}"/>'
                f'<text x="{x + size / 2 - 1}" y="{y + 18}" text-anchor="middle" '
                f'class="cell{" inverse" if share > 0.5 else ""}">{100 * (1 - share):.0f}</text></g>'
            )
    for c, name in enumerate(column_names):
        plot.text(left + size * (c + 0.5) - 1, top + 30 * rows + 14, name)
    plot.text(left + size * columns / 2, plot.height - 8, column_label, "label")
    middle = top + 15 * rows
    plot.text(12, middle, row_label, "label", more=f' transform="rotate(-90 12 {middle:.1f})"')
    return plot.svg(label)


def over_time(
    edges: Sequence[float],
    layers: Sequence[tuple[str, Sequence[float], str]],
    label: str,
    *,
    is_stacked: bool = False,
    y_format: Callable[[float], str] = number,
    y_max: float | None = None,
    has_x: bool = False,
    instants: Sequence[tuple[float, str]] = (),
    instant_class: str = "miss",
) -> str:
    """Values by interval of time; layers: (name, values, class). instants are marked at the top."""
    height = 118 if has_x else 96
    stacked: list[list[float]] = []
    total = [0.0] * (len(edges) - 1)
    # Stacked layers are drawn as bands between running sums, others as areas from the axis.
    for _, values, _ in layers:
        total = [t + v for t, v in zip(total, values, strict=True)] if is_stacked else list(values)
        stacked.append(total)
    most = max((v for values in stacked for v in values if math.isfinite(v)), default=0.0)
    plot = Plot(
        (edges[0], edges[-1]), (0.0, y_max or 1.1 * most or 1.0), 1060, height, bottom=34 if has_x else 12, top=10
    )
    right, bottom = plot.width - plot.right, plot.height - plot.bottom
    for value in ticks(*plot.y_range, 3):
        y = plot.y(value)
        plot.add(f'<line x1="{plot.left}" x2="{right}" y1="{y}" y2="{y}" class="grid"/>')
        plot.text(plot.left - 6, y + 4, y_format(value), anchor="end")
    if has_x:
        for value in ticks(edges[0], edges[-1], 10):
            plot.text(plot.x(value), bottom + 15, number(value))
        plot.text((plot.left + right) / 2, plot.height - 4, "seconds", "label")
    below = [0.0] * (len(edges) - 1)
    for (_, _, kind), values in zip(layers, stacked, strict=True):
        upper = _steps(plot, edges, values)
        if is_stacked:
            lower = _steps(plot, edges, below)
            plot.add(f'<path d="{path(upper + lower[::-1])}Z" class="{kind}"/>')
            below = values
        else:
            plot.add(f'<path d="{path(upper)}" class="{kind}"/>')
    # More marks than this would be one line.
    for at, note in instants[:400]:
        x = plot.x(at)
        plot.add(f'<path d="M{x} 2v7" class="{instant_class}"><title>{escape(note)}</title></path>')
    plot.add(f'<line x1="{plot.left}" x2="{right}" y1="{bottom}" y2="{bottom}" class="axis"/>')
    return plot.svg(label)


def _steps(plot: Plot, edges: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    found = []
    for i, value in enumerate(values):
        y = plot.y(value if math.isfinite(value) else 0.0)
        found += [(plot.x(edges[i]), y), (plot.x(edges[i + 1]), y)]
    return found
