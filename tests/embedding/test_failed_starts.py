"""An engine that could not start is gone with its last reference: no garbage collection is needed for that."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
from collections.abc import Callable, Iterator

import pytest

from actorllm import LLM, AsyncLLM
from actorllm.errors import ConfigError, copied, without_frames
from tests.embedding.host_program import wait_until

TOO_LITTLE = {"kv_cache_memory_bytes": 1, "num_threads": 1}


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def by_a_stream(topology: str) -> None:
    async def main() -> None:
        llm = AsyncLLM("storyteller", topology=topology, **TOO_LITTLE)
        with pytest.raises(ConfigError, match="give more memory"):
            await llm.complete("Once")

    asyncio.run(main())


def by_start(topology: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="give more memory"):
            await AsyncLLM("storyteller", topology=topology, **TOO_LITTLE).start()

    asyncio.run(main())


def by_two_starts(topology: str) -> None:
    async def main() -> None:
        llm = AsyncLLM("storyteller", topology=topology, **TOO_LITTLE)
        for _ in range(2):
            with pytest.raises(ConfigError, match="give more memory"):
                await llm.start()

    asyncio.run(main())


def blocking(topology: str) -> None:
    with pytest.raises(ConfigError, match="give more memory"):
        LLM("storyteller", topology=topology, **TOO_LITTLE)


@pytest.mark.parametrize("topology", ["inline", "process"])
@pytest.mark.parametrize("fail", [by_a_stream, by_start, by_two_starts, blocking])
def test_no_thread_of_it_is_left(fail: Callable[[str], None], topology: str, no_collection: None) -> None:
    before = set(threading.enumerate())
    fail(topology)
    assert wait_until(lambda: not _ours(set(threading.enumerate()) - before)), threading.enumerate()


def _ours(threads: set[threading.Thread]) -> list[str]:
    return [thread.name for thread in threads if thread.name.startswith("actorllm")]


def test_an_exception_that_is_kept_keeps_the_text_of_its_traceback_and_no_variable(no_collection: None) -> None:
    class Large:
        pass

    def fail() -> None:
        large = Large()
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError(f"outer {id(large)}") from error

    def caught() -> BaseException:
        try:
            fail()
        except ValueError as error:
            return error
        raise AssertionError

    error = caught()
    assert any(type(found) is Large for found in gc.get_objects())
    assert without_frames(error) is error
    assert not any(type(found) is Large for found in gc.get_objects())
    lines = "".join(traceback.format_exception(error))
    assert "in fail" in lines
    assert "KeyError: 'inner'" in lines


def test_a_copy_is_raised_in_place_of_what_is_kept() -> None:
    kept = ValueError("kept")
    kept.__cause__ = KeyError("cause")
    with pytest.raises(ValueError, match="kept") as raised:
        raise copied(kept)
    assert raised.value is not kept
    assert raised.value.__cause__ is kept.__cause__
    assert kept.__traceback__ is None
