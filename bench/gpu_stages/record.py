"""What the stages leave, so that a measurement can be taken in several calls and outlives the failure of one of them.

A folder has one file per stage: what it found, or why it ended without, and what its figures hold for. Whatever is of another
machine, other sources, another table of configurations or other models does not count, and is measured again: shares of one
machine's ceilings say nothing about another's.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Record:
    """What became of a stage."""

    stage: str
    of: dict[str, Any]
    """What its figures hold for, by name: machine, sources, table, models."""
    found: dict[str, Any]
    problem: str = ""
    """Why it ended before it had found anything."""
    seconds: float = 0.0
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"))

    @property
    def complaint(self) -> str:
        """Why what comes after it would not count; nothing: all is well."""
        return self.problem or str(self.found.get("wrong", ""))


class Work:
    """The records in a folder that hold for what is here now."""

    def __init__(self, folder: Path, here: dict[str, Any], depends_on: dict[str, tuple[str, ...]]) -> None:
        """here: what figures may depend on, as it is now; depends_on: the names in it that those of a stage do."""
        self.folder = folder
        self._here = here
        self._depends_on = depends_on

    def file(self, stage: str) -> Path:
        return self.folder / f"{stage}.json"

    def of(self, stage: str) -> dict[str, Any]:
        """What figures of this stage would hold for."""
        return {name: self._here[name] for name in self._depends_on[stage]}

    def read(self, stage: str) -> Record | None:
        """None: it has not been run, or with something else."""
        try:
            record = Record(**json.loads(self.file(stage).read_text()))
        except FileNotFoundError:
            return None
        return record if record.of == self.of(stage) else None

    def write(self, stage: str, found: dict[str, Any], problem: str = "", seconds: float = 0.0) -> Record:
        record = Record(stage, self.of(stage), found, problem, seconds)
        self.file(stage).write_text(json.dumps(asdict(record)))
        return record

    def forget(self, stage: str) -> None:
        self.file(stage).unlink(missing_ok=True)

    def records(self) -> list[Record]:
        """In the order of the stages."""
        return [record for stage in self._depends_on if (record := self.read(stage)) is not None]

    def results(self) -> Results:
        """What the stages found that ended well."""
        return {record.stage: record.found for record in self.records() if not record.problem}


def digest_of(*files: Path) -> str:
    """Changes with their names and contents."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def sources() -> str:
    """Of all that is measured. The scripts of the measurement are not among it: they may be mended on the way."""
    return digest_of(*ROOT.glob("actorllm/**/*.py"), *ROOT.glob("kernels/actorllm_kernels/*.py"))


def configurations() -> str:
    """Of the kernels' table, which the searches change."""
    return digest_of(ROOT / "kernels" / "actorllm_kernels" / "configs.json")
