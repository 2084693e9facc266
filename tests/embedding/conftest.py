"""What tests of an application's own process share."""

from __future__ import annotations

import pytest


@pytest.fixture
def processes_are_execed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in the tests' own process start here as in an application: by exec, from the first import on."""
    monkeypatch.setenv("ACTORLLM_EXEC", "1")
