"""A host that changes its working folder, as notebooks and test suites do, finds its engine where it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from actorllm import SamplingParams
from actorllm.config import BUNDLED_MODELS
from actorllm.testing import ScriptedAnswer, ScriptedLLM


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a model and a tokenizer."""
    for name in ("model", "tokenizer"):
        shutil.copytree(BUNDLED_MODELS["storyteller"], tmp_path / name, ignore=shutil.ignore_patterns("*.py", "draft"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_paths_are_those_of_the_folder_in_which_the_engine_was_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler and the worker read them later, and the tokenizer is read by the first prompt."""
    answers = [ScriptedAnswer("It goes on.", worker_dies_after=1)] * 2
    llm = ScriptedLLM(answers, model="model", tokenizer="tokenizer", record="record")
    try:
        for where in ("other", ".."):
            monkeypatch.chdir(where)
            (output,) = llm.generate("Once", SamplingParams(max_tokens=9), use_tqdm=False)
            assert output.outputs[0].text == "It goes on."
            llm.unload()
    finally:
        llm.shutdown()
    assert [path.name for path in (folder / "other").iterdir()] == []
    assert (folder / "record").exists()
