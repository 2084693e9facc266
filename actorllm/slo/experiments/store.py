"""`Store`: the results file. One JSON object a line, appended in one write, so that a kill leaves whole lines.

At most a part of the last line is left; it is cut off before anything is added. Reading changes nothing. A file whose first line
is no scenario, nor the beginning of one, belongs to another program: it is refused as it is.

    {"scenario": hash, "values": {...}, "stamp": {...}}     before the first point of a scenario
    {"scenario": hash, "searched": [0.99, 0.9]}             before the points of a search for highest rates
    {"key": hash, "scenario": hash, ...}                     a point (`record.record_of`)

Points of other scenarios, or made by other code, stay where they are and are told of.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from actorllm.errors import ConfigError
from actorllm.slo.experiments.point import Scenario, code_digest
from actorllm.slo.experiments.stamp import stamp

BEGINS = b'{"scenario":"'


class Store:
    """path None: results are kept in memory only."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)
        self.records: dict[str, dict[str, Any]] = {}
        self.scenarios: dict[str, dict[str, Any]] = {}
        """Values and stamp by hash, in the order of the file."""
        self.searched: dict[str, set[float]] = {}
        """Targets whose highest rates were searched for, by the hash of the scenario."""
        self.num_dropped = 0
        """Broken lines."""
        self._cut: tuple[int, int] | None = None
        """Size of the file and of its whole lines, when a kill has cut the last write short."""
        self._fd: int | None = None
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def _read(self, path: Path) -> None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"results file {str(path)!r} cannot be read: {error.strerror}") from error
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].split(b"\n")[:-1]
        is_torn = not lines and _is_begun(data)
        if data and not is_torn and (not lines or "values" not in (_object_of(lines[0]) or ())):
            raise ConfigError(
                f"{str(path)!r} holds no results of a sweep: its first line is not the scenario that `actorllm sweep` "
                f"writes there; name another file"
            )
        for line in lines:
            given = _object_of(line)
            if given is None:
                self.num_dropped += 1
            elif "values" in given:
                self.scenarios[given["scenario"]] = given
            elif "searched" in given:
                self.searched.setdefault(given["scenario"], set()).update(given["searched"])
            else:
                self.records[given["key"]] = given
        if whole < len(data):
            self.num_dropped += 1
            self._cut = (len(data), whole)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def begin(self, scenario: Scenario, targets: Sequence[float] = ()) -> list[str]:
        """Points of this scenario will come, and searches for these targets.

        Returns what is to be said of the points that are there already.
        """
        digest = scenario.digest
        told = []
        mine = [record for record in self.records.values() if record["scenario"] == digest]
        others = len(self.records) - len(mine)
        if others:
            told.append(
                f"{self.path}: {others} points of other configurations than this one ({digest}) are there and stay unused"
            )
        stale = sum(record["code"] != code_digest() for record in mine)
        if stale:
            told.append(
                f"{self.path}: {stale} points were made by other code than this ({code_digest()}): name another file to "
                f"make them anew"
            )
        if self.num_dropped:
            told.append(f"{self.path}: {self.num_dropped} broken lines were dropped")
        if digest not in self.scenarios:
            line = {"scenario": digest, "values": scenario.to_dict(), "stamp": stamp()}
            self.scenarios[digest] = line
            self._append(line)
        known = self.searched.setdefault(digest, set())
        if not known.issuperset(targets):
            self._append({"scenario": digest, "searched": sorted(set(targets))})
            known.update(targets)
        return told

    def add(self, record: dict[str, Any]) -> None:
        self.records[record["key"]] = record
        self._append(record)

    def _append(self, line: dict[str, Any]) -> None:
        if self.path is None:
            return
        if self._fd is None:
            try:
                self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise ConfigError(f"results file {str(self.path)!r} cannot be written: {error.strerror}") from error
            if self._cut is not None and os.fstat(self._fd).st_size == self._cut[0]:
                os.ftruncate(self._fd, self._cut[1])
        data = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        try:
            why = "no space is left" if os.write(self._fd, data) < len(data) else None
        except OSError as error:
            why = str(error.strerror)
        if why is not None:
            raise ConfigError(f"results file {str(self.path)!r} cannot be written: {why}; the sweep can be resumed")


def _is_begun(data: bytes) -> bool:
    """Whether this, without an end of line, may be a part of the first line of a results file, and of nothing else."""
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return data.startswith(BEGINS) or BEGINS.startswith(data)
    return "values" in (_object_of(data) or ())


def _object_of(line: bytes) -> dict[str, Any] | None:
    """A line of a results file: a scenario, what is searched for, or a point; None if it is none of these."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or not isinstance(given.get("scenario"), str):
        return None
    is_scenario = isinstance(given.get("values"), dict) and isinstance(given.get("stamp"), dict)
    targets = given.get("searched")
    is_search = isinstance(targets, list) and all(isinstance(target, int | float) for target in targets)
    return (
        given if is_scenario or is_search or {"key", "variant", "code", "blocks", "summary"} <= given.keys() else None
    )


def read_results(
    path: str | Path, scenario: str | None = None
) -> tuple[Scenario, list[dict[str, Any]], dict[str, Any], tuple[float, ...]]:
    """A scenario of a results file (its hash, or the beginning of it; None: the last one), its points, its stamp, and the
    targets whose highest rates were searched for."""
    if not Path(path).exists():
        raise ConfigError(f"there is no results file {str(path)!r}; `actorllm sweep --results {path}` makes one")
    store = Store(path)
    names = [name for name in store.scenarios if name.startswith(scenario or "")]
    if not store.scenarios:
        raise ConfigError(f"{str(path)!r} holds no results: a sweep that writes there has not begun; name another file")
    if not names:
        there = ", ".join(store.scenarios)
        raise ConfigError(f"{str(path)!r} has no scenario {scenario!r}; there is {there}")
    line = store.scenarios[names[-1]]
    records = [record for record in store.records.values() if record["scenario"] == names[-1]]
    return Scenario.from_dict(line["values"]), records, line["stamp"], tuple(store.searched.get(names[-1], ()))
