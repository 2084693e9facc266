"""A plugin for pytest: `pytest_plugins = ["actorllm.testing.plugin"]` in the conftest.py of an application.

It has the fixture of `actorllm.testing.fixtures`. With it, a test with the mark of pytest-asyncio runs once. Without, anyio's
automatic mode takes the test as well, and it runs once for each backend.
"""

from __future__ import annotations

from types import FunctionType

import pytest

from actorllm.testing.fixtures import scripted_llm

__all__ = ["pytest_pycollect_makeitem", "scripted_llm"]


def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, obj: object) -> None:
    """A test with the mark of pytest-asyncio is not anyio's, whose automatic mode has just taken every coroutine function."""
    if not isinstance(obj, FunctionType):
        return
    marks: list[pytest.Mark] = getattr(obj, "pytestmark", [])
    if collector.get_closest_marker("asyncio") or any(mark.name == "asyncio" for mark in marks):
        is_anyios = [mark.name == "usefixtures" and mark.args == ("anyio_backend",) for mark in marks]
        obj.pytestmark = [mark for mark, is_its in zip(marks, is_anyios, strict=True) if not is_its]  # type: ignore[attr-defined]
