"""Streams run where actors do, on uvloop; and the agent of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.nodes.agents import Agent, key_file


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the key of the agent of a module."""
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def agent(folder: Path) -> Iterator[Agent]:
    """One for all tests of a module."""
    made = Agent(key_file(folder))
    yield made
    made.close()
