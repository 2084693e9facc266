"""These tests are about the engine, not about the caller's loop: one backend is enough."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
