"""`WeightUpdates`: from new weights of a caller to a version that all replicas compute with. A part of `Engine`.

An update has two phases. First every rank of every replica stages the version: it reads it and checks it, beside the steps. If one
of them cannot, nothing changes anywhere. Then the version is decided on: from here on every process that is started, and every
scheduler, begins with it. At last every scheduler commits it between two steps.

Runs on the engine's thread. One update at a time; another one is refused meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio
from anyio import to_thread

from actorllm.actors.memory_file import MemoryFile
from actorllm.client.weight_memory import WeightMemory
from actorllm.config import EngineConfig
from actorllm.errors import ActorLLMError, EngineError, InvalidParameterError, nearest_name, shown
from actorllm.model import memory
from actorllm.types.params import is_text
from actorllm.types.weight_version import (
    MAX_VERSION,
    RUNNING_REQUESTS,
    RunningRequests,
    WeightSource,
    files_of,
)

if TYPE_CHECKING:
    from actorllm.client.stepper import Stepper
    from actorllm.model.updates.tensor_files import NewMemory, TensorFile

NEW_MEMORY = partial(MemoryFile, "weights")
MAX_FILES = 1000
"""Of a part of an update."""
LONGEST_S = float("inf")
"""Reading weights takes as long as it takes."""
T = TypeVar("T")


class UpdatedEngine(Protocol):
    """What an update asks of its engine."""

    stepper: Stepper | None
    """None: it has a loop."""

    def change_config(self, change: Callable[[EngineConfig], EngineConfig]) -> None: ...
    async def ask_all_schedulers(self, verb: str, **arguments: Any) -> Any: ...
    def starting(self) -> list[anyio.Event]:
        """Set when a replica that starts now has."""

    def note_new_weights(self) -> None:
        """Every worker has the weights of another version."""


@dataclass(slots=True)
class NewWeights:
    """What a caller has brought, and what was looked at of it: a folder, or tensors in memory."""

    folder: str | None = None
    files: tuple[tuple[str, int, int], ...] = ()
    tensor_files: Sequence[TensorFile] = field(default_factory=list)

    @classmethod
    def of_folder(cls, folder: object) -> NewWeights:
        """Raises InvalidParameterError: it is none; CorruptModelError: it cannot be read."""
        if not isinstance(folder, str | os.PathLike) or not str(folder):
            raise InvalidParameterError(f"folder={shown(folder)} must be the path of a folder with safetensors files")
        path = Path(os.fspath(folder)).absolute()  # workers may have another working folder
        if not path.is_dir():
            raise InvalidParameterError(f"folder={str(folder)!r:.300} is no folder; give one with safetensors files")
        files = files_of(path)
        if not files:
            raise InvalidParameterError(
                f"folder={str(folder)!r:.300} has no safetensors files; save the model there (save_pretrained) first"
            )
        return cls(str(path), files)

    @classmethod
    def of_tensors(cls, tensors: object, new_memory: NewMemory = NEW_MEMORY) -> NewWeights:
        """Copies them. Raises InvalidParameterError, naming the tensor; EngineError for want of memory."""
        from actorllm.model.updates.tensor_files import file_of_tensors

        try:
            return cls(tensor_files=[file_of_tensors(tensors, new_memory)])
        except OSError as error:
            raise EngineError(f"there is no memory for the new weights, and nothing was changed: {error}") from error

    @classmethod
    def of_files(cls, files: object, kept: WeightMemory | None = None) -> NewWeights:
        """The tensors of safetensors files, copied; of two with one name the later counts.

        kept: what they are copied to, where memory is kept for them.

        Raises InvalidParameterError, naming the file; CorruptModelError: it holds no such tensors; EngineError for want of memory.
        """
        from actorllm.model.updates.tensor_files import tensors_of_file

        if not isinstance(files, list | tuple) or not files or len(files) > MAX_FILES:
            raise InvalidParameterError(
                f"update_info: files={shown(files)} must be a list of 1 to {MAX_FILES} paths of safetensors files"
            )
        sizes: list[int] = []
        for file in files:
            if not isinstance(file, str | os.PathLike) or not os.path.isfile(file):  # a pipe would be waited for
                raise InvalidParameterError(f"update_info: {shown(str(file))} is no file")
            try:
                sizes.append(os.path.getsize(file))
            except OSError as error:  # it is removed at this moment
                raise InvalidParameterError(f"update_info: {shown(str(file))} cannot be read: {error}") from error
        # Of the tensors, of the copy that workers open, and of a file while it is taken apart.
        needed = 2 * sum(sizes) + max(sizes)
        available = memory.available_bytes()
        if needed > available and kept is not None:
            needed -= kept.room_for(sum(sizes))
            available = memory.available_bytes()
        if needed > available and kept is not None:  # files of other sizes may be kept beside the one that serves
            kept.clear()
            needed, available = 2 * sum(sizes) + max(sizes), memory.available_bytes()
        if needed > available:
            raise EngineError(
                f"update_info: {len(files)} files have {sum(sizes)} bytes, and copying them takes {needed} bytes of memory, of "
                f"which {available} are available; bring them in several parts, or all of them by update_weights_from_disk"
            )
        tensors: dict[str, Any] = {}
        for file in files:
            try:
                tensors |= tensors_of_file(Path(file))
            except OSError as error:
                raise InvalidParameterError(f"update_info: {shown(str(file))} cannot be read: {error}") from error
        return cls.of_tensors(tensors, NEW_MEMORY if kept is None else kept.new)

    @classmethod
    def of_worker(cls, told: str, new_memory: NewMemory = NEW_MEMORY) -> NewWeights:
        """Tensors that functions of the application have given `load_weights` in a worker.

        told: as of `memory_file.told_of`. Raises EngineError: the worker has ended, or a later call has brought others.
        """
        from actorllm.model.updates.tensor_files import TensorFile

        try:
            file = MemoryFile.opened_as_told(told)
            return cls(tensor_files=[TensorFile.opened(file, new_memory)])
        except OSError as error:
            raise EngineError(
                f"the new weights of this call are gone, and nothing was changed: a later call has brought others, or the worker "
                f"has ended; wait for a call that brings weights before the next one ({error})"
            ) from error

    def close(self) -> None:
        for file in self.tensor_files:
            file.close()


def check_update(version: object, running: object) -> None:
    """Raises InvalidParameterError for arguments that no update has."""
    if version is not None and (not is_text(version) or not 0 < len(str(version)) <= MAX_VERSION):
        raise InvalidParameterError(
            f"version={shown(version)} must be a string of valid Unicode with 1 to {MAX_VERSION} characters, or None"
        )
    if running not in RUNNING_REQUESTS:
        raise InvalidParameterError(
            f"running={shown(running)} must be one of {', '.join(map(repr, RUNNING_REQUESTS))}"
            f"{nearest_name(str(running), RUNNING_REQUESTS)}"
        )


def laid_over(old: Sequence[TensorFile], new: Sequence[TensorFile]) -> tuple[list[TensorFile], list[TensorFile]]:
    """As `tensor_files.layered`. Raises EngineError for want of memory."""
    from actorllm.model.updates.tensor_files import layered

    try:
        return layered(old, new)
    except (OSError, MemoryError) as error:
        # Without the frames of the error, which hold what was copied.
        raise EngineError(f"there is no memory for the new weights, and nothing was changed: {error}") from None


def close_all(files: Iterable[TensorFile]) -> None:
    """No worker needs them any more."""
    for file in files:
        file.close()


class WeightUpdates:
    """See the module docstring."""

    def __init__(self, engine: UpdatedEngine) -> None:
        self._engine = engine
        self.current = WeightSource()
        """The version that was decided on."""
        self._tensor_files: list[TensorFile] = []
        """Those that `current` lays over its folder; every process may open them as long as it counts."""
        self.memory = WeightMemory()
        """Where new tensors are copied to."""
        self._num_updates = 0
        self._is_under_way = False

    async def update(self, new: NewWeights, version: str | None, running: RunningRequests) -> str:
        """Let all replicas compute with new weights; returns the name of the version. The files of `new` are taken over.

        Raises what is wrong with the weights, or EngineError; then nothing has changed.
        """
        if self._is_under_way:
            await self._close(new.tensor_files)
            raise EngineError("an update of the weights is under way; wait for it before the next one")
        self._is_under_way = True
        try:
            return await self._update(new, version, running)
        finally:
            self._is_under_way = False

    async def _update(self, new: NewWeights, version: str | None, running: RunningRequests) -> str:
        layers: Sequence[TensorFile] = ()
        dropped: Sequence[TensorFile] = self._tensor_files
        folder, files = new.folder, new.files
        if folder is None:
            folder, files = self.current.folder, self.current.files
            try:
                lay = partial(laid_over, self._tensor_files, new.tensor_files)
                layers, dropped = await self._aside(lay) if self._tensor_files else lay()
            except BaseException:
                await self._close(new.tensor_files)
                raise
        source = WeightSource(
            version=str(self._num_updates + 1) if version is None else version,
            identity=secrets.token_hex(16),  # never a caller's name: two updates of one name are two
            folder=folder,
            overlays=tuple(file.path for file in layers),
            files=files,
        )
        try:
            await self._engine.ask_all_schedulers("stage_weights", timeout=LONGEST_S, source=source.to_tree())
        except BaseException:
            await self._close([file for file in (*layers, *new.tensor_files) if file not in self._tensor_files])
            with contextlib.suppress(ActorLLMError):  # the caller is told of the first error
                await self._engine.ask_all_schedulers("discard_weights", timeout=LONGEST_S)
            raise
        self._tensor_files = list(layers)
        self._num_updates += 1
        await self._commit(source, running)
        self._engine.note_new_weights()
        if dropped:  # every worker has the new ones
            await self._aside(close_all, dropped)
        if not layers:  # the next one may well be of a folder, too
            await self.give_back()
        return source.version

    async def give_back(self) -> int:
        """Keep no memory for the next update; how many bytes that was."""
        num_bytes = self.memory.num_kept_bytes
        if num_bytes:
            await self._aside(self.memory.clear)
        return num_bytes

    async def _aside(self, function: Callable[..., T], *arguments: Any) -> T:
        """Beside the loop: a GiB takes the system a tenth of a second, and copying it longer."""
        if self._engine.stepper is not None:  # there is no loop
            return function(*arguments)
        return await to_thread.run_sync(function, *arguments)

    async def _close(self, files: Sequence[TensorFile]) -> None:
        """Beside the loop, also where the update was cancelled."""
        if self._engine.stepper is not None:
            close_all(files)
            return
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(close_all, files)

    async def name(self, version: str) -> str:
        """Call the version that counts otherwise, for tokens from now on. Raises EngineError while an update is under way."""
        if self._is_under_way:
            raise EngineError("an update of the weights is under way; name the next version with it")
        self._is_under_way = True
        try:
            await self._commit(replace(self.current, version=version), "keep")
        finally:
            self._is_under_way = False
        return version

    async def _commit(self, source: WeightSource, running: RunningRequests) -> None:
        # From here on the version counts: a process that is started, for whatever reason, begins with it.
        self._engine.change_config(lambda config: replace(config, model=replace(config.model, weights=source)))
        self.current = source
        while True:
            starting = self._engine.starting()  # one may have begun with the version before, and is not asked now
            await self._engine.ask_all_schedulers(
                "commit_weights", timeout=LONGEST_S, source=source.to_tree(), running=running
            )
            if not starting:
                return
            for has_started in starting:
                await has_started.wait()

    def close(self) -> None:
        """The engine has ended. Idempotent."""
        self.memory.close()
        close_all(self._tensor_files)
        self._tensor_files = []
