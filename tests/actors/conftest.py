"""The loop of tests that call actors directly."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Actors run on uvloop."""
    return "asyncio", {"use_uvloop": True}
