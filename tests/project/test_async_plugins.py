"""The two plugins for coroutine tests side by side: each test is run by the one that it asks for, and by no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from anyio.lowlevel import current_token


@pytest_asyncio.fixture
async def loop_of_the_fixture() -> AsyncIterator[asyncio.AbstractEventLoop]:
    yield asyncio.get_running_loop()


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_without_a_mark_a_test_is_anyios(anyio_backend: str) -> None:
    assert current_token().backend_class.__module__ == f"anyio._backends._{anyio_backend}"


@pytest.mark.asyncio
async def test_with_the_mark_it_is_pytest_asyncios(
    loop_of_the_fixture: asyncio.AbstractEventLoop, request: pytest.FixtureRequest
) -> None:
    assert asyncio.get_running_loop() is loop_of_the_fixture
    assert "anyio_backend" not in request.fixturenames


@pytest.mark.asyncio
class TestOfAClass:
    async def test_the_mark_of_a_class_counts_as_well(self, request: pytest.FixtureRequest) -> None:
        assert asyncio.get_running_loop().is_running()
        assert "anyio_backend" not in request.fixturenames
