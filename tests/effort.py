"""How much a test tries: few examples and cells of a grid for every change, all where `make test-slow` runs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest


def examples(quick: int, thorough: int) -> int:
    """How many examples a property test draws: the second number where `THOROUGH` is set, as `make test-slow` does."""
    return thorough if os.environ.get("THOROUGH") else quick


def grid(*factors: Sequence[Any]) -> list[Any]:
    """Every combination of the values of these factors, to be given to `parametrize`.

    The quick ones are few, and have each pair of values of two factors. The others are marked slow.
    """
    cells = list(itertools.product(*(range(len(values)) for values in factors)))
    quick = _with_each_pair(cells)
    rest = pytest.mark.slow(reason="the quick cells have each pair of values of two factors")
    return [
        pytest.param(*(values[i] for values, i in zip(factors, cell, strict=True)), marks=[] if cell in quick else rest)
        for cell in cells
    ]


def each_value(*factors: Sequence[Any]) -> list[Any]:
    """As `grid`, where the factors do not act on each other: the quick cells have each value of a factor.

    A value that is a tuple is several arguments.
    """
    num_quick = max(map(len, factors))
    quick = {tuple(number % len(values) for values in factors) for number in range(num_quick)}
    rest = pytest.mark.slow(reason="the quick cells have each value of each factor")
    found = []
    for cell in itertools.product(*(range(len(values)) for values in factors)):
        chosen = [values[i] for values, i in zip(factors, cell, strict=True)]
        arguments = [one for value in chosen for one in (value if isinstance(value, tuple) else (value,))]
        found.append(pytest.param(*arguments, marks=[] if cell in quick else rest))
    return found


def _with_each_pair(cells: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Chosen one by one, each time a cell with the most pairs that no chosen one has."""
    left = {pair for cell in cells for pair in _pairs_of(cell)}
    chosen = set()
    while left:
        best = max(cells, key=lambda cell: len(left & _pairs_of(cell)))
        chosen.add(best)
        left -= _pairs_of(best)
    return chosen


def _pairs_of(cell: tuple[int, ...]) -> set[tuple[Any, ...]]:
    """Of factors and their values."""
    return set(itertools.combinations(enumerate(cell), 2))
