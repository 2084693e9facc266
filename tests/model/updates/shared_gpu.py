"""A stand-in for CUDA IPC, in one process: tensors on "the GPU" are kept by a handle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actorllm.actors import weight_receiver
from actorllm.model.updates import device_handles


class OnGPU(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    def detach(self) -> OnGPU:
        return self


class SharedGPU:
    """In the place of the calls of torch that need one. The workers of this process compute on it."""

    uuid = "GPU-11111111-2222"

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._held: dict[bytes, torch.Tensor] = {}
        self.opened_on: list[int] = []
        patch.setattr(device_handles, "reduce_tensor", self._reduce)
        patch.setattr(device_handles, "rebuild_cuda_tensor", self._rebuild)
        patch.setattr(device_handles, "device_uuid", lambda device: self.uuid)
        patch.setattr(weight_receiver, "device_of", lambda runner: torch.device("cuda", 3))

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        return value.as_subclass(OnGPU)

    def _reduce(self, tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        handle = f"handle {len(self._held)}".encode()
        plain = tensor.as_subclass(torch.Tensor)
        self._held[handle] = plain
        size, stride, storage = plain.size(), plain.stride(), torch.storage.TypedStorage
        place = 0, handle, plain.untyped_storage().nbytes(), 0
        return None, (
            torch.Tensor,
            size,
            stride,
            plain.storage_offset(),
            storage,
            plain.dtype,
            *place,
            False,
            b"c",
            0,
            b"e",
            True,
        )

    def _rebuild(self, *arguments: Any) -> torch.Tensor:
        by_name = dict(zip(device_handles.ORDER, arguments, strict=True))
        assert by_name["counter"] == b"c"
        assert by_name["event"] == b"e"
        assert by_name["waits_for_event"] is True
        if by_name["handle"] not in self._held:
            raise RuntimeError("CUDA error: invalid resource handle")
        self.opened_on.append(by_name["device"])
        tensor = self._held[by_name["handle"]]
        return tensor.as_strided(by_name["shape"], by_name["stride"], by_name["offset"])
