"""A forked process of an engine is to its owner what one is that was made by exec."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actorllm import LLM
from tests.forking import SYS_CLONE


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def program(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


@pytest.mark.skipif(
    SYS_CLONE is None or bool(os.environ.get("ACTORLLM_EXEC")),
    reason="no copies are made on this architecture, or as ACTORLLM_EXEC asks for",
)
def test_copies_are_children_of_the_owner_with_sessions_and_environments_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACTORLLM_TEST_WORD", "told")
    with LLM("storyteller", num_threads=1) as llm:
        pids = llm._engine.pids
        assert set(pids) == {"scheduler", "worker0"}
        for name, pid in pids.items():
            assert "forking.py" in program(pid)
            assert status(pid)["Name"] == f"actor:{name}"
            assert int(status(pid)["PPid"]) == os.getpid()
            assert os.getsid(pid) == pid
            assert Path(f"/proc/{pid}/cwd").resolve() == tmp_path
            assert Path(f"/proc/{pid}/fd/0").readlink() == Path(os.devnull)
            assert Path(f"/proc/{pid}/fd/1").readlink() == Path(f"/proc/{pid}/fd/2").readlink()


def test_exec_it_is_where_the_environment_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with LLM("storyteller") as llm:
        programs = {name: program(pid) for name, pid in llm._engine.pids.items()}
    assert all("child.py" in text for text in programs.values())
