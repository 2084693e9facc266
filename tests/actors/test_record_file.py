"""Files of recordings: how many there are, and what is left of one that was cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actorllm.actors.record_file import KEPT_LIVES, RecordFile, read_recording
from actorllm.config import EngineConfig

STORYTELLER = "storyteller"


def make() -> RecordFile:
    return RecordFile(EngineConfig.from_arguments(STORYTELLER), (), None)


def test_the_recordings_of_many_lives_are_the_first_and_the_newest(tmp_path: Path) -> None:
    for life in range(1, 41):
        file = make()
        file.open_life(tmp_path / "run", life)
        file.close()
    assert set(os.listdir(tmp_path)) == {"run", *(f"run.{life}" for life in range(41 - KEPT_LIVES, 41))}


def test_what_was_cut_is_readable_up_to_the_cut(tmp_path: Path) -> None:
    file = make()
    file.open_at(tmp_path / "run")
    for number in range(100):
        file.write(("schedule", float(number), None))
    file.close()
    whole = list(read_recording(tmp_path / "run"))
    assert len(whole) == 100
    data = (tmp_path / "run").read_bytes()
    (tmp_path / "run").write_bytes(data[:-1000])
    cut = list(read_recording(tmp_path / "run"))
    assert 50 < len(cut) < 100
    assert cut == whole[: len(cut)]


def test_a_recording_stops_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = make()
    file.open_at(tmp_path / "nowhere" / "run")
    for _ in range(3):
        assert file.is_open, "else it would be opened again"
        file.write(("schedule", 0.0, None))
    file.close()
    assert file.statistics() == {
        "path": str(tmp_path / "nowhere" / "run"),
        "num_bytes": 0,
        "stopped": "No such file or directory",
    }
    assert len(caplog.records) == 1
