"""Where processes of an engine look for modules, after the program has changed its working folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from actorllm.actors import search_path as module
from actorllm.actors.search_path import MAX_FOLDERS, ROOT, note_folder, search_path


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two of them; the first is the working folder."""
    monkeypatch.setattr(module, "_folders", [])
    found = [tmp_path / name for name in "ab"]
    for one in found:
        one.mkdir()
    monkeypatch.chdir(found[0])
    return str(found[0]), str(found[1])


def test_relative_entries_are_of_the_folder_in_which_the_engine_was_built(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = folders
    monkeypatch.setattr(sys, "path", ["", "/abs", "lib", Path("/not/a/string")])
    assert search_path() == [first, "/abs", f"{first}/lib", ROOT]
    note_folder()
    monkeypatch.chdir(second)
    assert search_path() == [first, "/abs", f"{first}/lib", ROOT]
    note_folder()
    assert search_path() == [second, first, "/abs", f"{second}/lib", f"{first}/lib", ROOT]


def test_a_path_without_relative_entries_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    note_folder()
    monkeypatch.setattr(sys, "path", ["/abs", "/other"])
    assert search_path() == ["/abs", "/other"]


def test_a_folder_that_was_removed_is_not_looked_into(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.rmdir(folders[0])
    monkeypatch.setattr(sys, "path", ["", "/abs"])
    note_folder()
    assert search_path() == ["/abs", ROOT]


def test_the_oldest_folders_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [""])
    for number in range(MAX_FOLDERS + 1):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        note_folder()
    assert search_path() == [*(str(tmp_path / str(number)) for number in range(MAX_FOLDERS, 0, -1)), ROOT]
