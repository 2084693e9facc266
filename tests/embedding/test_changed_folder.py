"""A host that changes its working folder, as notebooks and test suites do, finds its engine where it was."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from actorllm import LLM, SamplingParams
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


def test_modules_of_that_folder_are_found_by_what_is_started_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A notebook and a REPL have '' in their path, which stands for the working folder of the process that looks."""
    (folder / "own_of_the_folder.py").write_text(
        "from actorllm.scheduling.policies.fcfs import Fcfs\n\n\nclass Own(Fcfs):\n    pass\n"
    )
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    request.addfinalizer(lambda: sys.modules.pop("own_of_the_folder", None))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM("storyteller", num_threads=1, scheduling_policy="own_of_the_folder:Own") as llm:
        monkeypatch.chdir("other")
        before = llm.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids
        os.kill(llm._engine.pids["scheduler"], signal.SIGKILL)
        assert llm.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids == before
