"""Answers in a file of the user's cache folder. More of it: `cpu/test_measured_once.py`, `cuda/proof/test_self_check.py`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from actorllm.model.answer_file import MAX_ENTRIES, AnswerFile


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AnswerFile:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return AnswerFile("answers.json", lambda answer: isinstance(answer, int))


def test_what_is_added_at_once_is_all_there(answers: AnswerFile) -> None:
    """Each opens the lock anew, so that threads exclude each other as processes do."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: answers.add(f"key {number}", number), range(40)))
    assert answers.read() == {f"key {number}": number for number in range(40)}


def test_an_answer_that_is_added_again_is_the_newest(answers: AnswerFile) -> None:
    for number in range(MAX_ENTRIES):
        answers.add(str(number), number)
    answers.add("0", 7)
    answers.add("more", 8)
    assert list(answers.read().items())[-2:] == [("0", 7), ("more", 8)]
    assert "1" not in answers.read()


def test_what_is_no_answer_is_not_there(answers: AnswerFile) -> None:
    answers.path().parent.mkdir()
    answers.path().write_text('{"a": "text", "b": 2}')
    assert answers.read() == {"b": 2}
    assert answers.add_once("a", lambda: 1) == 1
    assert answers.read() == {"a": 1, "b": 2}


def test_a_write_that_fails_leaves_the_file_as_it_was(answers: AnswerFile) -> None:
    answers.add("a", 1)
    before = sorted(answers.path().parent.iterdir())
    with pytest.raises(TypeError):
        answers.add("b", object())
    assert sorted(answers.path().parent.iterdir()) == before
    assert answers.read() == {"a": 1}


def test_without_a_home_folder_there_are_none(answers: AnswerFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert answers.read() == {}
    with pytest.raises(OSError, match="set XDG_CACHE_HOME"):
        answers.add("a", 1)
