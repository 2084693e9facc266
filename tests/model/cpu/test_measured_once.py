"""Of several processes one measures, and all have its answer."""

from __future__ import annotations

import fcntl
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from actorllm.model import answer_file
from actorllm.model.answer_file import MAX_ENTRIES
from actorllm.model.cpu.measured_once import measured_once, path


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_those_that_ask_at_once_have_one_answer() -> None:
    """Each opens the file anew, so that threads exclude each other as processes do."""
    answers = itertools.count()

    def ask(_: int) -> str | None:
        def measure() -> str:
            time.sleep(0.05)  # so that all have begun
            return str(next(answers))

        return measured_once("key", measure)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {"0"}


def test_each_key_has_its_own_answer_and_the_oldest_go() -> None:
    for number in range(MAX_ENTRIES + 1):
        assert measured_once(f"key {number}", lambda number=number: str(number)) == str(number)  # type: ignore[misc]
    assert measured_once("key 1", lambda: "anew") == "1"
    assert measured_once("key 0", lambda: "anew") == "anew"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"key": 1}'])
def test_a_file_that_is_not_ours_is_written_anew(text: str) -> None:
    path().parent.mkdir()
    path().write_text(text)
    assert measured_once("key", lambda: "found") == "found"
    assert json.loads(path().read_text()) == {"key": "found"}


def test_a_process_that_holds_the_file_for_too_long_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(answer_file, "WAIT_S", 0.05)
    path().parent.mkdir()
    with path().with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert measured_once("key", lambda: "found") is None
    assert "is held by another process" in caplog.text
    assert measured_once("key", lambda: "found") == "found"
    with path().with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert measured_once("key", lambda: "anew") == "found", "what is known needs no lock"


def test_without_a_home_folder_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert measured_once("key", lambda: "found") is None
    assert "set XDG_CACHE_HOME" in caplog.text
