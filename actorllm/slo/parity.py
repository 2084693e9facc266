"""The parity plot of a fitted step-time model: what held-out steps took against what was predicted for them.

As text for a terminal, and as an SVG that needs nothing else. Both axes are logarithmic and the same: a step on the diagonal
was predicted exactly.
"""

from __future__ import annotations

import math
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import F64
from actorllm.scheduling.cost_model import Fit

MAX_POINTS = 2000
SHADES = " ·░▒▓█"


def _bounds(found: Fit) -> tuple[float, float]:
    both = np.concatenate((found.measured, found.predicted))
    low, high = float(both.min()), float(both.max())
    return low / 1.05, max(high, low * 1.5) * 1.05


def _places(values: F64, low: float, high: float, size: int) -> NDArray[np.int64]:
    """Of values on a logarithmic axis of so many places."""
    share = np.log(values / low) / math.log(high / low)
    return np.minimum((share * size).astype(np.int64), size - 1)


def parity_text(found: Fit, width: int = 56, height: int = 20) -> str:
    """Denser cells hold more steps; / is the diagonal."""
    low, high = _bounds(found)
    counts = np.zeros((height, width), np.int64)
    np.add.at(counts, (_places(found.predicted, low, high, height), _places(found.measured, low, high, width)), 1)
    depth = np.log1p(counts)  # of the densest cell too: another logarithm may differ in the last bit
    shade = np.ceil(depth / max(float(depth.max()), 1e-9) * (len(SHADES) - 1)).astype(int)
    lines = []
    for row in reversed(range(height)):
        cells = [SHADES[shade[row, column]] for column in range(width)]
        for column in range(row * width // height, (row + 1) * width // height):
            cells[column] = "/" if cells[column] == " " else cells[column]
        edge = f"{high * 1e3:9.3g} ┤" if row == height - 1 else f"{low * 1e3:9.3g} ┤" if not row else " " * 10 + "│"
        lines.append(edge + "".join(cells))
    left, right = f"{low * 1e3:.3g}", f"{high * 1e3:.3g}"
    lines.append(" " * 10 + "└" + "─" * width)
    lines.append(" " * 11 + left + right.rjust(width - len(left)))
    title = "predicted ms against measured ms, held-out steps"
    return "\n".join([" " * 11 + title, *lines])


def parity_svg(found: Fit, size: int = 480) -> str:
    """The same as a picture of its own."""
    low, high = _bounds(found)
    margin = 56
    span = math.log(high / low)

    def x(value: float) -> float:
        return margin + (size - 2 * margin) * math.log(value / low) / span

    def y(value: float) -> float:
        return size - x(value)

    def line(points: list[tuple[float, float]], style: str) -> str:
        told = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        return f'<polyline points="{told}" fill="none" {style}/>'

    order = np.argsort(found.measured, kind="stable")
    chosen = order[np.unique(np.linspace(0, order.size - 1, min(MAX_POINTS, order.size)).astype(int))]
    points = [
        f'<circle cx="{x(float(found.measured[i])):.1f}" cy="{y(float(found.predicted[i])):.1f}" r="2"/>'
        for i in chosen.tolist()
    ]
    frame = [(x(low), y(low)), (x(high), y(low)), (x(high), y(high)), (x(low), y(high)), (x(low), y(low))]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif" font-size="12">',
        f'<rect width="{size}" height="{size}" fill="white"/>',
        line(frame, 'stroke="#888"'),
        line([(x(low), y(low)), (x(high), y(high))], 'stroke="#444"'),
    ]
    for factor in (1.2, 1 / 1.2):
        ends = [(v, v * factor) for v in (low, high)]
        clipped = [(min(max(a, low), high), min(max(b, low), high)) for a, b in ends]
        parts.append(line([(x(a), y(b)) for a, b in clipped], 'stroke="#bbb" stroke-dasharray="4 3"'))
    parts.append(f'<g fill="#1f6fb2" fill-opacity="0.45">{"".join(points)}</g>')
    for tick in _ticks(low, high):
        label = f"{tick * 1e3:g}"
        parts.append(f'<text x="{x(tick):.1f}" y="{size - margin + 16}" text-anchor="middle">{label}</text>')
        parts.append(f'<text x="{margin - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{label}</text>')
    told = (
        f"{found.model.name}: {found.mape:.1%} mean error, {found.bias:+.1%} bias, {found.measured.size} held-out steps"
    )
    middle = size / 2
    parts += [
        f'<text x="{middle}" y="28" text-anchor="middle" font-size="13">{escape(told)}</text>',
        f'<text x="{middle}" y="{size - 14}" text-anchor="middle">measured (ms); dashed: 20 % off</text>',
        f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">predicted (ms)</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten within the bounds; only the powers if that is many."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**e for e in exponents for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    if len(ticks) > 9:
        ticks = [10.0**e for e in exponents if low <= 10.0**e <= high]
    assert all(a < b for a, b in pairwise(ticks))
    return ticks
