"""`WeightTransfer`: an update of the weights that comes in parts, by the verbs of vLLM. A part of a front door.

    init_weight_transfer_engine -> start_weight_update -> update_weights, for each part -> finish_weight_update

How a part comes is that of its transport (`transports.table`). Each is copied when it comes. Nothing of it is staged before
`finish_weight_update`, which makes one update of all parts. Any thread may call it. A part is of the
update that was under way when it was given: one that is read slowly lands in no later update.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from actorllm.client.transports.jobs import RankJob
from actorllm.client.transports.table import transport_of_init, transport_of_part
from actorllm.client.weight_updates import NewWeights, close_all, laid_over
from actorllm.errors import InvalidParameterError, shown

if TYPE_CHECKING:
    from actorllm.client.weight_memory import WeightMemory
    from actorllm.model.updates.tensor_files import TensorFile

IS_CHECKPOINT_FORMAT = "is_checkpoint_format"
"""A field of `start_weight_update` in releases of vLLM, and of update_info in those before."""


class TransferPart:
    """A part of the update that is under way when this is made. See `WeightTransfer.part`."""

    def __init__(self, transfer: WeightTransfer, request: object, number: int | None) -> None:
        self._transfer, self._request = transfer, request
        self.number = number
        """Of its update; None: none was under way."""
        self.is_given_up = False
        """The caller does not wait any more, and may give the part again."""

    def bring(self) -> RankJob | None:
        """Read the part and keep it. Takes as long as copying it, and perhaps parts that came before.

        Returns what the ranks are to do for it, if they bring it; `keep` what comes of that. None: it is kept.

        Raises:
            InvalidParameterError: names the tensor or the file; or no update was started, or it ended meanwhile.
            CorruptModelError: a file is none of safetensors.
            EngineError: for want of memory; the parts that came before are kept.
        """
        self._transfer.check(self)
        new = read(self._request, self._transfer.memory)
        if isinstance(new, RankJob):
            return new
        self.keep(new)
        return None

    def keep(self, new: NewWeights) -> None:
        """What was read of it. Raises as `bring`."""
        self._transfer.add(new, self)


class WeightTransfer:
    """See the module docstring. memory: what parts are copied to; None: none is kept for them."""

    def __init__(self, memory: WeightMemory | None = None) -> None:
        self.memory = memory
        self._lock = threading.Lock()
        """Held for moments: an event loop may wait for it."""
        self._adding = threading.Lock()
        """Held while parts are copied, and by what takes them. Taken before the other one."""
        self._parts: list[TensorFile] | None = None
        """Of the update that was started; None: none was. Those that are forgotten close with their last reader."""
        self._number = 0
        """Of the update that was started last."""

    def init(self, request: object) -> dict[str, Any] | None:
        """Where the ranks have to meet a trainer; None: nowhere. Raises InvalidParameterError for what is no setup of one."""
        info = _part_of("init_info", request)
        return transport_of_init(info).setup({key: value for key, value in info.items() if key != "backend"})

    def start(self, is_checkpoint_format: object = True) -> None:
        """What came of an update that was not finished is forgotten. Raises InvalidParameterError for another format."""
        _check_format(is_checkpoint_format)
        with self._lock:
            forgotten, self._parts = self._parts, []
            self._number += 1
        del forgotten  # not under the lock: the system takes a tenth of a second for a GiB

    def part(self, request: object) -> TransferPart:
        """A part of the update that is under way now, whenever it is read. Nothing is looked at yet."""
        with self._lock:
            return TransferPart(self, request, None if self._parts is None else self._number)

    def check(self, part: TransferPart) -> None:
        """Raises InvalidParameterError: its update is not under way."""
        if part.number is None:
            raise _not_started("update_weights")
        if part.is_given_up or self._parts is None or part.number != self._number:
            raise InvalidParameterError(
                "update_weights: the update was finished or given up before this part was read, so the part was not kept; wait for "
                "every update_weights before finish_weight_update, and before the next start_weight_update"
            )

    def add(self, new: NewWeights, part: TransferPart) -> None:
        """Keep a part that was read. A tensor that came before is replaced.

        Raises InvalidParameterError, as `check`; EngineError for want of memory. Then the parts are those of before.
        """
        try:
            with self._adding:
                before = self._parts or []
                self.check(part)
                laid, dropped = laid_over(before, new.tensor_files)
                with self._lock:
                    self.check(part)
                    self._parts = laid
            close_all(dropped)
        except BaseException:
            new.close()
            raise

    def finish(self) -> NewWeights:
        """All parts. Raises InvalidParameterError where there is nothing to finish; what was started goes on then."""
        with self._adding, self._lock:
            if self._parts is None:
                raise _not_started("finish_weight_update")
            if not self._parts:
                raise InvalidParameterError("no tensor has come since start_weight_update; call update_weights before")
            parts, self._parts = self._parts, None
        return NewWeights(tensor_files=parts)

    def close(self) -> None:
        """Forget what came. Idempotent."""
        with self._lock:
            forgotten, self._parts = self._parts, None
        del forgotten


def read(request: object, memory: WeightMemory | None = None) -> NewWeights | RankJob:
    """A part, copied, or what ranks are to do for it.

    Raises InvalidParameterError, naming the tensor or the file; CorruptModelError: it is none; EngineError: there is no memory.
    """
    info = _part_of("update_info", request)
    if IS_CHECKPOINT_FORMAT in info:
        _check_format(info[IS_CHECKPOINT_FORMAT])
        info = {key: value for key, value in info.items() if key != IS_CHECKPOINT_FORMAT}
    return transport_of_part(info).part(info, memory)


def _check_format(is_checkpoint_format: object) -> None:
    if is_checkpoint_format is not True:
        raise InvalidParameterError(
            f"{IS_CHECKPOINT_FORMAT}={shown(is_checkpoint_format)}: tensors come by the names and in the shapes of the checkpoint, "
            "and the engine fuses and shards them; give True, or leave it out"
        )


def _not_started(verb: str) -> InvalidParameterError:
    return InvalidParameterError(f"{verb}: no update was started; call start_weight_update first")


def _part_of(name: str, request: object) -> Mapping[Any, Any]:
    """A field of a request as vLLM's requests have it: an object with it, a mapping that holds it, or its value."""
    found = getattr(request, name, request)
    if isinstance(found, Mapping) and found.keys() == {name}:
        found = found[name]
    if not isinstance(found, Mapping):
        raise InvalidParameterError(f"request={shown(request)} must be a mapping {{{name!r}: {{...}}}}")
    return found
