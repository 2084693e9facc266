"""Arguments and results of calls of the workers, as bytes: JSON values, and tensors in the format of messages. No pickle.

Values are None, bool, int, float, str, bytes, lists, tuples, sets, mappings with texts as keys, torch tensors and numpy arrays.
Tuples and sets come back as lists, and tensors on the CPU. What JSON has no form for stands in a mapping with the one key MARK.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from actorllm.errors import CorruptLinkError, InvalidParameterError, shown
from actorllm.ring import codec

U8: TypeAlias = NDArray[np.uint8]

MARK = "$"
MAX_BYTES = 48 << 20
"""Of the arguments of a call, and of what one rank returns. A message has room for 64 MiB."""
MAX_DEPTH = 100


def encode_value(value: object, name: str) -> U8:
    """As bytes. Raises InvalidParameterError, which says where in `name` there is something that does not travel."""
    arrays: list[NDArray[Any]] = []
    tree = _tree_of(value, name, arrays, 0)
    num_bytes = sum(array.nbytes for array in arrays)
    if num_bytes <= MAX_BYTES:
        try:
            body = b"".join(codec.encode(tree, [a.reshape(-1).view(np.uint8) for a in arrays]))
        except TypeError as error:
            raise InvalidParameterError(f"{name} cannot travel between processes: {error}") from error
        num_bytes = len(body)
    if num_bytes > MAX_BYTES:
        raise InvalidParameterError(
            f"{name} has {num_bytes} bytes, and {MAX_BYTES} at most travel; pass the path of a file instead"
        )
    return np.frombuffer(body, np.uint8)


def decode_value(data: U8) -> Any:
    """The value again; tensors are copies. Raises CorruptLinkError for what `encode_value` has not made."""
    tree, arrays = codec.decode(data.tobytes())
    try:
        return _value_of(tree, arrays)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CorruptLinkError(f"the value of a call: {type(error).__name__}: {error}") from error


def _tree_of(value: Any, where: str, arrays: list[NDArray[Any]], depth: int) -> Any:
    # What JSON has a form for. A bool is an int, too, and comes first.
    if value is None or isinstance(value, bool | str):
        return _checked_text(value, where) if isinstance(value, str) else value
    if isinstance(value, int | np.integer):
        if not -(2**63) <= value < 2**64:
            raise InvalidParameterError(f"{where}={shown(value)} must be an integer of 64 bits")
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else {MARK: ["float", str(float(value))]}
    # What contains other values: a mapping with the key MARK is told from a mark by being in one.
    if depth > MAX_DEPTH:
        raise InvalidParameterError(f"{where:.200} is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise InvalidParameterError(f"{where} has the key {shown(odd[0])}; keys of mappings must be texts")
        tree = {
            _checked_text(key, where): _tree_of(one, f"{where}[{key!r:.40}]", arrays, depth + 1)
            for key, one in value.items()
        }
        return {MARK: ["map", tree]} if MARK in tree else tree
    if isinstance(value, list | tuple):
        return [_tree_of(one, f"{where}[{i}]", arrays, depth + 1) for i, one in enumerate(value)]
    if isinstance(value, set | frozenset):  # such as what `load_weights` returns
        return [_tree_of(one, f"{where}[{i}]", arrays, depth + 1) for i, one in enumerate(sorted(value, key=repr))]
    # All else is bytes, or does not travel.
    return _array_of(value, where, arrays)


def _checked_text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameterError(f"{where} is no valid Unicode: {error}") from None
    return text


def _array_of(value: Any, where: str, arrays: list[NDArray[Any]]) -> Any:
    """What travels as bytes."""
    if len(arrays) == codec.MAX_ARRAYS:
        raise InvalidParameterError(f"{where}: more than {codec.MAX_ARRAYS} tensors do not travel in one call")
    number = len(arrays)
    if isinstance(value, bytes | bytearray | memoryview):
        arrays.append(np.frombuffer(bytes(value), np.uint8))
        return {MARK: ["bytes", number]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        arrays.append(np.ascontiguousarray(value))
        return {MARK: ["array", number, value.dtype.str, list(value.shape)]}
    torch = sys.modules.get("torch")  # else there are no tensors
    if torch is not None and isinstance(value, torch.Tensor) and value.layout is torch.strided:
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        arrays.append(plain.reshape(-1).view(torch.uint8).numpy())
        return {MARK: ["tensor", number, str(value.dtype).removeprefix("torch."), list(value.shape)]}
    raise InvalidParameterError(
        f"{where} is {type(value).__name__}, which does not travel between processes; use JSON values, bytes, dense tensors and "
        f"numpy arrays of numbers"
    )


def _value_of(tree: Any, arrays: list[NDArray[Any]]) -> Any:
    if isinstance(tree, list):
        return [_value_of(one, arrays) for one in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.keys() != {MARK}:
        return {key: _value_of(one, arrays) for key, one in tree.items()}
    match tree[MARK]:
        case ["float", text]:
            return float(text)
        case ["map", dict(inner)]:
            return {key: _value_of(one, arrays) for key, one in inner.items()}
        case ["bytes", int(number)]:
            return arrays[number].tobytes()
        case ["array", int(number), str(dtype), list(shape)]:
            return arrays[number].copy().view(np.dtype(dtype)).reshape(shape)
        case ["tensor", int(number), str(dtype), list(shape)]:
            import torch

            kind = getattr(torch, dtype)
            if not isinstance(kind, torch.dtype):
                raise ValueError(f"dtype {dtype!r}")
            data = arrays[number]
            if not data.size:
                return torch.empty(shape, dtype=kind)
            return torch.from_numpy(data.copy()).view(kind).reshape(shape)
    raise ValueError(f"mark {tree[MARK]!r:.80}")
