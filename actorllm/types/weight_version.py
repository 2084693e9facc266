"""Versions of a model's weights: what an engine is told of one, and which tokens of an output are of which.

`WeightSource` is what every process of an engine gets: where the weights of a version are read. It is part of the configuration,
so that a process which is started again has the committed version. `WeightVersionSpan` is what an output says.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from actorllm.errors import CorruptModelError

FIRST_VERSION = "0"
"""Of the weights that an engine starts with."""
MAX_VERSION = 200
"""Characters of the name of a version."""

RunningRequests: TypeAlias = Literal["recompute", "keep", "abort"]
RUNNING_REQUESTS: tuple[RunningRequests, ...] = ("recompute", "keep", "abort")
"""What an update does with requests that have started: computes their KV again, lets them keep it, or ends them."""


class WeightVersionSpan(NamedTuple):
    """Tokens of one sequence that were sampled with one version of the weights."""

    start: int
    """Index of the first of them among all tokens of the sequence."""
    end: int
    """Index behind the last of them."""
    version: str


def spans_until(starts: Sequence[tuple[int, str]], num_tokens: int) -> list[WeightVersionSpan]:
    """The spans of the first num_tokens tokens. starts: (index of the first token, version), in order."""
    if len(starts) == 1 and starts[0][0] < num_tokens:  # so it is until there is an update
        return [WeightVersionSpan(starts[0][0], num_tokens, starts[0][1])]
    known = [(start, version) for start, version in starts if start < num_tokens]
    ends = [*(start for start, _ in known[1:]), num_tokens]
    return [WeightVersionSpan(start, end, version) for (start, version), end in zip(known, ends, strict=False)]


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One version of the weights, and where every process of the engine reads it."""

    version: str = FIRST_VERSION
    """The name that the caller gave it."""
    identity: str = ""
    """Of this update and of no other: part of what block hashes cover. Empty: the weights that the engine started with."""
    folder: str | None = None
    """Of safetensors files; None: the model's own folder, or random weights."""
    overlays: tuple[str, ...] = ()
    """Safetensors files whose tensors count in place of those of the folder; of two files, in the later one's."""
    files: tuple[tuple[str, int, int], ...] = ()
    """Name, size and time of change (ns) of each file of `folder` when the version was staged."""

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any] | None) -> WeightSource:
        """Of what `to_tree` made, once it has travelled as JSON; None: of the weights that an engine starts with."""
        if tree is None:
            return cls()
        files = tuple((str(name), int(size), int(at)) for name, size, at in tree["files"])
        return cls(**{**tree, "overlays": tuple(tree["overlays"]), "files": files})

    def to_tree(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_first(self) -> bool:
        """It is what the engine started with."""
        return not self.identity

    def check_unchanged(self) -> None:
        """CorruptModelError: the files of the folder are not those of before, and so not those of this version."""
        if self.folder is None or not self.files:
            return
        if files_of(Path(self.folder)) != self.files:
            raise CorruptModelError(
                f"{self.folder} has changed since version {self.version!r} was read from it; write each version into a folder "
                f"of its own, and keep it until the next one is committed"
            )


FIRST_WEIGHTS = WeightSource()
"""What an engine starts with."""


def files_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """`WeightSource.files` of a folder as it is now. CorruptModelError: it cannot be read."""
    try:
        found = [(path.name, path.stat()) for path in sorted(folder.glob("*.safetensors*"))]
    except OSError as error:
        raise CorruptModelError(f"{folder} cannot be read: {error}") from error
    for name, told in found:
        if not stat.S_ISREG(told.st_mode):  # a pipe would be waited for
            raise CorruptModelError(f"{folder / name} is no regular file")
    return tuple((name, told.st_size, told.st_mtime_ns) for name, told in found)
