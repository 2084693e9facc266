"""Where a start itself is looked at, it is that of an application: by exec, from the first import on."""

from __future__ import annotations

import pytest


@pytest.fixture
def processes_are_execed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of engines in the tests' own process."""
    monkeypatch.setenv("ACTORLLM_EXEC", "1")
