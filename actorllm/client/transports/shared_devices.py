"""`SharedDevices`: the tensors are on a GPU that a rank computes on, too, and it opens them there ("cuda_ipc", in vLLM "ipc")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from actorllm.client.transports.jobs import DESCRIBED, RankJob, described, laid_out, only
from actorllm.errors import InvalidParameterError, shown
from actorllm.types.weight_transport import CUDA_IPC

if TYPE_CHECKING:
    from actorllm.client.weight_memory import WeightMemory

MAX_DEVICES = 64


class SharedDevices:
    """See the module docstring."""

    def setup(self, info: Mapping[str, Any]) -> None:
        """As `Transport.setup`: nothing has to be set up."""
        only("init_info", info, ("packed",), CUDA_IPC)
        if info.get("packed"):
            raise InvalidParameterError("init_info: packed=True is not supported by backend='cuda_ipc'; leave it out")

    def part(self, info: Mapping[str, Any], kept: WeightMemory | None) -> RankJob:
        """As `Transport.part`; EngineError: there is no memory."""
        if "ipc_handles_pickled" in info:
            raise InvalidParameterError(
                "update_info: ipc_handles_pickled is not read, since a pickle may run code; give ipc_handles, which are JSON "
                "values by actorllm.compat.weight_sender.handles_of(tensors)"
            )
        only("update_info", info, (*DESCRIBED, "ipc_handles"), CUDA_IPC)
        layout = described(info)
        handles = _checked(info.get("ipc_handles"), layout)  # before memory that is kept is given to it
        return RankJob("open", laid_out(layout, kept), by_device=handles)

    def whole(self, tensors: object, kept: WeightMemory | None) -> RankJob:
        """As `Transport.whole`; EngineError: there is no memory."""
        from actorllm.model.updates import device_handles
        from actorllm.model.updates.transfer_group import named_tensors

        if not isinstance(tensors, Mapping):
            raise InvalidParameterError(
                f"tensors={shown(tensors)} must be a mapping from names to tensors, such as model.state_dict()"
            )
        named = named_tensors(tensors)
        handles = [device_handles.handle_of(layout.name, tensor) for layout, tensor in named]
        return RankJob("open", laid_out([layout for layout, _ in named], kept), by_device=handles, shared=named)


def _checked(handles: object, layout: list[Any]) -> list[Mapping[str, Any]]:
    """A mapping from GPUs to handles for each tensor. Raises InvalidParameterError."""
    from actorllm.model.updates.device_handles import TYPES, checked_handle
    from actorllm.model.updates.tensor_files import TORCH_TYPES

    if not isinstance(handles, list | tuple) or len(handles) != len(layout):
        raise InvalidParameterError(
            f"update_info: ipc_handles={shown(handles)} must be a list of {len(layout)} mappings from a GPU's UUID to a handle"
        )
    found: list[Mapping[str, Any]] = []
    for one, by_device in zip(layout, handles, strict=True):
        if not isinstance(by_device, Mapping) or not 0 < len(by_device) <= MAX_DEVICES:
            raise InvalidParameterError(
                f"update_info: the handle of {one.name!r} is {shown(by_device)}; give a mapping from a GPU's UUID to a handle"
            )
        known = {str(device): checked_handle(one.name, told) for device, told in by_device.items()}
        for told in known.values():
            if tuple(told["shape"]) != one.shape or TYPES[told["dtype"]] is not TORCH_TYPES[one.dtype]:
                raise InvalidParameterError(
                    f"update_info: the handle of {one.name!r} has {told['dtype']} {told['shape']}, and shapes and dtype_names say "
                    f"another tensor; give both of the same"
                )
        found.append(known)
    return found
