"""What another process is told of a tensor on a GPU, with a stand-in for the two calls of torch that need one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from actorllm.errors import InvalidParameterError
from actorllm.model.updates import device_handles
from tests.model.updates.shared_gpu import SharedGPU


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SharedGPU:
    return SharedGPU(monkeypatch)


def test_a_tensor_is_told_of_in_plain_values_and_opened_again(gpu: SharedGPU) -> None:
    tensor = gpu.tensor(torch.arange(12.0).reshape(3, 4)[:, 1:])
    told = json.loads(json.dumps(device_handles.handle_of("a", tensor)))
    assert list(told) == [gpu.uuid]
    handle = device_handles.checked_handle("a", told[gpu.uuid])
    assert handle == told[gpu.uuid]
    opened = device_handles.opened(handle, torch.device("cuda", 5))
    assert torch.equal(opened, torch.arange(12.0).reshape(3, 4)[:, 1:])
    assert gpu.opened_on == [5], "the number that the GPU has here"


def test_the_arguments_of_torch_do_as_well(gpu: SharedGPU) -> None:
    _, arguments = device_handles.reduce_tensor(gpu.tensor(torch.arange(3.0)))
    handle = device_handles.checked_handle("a", arguments)
    assert torch.equal(device_handles.opened(handle, torch.device("cuda", 0)), torch.arange(3.0))


@pytest.mark.parametrize(("place", "value"), [("dtype", torch.complex64), ("offset", -1), ("handle", b"a" * 4096)])
def test_what_torch_would_not_take_is_no_argument(gpu: SharedGPU, place: str, value: object) -> None:
    arguments = list(device_handles.reduce_tensor(gpu.tensor(torch.zeros(2)))[1])
    arguments[device_handles.ORDER.index(place)] = value
    with pytest.raises(InvalidParameterError, match=r"the handle of 'a' is .* give what told_of_tensor says"):
        device_handles.checked_handle("a", arguments)


def test_the_order_is_that_of_torch() -> None:
    """Of the release that is here: the names of the arguments say what they are."""
    import inspect

    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    theirs = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert theirs == [
        *("tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device"),
        *("storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad", "ref_counter_handle"),
        *("ref_counter_offset", "event_handle", "event_sync_required"),
    ]
    assert len(theirs) == len(device_handles.ORDER)


def test_a_tensor_of_the_host_is_not_shared() -> None:
    with pytest.raises(InvalidParameterError, match=r"'a' is on cpu, .*; use transport='shm'"):
        device_handles.handle_of("a", torch.zeros(2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"handle": "?"}, "handle is no base64"),
        ({"handle": "é"}, "handle is no base64"),
        ({"handle": "A" * 5000}, "give what told_of_tensor says"),
        ({"offset": -1}, "give what told_of_tensor says"),
        ({"shape": [1.5]}, "give what told_of_tensor says"),
        ({"dtype": "object"}, "give what told_of_tensor says"),
        ({"more": 1}, "give what told_of_tensor says"),
    ],
)
def test_what_is_no_handle_is_refused(gpu: SharedGPU, change: dict[str, Any], said: str) -> None:
    told = device_handles.told_of_tensor("a", gpu.tensor(torch.zeros(2)))
    with pytest.raises(InvalidParameterError, match=said):
        device_handles.checked_handle("a", told | change)


@pytest.mark.parametrize("told", [None, "pickled", (1, 2), [None] * 15, {}])
def test_what_is_no_handle_at_all_is_refused(told: Any) -> None:
    with pytest.raises(InvalidParameterError, match="the handle of 'a'"):
        device_handles.checked_handle("a", told)
