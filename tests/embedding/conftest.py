"""Engines in the tests' own process start here as in an application: by exec, from the first import on."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def processes_are_execed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORLLM_EXEC", "1")
