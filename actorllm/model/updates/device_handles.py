"""CUDA IPC: tensors of a GPU that another process of the machine opens, and what it is told of one, in plain values.

torch gives the fields of a tensor (`reduce_tensor`), and makes the tensor of them again (`rebuild_cuda_tensor`). They are numbers
and a few bytes, which travel here as base64: nothing is pickled. The process that shares a tensor has to keep it until the others
are through, and each telling is opened once. No GPU has run this yet; the tests have a stand-in for both calls. Imports torch.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from actorllm.errors import InvalidParameterError, shown
from actorllm.model.updates.tensor_files import DTYPES

ORDER = (
    *("class", "shape", "stride", "offset", "storage", "dtype", "device", "handle", "num_bytes", "offset_bytes"),
    *("requires_grad", "counter", "counter_offset", "event", "waits_for_event"),
)
"""What torch's arguments are, in their order."""
IN_BYTES = ("handle", "counter", "event")
NUMBERS = ("offset", "num_bytes", "offset_bytes", "counter_offset")
LISTS = ("shape", "stride")
TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
MAX_HANDLE = 4096
"""Characters of what stands for memory; CUDA has 64 bytes."""


def device_uuid(device: torch.device) -> str:
    """The name of a GPU that all processes of the machine know it by."""
    return str(torch.cuda.get_device_properties(device).uuid)


def handle_of(name: str, tensor: torch.Tensor) -> dict[str, dict[str, Any]]:
    """By the GPU that a tensor is on, what another process opens it by. Raises as `told_of_tensor`."""
    told = told_of_tensor(name, tensor)
    return {device_uuid(tensor.device): told}


def told_of_tensor(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """For another process, as JSON values. Raises InvalidParameterError: it is not on a GPU."""
    if tensor.device.type != "cuda":
        raise InvalidParameterError(
            f"tensor {name!r} is on {tensor.device}, and transport='cuda_ipc' shares memory of GPUs; use transport='shm'"
        )
    _, arguments = reduce_tensor(tensor.detach())  # type: ignore[no-untyped-call]
    return told_of_arguments(name, arguments)


def told_of_arguments(name: str, arguments: Sequence[Any]) -> dict[str, Any]:
    """The same, of what `reduce_tensor` gave. Raises InvalidParameterError."""
    if len(arguments) != len(ORDER):
        raise InvalidParameterError(
            f"the handle of {name!r} has {len(arguments)} values; give the {len(ORDER)} of torch's reduce_tensor(tensor)[1]"
        )
    by_name = dict(zip(ORDER, arguments, strict=True))
    told: dict[str, Any] = {
        "dtype": str(by_name["dtype"]).removeprefix("torch."),
        "waits_for_event": bool(by_name["waits_for_event"]),
    }
    try:
        told |= {key: base64.b64encode(by_name[key]).decode() for key in IN_BYTES}
        told |= {key: int(by_name[key]) for key in NUMBERS}
        told |= {key: [int(one) for one in by_name[key]] for key in LISTS}
    except (TypeError, ValueError) as error:
        raise InvalidParameterError(
            f"the handle of {name!r} is not what torch's reduce_tensor gives: {error}"
        ) from error
    return told


def checked_handle(name: str, told: object) -> dict[str, Any]:
    """A handle that a caller gives: `told_of_tensor`, or the arguments themselves. Raises InvalidParameterError."""
    if isinstance(told, list | tuple):
        told = told_of_arguments(name, told)
    keys = {*IN_BYTES, *NUMBERS, *LISTS, "dtype", "waits_for_event"}
    if not isinstance(told, Mapping) or told.keys() != keys:
        raise InvalidParameterError(f"the handle of {name!r} is {shown(told)}; give what told_of_tensor says of it")
    # Each value is what it must be before torch sees it: CUDA takes bytes and sizes as they are.
    found = dict(told)
    is_whole = all(type(found[key]) is int and found[key] >= 0 for key in NUMBERS) and all(
        isinstance(found[key], list) and all(type(one) is int and one >= 0 for one in found[key]) for key in LISTS
    )
    is_text = all(isinstance(found[key], str) and len(found[key]) <= MAX_HANDLE for key in IN_BYTES)
    if not is_whole or not is_text or found["dtype"] not in TYPES or not isinstance(found["waits_for_event"], bool):
        raise InvalidParameterError(f"the handle of {name!r} is {shown(told)}; give what told_of_tensor says of it")
    try:
        for key in IN_BYTES:
            base64.b64decode(found[key], validate=True)
    except ValueError as error:
        raise InvalidParameterError(f"the handle of {name!r}: {key} is no base64: {error}") from error
    return found


def opened(told: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """The tensor itself, in the memory of the process that told of it. Raises RuntimeError: it is gone."""
    by_name: dict[str, Any] = {
        "class": torch.Tensor,
        "storage": torch.storage.TypedStorage,
        "dtype": TYPES[told["dtype"]],
        "device": device.index,  # the same GPU may have another number there
        "requires_grad": False,
        "waits_for_event": told["waits_for_event"],
        **{key: base64.b64decode(told[key]) for key in IN_BYTES},
        **{key: told[key] for key in NUMBERS},
        **{key: tuple(told[key]) for key in LISTS},
    }
    tensor: torch.Tensor = rebuild_cuda_tensor(*(by_name[key] for key in ORDER))  # type: ignore[no-untyped-call]
    return tensor
