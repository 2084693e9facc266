"""Values in messages: as `repr` writes them, cut short, at a cost that does not depend on their size."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from actorllm.errors import MAX_SHOWN, shown

VALUES: tuple[Any, ...] = (
    *("", "a" * 99, "a" * 5_000, "'\n" * 300, b"x" * 1_000, 1.5, None, True, -(10**50), 10**4_000),
    *([], {}, (), (1,), {3}, [1, [2, {"b": 1, "a": (3, "c")}]], list(range(1_000)), {i: str(i) for i in range(1_000)}),
    *([[number] * 40 for number in range(40)], [["a" * 150]], {"k": {"z": [1], "y": "'" * 300}}),
    functools.reduce(lambda inner, _: [inner], range(300), [1]),
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:20])
def test_it_begins_as_repr(value: Any) -> None:
    text = repr(value)
    assert shown(value) == (text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")


def test_what_has_no_repr_is_called_by_its_type() -> None:
    assert shown(10**5_000) == "<int>"
    assert shown([10**5_000]) == "<list>"


def test_no_more_is_looked_at_than_is_shown() -> None:
    class Item:
        num_shown = 0

        def __repr__(self) -> str:
            Item.num_shown += 1
            return "i"

    many = [Item()] * 200
    assert shown([[many] * 200] * 200).startswith("[[[i, i, i")
    assert Item.num_shown <= MAX_SHOWN
