"""`WeightReceiver`: what a rank does for new weights that a trainer sends to it, or shares on its GPU. A part of `WorkerActor`.

The engine has laid out memory for them. One rank fills it; the others of a group take part in its broadcasts. What was filled is
tensors in memory like any others: staged by all ranks, and committed between steps (`weight_commits`).

A trainer may be silent for long. So each job has a thread of its own, beside the steps and the other work of the actor. Where
there is no loop, it runs in the caller. A job that is asked once more, by a scheduler that took another's place, is not done again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from actorllm.actors.call_values import decode_value
from actorllm.actors.engine_thread import HostLoop
from actorllm.config import EngineConfig
from actorllm.errors import EngineError, InvalidParameterError, copied, without_frames

if TYPE_CHECKING:
    import torch

    from actorllm.actors.call_values import U8
    from actorllm.model.updates.transfer_group import TransferGroup


class TransferJob:
    """One thing that a rank was asked to do."""

    def __init__(self, identity: str, run: Callable[[], dict[str, Any]]) -> None:
        self.identity = identity
        self.is_over = False
        self._run = run
        self._answer: Any = None
        self._error: BaseException | None = None
        self._waiters: list[Callable[[], object]] = []

    def start(self) -> None:
        """On a thread that no end of the process waits for: it may be in a call of torch for as long as a trainer is silent."""
        threading.Thread(target=self.run, name="actorllm:transfer", daemon=True).start()

    def run(self) -> None:
        try:
            self._answer = self._run()
        except Exception as error:  # it is the answer to the scheduler, and the worker goes on
            self._error = without_frames(error)  # those of its causes hold tensors, too
        self.is_over = True
        for tell in self._waiters:
            tell()

    async def outcome(self) -> Any:
        """Raises what it raised."""
        if not self.is_over:
            done = anyio.Event()
            self._waiters.append(partial(HostLoop.current().call_soon_threadsafe, done.set))
            if not self.is_over:  # else the thread may not have seen this one
                await done.wait()
        if self._error is not None:
            raise copied(self._error)
        return self._answer


class WeightReceiver:
    """See the module docstring. runner: of this rank, a `ModelRunner`."""

    def __init__(self, config: EngineConfig, rank: int, runner: Any) -> None:
        self._runner = runner
        self._number = config.replica * config.num_workers + rank
        """Among all ranks of the engine."""
        self._group: TransferGroup | None = None
        self._is_keeper = False
        """It is the rank that fills the memory."""
        self._job: TransferJob | None = None
        self._is_over = threading.Event()

    async def answer(self, identity: str, what: str, data: U8, *, has_loop: bool) -> dict[str, Any]:
        """Do one of `number`, `device`, `join`, `leave`, `receive`, `fetch` and `open`. data: its arguments. Raises what it raises.

        Arguments:
            identity: of this question: asked again, it is answered with what came of it.
            has_loop: there is one, which goes on meanwhile.
        """
        job = self._job
        if job is None or job.identity != identity:
            if job is not None and not job.is_over:
                raise EngineError(
                    "the ranks are with a transfer of before; wait until its trainer has sent everything, or for its timeout"
                )
            jobs: dict[str, Callable[..., dict[str, Any]]] = {
                "number": self._tell_number,
                "device": self._device,
                "join": self._join,
                "leave": self._leave,
                "receive": self._receive,
                "fetch": self._fetch,
                "open": self._open,
            }
            job = self._job = TransferJob(identity, partial(jobs[what], **decode_value(data)))
            if has_loop:
                job.start()
            else:
                job.run()
        answer: dict[str, Any] = await job.outcome()
        return answer

    def close(self) -> None:
        """The rank ends. A job that waits for a trainer is given up; else it keeps what it needs until it is over."""
        self._is_over.set()
        if self._job is None or self._job.is_over:
            self._leave()

    # What it is asked for: each returns what it answers, and raises what is wrong.

    def _tell_number(self) -> dict[str, Any]:
        return {"number": self._number, "is_joined": self._group is not None and self._group.is_open}

    def _device(self) -> dict[str, Any]:
        """By which name other processes know the GPU of this rank."""
        from actorllm.model.updates.device_handles import device_uuid

        device = device_of(self._runner)
        if device.type != "cuda":
            raise InvalidParameterError(
                "transport='cuda_ipc' opens memory of a GPU, and this engine computes on a CPU; use transport='shm'"
            )
        return {"number": self._number, "device": device_uuid(device)}

    def _join(self, **place: Any) -> dict[str, Any]:
        """Meet a trainer, for all parts that come."""
        self._leave()
        self._group = self._met(place)
        return {}

    def _leave(self) -> dict[str, Any]:
        group, self._group = self._group, None
        if group is not None:
            group.close()
        return {}

    def _receive(self, path: str) -> dict[str, Any]:
        """Take part in the broadcast of a part; the first rank fills the memory at `path`."""
        if self._group is None:
            raise EngineError("this rank has met no trainer; call init_weight_transfer_engine")
        return self._filled(self._group, path)

    def _fetch(self, path: str, **place: Any) -> dict[str, Any]:
        """Meet a trainer, take one part, and leave."""
        group = self._met(place)
        try:
            return self._filled(group, path)
        finally:
            group.close()

    def _open(self, path: str, number: int, handles: list[dict[str, Any]]) -> dict[str, Any]:
        """Fill the memory at `path` from that of a GPU. handles: of each tensor. number: of the rank that does."""
        if number != self._number:
            return {}
        from actorllm.model.updates import device_handles
        from actorllm.model.updates.tensor_files import TensorRoom
        from actorllm.model.updates.transfer_group import flat_bytes

        device = device_of(self._runner)
        with TensorRoom(path, is_written=True) as room:
            for one, handle in zip(room.layout, handles, strict=True):
                try:
                    room.write(flat_bytes(device_handles.opened(handle, device)).cpu().numpy())
                except RuntimeError as error:
                    raise EngineError(
                        f"tensor {one.name!r} cannot be opened on the GPU, and nothing was changed; the trainer must keep it until "
                        f"update_weights returns ({str(error)[:200]})"
                    ) from error
        return {"has_written": True}

    def _met(self, place: Mapping[str, Any]) -> TransferGroup:
        """place: of a group, with the numbers of all ranks of the engine, and which rank of the group the first one of them is."""
        from actorllm.model.updates.transfer_group import TransferGroup
        from actorllm.types.weight_transport import GroupPlace

        known = dict(place)
        index, first = known.pop("numbers").index(self._number), known.pop("rank_offset")
        self._is_keeper = not index
        return TransferGroup(GroupPlace(**known), first + index, device_of(self._runner), None, self._is_over.is_set)

    def _filled(self, group: TransferGroup, path: str) -> dict[str, Any]:
        from actorllm.model.updates.tensor_files import TensorRoom

        try:
            with TensorRoom(path, is_written=self._is_keeper) as room:
                group.receive(room.layout, room.write if self._is_keeper else None, self._is_over.is_set)
        except OSError as error:
            group.close()
            raise EngineError(f"there is no memory for the new weights, and nothing was changed: {error}") from error
        except EngineError:
            group.close()
            raise
        return {"has_written": True} if self._is_keeper else {}


def device_of(runner: Any) -> torch.device:
    """Where a runner computes."""
    import torch

    device = getattr(runner, "device", None)
    return torch.device("cpu") if device is None else device.torch_device
