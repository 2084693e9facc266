"""What a call of the application has brought on rank 0, as bytes for the other ranks: outputs, or an exception.

Outputs are dataclasses of `actorllm.types` in lists, tuples and mappings, with numbers, text, arrays and tensors in them. They are
made again by the names of their fields. Nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson

from actorllm import errors
from actorllm.errors import EngineError
from actorllm.types.pooling_outputs import PoolingOutput

PREFIX = "actorllm.types."


def outcome_of(call: Callable[[], Any]) -> tuple[bytes, Any, BaseException | None]:
    """Make a call. Returns its outcome as bytes, and what it has returned or raised.

    There is always one: the other ranks wait for it. So an interrupt is one, and so is an output that does not travel.
    """
    try:
        value = call()
        blobs: list[bytes] = []
        return _packed({"value": _tree(value, blobs)}, blobs), value, None
    except BaseException as error:  # of the application's call: every rank raises it
        return _packed(_told(error), []), None, error


def _told(error: BaseException) -> dict[str, Any]:
    """An exception, with those of its attributes that are plain."""
    attributes = {name: _plain(value) for name, value in vars(error).items() if isinstance(value, int | str | None)}
    return {"error": type(error).__name__, "text": _plain(str(error)), "attributes": attributes}


def _plain(value: int | str | None) -> int | str | None:
    """As JSON has it: no lone surrogates, and no number of more than 64 bits."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return value if value is None or -(2**63) <= value < 2**63 else None


def _packed(tree: Any, blobs: list[bytes]) -> bytes:
    """The size of the text, the text, and the bytes of all arrays."""
    try:
        text = orjson.dumps(tree)
    except TypeError as error:
        raise EngineError(f"what the call has returned does not travel between ranks: {error}") from error
    return b"".join((len(text).to_bytes(8, "little"), text, *blobs))


def taken(body: bytes) -> Any:
    """What the call has returned on rank 0. Raises what it has raised there."""
    size = int.from_bytes(body[:8], "little")
    tree = orjson.loads(body[8 : 8 + size])
    if "error" not in tree:
        return _value(tree["value"], memoryview(body)[8 + size :])
    kind = getattr(errors, tree["error"], None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise EngineError(f"{tree['error']}: {tree['text']}")
    error = kind.__new__(kind)
    error.args = (tree["text"],)
    vars(error).update(tree["attributes"])
    raise error


def _names_of(cls: type[Any]) -> Sequence[str]:
    """Of its fields; none of what is no record."""
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    return PoolingOutput.__slots__ if cls is PoolingOutput else getattr(cls, "_fields", ())  # those of a named tuple


def _tree(value: Any, blobs: list[bytes]) -> Any:
    cls = type(value)
    names = _names_of(cls)
    if names:
        if not cls.__module__.startswith(PREFIX):
            raise EngineError(f"{cls.__module__}.{cls.__qualname__} does not travel between ranks")
        fields = {name: _tree(getattr(value, name), blobs) for name in names}
        return {"class": f"{cls.__module__}:{cls.__qualname__}", "fields": fields}
    if isinstance(value, dict):
        return {"pairs": [[_tree(key, blobs), _tree(one, blobs)] for key, one in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_tree(one, blobs) for one in value]}
    if isinstance(value, list):
        return [_tree(one, blobs) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}  # JSON has none
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) or hasattr(value, "numpy"):
        array = np.ascontiguousarray(value)
        start = sum(map(len, blobs))
        blobs.append(array.tobytes())
        return {"array": [array.dtype.str, array.shape, start, array.nbytes], "is_tensor": hasattr(value, "numpy")}
    return value


def _value(tree: Any, blob: memoryview) -> Any:
    if isinstance(tree, list):
        return [_value(one, blob) for one in tree]
    if not isinstance(tree, dict):
        return tree
    if "pairs" in tree:
        return {_value(key, blob): _value(one, blob) for key, one in tree["pairs"]}
    if "tuple" in tree:
        return tuple(_value(one, blob) for one in tree["tuple"])
    if "float" in tree:
        return float(tree["float"])
    if "array" in tree:
        dtype, shape, start, size = tree["array"]
        array = np.frombuffer(blob[start : start + size], dtype).reshape(shape).copy()
        if not tree["is_tensor"]:
            return array
        import torch

        return torch.from_numpy(array)
    module, _, name = tree["class"].partition(":")
    assert module.startswith(PREFIX)
    cls: Any = importlib.import_module(module)
    for part in name.split("."):
        cls = getattr(cls, part)
    fields = {field: _value(one, blob) for field, one in tree["fields"].items()}
    if issubclass(cls, tuple):
        return cls(**fields)
    made = cls.__new__(cls)
    for field, one in fields.items():
        object.__setattr__(made, field, one)
    return made
