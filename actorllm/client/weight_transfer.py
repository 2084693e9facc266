"""`WeightTransfer`: an update of the weights that comes in parts, by the verbs of vLLM. A part of a front door.

    init_weight_transfer_engine -> start_weight_update -> update_weights, for each part -> finish_weight_update

Each part is copied when it comes. Nothing of it is staged before `finish_weight_update`, which makes one update of all parts. Any
thread may call it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from actorllm.client.weight_updates import NewWeights, check_transport
from actorllm.errors import InvalidParameterError, shown

if TYPE_CHECKING:
    from actorllm.model.updates.tensor_files import TensorFile

BACKEND = "shm"


class WeightTransfer:
    """See the module docstring."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: list[TensorFile] | None = None
        """Of the update that was started; None: none was."""

    def init(self, request: object) -> None:
        """Nothing has to be set up. Raises InvalidParameterError for another way than shared memory."""
        info = _part_of("init_info", request)
        check_transport(info.get("backend", BACKEND))
        if others := sorted(map(str, info.keys() - {"backend"})):
            raise InvalidParameterError(
                f"init_info has {shown(others[0])}, which another backend of vLLM needs; give {{'backend': 'shm'}}, or nothing"
            )

    def start(self) -> None:
        """What came of an update that was not finished is forgotten."""
        with self._lock:
            parts, self._parts = self._parts, []
        close(parts)

    def read(self, request: object) -> NewWeights:
        """A part, copied. Raises InvalidParameterError, naming the tensor or the file; CorruptModelError: it is none."""
        self._check_started("update_weights")
        info = _part_of("update_info", request)
        if info.keys() == {"tensors"}:
            return NewWeights.of_tensors(info["tensors"])
        if info.keys() == {"files"}:
            return NewWeights.of_files(info["files"])
        given = ", ".join(sorted(map(str, info)))[:200] or "nothing"
        raise InvalidParameterError(
            f"update_info has {given}; it must have 'tensors', a mapping from the names in the checkpoint to tensors, which travel "
            f"through shared memory, or 'files', paths of safetensors files"
        )

    def add(self, part: NewWeights) -> None:
        """Keep a part, unless the update was given up meanwhile. A tensor that came before is replaced."""
        from actorllm.model.updates.tensor_files import layered

        with self._lock:
            if self._parts is None:
                part.close()
                return
            self._parts, dropped = layered(self._parts, part.tensor_files)
        close(dropped)

    def finish(self) -> NewWeights:
        """All parts. Raises InvalidParameterError where there is nothing to finish."""
        self._check_started("finish_weight_update")
        with self._lock:
            parts, self._parts = self._parts, None
        if not parts:
            raise InvalidParameterError("no tensor has come since start_weight_update; call update_weights before")
        return NewWeights(tensor_files=parts)

    def _check_started(self, verb: str) -> None:
        if self._parts is None:
            raise InvalidParameterError(f"{verb}: no update was started; call start_weight_update first")

    def close(self) -> None:
        """Forget what came. Idempotent."""
        with self._lock:
            parts, self._parts = self._parts, None
        close(parts)


def close(parts: list[TensorFile] | None) -> None:
    for part in parts or ():
        part.close()


def _part_of(name: str, request: object) -> Mapping[Any, Any]:
    """A field of a request as vLLM's requests have it: an object with it, a mapping that holds it, or its value."""
    found = getattr(request, name, request)
    if isinstance(found, Mapping) and found.keys() == {name}:
        found = found[name]
    if not isinstance(found, Mapping):
        raise InvalidParameterError(f"request={shown(request)} must be a mapping {{{name!r}: {{...}}}}")
    return found
