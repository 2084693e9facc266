"""`SharedCopies`: the caller has the tensors, or files of them, and copies them into memory that all ranks map ("shm")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from actorllm.client.transports.jobs import only
from actorllm.client.weight_updates import NEW_MEMORY, NewWeights
from actorllm.errors import InvalidParameterError
from actorllm.types.weight_transport import SHM

if TYPE_CHECKING:
    from actorllm.client.weight_memory import WeightMemory


class SharedCopies:
    """See the module docstring."""

    def setup(self, info: Mapping[str, Any]) -> None:
        """As `Transport.setup`: nothing has to be set up."""
        only("init_info", info, (), SHM)

    def part(self, info: Mapping[str, Any], kept: WeightMemory | None) -> NewWeights:
        """As `Transport.part`; CorruptModelError: a file is none of safetensors; EngineError: there is no memory."""
        if info.keys() == {"tensors"}:
            return self.whole(info["tensors"], kept)
        if info.keys() == {"files"}:
            return NewWeights.of_files(info["files"], kept)
        given = ", ".join(sorted(map(str, info)))[:200] or "nothing"
        raise InvalidParameterError(
            f"update_info has {given}; it must have 'tensors', a mapping from the names in the checkpoint to tensors, which travel "
            f"through shared memory, or 'files', paths of safetensors files; or what a trainer sends: 'names', 'dtype_names' and "
            f"'shapes'"
        )

    def whole(self, tensors: object, kept: WeightMemory | None) -> NewWeights:
        """As `Transport.whole`; EngineError: there is no memory."""
        return NewWeights.of_tensors(tensors, NEW_MEMORY if kept is None else kept.new)
