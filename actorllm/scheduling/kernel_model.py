"""`KernelModel`: step times that are sums of the kernels of a step, each of which was measured on its own.

    tokens   everything that is computed for each token but attention: projections, experts, norms; by tokens of the step
    logits   the last layer and the sampler; by rows that get logits
    decode   attention of decode rows in steps without prompts; by rows and by the mean context of a row
    mixed    the same beside prompts, where other kernels run
    prompt   attention of chunks: seconds of any chunk, of a (query, key) pair and of a token computed before

Between two nodes of a curve the time is on a straight line, beyond the last one it goes on as between the last two. Kernels
do not say what a step takes between them: that is `fixed_s`. Seconds. Pure.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from actorllm.errors import ConfigError
from actorllm.messages import F64

NUM_PROMPT_COEFFICIENTS = 3


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by one size."""

    sizes: tuple[float, ...]
    """Nodes, ascending."""
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_axis("sizes", self.sizes)
        if len(self.seconds) != len(self.sizes) or not all(_is_time(x) for x in self.seconds):
            raise ConfigError(f"a curve of {len(self.sizes)} sizes needs as many seconds, 0 or more")

    def at(self, size: float) -> float:
        i, share = _place(self.sizes, size)
        low = self.seconds[i]
        return low if not share else max(0.0, low + share * (self.seconds[i + 1] - low))


@dataclass(frozen=True, slots=True)
class Surface:
    """Seconds by decode rows and by the mean context of a row."""

    rows: tuple[float, ...]
    """Nodes, ascending."""
    contexts: tuple[float, ...]
    """Nodes, ascending."""
    seconds: tuple[tuple[float, ...], ...]
    """By rows, then by contexts."""

    def __post_init__(self) -> None:
        _check_axis("rows", self.rows)
        _check_axis("contexts", self.contexts)
        if len(self.seconds) != len(self.rows) or any(len(line) != len(self.contexts) for line in self.seconds):
            raise ConfigError(f"a surface of {len(self.rows)} rows needs as many lines of {len(self.contexts)} seconds")
        if not all(_is_time(x) for line in self.seconds for x in line):
            raise ConfigError("the seconds of a surface must be 0 or more")

    def at(self, rows: float, context: float) -> float:
        i, x = _place(self.rows, rows)
        j, y = _place(self.contexts, context)
        low = _between(self.seconds[i], j, y)
        return low if not x else max(0.0, low + x * (_between(self.seconds[i + 1], j, y) - low))

    def along(self, rows: float, contexts: F64) -> F64:
        """`at` for many contexts, to the last bit."""
        i, x = _place(self.rows, rows)
        low = _along(self.contexts, self.seconds[i], contexts)
        if not x:
            return low
        found: F64 = np.maximum(0.0, low + x * (_along(self.contexts, self.seconds[i + 1], contexts) - low))
        return found


def _check_axis(name: str, axis: tuple[float, ...]) -> None:
    if not axis or any(not x >= 0 for x in axis) or any(a >= b for a, b in itertools.pairwise(axis)):
        raise ConfigError(f"{name}={axis!r:.80} must be numbers that ascend")


def _is_time(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _place(axis: tuple[float, ...], value: float) -> tuple[int, float]:
    """The node at or below a value, and the share of the way to the next one: above 1 beyond the last, 0 below the first."""
    at = min(bisect_right(axis, value) - 1, len(axis) - 2)
    if at < 0:
        return 0, 0.0
    return at, (value - axis[at]) / (axis[at + 1] - axis[at])


def _between(line: tuple[float, ...], at: int, share: float) -> float:
    return line[at] if not share else line[at] + share * (line[at + 1] - line[at])


def _along(axis: tuple[float, ...], line: tuple[float, ...], values: F64) -> F64:
    nodes, seconds = np.array(axis), np.array(line)
    if nodes.size == 1:
        return np.full(values.size, seconds[0])
    at = np.minimum(np.searchsorted(nodes, values, side="right") - 1, nodes.size - 2)
    below = at < 0
    at[below] = 0
    share = (values - nodes[at]) / (nodes[at + 1] - nodes[at])
    share[below] = 0.0
    found: F64 = seconds[at] + share * (seconds[at + 1] - seconds[at])
    return found


@dataclass(frozen=True, slots=True)
class KernelModel:
    """A `StepModel`. See the module docstring."""

    tokens: Curve
    logits: Curve | None = None
    decode: Surface | None = None
    mixed: Surface | None = None
    """None: as decode."""
    prompt: tuple[float, ...] = (0.0, 0.0, 0.0)
    name: str = "kernels"
    fixed_s: float = 0.0
    """Of every step: what no kernel says, such as launches and copies."""
    gap_s: float = 0.0
    launch_s: float = 0.0
    residuals: tuple[float, ...] = ()
    submit_s: float = 0.0
    deliver_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.prompt) != NUM_PROMPT_COEFFICIENTS or not all(_is_time(x) for x in self.prompt):
            raise ConfigError(f"prompt={self.prompt!r:.80} must be {NUM_PROMPT_COEFFICIENTS} numbers, 0 or more")

    def seconds(
        self, p: float, d: float, decode_context: float, prefill_context: float = 0.0, prefill_pairs: float = 0.0
    ) -> float:
        found = self.fixed_s + self.tokens.at(p + d)
        if self.logits is not None:
            found += self.logits.at(d + 1 if p else d)
        if d:
            surface = self.mixed or self.decode if p else self.decode
            if surface is not None:
                found += surface.at(d, decode_context / d)
        if p:
            once, pair, before = self.prompt
            found += once + pair * prefill_pairs + before * prefill_context
        return found

    def decode_run(self, d: int, context: int, steps: int) -> F64:
        alone = self.fixed_s + self.tokens.at(d)
        if self.logits is not None:
            alone += self.logits.at(d)
        if self.decode is None:
            return np.full(steps, alone)
        contexts: F64 = (context + d * np.arange(steps)) / d
        return alone + self.decode.along(d, contexts)
