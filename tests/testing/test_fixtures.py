"""The fixture of `actorllm.testing`, with anyio's plugin; `examples/application_test.py` has it with pytest-asyncio."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actorllm.testing import ScriptedAsyncLLM
from actorllm.testing.plugin import scripted_llm

__all__ = ["scripted_llm"]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_with_anyio(scripted_llm: Callable[..., ScriptedAsyncLLM]) -> None:
    async for output in scripted_llm(["fine"]).generate("x"):
        assert output.outputs[0].text in "fine"
    assert output.finished
