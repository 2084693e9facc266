"""What the scheduler takes from a frontend that runs in somebody else's program.

The ring has checked that a frame is whole, and `messages.unpack` that it has the columns of its type. That is enough
between processes of one engine, whose messages come from checked parameters. An attached program may be wrong in any
way, and what it sends is worked on together with what others sent; so here every value is held against its type and
range before anything uses it. Called by SchedulerActor for attached frontends only.
"""

from __future__ import annotations

import math
import reprlib
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from actorllm.messages import Abort, Ask, Message, Reply, Submit, Unblock
from actorllm.types.objective import SLO
from actorllm.types.params import MAX_N

Check = Callable[[Any], bool]

ALLOWED = (Submit, Abort, Unblock, Ask, Reply)
HASH_BYTES = 32
MAX_F32 = 3.4e38
"""Numbers of a plan are of 32 bits."""

MAX_NESTING = 32
"""Of a value without a type of its own. Readers of JSON go down to 1024 levels, and whoever walks what they return, to print or
to compare it, has no room for that on his stack."""

INT_RANGES = {"seed": (0, 2**64), "priority": (-(2**63), 2**63), "id": (0, 2**63)}
"""Of integers that are wider than 32 bits on the wire."""

RANGES: dict[str, Check] = {
    "max_tokens": lambda value: value >= 1,
    "min_tokens": lambda value: value >= 0,
    "temperature": lambda value: 0 <= value <= MAX_F32,
    "top_k": lambda value: value >= 0,
    "top_p": lambda value: 0 < value <= 1,
    "min_p": lambda value: 0 <= value <= 1,
    "sample_index": lambda value: 0 <= value < 2**31 - MAX_N,  # siblings count on from it
    "slo": lambda value: value is None or _is_objective(value),
    "num_sequences": lambda value: value >= 1,
    "num_deaths": lambda value: value >= 0,
    "most_beside": lambda value: value >= 0,
    "num_losses": lambda value: value >= 0,
    "adapter_id": lambda value: value == 0,  # there are none, and a worker refuses the whole plan
}


def check_foreign(message: Message, vocab_size: int) -> None:
    """ValueError when no frontend of this version would have sent this."""
    if not isinstance(message, ALLOWED):
        raise ValueError(f"a {type(message).__name__}, which is not for a frontend to send")
    for name, check in _CHECKS[type(message)]:
        value = getattr(message, name)
        if not check(value):
            raise ValueError(f"{type(message).__name__}.{name}={reprlib.repr(value)}")
    if isinstance(message, Submit):
        if any(not 0 <= token < vocab_size for token in message.stop_token_ids):
            raise ValueError(f"stop_token_ids={message.stop_token_ids!r:.80} with a vocabulary of {vocab_size}")
        if message.siblings.size >= MAX_N:
            raise ValueError(f"{message.siblings.size} siblings, and a request has at most {MAX_N} sequences")
        if message.block_hashes.size % HASH_BYTES:
            raise ValueError(f"block_hashes of {message.block_hashes.size} bytes")


def _checks(cls: type[Any]) -> list[tuple[str, Check]]:
    """What to ask of the scalar fields of a message type, from their annotations; columns are checked by `unpack`."""
    found: list[tuple[str, Check]] = []
    for name, hint in typing.get_type_hints(cls).items():
        check = _check_of(hint, INT_RANGES.get(name, (-(2**31), 2**31)))
        if check is not None:
            found.append((name, check))
        if name in RANGES:
            found.append((name, RANGES[name]))
    return found


def _check_of(hint: Any, int_range: tuple[int, int]) -> Check | None:
    """A test for values of a type; None when there is nothing to ask."""
    low, high = int_range
    if hint is bool:
        return lambda value: isinstance(value, bool)
    if hint is int:
        return lambda value: type(value) is int and low <= value < high
    if hint is float:
        return lambda value: type(value) in (int, float) and math.isfinite(value)
    if hint is str:
        return lambda value: isinstance(value, str)
    if hint is type(None):
        return lambda value: value is None
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        choices = [_check_of(argument, int_range) for argument in arguments]
        tests = [choice for choice in choices if choice is not None]
        return (lambda value: any(test(value) for test in tests)) if len(tests) == len(choices) else None
    if hint is Any:
        return _is_shallow
    if origin is dict:
        return lambda value: isinstance(value, dict) and _is_shallow(value)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        inner = _check_of(arguments[0], int_range)
        return lambda value: (
            isinstance(value, list | tuple) and (inner is None or all(inner(element) for element in value))
        )
    return None


def _is_objective(value: Sequence[float | None]) -> bool:
    try:
        SLO.from_fields(value)
    except ValueError:
        return False
    return True


def _is_shallow(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_NESTING):
        inner = (part for outer in level for part in (outer.values() if isinstance(outer, dict) else outer))
        level = [part for part in inner if isinstance(part, dict | list)]
    return not level


_CHECKS = {cls: _checks(cls) for cls in ALLOWED}
