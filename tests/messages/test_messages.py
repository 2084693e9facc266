"""Messages survive the wire, and what is not a message is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorllm.messages import KIND_OF, KINDS, NO_I32, Ask, Message, Outputs, StepPlan, StepResult, Submit, pack, unpack

NESTED = orjson.loads("[" * 1000 + "]" * 1000)
"""As deep as a reader of JSON goes; printing it overruns the stack."""


def through_the_wire(message: Message) -> Any:
    kind, scalars, arrays = pack(message)
    return unpack(kind, orjson.loads(orjson.dumps(scalars)), [np.frombuffer(a.tobytes(), a.dtype) for a in arrays])


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    for name in a.__dataclass_fields__:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype
            assert x.tolist() == y.tolist()
        else:
            assert (list(x) if isinstance(x, tuple) else x) == y, name


@given(
    rid=st.integers(0, 2**31 - 1),
    prompt=st.lists(st.integers(0, 2**31 - 1)),
    seed=st.integers(0, 2**64 - 1),
    stop=st.lists(st.text(st.characters(exclude_categories=["Cs"]))),
    slo=st.none() | st.lists(st.none() | st.floats(0, 10), min_size=4, max_size=4),
)
def test_submit_round_trip(rid: int, prompt: list[int], seed: int, stop: list[str], slo: Any) -> None:
    message = Submit(
        rid=rid, arrival=1.5, prompt=np.array(prompt, np.int32), max_tokens=3, seed=seed, stop=stop, slo=slo
    )
    assert_equal(message, through_the_wire(message))


def test_none_and_empty_stay_apart() -> None:
    assert through_the_wire(StepPlan(step=1)).decode_slots is None
    empty = through_the_wire(StepPlan(step=1, decode_slots=NO_I32)).decode_slots
    assert empty is not None
    assert empty.size == 0


def test_outputs_round_trip() -> None:
    i4 = np.array([1, 2], np.int32)
    message = Outputs(rids=i4, index=i4, tokens=i4, text="añ", text_ends=i4, ends=[[0, "stop", "x", None]], emitted=2.0)
    assert_equal(message, through_the_wire(message))


@pytest.mark.parametrize(
    ("kind", "scalars", "arrays"),
    [
        (999, [0, 0], []),
        (KIND_OF[Ask], [0, 0], []),
        (KIND_OF[Ask], {"id": 1}, []),
        (KIND_OF[Ask], ["x", 0, 1, "v", {}], []),
        (KIND_OF[StepResult], [1, 0, 5, 0.0, 0.0], []),
        (KIND_OF[StepResult], [1, 0, 5, 0.0, 0.0], [np.zeros(2, np.float32)]),
        (KIND_OF[StepResult], [0, 0, 5, 0.0, 0.0], [np.zeros(2, np.int32)]),
        (KIND_OF[Ask], NESTED, []),
        (KIND_OF[Ask], [NESTED, 0, 1, "v", {}], []),
    ],
)
def test_what_is_no_message_is_refused(kind: int, scalars: Any, arrays: Any) -> None:
    with pytest.raises(ValueError, match=r"kind|expected|masks|arrays"):
        unpack(kind, scalars, arrays)


def test_kinds_are_unique_and_complete() -> None:
    assert len(set(KINDS.values())) == len(KINDS)
    assert min(KINDS) > 0


@pytest.mark.parametrize("cls", KINDS.values(), ids=lambda cls: cls.__name__)
def test_a_message_is_made_whole_and_never_changed(cls: type[Any]) -> None:
    values = {f.name: object() for f in fields(cls)}
    message = cls(**values)
    assert type(message) is cls
    assert all(getattr(message, name) is value for name, value in values.items())
    assert replace(message) is not message
    for name in values:
        with pytest.raises(FrozenInstanceError):
            setattr(message, name, 1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
        cls(**values, unknown=1)
    with pytest.raises(TypeError, match="positional"):
        cls(*values.values())


def test_messages_share_no_default_that_can_change() -> None:
    assert Ask(id=1, verb="a").arguments is not Ask(id=1, verb="a").arguments
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'step'"):
        StepPlan()  # type: ignore[call-arg]
