"""A parsed body on its way from the parse process to the loop: one reply, which the loop takes in without a walk over it.

What may be long and is of one kind travels as it lies in memory. Token ids are integers of 32 bits (of 64, if one of them needs
that), a text is UTF-8. All the rest is JSON again, and has at most `limits.MAX_ITEMS` items. A question is the names of the fields
that may be long lists of token ids, separated by commas, a line feed, and the body. A reply is

    the length of the head (4 bytes) · head · rest · segments, one after the other

with head = {"rest": bytes, "segments": [[field, kind, bytes, counts], ...]} or {"refusal": [message, param]}. kind: "text", or
the format of the integers ("i", "q"); counts: of several lists, the length of each. `pack` runs in the parse process, `unpack`
on the loop.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Collection
from itertools import chain
from typing import Any

import orjson

from actorllm.server.bodies.limits import MAX_ITEMS, MAX_TOKEN_IDS, BodyRefusal, depth_refusal_of, num_items, refusal_of

NUM_LENGTH_BYTES = 4
MIN_SEGMENT = 1 << 10
"""What is shorter stays in the JSON: elements of a list, characters of a text."""
MAX_SHOWN = 40
MAX_ID = 2**63 - 1

Segment = tuple[str, bytes | array, list[int] | None]  # type: ignore[type-arg]
"""kind, content, counts."""


def question(data: bytearray, token_fields: Collection[str]) -> list[bytes | bytearray]:
    """What `pack` is asked, as parts of a frame."""
    return [",".join(token_fields).encode() + b"\n", data]


def pack(asked: bytearray) -> list[Any]:
    """The reply about a body, as parts that are bytes or arrays."""
    end = asked.index(b"\n")
    token_fields = asked[:end].decode().split(",")
    try:
        tree = orjson.loads(memoryview(asked)[end + 1 :])
    except orjson.JSONDecodeError as error:
        return refused(refusal_of_json(error))
    if not isinstance(tree, dict):
        return refused(BodyRefusal(f"the body must be a JSON object, not {type(tree).__name__}", None))
    refusal = refusal_of(tree, token_fields)
    if refusal is not None:
        return refused(refusal)
    segments = {}
    for name, value in tree.items():
        segment = _segment_of(value, name in token_fields)
        if segment is not None:
            segments[name] = segment
    rest = {name: None if name in segments else value for name, value in tree.items()}
    number = num_items(rest, MAX_ITEMS)
    if number > MAX_ITEMS:
        return refused(_too_many_items(rest, token_fields))
    refusal = depth_refusal_of(rest)
    if refusal is not None:
        return refused(refusal)
    body = orjson.dumps(rest)
    told = [[name, kind, memoryview(content).nbytes, counts] for name, (kind, content, counts) in segments.items()]
    contents = [content for _, content, _ in segments.values()]
    return [*_headed({"rest": len(body), "segments": told}), body, *contents]


def refused(refusal: BodyRefusal) -> list[bytes]:
    return _headed({"refusal": list(refusal)})


def refusal_of_json(error: orjson.JSONDecodeError) -> BodyRefusal:
    return BodyRefusal(f"the body is not valid JSON: {error}", None)


def _headed(head: dict[str, Any]) -> list[bytes]:
    encoded = orjson.dumps(head)
    return [len(encoded).to_bytes(NUM_LENGTH_BYTES, "little"), encoded]


def _segment_of(value: Any, is_token_field: bool) -> Segment | None:
    if type(value) is str and len(value) >= MIN_SEGMENT:
        return "text", value.encode(), None
    # Types are compared exactly: a bool is no token id, and goes as JSON to be refused with its name.
    if not is_token_field or type(value) is not list or not value:
        return None
    if type(value[0]) is int:
        ids = _ids(value) if len(value) >= MIN_SEGMENT else None
        return None if ids is None else (ids.typecode, ids, None)
    if set(map(type, value)) != {list}:
        return None
    counts = list(map(len, value))
    if not MIN_SEGMENT <= sum(counts) <= MAX_TOKEN_IDS:
        return None
    ids = _ids(list(chain.from_iterable(value)))
    return None if ids is None else (ids.typecode, ids, counts)


def _ids(values: list[Any]) -> array[int] | None:
    """None: not all of them are integers of 64 bits."""
    if set(map(type, values)) != {int}:
        return None
    for kind in ("i", "q"):
        with contextlib.suppress(OverflowError):
            return array(kind, values)
    return None


def _too_many_items(tree: dict[str, Any], token_fields: Collection[str]) -> BodyRefusal:
    """By the field that has most of them."""
    numbers = {name: num_items(value, MAX_ITEMS) for name, value in tree.items()}
    name = max(numbers, key=lambda name: numbers[name])
    told = f"{name} has more than {MAX_ITEMS} items"
    value = tree[name]
    if name in token_fields and type(value) is list:
        wrong = _first_wrong(value)
        if wrong is not None:
            return BodyRefusal(
                f"{told}, and {wrong}, which is no token id; send token ids as a flat list of integers", name
            )
    return BodyRefusal(f"{told}, which is the limit for all of a body; send less of it", name)


def _first_wrong(values: list[Any], is_inner: bool = False) -> str | None:
    for place, one in enumerate(values):
        if type(one) is list and type(values[0]) is list and not is_inner:
            wrong = _first_wrong(one, is_inner=True)
            if wrong is not None:
                return f"item {place} of it holds one in which {wrong}"
        elif type(one) is not int or one > MAX_ID:
            return f"item {place} of it is {_shown(one)}"
    return None


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return orjson.dumps(value).decode()[:MAX_SHOWN]


# On the loop ----------------------------------------------------------------------------------------------------------


def unpack(reply: bytearray) -> dict[str, Any] | BodyRefusal:
    """The body. Token ids are arrays: as few objects as may be are made here, and values are those of `orjson.loads`."""
    import numpy as np

    start = NUM_LENGTH_BYTES + int.from_bytes(reply[:NUM_LENGTH_BYTES], "little")
    view = memoryview(reply)
    head = orjson.loads(view[NUM_LENGTH_BYTES:start])
    if "refusal" in head:
        return BodyRefusal(*head["refusal"])
    end = start + head["rest"]
    tree: dict[str, Any] = orjson.loads(view[start:end])
    for name, kind, num_bytes, counts in head["segments"]:
        start, end = end, end + num_bytes
        if kind == "text":
            tree[name] = str(view[start:end], "utf-8")
            continue
        ids = np.frombuffer(view[start:end], np.dtype(kind)).copy()
        tree[name] = ids if counts is None else np.split(ids, np.cumsum(counts)[:-1])
    return tree
