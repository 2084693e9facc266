"""The table of messages names every field, and `violation` refuses by name what the table does not allow."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorllm import messages
from actorllm.messages import KINDS, StepPlan, StepResult, Submit, pack, unpack
from actorllm.messages.schema import (
    EMPTY,
    FRONTEND,
    I32_MAX,
    SCHEDULER,
    SCHEMA,
    WORKER,
    Field,
    check_of,
    check_of_fields,
    violation,
)

ALIASES = {"i4": messages.I32, "i8": messages.I64, "u1": messages.U8, "u4": messages.U32, "f4": messages.F32}
SCALARS = {"int": int, "float": float, "bool": bool, "str": str}
EVERY = [(cls, name) for cls in KINDS.values() for name in SCHEMA[cls.__name__].fields]
NESTED = orjson.loads("[" * 1000 + "]" * 1000)


def column(field: Field, *values: Any) -> np.ndarray[Any, Any]:
    return np.array(values, field.kind)


def right_values(field: Field) -> Iterator[Any]:
    """Some that a field may hold, its bounds among them."""
    low, high = field.low, field.high
    bounds = [bound for bound in (low, high) if bound is not None]
    if field.is_nullable:
        yield None
    if field.is_column:
        yield EMPTY[field.kind]
        yield column(field)
        yield column(field, *(bounds or [1]), 3)
        return
    match field.kind:
        case "int":
            yield from map(int, bounds)
        case "float":
            yield from bounds or (0, 1.5, -2.0)
        case "bool":
            yield from (True, False)
        case "str":
            yield from ("", "x")
        case "ints":
            yield from ([], (), [0, I32_MAX])
        case "floats":
            yield from ([], [0.5, None])
        case "strs":
            yield from ([], ["x", ""], ("x",))
        case "rows":
            yield from ([], [[1, "stop", None]])
        case "map":
            yield from ({}, {"a": [1, {"b": None}]})
        case "any":
            yield from (None, 1, "x", [1], {"a": 1})


def wrong_values(field: Field) -> Iterator[Any]:
    """Of another type, out of range, None where that is not allowed, nested too deeply."""
    low, high = field.low, field.high
    if not field.is_nullable and field.kind != "any":
        yield None
    if field.is_column:
        other = "f8" if field.kind != "f8" else "i4"
        yield from (0, "x", [], [1], np.zeros(1, other), np.zeros(0, other), column(field, 1).reshape(1, 1))
        yield np.zeros((), field.kind)
        yield np.zeros(1, f">{field.kind}") if field.kind != "u1" else np.zeros(1, "i1")
        if low is not None:
            yield column(field, max(low, 0), low - 1)
        if high is not None:
            yield column(field, high + 1)
        return
    match field.kind:
        case "int":
            yield from (True, 1.0, "1", [], {}, np.int64(1))
            yield from (int(bound) + step for bound, step in ((low, -1), (high, 1)) if bound is not None)
        case "float":
            yield from (True, "1", [1], float("nan"), float("inf"), -float("inf"), 10**400, 1j)
            yield from () if low is None else (low - 1,)
            yield from () if high is None else (high * 1.01,)
        case "bool":
            yield from (0, 1, "true", [True])
        case "str":
            yield from (0, b"x", ["x"])
        case "ints":
            yield from (3, "3", [True], [1.0], [None], [I32_MAX + 1], {1: 1})
        case "floats":
            yield from (0.5, "x", ["x"], [float("nan")], [True], [[]])
        case "strs":
            yield from ("x", [1], [None], [["x"]], {"x": 1})
        case "rows":
            yield from ("x", [1], [None], [{}], [[NESTED]])
        case "map":
            yield from ([], "x", 1, {"a": NESTED})
        case "any":
            yield NESTED


def valid(cls: type[Any]) -> Any:
    """A message with as few fields as there can be."""
    fields = SCHEMA[cls.__name__].fields
    given = {
        f.name: next(value for value in right_values(fields[f.name]) if value is not None)
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    return cls(**given)


def changed(message: Any, name: str, value: Any) -> Any:
    return dataclasses.replace(message, **{name: value})


# The table ------------------------------------------------------------------------------------------------------------


def test_every_message_is_in_the_table_with_its_fields_in_their_order() -> None:
    assert set(SCHEMA) == {cls.__name__ for cls in KINDS.values()}
    for cls in KINDS.values():
        assert list(SCHEMA[cls.__name__].fields) == [f.name for f in dataclasses.fields(cls)]


@pytest.mark.parametrize(("cls", "name"), EVERY, ids=lambda value: getattr(value, "__name__", value))
def test_the_table_says_what_the_annotation_says(cls: type[Any], name: str) -> None:
    field = SCHEMA[cls.__name__].fields[name]
    hint = typing.get_type_hints(cls)[name]
    arguments = typing.get_args(hint)
    is_nullable = type(None) in arguments
    if is_nullable:
        (hint,) = [argument for argument in arguments if argument is not type(None)]
    assert field.is_nullable == is_nullable
    if field.is_column:
        assert hint == ALIASES[field.kind]
    elif field.kind in SCALARS:
        assert hint is SCALARS[field.kind]
    else:
        told = {"ints": "Sequence[int]", "floats": "Sequence[float", "strs": "Sequence[str]"}
        told |= {"rows": "Sequence[collections.abc.Sequence", "map": "dict[str", "any": "typing.Any"}
        assert told[field.kind] in str(hint)


def test_who_sends_what() -> None:
    for inbox, sender in (
        (messages.ToScheduler, {FRONTEND, WORKER}),
        (messages.ToWorker | messages.ToFrontend, {SCHEDULER}),
    ):
        for cls in typing.get_args(inbox):
            assert SCHEMA[cls.__name__].senders & sender, cls
    for cls in KINDS.values():
        message = valid(cls)
        for sender in (FRONTEND, SCHEDULER, WORKER):
            wrong = violation(message, sender)
            if sender in SCHEMA[cls.__name__].senders:
                assert wrong is None
            else:
                assert wrong == f"a {cls.__name__}, which is not for a {sender} to send"
    assert violation(object(), WORKER) == "a object, which is not for a worker to send"


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "name"), EVERY, ids=lambda value: getattr(value, "__name__", value))
def test_what_a_field_may_not_hold_is_refused_by_name(cls: type[Any], name: str) -> None:
    entry = SCHEMA[cls.__name__]
    (sender, *_) = entry.senders
    message = valid(cls)
    for value in right_values(entry.fields[name]):
        assert violation(changed(message, name, value), sender) is None, value
    tried = 0
    for value in wrong_values(entry.fields[name]):
        wrong = violation(changed(message, name, value), sender)
        assert wrong is not None, value
        assert wrong.startswith(f"{cls.__name__}.{name}=")
        assert "\n" not in wrong
        tried += 1
    assert tried


@pytest.mark.parametrize(("cls", "name"), EVERY)
def test_the_check_of_some_fields_is_that_of_each(cls: type[Any], name: str) -> None:
    """It is one expression where it can be: the results of steps come that way."""
    field = SCHEMA[cls.__name__].fields[name]
    message, check = valid(cls), check_of(field)
    is_right = check_of_fields(cls.__name__, (name,))
    swapped = [np.zeros(2, np.dtype(field.kind).newbyteorder())] if field.is_column else []
    values = [*right_values(field), *wrong_values(field), np.float64(1), True, None, float("nan"), *swapped]
    for value in values:
        assert is_right(changed(message, name, value)) == check(value), value


@pytest.mark.parametrize("name", [name for name, field in SCHEMA["StepResult"].fields.items() if field.is_column])
def test_a_result_is_plain_while_only_its_tokens_hold_anything(name: str) -> None:
    plain = messages.StepResult(step=1, tokens=np.zeros(1, np.int32))
    assert plain.is_plain
    one = np.zeros(1, SCHEMA["StepResult"].fields[name].kind)
    for value in (one, one[:0], None):
        assert changed(plain, name, value).is_plain == (name == "tokens"), value


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@given(value=ANYTHING, where=st.sampled_from(EVERY))
def test_no_value_makes_the_check_itself_fail(value: Any, where: tuple[type[Any], str]) -> None:
    cls, name = where
    field = SCHEMA[cls.__name__].fields[name]
    (sender, *_) = SCHEMA[cls.__name__].senders
    wrong = violation(changed(valid(cls), name, value), sender)
    assert (wrong is None) == check_of(field)(value)
    if wrong is None and not field.is_column:  # what is accepted travels
        kind, scalars, arrays = pack(changed(valid(cls), name, value))
        assert getattr(unpack(kind, scalars, arrays), name) == value


# The way over the wire ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", KINDS.values(), ids=lambda cls: cls.__name__)
def test_a_round_trip_changes_no_byte(cls: type[Any]) -> None:
    """With all columns empty, with all full, and with those that may be None."""
    fields = SCHEMA[cls.__name__].fields
    columns = {name: field for name, field in fields.items() if field.is_column}
    full = {name: column(field, 1, 2) for name, field in columns.items()}
    empty = {name: EMPTY[field.kind] for name, field in columns.items()}
    none = {name: None for name, field in columns.items() if field.is_nullable}
    for given_columns in (full, empty, none, {}):
        message = dataclasses.replace(valid(cls), **given_columns)
        kind, scalars, arrays = pack(message)
        body = orjson.dumps(scalars), [a.tobytes() for a in arrays]
        again = unpack(
            kind, orjson.loads(body[0]), [np.frombuffer(b, a.dtype) for a, b in zip(arrays, body[1], strict=True)]
        )
        assert type(again) is cls
        kind_again, scalars, arrays = pack(again)
        assert (kind_again, orjson.dumps(scalars), [a.tobytes() for a in arrays]) == (kind, *body)
        for name in columns:
            was, now = getattr(message, name), getattr(again, name)
            assert (was is None) == (now is None)
            assert was is None or (was.dtype == now.dtype and was.tolist() == now.tolist())


def test_the_bytes_of_known_messages() -> None:
    """Recordings of other versions are read: the order of fields and bits stays."""
    i4 = np.array([1, 2], np.int32)
    assert pack(StepResult(step=3, tokens=i4, nonfinite_rows=i4, ended=2.5))[:2] == (6, [0b10001, 0, 3, 0.0, 2.5])
    assert pack(StepPlan(step=4, prefill_slots=i4, embeds=np.zeros(1, np.uint8)))[:2] == (
        4,
        [1 << 15 | 1 << 18, 1 << 14, 4, 0],
    )
    kind, scalars, _ = pack(Submit(rid=1, arrival=0.5, prompt=i4, max_tokens=8))
    assert (kind, scalars[:5], len(scalars)) == (1, [1, 0, 1, 0.5, 8], 2 + 46)


@pytest.mark.parametrize("masks", [(-1, 0), (0, -1), (1 << 13, 0), (0, 1 << 13), (1, 1)])
def test_masks_of_columns_that_there_are_not(masks: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="masks"):
        unpack(6, [*masks, 5, 0.0, 0.0], [np.zeros(2, np.int32)])


def test_empty_columns_are_one_array_that_nobody_can_write_to() -> None:
    for cls in KINDS.values():
        fields = SCHEMA[cls.__name__].fields
        message = valid(cls)
        again = unpack(*pack(message))
        for f in dataclasses.fields(cls):
            kind = fields[f.name].kind
            if kind in EMPTY and f.default_factory is not dataclasses.MISSING:
                assert getattr(message, f.name) is getattr(again, f.name) is EMPTY[kind]
    for empty in EMPTY.values():
        assert not empty.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            empty[:] = 1
    one, other = messages.Ask(id=1, verb="a"), messages.Ask(id=2, verb="a")
    assert one.arguments is not other.arguments, "what can be written to is not shared"
