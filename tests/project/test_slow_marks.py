"""Each mark `slow` says why its test is slow, so that a reader knows what `make test` leaves out."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

from tests.effort import each_value, grid

TESTS = Path(__file__).parents[1]


def marks_without_reason(source: str) -> Iterator[int]:
    """The lines of marks `slow` that are not called with `reason`, a string that is not empty."""
    tree = ast.parse(source)
    with_reason = {
        call.func
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and any(
            word.arg == "reason"
            and isinstance(word.value, ast.Constant)
            and isinstance(word.value.value, str)
            and word.value.value.strip()
            for word in call.keywords
        )
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "slow"
            and isinstance(node.value, ast.Attribute)
            and node.value.attr == "mark"
            and node not in with_reason
        ):
            yield node.lineno


def test_each_slow_mark_has_a_reason() -> None:
    silent = [
        f"{file.relative_to(TESTS)}:{line}"
        for file in sorted(TESTS.rglob("*.py"))
        for line in marks_without_reason(file.read_text())
    ]
    assert silent == []


def test_a_mark_without_a_reason_is_found() -> None:
    marks = ("slow", "slow()", 'slow("long")', 'slow(reason="")', 'slow(reason="long")', "timeout(9)")
    source = "".join(f"@pytest.mark.{mark}\ndef test(): ...\n" for mark in marks)
    assert list(marks_without_reason(source)) == [1, 3, 5, 7]


def test_quick_cells_of_a_grid_have_each_pair_of_values() -> None:
    factors = ("ab", (1, 2, 3), (None, False), "xyz")
    cells = grid(*factors)
    assert [cell.values for cell in cells] == list(itertools.product(*factors))
    quick = [cell.values for cell in cells if not cell.marks]
    assert len(quick) < len(cells) / 2
    for first, second in itertools.combinations(range(len(factors)), 2):
        pairs = {(values[first], values[second]) for values in quick}
        assert pairs == set(itertools.product(factors[first], factors[second]))


def test_quick_cells_of_factors_that_do_not_act_on_each_other_have_each_value() -> None:
    cells = each_value("ab", [(1, None), (2, False), (3, True)], "xy")
    assert [cell.values for cell in cells] == [
        (first, *pair, last) for first in "ab" for pair in [(1, None), (2, False), (3, True)] for last in "xy"
    ]
    quick = [cell.values for cell in cells if not cell.marks]
    assert len(quick) == 3
    assert [set(column) for column in zip(*quick, strict=True)] == [
        set("ab"),
        {1, 2, 3},
        {None, False, True},
        set("xy"),
    ]
