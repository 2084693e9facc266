"""How much of what the body of a request may hold. Counted before any item is looked at.

Both sides use it: the loop for small bodies, the parse process for large ones. The engine has limits of its own for many of
these fields, and the better messages. These here are what the loop can check in a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

MAX_FIELDS = 1024
"""Of the body itself, known or unknown."""

MAX_ITEMS = 1 << 16
"""Of everything in a body together, at any depth: elements of lists and fields of objects. Token ids count as one."""

MAX_DEPTH = 200
"""Lists and objects within each other. orjson reads more levels than it writes, which are 254, and answers hold parts of bodies."""

MAX_PROMPTS = 1 << 14
"""As many as a request may have sequences (`request.MAX_N`)."""
MAX_MESSAGES = 1 << 12
MAX_TOOLS = 1 << 10
MAX_TOKEN_IDS = 1 << 21
"""In the prompts of a body. The engine knows how long each may be."""
MAX_ID_ITEMS = 1 << 19
"""Token ids in a field that becomes a list of Python's integers. Vocabularies are smaller."""

MOST = {
    **dict.fromkeys(("prompt", "input", "documents"), MAX_PROMPTS),
    **dict.fromkeys(("text_1", "text_2", "queries", "items", "data_1", "data_2"), MAX_PROMPTS),
    "messages": MAX_MESSAGES,
    **dict.fromkeys(("tools", "functions"), MAX_TOOLS),
    **dict.fromkeys(("logit_bias", "stop_token_ids", "logprob_token_ids", "request_ids"), 1 << 12),
    **dict.fromkeys(("stop", "bad_words", "include"), 1 << 10),
    **dict.fromkeys(("tokens", "allowed_token_ids"), MAX_ID_ITEMS),
}
"""Elements of the list, or fields of the object, that a field of the body may be."""


class BodyRefusal(NamedTuple):
    """Why a body is not taken. param: the field that it is about."""

    message: str
    param: str | None


def refusal_of(tree: dict[str, Any], token_fields: Collection[str] = ()) -> BodyRefusal | None:
    """What a body has too many of at its first level. token_fields: those that may be long lists of token ids."""
    if len(tree) > MAX_FIELDS:
        return BodyRefusal(
            f"the body has {len(tree)} fields, and the limit is {MAX_FIELDS}; leave out what has no effect", None
        )
    for name, value in tree.items():
        most = MOST.get(name, MAX_ITEMS)
        if isinstance(value, list | dict) and len(value) > most:
            if most == MAX_PROMPTS and name in token_fields and type(value) is list and type(value[0]) is int:
                most = MAX_TOKEN_IDS  # it is one prompt
                if len(value) <= most:
                    continue
            return BodyRefusal(f"{name} has {len(value)} items, and the limit is {most}; send fewer at a time", name)
    return None


def depth_refusal_of(tree: dict[str, Any]) -> BodyRefusal | None:
    """Which field of a body has more than MAX_DEPTH levels. Takes time in proportion to its items."""
    for name, value in tree.items():
        if _is_too_deep(value):
            return BodyRefusal(f"{name} is nested too deeply: the limit is {MAX_DEPTH} levels; send it flatter", name)
    return None


def _is_too_deep(value: object) -> bool:
    level, depth = [value], 0
    while level:
        if depth >= MAX_DEPTH:
            return True
        depth += 1
        inner: list[Any] = []
        for one in level:
            if type(one) is list:
                inner += one
            elif type(one) is dict:
                inner += one.values()
        level = [one for one in inner if type(one) is list or type(one) is dict]
    return False


def num_items(value: object, most: int) -> int:
    """Of a value at all its depths. Counting ends above `most`."""
    number, level = 0, [value]
    while level:
        one = level.pop()
        if type(one) is list:
            inner: Any = one
        elif type(one) is dict:
            inner = one.values()
        else:
            continue
        number += len(inner)
        if number > most:
            break
        level += inner
    return number
