"""`Broadcasts`: a trainer sends the tensors to all ranks, over a group of torch.distributed ("gloo", and "nccl" between GPUs).

The trainer is another program (`compat.weight_sender`), or this one, for `update_weights_from_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from actorllm.client.transports.jobs import DESCRIBED, RankJob, described, laid_out, only
from actorllm.errors import InvalidParameterError, shown
from actorllm.types.weight_transport import BUFFER_BYTES, NCCL, TIMEOUT_S, GroupPlace, check_integer, checked_place

if TYPE_CHECKING:
    from actorllm.client.weight_memory import WeightMemory
    from actorllm.model.updates.transfer_group import Named

SETUP = ("master_address", "master_port", "rank_offset", "world_size", "timeout_s")
OF_TRAINER = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")
"""What vLLM's trainers say, too. Here the trainer tells the ranks when they meet."""
HERE = "127.0.0.1"


class Broadcasts:
    """See the module docstring. backend: of torch.distributed."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def setup(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """As `Transport.setup`."""
        if "nccl_unique_id_b64" in info:
            raise InvalidParameterError(
                "init_info: nccl_unique_id_b64 is not supported; give master_address and master_port, where the trainer listens"
            )
        only("init_info", info, (*SETUP, *OF_TRAINER), self.backend)
        address, port, world_size = (info.get(name) for name in ("master_address", "master_port", "world_size"))
        given: Any = (address, port, world_size, info.get("timeout_s", TIMEOUT_S))
        place = checked_place(GroupPlace(self.backend, *given), "init_info: ")
        offset = info.get("rank_offset", 1)
        check_integer("init_info: rank_offset", offset, 1, place.world_size - 1)
        return {"rank_offset": offset, **asdict(place)}

    def part(self, info: Mapping[str, Any], kept: WeightMemory | None) -> RankJob:
        """As `Transport.part`; EngineError: there is no memory."""
        only("update_info", info, (*DESCRIBED, *OF_TRAINER), self.backend)
        return RankJob("receive", laid_out(described(info), kept))

    def whole(self, tensors: object, kept: WeightMemory | None) -> RankJob:
        """As `Transport.whole`; EngineError: there is no memory, or no port."""
        from actorllm.model.updates.transfer_group import named_tensors

        if not isinstance(tensors, Mapping):
            raise InvalidParameterError(
                f"tensors={shown(tensors)} must be a mapping from names to tensors, such as model.state_dict()"
            )
        named = named_tensors(tensors)
        for layout, tensor in named:
            if self.backend == NCCL and tensor.device.type != "cuda":
                raise InvalidParameterError(
                    f"tensor {layout.name!r:.200} is on {tensor.device}, and transport='nccl' is between GPUs; use "
                    f"transport='gloo', or 'shm'"
                )
        return RankJob("fetch", laid_out([layout for layout, _ in named], kept), offer=_Here(self.backend, named))


class _Here:
    """As `TensorOffer`: this program is the trainer."""

    def __init__(self, backend: str, named: Named) -> None:
        self._backend, self._named = backend, named
        self._place: GroupPlace | None = None
        self._store: Any = None

    def open(self, num_ranks: int) -> dict[str, Any]:
        from actorllm.model.updates.transfer_group import Buffers, serve

        place = GroupPlace(self._backend, HERE, 0, 1 + num_ranks)
        self._store = serve(place, Buffers(True, BUFFER_BYTES))
        self._place = replace(place, master_port=self._store.port)
        return {"rank_offset": 1, **asdict(self._place)}

    def send(self, is_given_up: Callable[[], bool]) -> None:
        from actorllm.model.updates.transfer_group import TRAINER, TransferGroup

        assert self._place is not None
        group = TransferGroup(self._place, TRAINER, self._named[0][1].device, self._store, is_given_up)
        try:
            group.send(self._named, is_given_up)
        finally:
            group.close()
