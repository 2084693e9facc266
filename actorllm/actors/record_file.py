"""The file that a scheduler's inputs are recorded to (`EngineConfig.record`), and what it takes to replay them.

Length-prefixed frames, each of them one call: [call, now, kind (0: plain values), scalars or values], segments. The first one
is no call but says how the scheduler was built, so that `fresh_scheduler` can build it again anywhere. A file whose writer was
killed, or found no room, ends with half a frame, which is left out. It holds prompts: its mode is 0600.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from actorllm.actors.private_file import open_private
from actorllm.actors.scheduler_setup import build_policy, is_of_user, scheduler_arguments
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.messages import StepFailed, StepResult, Submit, pack, unpack
from actorllm.ring.codec import decode, encode
from actorllm.scheduling.policy import PlanPolicy
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.telemetry.decisions import DECIDE, ToldPolicy
from actorllm.scheduling.telemetry.recording import Entry

if TYPE_CHECKING:
    import io

logger = logging.getLogger(__name__)

BUILT = "built"
"""The first frame's call: [configuration as JSON, ids that end a text, the tokenizer's own, whether workers are replaced]."""


KEPT_LIVES = 8
"""Beside the recording of the first scheduler, those of so many are kept: the newest."""


class RecordFile:
    """Where entries are written. What cannot be written ends the recording and nothing else; `stopped` says why."""

    def __init__(
        self,
        config: EngineConfig,
        eos_token_ids: tuple[int, ...],
        primary_eos_token_id: int | None,
    ) -> None:
        """What the scheduler is built with (`scheduler_arguments`)."""
        self._header = [config.to_json().decode(), list(eos_token_ids), primary_eos_token_id]
        self._file: IO[bytes] | None = None
        self.path: Path | None = None
        self.num_bytes = 0
        self.stopped: str | None = None
        """Why nothing more is written."""

    def open_life(self, path: Path, life: int) -> None:
        """Of the n-th scheduler of an engine. What the first one wrote stays; of the others, what the newest wrote."""
        if life > KEPT_LIVES + 1:
            with suppress(OSError):
                _path_of(path, life - KEPT_LIVES).unlink()
        self.open_at(_path_of(path, life))

    def open_at(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_private(path)
        except (OSError, ConfigError) as error:
            self._stop(error)
        else:
            self._write([BUILT, 0.0, 0, self._header], [])

    @property
    def is_open(self) -> bool:
        """It was opened; it may have stopped meanwhile."""
        return self._file is not None or self.stopped is not None

    def write(self, entry: Entry) -> None:
        if self._file is None:
            return
        call, at, argument = entry
        if isinstance(argument, Submit | StepResult | StepFailed):
            kind, scalars, arrays = pack(argument)
        else:
            kind, scalars, arrays = 0, argument, []
        self._write([call, at, kind, scalars], arrays)

    def _write(self, values: list[Any], arrays: list[Any]) -> None:
        assert self._file is not None
        frame = b"".join(encode(values, arrays))
        try:
            self._file.write(struct.pack("<I", len(frame)) + frame)
        except OSError as error:
            self._stop(error)
        else:
            self.num_bytes += 4 + len(frame)

    def close(self) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as error:
            self._stop(error)
        self._file = None

    def _stop(self, error: Exception) -> None:
        self.stopped = (error.strerror if isinstance(error, OSError) else None) or str(error)
        if self._file is not None:
            file, self._file = cast("io.BufferedWriter", self._file), None
            with suppress(OSError):
                file.raw.close()  # what is in the buffer found no room
        told = "recording to %s stopped: %s; what was written can be read, and the engine goes on"
        logger.error(told, self.path, self.stopped, extra={"event": "recording stopped"})

    def statistics(self) -> dict[str, Any]:
        path = None if self.path is None else str(self.path)
        return {"path": path, "num_bytes": self.num_bytes, "stopped": self.stopped}


def _path_of(path: Path, life: int) -> Path:
    return path if life == 1 else path.with_name(f"{path.name}.{life}")


def _frames(path: str | Path) -> Iterator[tuple[list[Any], Any]]:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"recording {str(path)!r} cannot be read: {error.strerror}") from error
    at = 0
    while at + 4 <= len(data):
        (size,) = struct.unpack_from("<I", data, at)
        if at + 4 + size > len(data):
            return  # it was killed
        try:
            yield decode(data[at + 4 : at + 4 + size])
        except Exception as error:
            raise ConfigError(f"recording {str(path)!r} is none: byte {at} begins no frame ({error})") from error
        at += 4 + size


def read_recording(path: str | Path) -> Iterator[Entry]:
    """The recorded calls, for `scheduling.telemetry.recording.replay`. Raises ConfigError for what is no recording."""
    for (call, when, kind, scalars), arrays in _frames(path):
        if call != BUILT:
            yield call, when, unpack(kind, scalars, arrays) if kind else scalars


def is_recording(path: str | Path) -> bool:
    """Whether a file begins as a recording does. One that cannot be read is none."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(4096)
    except OSError:
        return False
    return len(head) > 4 and f'["{BUILT}"'.encode() in head


def recorded_configuration(path: str | Path) -> EngineConfig:
    """Of the engine that was recorded; its number of KV blocks is known. Raises ConfigError."""
    return _read_header(path)[0]


def _read_header(path: str | Path) -> tuple[EngineConfig, tuple[int, ...], int | None]:
    nothing: list[Any] = [None]
    values = next((values for values, _ in _frames(path)), nothing)
    if values[0] != BUILT:
        raise ConfigError(
            f"recording {str(path)!r} does not say of which engine it is: it is empty, or of an older version"
        )
    configuration, eos_token_ids, primary = values[3]
    return EngineConfig.from_json(configuration), tuple(eos_token_ids), primary


def recorded_arguments(path: str | Path) -> dict[str, Any]:
    """What the recorded scheduler was built with, but for its first policy (`recorded_policy`). Raises ConfigError."""
    segments: list[list[Entry]] = [[]]
    for entry in read_recording(path):
        if entry[0] == "change_policy":
            segments.append([])
        elif entry[0].startswith(DECIDE):
            segments[-1].append(entry)
    config = recorded_configuration(path).scheduler

    def build(policy: str, admission: str | None, number: int) -> PlanPolicy:
        changed = replace(config, policy=policy, admission=admission)
        return cast("PlanPolicy", ToldPolicy(segments[number])) if is_of_user(changed) else build_policy(changed)

    return {**scheduler_arguments(*_read_header(path)), "build_policy": build}


def fresh_scheduler(path: str | Path) -> Scheduler:
    """One that is built as the recorded one was, and whose policies decide anew. Raises ConfigError."""
    config = recorded_configuration(path).scheduler

    def build(policy: str, admission: str | None, number: int) -> PlanPolicy:
        return build_policy(replace(config, policy=policy, admission=admission))

    return Scheduler(policy=build_policy(config), build_policy=build, **scheduler_arguments(*_read_header(path)))


def recorded_policy(path: str | Path) -> Callable[[], PlanPolicy]:
    """Builds what decides as the recorded policy did: from its decisions where the recording has them, else anew.

    What it builds raises ConfigError for a policy that cannot be loaded.
    """
    first = takewhile(lambda entry: entry[0] != "change_policy", read_recording(path))
    entries = [entry for entry in first if entry[0].startswith(DECIDE)]
    if entries:
        return lambda: cast("PlanPolicy", ToldPolicy(entries))
    config = recorded_configuration(path).scheduler
    return lambda: build_policy(config)


def told_scheduler(path: str | Path) -> Scheduler:
    """One that is built as the recorded one was, and decides as that did, whether or not its policy is at hand."""
    return Scheduler(policy=recorded_policy(path)(), **recorded_arguments(path))
