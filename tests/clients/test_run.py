"""What `make clients` says of a client that does less than it was asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients import run

PROGRAM = """#!{python}
import pathlib
pathlib.Path(".schemathesis").mkdir()
print("10 generated, 10 passed")
"""


@pytest.fixture
def schemathesis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in its place, which makes up ten cases at a time; and the folder that it is started from."""
    program = tmp_path / "bin" / "schemathesis"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(run, "python_of", lambda name: str(program.with_name("python")))
    monkeypatch.setattr(run, "version_of", lambda python, package: {package: "1"})
    started = tmp_path / "here"
    started.mkdir()
    monkeypatch.chdir(started)
    return started


def told(cases: int, limit_s: float) -> dict[str, Any]:
    (outcome,) = run.schemathesis("http://127.0.0.1:1", cases, limit_s)["checks"]
    return dict(outcome)


def test_as_many_cases_as_were_asked_for(schemathesis: Path) -> None:
    outcome = told(30, 3600)
    assert (outcome["outcome"], outcome["cases"], outcome["asked"]) == ("ok", 30, 30)
    assert not list(schemathesis.iterdir())


def test_fewer_cases_than_were_asked_for(schemathesis: Path) -> None:
    outcome = told(30, 0)
    assert (outcome["outcome"], outcome["cases"], outcome["asked"]) == ("failed", 0, 30)
    assert "0 of 30 cases" in outcome["why"]
