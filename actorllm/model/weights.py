"""Where the weights of a model come from: safetensors files, or a seeded generator for dummy weights.

A model asks for every tensor it needs by name and shape (`take`) while it is built. `close` then checks that nothing of the
checkpoint was left over. Every tensor is read when it is asked for and converted to the target type at once. So loading needs
little more memory than the model itself. Called by `families.tensors`;
`hf` shares the checks of files.

Format: https://huggingface.co/docs/safetensors (one file, or several and `model.safetensors.index.json`).
"""

from __future__ import annotations

import contextlib
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson
import torch
from safetensors import SafetensorError, safe_open

from actorllm.config import ModelConfig
from actorllm.errors import CorruptModelError
from actorllm.model.updates.tensor_files import MappedTensors
from actorllm.types.model_files import INDEX_FILE, SINGLE_FILE, check_weights_exist
from actorllm.types.progress_bar import ProgressBar

PREFIX = "model."
"""What the names of all tensors begin with but those of the head."""

UPDATE = "the tensors of the update"

PROGRESS_DELAY_S = 1.0
"""The progress bar appears when loading takes longer than this."""


ALL = slice(None)

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of plain weights, in the words of safetensors."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file, as its header says."""

    shape: tuple[int, ...]
    kind: str
    """Its type in the words of safetensors, such as "BF16"."""


class Weights(ABC):
    """The tensors of one model, each taken once."""

    def __init__(self, dtype: torch.dtype, device: torch.device | None = None) -> None:
        """device: where the tensors are wanted; None: on the CPU."""
        self.dtype = dtype
        self.device = device or torch.device("cpu")

    @abstractmethod
    def take(
        self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The tensor `name` of this shape, or some of its rows or columns; owned by the caller.

        dtype: what it becomes, if not the target type; a type of integers must be the one that it has.
        """

    def stored(self, name: str) -> Stored | None:
        """What the files say of the tensor `name`; None: they have no such tensor, or there are no files."""
        return None

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """One that `take` returned, to be kept as it is: a copy where it would keep the memory of an update."""
        return tensor

    @abstractmethod
    def close(self, is_ignorable: Callable[[str], bool]) -> None:
        """No more tensors will be taken. Raises CorruptModelError if one was left over that is not ignorable."""

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class CheckpointWeights(Weights):
    """The safetensors files of a model's folder."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        show_progress: bool | None = None,
        device: torch.device | None = None,
        *,
        overlays: Sequence[str] = (),
        is_complete: bool = False,
        is_update: bool = False,
    ) -> None:
        """show_progress None: only where standard error is a terminal, and only once loading has become noticeable.

        overlays: safetensors files whose tensors count in place of those of the folder, the last first. is_complete: they alone
        count. is_update: of a model that runs: a tensor with NaN or infinity is refused, and none is a view of a file of the
        folder, which may be written to.
        """
        super().__init__(dtype, device)
        self.folder = folder
        self._is_update = is_update
        self._file_of = {} if is_complete else tensor_files(folder)
        self._overlays = {overlay: MappedTensors(overlay) for overlay in overlays}
        for overlay, mapped in self._overlays.items():
            self._file_of |= dict.fromkeys(mapped.records, overlay)
        self._left = set(self._file_of)
        self._has_no_prefix = not any(name.startswith(PREFIX) for name in self._file_of)
        """It was saved without a head, and so without the name of what a head is put on."""
        self._open: dict[str, Any] = {}
        self._progress = ProgressBar(
            total=len(self._left),
            desc="weights",
            unit="tensor",
            delay=PROGRESS_DELAY_S,
            disable=not progress_is_shown(show_progress),
            leave=False,
        )

    def take(
        self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        name = self._name(name)
        if name not in self._file_of:
            raise CorruptModelError(f"{self.folder} has no tensor {name!r}, which this architecture needs")
        file = self._file_of[name]
        stored = self.stored(name)
        assert stored is not None
        if stored.shape != shape:
            raise CorruptModelError(
                f"{self._place(file)}: tensor {name!r} has shape {stored.shape}, config.json asks for {shape}"
            )
        tensor = self._read(file, name, rows, columns)
        wanted = dtype or self.dtype
        if tensor.dtype != wanted and not (tensor.is_floating_point() and wanted.is_floating_point):
            needed = "floats are" if wanted.is_floating_point else f"{wanted} is"
            raise CorruptModelError(f"{self._place(file)}: tensor {name!r} is {tensor.dtype}, {needed} needed")
        if name in self._left:  # else it is taken in parts
            self._left.remove(name)
            self._progress.update()
        # Vectors, and what is wanted in a type of its own, are kept as they are. One that is a view would keep all of a file.
        is_copied = self._is_update and (file not in self._overlays or len(shape) == 1 or dtype is not None)
        made = tensor.to(wanted, copy=is_copied)
        if self._is_update and made.is_floating_point() and not is_finite(made):  # in the type that is computed with
            raise CorruptModelError(f"{self._place(file)}: tensor {name!r} holds NaN or infinity, as {wanted}")
        return made

    def _read(self, file: str, name: str, rows: slice, columns: slice) -> torch.Tensor:
        """All of a tensor, or some of its rows or columns, on the device."""
        is_whole = rows == ALL and columns == ALL
        if file in self._overlays:
            tensor = self._overlays[file].tensor(name)
            if not is_whole:
                tensor = (tensor[rows, columns] if tensor.dim() > 1 else tensor[rows]).contiguous()
            return tensor.to(self.device)
        try:
            if is_whole:
                whole: torch.Tensor = self._opened(file).get_tensor(name)
                return whole
            view = self._opened(file).get_slice(name)
            part: torch.Tensor = view[rows, columns] if len(view.get_shape()) > 1 else view[rows]
            return part
        except (SafetensorError, OSError) as error:
            raise CorruptModelError(f"{self._place(file)}: tensor {name!r} cannot be read: {error}") from error

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if any(mapped.has(tensor) for mapped in self._overlays.values()) else tensor

    def _place(self, file: str) -> str:
        """Of a file, for messages."""
        return UPDATE if file in self._overlays else str(self.folder / file)

    def stored(self, name: str) -> Stored | None:
        name = self._name(name)
        if name not in self._file_of:
            return None
        file = self._file_of[name]
        if file in self._overlays:
            kind, shape, _ = self._overlays[file].records[name]
            return Stored(shape, kind)
        try:
            view = self._opened(file).get_slice(name)
            return Stored(tuple(view.get_shape()), str(view.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise CorruptModelError(f"{self.folder / file}: tensor {name!r} cannot be read: {error}") from error

    def _name(self, name: str) -> str:
        """In the files."""
        return name.removeprefix(PREFIX) if name not in self._file_of and self._has_no_prefix else name

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, framework="pt", device=str(self.device))
        return self._open[file]

    def close(self, is_ignorable: Callable[[str], bool]) -> None:
        unexpected = sorted(name for name in self._left if not is_ignorable(name))
        if unexpected:
            more = f" and {len(unexpected) - 1} more" if len(unexpected) > 1 else ""
            if self._file_of[unexpected[0]] in self._overlays:
                raise CorruptModelError(
                    f"{UPDATE} have one {unexpected[0]!r}{more} that this architecture does not know; give them the names "
                    f"that the checkpoint has"
                )
            raise CorruptModelError(
                f"{self.folder} has a tensor {unexpected[0]!r}{more} that this architecture does not know: "
                f"config.json describes another model"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.close()
        self._open.clear()
        self._overlays.clear()


class DummyWeights(Weights):
    """Random weights from a seed: the same tensor for the same seed, name, shape and kind of device.

    Scaled so that activations stay near 1 through the layers and the logits have a standard deviation of about 3:
    what is sampled then depends on the weights and the context, as with a real model.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__(dtype, device)
        self._seed = seed

    def take(
        self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        tensor = self._draw(name, shape)
        if rows == ALL and columns == ALL:
            return tensor
        return tensor[rows, columns].clone() if len(shape) > 1 else tensor[rows].clone()

    def _draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed((self._seed * 1_000_003 + stable_hash(name)) % 2**63)
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        if name.endswith(("norm.weight", "norm_f.weight")):
            return tensor.normal_(1.0, 0.1, generator=generator)
        if len(shape) == 1:
            return tensor.normal_(0.0, 0.1, generator=generator)
        gain = 3.0 if name in ("lm_head.weight", "model.embed_tokens.weight", "backbone.embeddings.weight") else 1.0
        return tensor.normal_(0.0, gain / math.sqrt(shape[-1]), generator=generator)

    def close(self, is_ignorable: Callable[[str], bool]) -> None:
        return None


def tensors_of_version(model: ModelConfig) -> dict[str, torch.Tensor]:
    """All tensors of the version of the weights that the configuration names, copied. Raises CorruptModelError."""
    dtype: torch.dtype = getattr(torch, model.dtype)
    source = model.weights
    folder = None if model.load_format == "dummy" and source.folder is None else Path(source.folder or model.path)
    path_of = {} if folder is None else {name: folder / file for name, file in tensor_files(folder).items()}
    overlays = {Path(overlay): MappedTensors(overlay) for overlay in source.overlays}
    for overlay, mapped in overlays.items():
        path_of |= dict.fromkeys(mapped.records, overlay)
    # File by file, and only what counts of each. A file of a folder may be written to later: nothing stays a view of it.
    tensors: dict[str, torch.Tensor] = {}
    for path in dict.fromkeys(path_of.values()):
        place = UPDATE if path in overlays else str(path)
        names = [name for name, where in path_of.items() if where == path]
        try:
            if path in overlays:
                tensors |= {name: overlays[path].tensor(name).clone() for name in names}
            else:
                with safe_open(path, framework="pt") as file:
                    tensors |= {name: file.get_tensor(name).clone() for name in names}
        except (SafetensorError, OSError) as error:
            raise CorruptModelError(f"{place} cannot be read: {error}") from error
        for name in names:
            is_wide = tensors[name].is_floating_point() and tensors[name].dtype.itemsize > dtype.itemsize
            if tensors[name].is_floating_point() and not is_finite(
                tensors[name].to(dtype) if is_wide else tensors[name]
            ):
                raise CorruptModelError(f"{place}: tensor {name!r} holds NaN or infinity")
    return tensors


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    if not tensor.numel():
        return True
    if tensor.dtype.itemsize == 1:  # of 8 bits: torch compares none of these
        tensor = tensor.float()
    # One pass over the numbers in their own type. NaN is both the least and the largest.
    least, largest = tensor.aminmax()
    return bool(least.isfinite()) and bool(largest.isfinite())


def progress_is_shown(wanted: bool | None) -> bool:
    """None: where standard error is a terminal."""
    return sys.stderr.isatty() if wanted is None else wanted


def stable_hash(name: str) -> int:
    """FNV-1a: the same in every process, unlike `hash`."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def tensor_files(folder: Path) -> dict[str, str]:
    """Which file of the folder holds each tensor. Opening a file checks that its header fits its length."""
    check_weights_exist(folder)
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            tree = orjson.loads(index.read_bytes())
            file_of = {str(name): str(file) for name, file in tree["weight_map"].items()}
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise CorruptModelError(f"{index} cannot be read: {error!r}") from error
        for file in sorted(set(file_of.values())):
            if Path(file).name != file:
                raise CorruptModelError(f"{index} names {file!r}, which is not a file of this folder")
            present = _tensor_names(folder / file)
            for name in (name for name, f in file_of.items() if f == file and name not in present):
                raise CorruptModelError(f"{folder / file} does not hold tensor {name!r}, as {INDEX_FILE} says")
        return file_of
    return dict.fromkeys(_tensor_names(folder / SINGLE_FILE), SINGLE_FILE)


def _tensor_names(path: Path) -> set[str]:
    _wait_for(path)
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        raise CorruptModelError(f"{path} cannot be read: {error}") from error


def _wait_for(path: Path) -> None:
    """Returns when the file system answers. `safe_open` waits for that with the GIL held, and all threads with it."""
    with contextlib.suppress(OSError), path.open("rb") as file:  # `safe_open` says what is wrong with the file
        file.read(1)
