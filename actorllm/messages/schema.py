"""What every field of every message may hold, and the senders of each message: one table, `SCHEMA`.

Owns types, ranges and nullability. `messages.pack` and `unpack` take the columns of a message from here. `violation` checks a
message against its entry, where a sender is not trusted. `messages.untrusted` asks it of attached frontends, the scheduler of
workers. What depends on the model or on other fields is not said here: a token id within the vocabulary, the rows of a plan.
The code that uses the values checks it.

Entries are compiled once, at import. Named by class, because `actorllm.messages` itself imports this module.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter, is_not
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actorllm.types.params import MAX_N
from actorllm.types.request_end import TIMES as TIMES_OF_AN_END

FRONTEND = "frontend"
"""Also one in another program."""
SCHEDULER = "scheduler"
WORKER = "worker"

EMPTY: Mapping[str, NDArray[Any]] = MappingProxyType({d: np.zeros(0, d) for d in ("i4", "i8", "u1", "u4", "f4", "f8")})
"""By dtype: the one empty array that stands for "nothing" in columns. Nothing can be written to it."""
for _empty in EMPTY.values():
    _empty.flags.writeable = False

I32_MIN, I32_MAX = -(2**31), 2**31 - 1
MAX_F32 = 3.4e38
"""Numbers of a plan are of 32 bits."""
SMALLEST = sys.float_info.min * sys.float_info.epsilon
"""More than zero."""

MAX_NESTING = 32
"""Of a value without a type of its own. Readers of JSON go down to 1024 levels, and code that walks what they return, to print or
to compare it, has no room for that on its stack."""

Check = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Field:
    """What one field may hold. low and high are inclusive; None: whatever the type holds, infinities excepted.

    kind: a dtype of `EMPTY`, for a column; "int", "float" (any finite number), "bool", "str"; "ints", "floats" (None among
    them), "strs": lists of these; "map": a JSON object; "rows": a list of lists; "any": any JSON value. low and high are of
    the elements of a column or list.

    is_time: it is a point in time on the sender's clock, in seconds, and no duration (`messages.times`). times: of rows, at
    which positions of each there is one.
    """

    kind: str
    low: float | None = None
    high: float | None = None
    is_nullable: bool = False
    is_time: bool = False
    times: tuple[int, ...] = ()

    @property
    def is_column(self) -> bool:
        return self.kind in EMPTY


@dataclass(frozen=True, slots=True)
class Entry:
    """Of one message: which actors may send it, and its fields by name."""

    senders: frozenset[str]
    fields: Mapping[str, Field]


def _entry(*senders: str, **fields: Field) -> Entry:
    return Entry(frozenset(senders), MappingProxyType(fields))


I32 = Field("i4")
INDEXES = Field("i4", 0)
"""Slots, rows, blocks, counts."""
U8 = Field("u1")
U32 = Field("u4")
F32 = Field("f4")
INT = Field("int", I32_MIN, I32_MAX)
COUNT = Field("int", 0, I32_MAX)
TIME = Field("float", is_time=True)
TIME_OR_NONE = Field("float", is_nullable=True, is_time=True)
BOOL = Field("bool")
STR = Field("str")
STR_OR_NONE = Field("str", is_nullable=True)
MAP_OR_NONE = Field("map", is_nullable=True)
ASK_ID = Field("int", 0, 2**63 - 1)
STEP = Field("int", 0, 2**63 - 1)

SCHEMA: Mapping[str, Entry] = MappingProxyType(
    {
        "Submit": _entry(
            FRONTEND,
            rid=INT,
            arrival=TIME,
            prompt=I32,
            output=I32,
            max_tokens=Field("int", 1, I32_MAX),
            min_tokens=COUNT,
            temperature=Field("float", 0, MAX_F32),
            top_k=COUNT,
            top_p=Field("float", SMALLEST, 1),
            min_p=Field("float", 0, 1),
            seed=Field("int", 0, 2**64 - 1),
            sample_index=Field("int", 0, I32_MAX - MAX_N),  # siblings count on from it
            siblings=I32,
            fork_of=Field("int", I32_MIN, I32_MAX, is_nullable=True),
            num_sequences=Field("int", 1, I32_MAX),
            is_resumed=BOOL,
            had_slot=BOOL,
            first_token=TIME_OR_NONE,
            num_deaths=COUNT,
            probe_size=COUNT,
            num_losses=COUNT,
            ignore_eos=BOOL,
            stop_token_ids=Field("ints", I32_MIN, I32_MAX),
            stop=Field("strs"),
            include_stop=BOOL,
            detokenize=BOOL,
            skip_special_tokens=BOOL,
            spaces_between_special_tokens=BOOL,
            stream_interval=INT,
            priority=Field("int", -(2**63), 2**63 - 1),
            slo=Field("floats", is_nullable=True),
            is_latency_sensitive=BOOL,
            type_info=STR_OR_NONE,
            tenant=STR_OR_NONE,
            deadline=TIME_OR_NONE,
            blocked_on=STR_OR_NONE,
            pooling=STR_OR_NONE,
            is_chunkable=BOOL,
            rules=MAP_OR_NONE,
            grammar=MAP_OR_NONE,
            needs_late_inputs=BOOL,
            adapter=STR_OR_NONE,
            adapter_path=STR_OR_NONE,
            block_hashes=U8,
            cache_salt=STR_OR_NONE,
            skip_reading_prefix_cache=BOOL,
            prompt_embeds=U8,
            name=STR_OR_NONE,
            processor_params=U8,
            pair_start=COUNT,
            weights=STR,
            hands_off=BOOL,
            kv_lease=Field("i8", 0),
        ),
        "Abort": _entry(FRONTEND, rids=I32),
        "Unblock": _entry(FRONTEND, rid=INT, error=STR_OR_NONE),
        "StepResult": _entry(
            WORKER,
            step=STEP,
            tokens=I32,  # those of rows without a choice are void, and may be anything
            counts=INDEXES,
            vector_rows=INDEXES,
            vectors=F32,
            nonfinite_rows=INDEXES,
            nonfinite_counts=INDEXES,
            nonfinite_prefills=INDEXES,
            logprob_spans=INDEXES,
            logprob_ids=I32,
            logprobs=F32,
            logprob_ranks=I32,
            errors=U8,
            num_drafted=INDEXES,
            started=TIME,
            ended=TIME,
        ),
        "StepFailed": _entry(WORKER, step=STEP, error=STR, rows=INDEXES, is_out_of_memory=BOOL),
        "Drafted": _entry(WORKER, step=STEP, slots=INDEXES, counts=Field("i4", 1), tokens=INDEXES),
        "StepPlan": _entry(
            SCHEDULER,
            step=STEP,
            freed=INDEXES,
            new_rows=U8,
            new_tokens=Field("i4", -3 - (1 << 15)),  # `embeds.LOWEST_ID`
            new_num_blocks=INDEXES,
            new_blocks=INDEXES,
            new_stop_ids=INDEXES,
            new_rules=I32,
            new_rule_numbers=F32,
            extended_slots=INDEXES,
            extended_blocks=INDEXES,
            extended_groups=U8,
            zero_blocks=INDEXES,
            copy_sources=INDEXES,
            copy_targets=INDEXES,
            decode_slots=Field("i4", 0, is_nullable=True),
            prefill_slots=INDEXES,
            prefill_counts=Field("i4", 1),
            late_slots=INDEXES,
            embeds=U8,
            new_processed=U8,
            new_salts=U8,
            lane=INDEXES,
            max_drafts=COUNT,
            partners=INDEXES,
            saved_states=INDEXES,
            restored_states=INDEXES,
        ),
        "LateInputs": _entry(
            SCHEDULER,
            step=STEP,
            slots=INDEXES,
            allowed=U32,
            counts=Field("i4", 1),
            forced=INDEXES,
            forced_counts=INDEXES,
        ),
        "Outputs": _entry(
            SCHEDULER,
            rids=I32,
            index=Field("i4", -1),  # of log-probabilities of a prompt alone
            tokens=INDEXES,
            counts=INDEXES,
            text=STR,
            text_ends=INDEXES,
            ends=Field("rows", times=TIMES_OF_AN_END),
            vector_rows=INDEXES,
            vectors=F32,
            logprob_spans=INDEXES,
            logprob_ids=INDEXES,
            logprobs=F32,
            logprob_ranks=I32,
            logprob_text=STR,
            logprob_text_ends=INDEXES,
            cached=I32,
            emitted=TIME,
            vector_ends=INDEXES,
        ),
        "PauseChanged": _entry(SCHEDULER, mode=STR_OR_NONE, started=I32),
        "WeightsChanged": _entry(SCHEDULER, version=STR, identity=STR, rids=I32, num_tokens=INDEXES),
        "ProbeGroup": _entry(SCHEDULER, rids=I32, size=COUNT, is_alone=BOOL),
        "Begun": _entry(SCHEDULER, rids=I32),
        "KvOffer": _entry(SCHEDULER, rid=INT, lease=Field("i8", 0), blocks=INDEXES, num_cached=INT),
        "Ask": _entry(FRONTEND, SCHEDULER, WORKER, id=ASK_ID, verb=STR, arguments=Field("map"), data=U8),
        "Reply": _entry(FRONTEND, SCHEDULER, WORKER, id=ASK_ID, value=Field("any"), error=STR_OR_NONE, data=U8),
    }
)
"""Every message by the name of its class, with its fields in their order."""


def violation(message: object, sender: str) -> str | None:
    """What of a message is not as its entry says, with the field's name; None: nothing. sender: FRONTEND, WORKER ..."""
    name = type(message).__name__
    compiled = _COMPILED.get(name)
    if compiled is None or sender not in compiled.senders:
        return f"a {name}, which is not for a {sender} to send"
    values = compiled.values_of(message)
    # Most columns are the shared empty one, and need no look: they are passed over without a line of Python for each.
    for i in compress(compiled.positions, map(is_not, values, compiled.empties)):
        if not compiled.checks[i](values[i]):
            return f"{name}.{compiled.names[i]}={shown(values[i])}"
    return None


def check_of_fields(name: str, fields: tuple[str, ...], unbounded: tuple[str, ...] = ()) -> Check:
    """The test of some fields of a message: whether they hold what the entry of this name allows.

    unbounded: columns among them whose values the caller holds against something else.
    """
    entry = SCHEMA[name].fields
    entry = {**entry, **{field: replace(entry[field], low=None, high=None) for field in unbounded}}
    checks = {field: check_of(entry[field]) for field in fields}
    # One function without calls where types and ranges say all: the results of steps come this way.
    tests = [_as_source(entry[field], f"message.{field}") or f"checks[{field!r}](message.{field})" for field in fields]
    names = {"checks": checks, "ndarray": np.ndarray} | {kind: np.dtype(kind) for kind in EMPTY}
    checked: Check = eval(f"lambda message: {' and '.join(tests)}", names)
    return checked


def _as_source(field: Field, value: str) -> str | None:
    """The test of `check_of` as an expression, for columns of any values and for numbers; None: it is not one line."""
    if field.is_nullable:
        return None
    if field.is_column and field.low is None and field.high is None:
        return f"isinstance({value}, ndarray) and {value}.dtype == {field.kind} and {value}.ndim == 1"
    if field.kind not in ("int", "float"):
        return None
    types = f"type({value}) is int" + (f" or isinstance({value}, float)" if field.kind == "float" else "")
    low = -sys.float_info.max if field.low is None else field.low
    high = sys.float_info.max if field.high is None else field.high
    return f"({types}) and {low!r} <= {value} <= {high!r}"


def getter_of(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """What reads these attributes of an object, in one call where there are several."""
    if len(names) > 1:
        return attrgetter(*names)
    if not names:
        return lambda _: ()
    get = attrgetter(*names)
    return lambda message: (get(message),)


def shown(value: object) -> str:
    """A value in few characters and one line."""
    if isinstance(value, np.ndarray):
        return f"{reprlib.repr(value.reshape(-1)[:8].tolist())} ({value.dtype}, shape {value.shape})"
    return reprlib.repr(value)


def check_of(field: Field) -> Check:
    """The test for values of a field. It returns False for anything else, and raises nothing."""
    is_right = _column_check(field) if field.is_column else _scalar_check(field)
    if field.is_nullable:
        return lambda value: value is None or is_right(value)
    return is_right


def _column_check(field: Field) -> Check:
    dtype, low, high = np.dtype(field.kind), field.low, field.high

    def is_column(value: Any) -> bool:
        return isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == 1

    def is_right(value: Any) -> bool:
        if not is_column(value):
            return False
        if not value.size:
            return True
        return (low is None or bool(value.min() >= low)) and (high is None or bool(value.max() <= high))

    return is_column if low is None and high is None else is_right


def _scalar_check(field: Field) -> Check:
    low = -sys.float_info.max if field.low is None else field.low
    high = sys.float_info.max if field.high is None else field.high
    match field.kind:
        case "int":
            return lambda value: type(value) is int and low <= value <= high
        case "float":  # comparisons are False of NaN
            return lambda value: (isinstance(value, float) or type(value) is int) and low <= value <= high
        case "bool":
            return lambda value: isinstance(value, bool)
        case "str":
            return lambda value: isinstance(value, str)
        case "map":
            return lambda value: isinstance(value, dict) and _is_shallow(value)
        case "any":
            return _is_shallow
        case "rows":
            return lambda value: _is_list_of(value, lambda row: isinstance(row, list | tuple) and _is_shallow(row))
        case "ints" | "floats" | "strs":
            inner = check_of(Field(field.kind[:-1], field.low, field.high, is_nullable=field.kind == "floats"))
            return lambda value: _is_list_of(value, inner)
    raise ValueError(f"{field.kind!r} is no kind of field")


def _is_list_of(value: Any, check: Check) -> bool:
    return isinstance(value, list | tuple) and all(map(check, value))


def _is_shallow(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list | tuple) else []
    for _ in range(MAX_NESTING):
        inner = (part for outer in level for part in (outer.values() if isinstance(outer, dict) else outer))
        level = [part for part in inner if isinstance(part, dict | list | tuple)]
    return not level


class _Compiled(NamedTuple):
    """An entry as `violation` uses it; all but the senders by position of the field."""

    senders: frozenset[str]
    values_of: Callable[[Any], tuple[Any, ...]]
    positions: range
    names: tuple[str, ...]
    empties: tuple[object, ...]
    """Of a scalar something that no message holds."""
    checks: tuple[Check, ...]


def _compiled(entry: Entry) -> _Compiled:
    names = tuple(entry.fields)
    empties = tuple(EMPTY.get(field.kind, field) for field in entry.fields.values())
    checks = tuple(map(check_of, entry.fields.values()))
    return _Compiled(entry.senders, getter_of(names), range(len(names)), names, empties, checks)


_COMPILED = {name: _compiled(entry) for name, entry in SCHEMA.items()}
