"""`scripted_llm`: a fixture for pytest, with pytest-asyncio and with anyio's plugin. Needs pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actorllm.testing.engine import ScriptedAsyncLLM


@pytest.fixture
def scripted_llm() -> Iterator[Callable[..., ScriptedAsyncLLM]]:
    """Builds engines, with the arguments of ScriptedAsyncLLM, and shuts them down after the test."""
    built: list[ScriptedAsyncLLM] = []

    def build(*arguments: Any, **options: Any) -> ScriptedAsyncLLM:
        built.append(ScriptedAsyncLLM(*arguments, **options))
        return built[-1]

    yield build
    for llm in built:
        llm.shutdown()
