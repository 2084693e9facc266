"""Points in time that travel in messages, for a transport between clocks that differ.

Processes of one machine share CLOCK_MONOTONIC, and their links carry times as they are. Two machines do not: there a deadline
of the sender may have passed long ago by the clock of the receiver. `TIMES` names the fields that hold points in time, from the
table of `messages.schema`, and `translated` moves them. Durations are the same by every clock. What `Ask` and `Reply` carry is
left as it is, by the clock of the actor that answers. `fleet.merging` moves what is shown beside the answers of other replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from actorllm.messages.schema import SCHEMA

M = TypeVar("M")

TIMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        name: found
        for name, entry in SCHEMA.items()
        if (found := tuple(field for field, told in entry.fields.items() if told.is_time or told.times))
    }
)
"""By message, the fields that are points in time, or rows with some; messages without any are not in it."""


def translate(message: object, offset_s: float) -> None:
    """As `translated`, in place: of a message that was just unpacked, to which there is no other reference. It costs no copy."""
    name = type(message).__name__
    for field in TIMES.get(name, ()):
        value = getattr(message, field)
        if value:
            times = SCHEMA[name].fields[field].times
            object.__setattr__(message, field, _moved_rows(value, times, offset_s) if times else value + offset_s)


def translated(message: M, offset_s: float) -> M:
    """The message by another clock. Without points in time it is the same object.

    Arguments:
        message: any of `actorllm.messages`; it is not changed.
        offset_s: what the receiver's clock shows minus what the sender's shows, in seconds. None and 0 stay: they say that
            there is no time.
    """
    name = type(message).__name__
    if name not in TIMES:
        return message
    fields = SCHEMA[name].fields
    changed = {
        field: _moved_rows(value, fields[field].times, offset_s) if fields[field].times else value + offset_s
        for field in TIMES[name]
        if (value := getattr(message, field))
    }
    return replace(message, **changed) if changed else message  # type: ignore[type-var]


def _moved_rows(rows: Sequence[Sequence[Any]], positions: tuple[int, ...], offset_s: float) -> list[list[Any]]:
    moved = [[*row] for row in rows]
    for row in moved:
        for position in positions:
            if row[position]:
                row[position] += offset_s
    return moved
