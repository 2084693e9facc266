"""Virtual time: latencies of the script, limits of requests, and the timers of the application pass without waiting."""

from __future__ import annotations

import asyncio
import math
import time as real_time
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from actorllm import SamplingParams
from actorllm.errors import EngineDeadError, InvalidParameterError
from actorllm.testing import ScriptedAnswer, ScriptedAsyncLLM, VirtualTime

PARAMS = SamplingParams(max_tokens=100)
NEVER = ScriptedAnswer("never", first_token_s=1e6)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def text_of(llm: ScriptedAsyncLLM, prompt: str = "x", **options: Any) -> str:
    text = ""
    async for output in llm.generate(prompt, PARAMS, **options):
        text = output.outputs[0].text
    return text


def test_tokens_come_when_the_script_says() -> None:
    time = VirtualTime()
    arrivals: list[float] = []

    async def main() -> None:
        async with ScriptedAsyncLLM([ScriptedAnswer([1, 2, 3], first_token_s=3600.0, token_s=60.0)], time=time) as llm:
            async for _ in llm.generate("x", PARAMS):
                arrivals.append(asyncio.get_running_loop().time())  # noqa: PERF401 - it is asked at each

    began = real_time.monotonic()
    time.run(main())
    assert arrivals == [3600.0, 3660.0, 3720.0, 3780.0]
    assert real_time.monotonic() - began < 3600.0


@pytest.mark.parametrize("kind", ["asyncio", "anyio", "wait_for"])
def test_timeouts_of_the_application_are_in_the_same_time(kind: str) -> None:
    time = VirtualTime()

    async def limited(llm: ScriptedAsyncLLM, seconds: float) -> str:
        if kind == "asyncio":
            async with asyncio.timeout(seconds):
                return await text_of(llm)
        if kind == "anyio":
            with anyio.fail_after(seconds):
                return await text_of(llm)
        return await asyncio.wait_for(text_of(llm), seconds)

    async def main() -> None:
        async with ScriptedAsyncLLM(lambda prompt: ScriptedAnswer("in time", first_token_s=30.0), time=time) as llm:
            assert await limited(llm, 31.0) == "in time"
            assert time.now() == 30.0
            with pytest.raises(TimeoutError):
                await limited(llm, 29.0)
            assert time.now() == 59.0

    time.run(main())


def test_a_retry_does_not_wait_for_the_request_that_was_left() -> None:
    time = VirtualTime()

    async def main() -> None:
        async with ScriptedAsyncLLM([NEVER, ScriptedAnswer("second", first_token_s=2.0)], time=time) as llm:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(30.0):
                    await text_of(llm)
            await asyncio.sleep(5.0)
            assert await text_of(llm) == "second"
            assert time.now() == 37.0

    time.run(main())


def test_one_that_is_left_delays_no_other() -> None:
    time = VirtualTime()
    answers = {"slow": NEVER, "quick": ScriptedAnswer("quick", first_token_s=1.0)}

    async def main() -> None:
        async with ScriptedAsyncLLM(answers, time=time) as llm, asyncio.TaskGroup() as tasks:
            quick = tasks.create_task(text_of(llm, "quick"))
            slow = tasks.create_task(text_of(llm, "slow"))
            await asyncio.sleep(30.0)
            slow.cancel()
            assert await quick == "quick"
            assert time.now() == 30.0

    time.run(main())


@pytest.mark.parametrize("limit", ["timeout", "deadline"])
def test_limits_of_requests_are_in_the_same_time(limit: str) -> None:
    time = VirtualTime()

    async def main() -> None:
        async with ScriptedAsyncLLM(lambda prompt: NEVER, time=time) as llm:
            seconds = 30.0 if limit == "timeout" else real_time.monotonic() + 30.0
            async for output in llm.generate("x", PARAMS, **{limit: seconds}):
                last = output.outputs[0]
            assert (last.finish_reason, last.stop_reason) == ("abort", "deadline")
            assert time.now() == 30.0 if limit == "timeout" else 0.0 < time.now() <= 30.0
            before = time.now()
            async for output in llm.generate("x", SamplingParams(n=2, max_tokens=9), timeout=10.0):
                assert output.finished
            assert time.now() == pytest.approx(before + 10.0)
            with pytest.raises(InvalidParameterError, match="timeout"):
                llm.generate("x", PARAMS, timeout=-1.0)

    time.run(main())


def test_a_request_within_its_limit_is_not_ended() -> None:
    time = VirtualTime()

    async def main() -> None:
        async with ScriptedAsyncLLM(lambda prompt: ScriptedAnswer("fine", first_token_s=9.0), time=time) as llm:
            assert await text_of(llm, timeout=10.0) == "fine"
            assert await text_of(llm, timeout=10.0) == "fine"
            assert time.now() == 18.0

    time.run(main())


def test_time_waits_for_recovery_and_for_threads() -> None:
    time = VirtualTime()

    async def main() -> None:
        answers = [ScriptedAnswer("It goes on.", token_s=1.0, worker_dies_after=2), ScriptedAnswer("y" * 500)]
        async with ScriptedAsyncLLM(answers, time=time) as llm, asyncio.timeout(100.0):
            assert await text_of(llm) == "It goes on."
            now = time.now()
            assert await asyncio.to_thread(lambda: real_time.sleep(0.05) or "done") == "done"
            grammar = {"structured_outputs": {"regex": "y{1,500}"}}
            async for output in llm.generate("z", SamplingParams(max_tokens=600, **grammar)):
                assert output.outputs[0].text.strip("y") == ""
            assert time.now() == now

    time.run(main())


def test_the_end_of_an_engine_and_a_pause() -> None:
    time = VirtualTime()

    async def main() -> None:
        async with ScriptedAsyncLLM([ScriptedAnswer("never", token_s=60.0, engine_dies_after=2)], time=time) as llm:
            with pytest.raises(EngineDeadError):
                await text_of(llm)
            assert time.now() == 60.0
        async with ScriptedAsyncLLM(["x", "x"], time=time) as llm:
            await llm.pause_generation()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(40.0):
                    await text_of(llm)
            assert time.now() == 100.0
            await llm.resume_generation()
            assert await text_of(llm) == "x"

    time.run(main())


def test_several_engines_and_many_streams_share_the_time() -> None:
    time = VirtualTime()

    async def main() -> list[float]:
        ends: list[float] = []

        async def read(llm: ScriptedAsyncLLM, number: int) -> None:
            await asyncio.sleep(0.5 * number)
            await text_of(llm, f"number {number}")
            ends.append(time.now())

        def answers(prompt: str) -> ScriptedAnswer:
            return ScriptedAnswer([1, 2], token_s=1.0)

        async with (
            ScriptedAsyncLLM(answers, time=time) as one,
            ScriptedAsyncLLM(answers, time=time) as two,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(12):
                tasks.create_task(read(one if number % 2 else two, number))
        return ends

    ends = time.run(main())
    assert ends == sorted(ends)
    assert len(ends) == 12
    # A request joins the batch when the two steps in flight are done, so it takes at most two seconds more than alone.
    assert all(0.5 * number + 2.0 <= end <= 0.5 * number + 4.0 for number, end in enumerate(ends))
    assert time.run(main()) == [end + ends[-1] for end in ends]  # the same again


def test_advance_on_a_loop_of_real_time_and_on_its_own() -> None:
    time = VirtualTime()

    async def main() -> None:
        async with ScriptedAsyncLLM([ScriptedAnswer("late", first_token_s=50.0)], time=time) as llm:
            task = asyncio.ensure_future(text_of(llm))
            await time.advance(49.0)
            assert not task.done()
            await time.advance(1.0)
            assert await task == "late"
            with pytest.raises(InvalidParameterError):
                await time.advance(-1.0)
            with pytest.raises(InvalidParameterError):
                await time.advance(math.inf)

    began = time.now()
    asyncio.run(main())
    assert time.now() == began + 50.0
    time.run(main())
    assert time.now() == began + 100.0


def test_draining_and_unloading_take_the_time_of_the_steps() -> None:
    time = VirtualTime()

    async def main() -> None:
        answer = ScriptedAnswer([1, 2], token_s=10.0)
        async with ScriptedAsyncLLM(lambda prompt: answer, time=time) as llm, asyncio.timeout(1000.0):
            await text_of(llm)
            await llm.unload()
            assert time.now() == 20.0
            task = asyncio.create_task(text_of(llm))
            await asyncio.sleep(1.0)
            assert await llm.drain()
            assert time.now() == 40.0
            await task

    time.run(main())


def test_advance_on_trio() -> None:
    time = VirtualTime()

    async def main() -> None:
        texts: list[str] = []
        answer = ScriptedAnswer("late", first_token_s=20.0)
        async with ScriptedAsyncLLM([answer], time=time) as llm, anyio.create_task_group() as tasks:

            async def read() -> None:
                texts.append(await text_of(llm))

            tasks.start_soon(read)
            await time.advance(19.0)
            assert not texts
            await time.advance(1.0)
        assert (texts, time.now()) == (["late"], 20.0)

    anyio.run(main, backend="trio")


async def test_advance_counts_for_limits_of_requests() -> None:
    time = VirtualTime()
    async with ScriptedAsyncLLM([NEVER], time=time) as llm:
        ends: list[Any] = []

        async def read() -> None:
            async for output in llm.generate("x", PARAMS, timeout=30.0):
                ends.append(output.outputs[0].stop_reason)  # noqa: PERF401 - it is looked at meanwhile

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.lowlevel.checkpoint()
            await time.advance(29.0)
            assert not ends
            await time.advance(1.0)
        assert ends == ["deadline"]


class TestWithAnyiosPlugin:
    @pytest.fixture
    def time(self) -> VirtualTime:
        return VirtualTime()

    @pytest.fixture
    def anyio_backend(self, time: VirtualTime) -> Any:
        return "asyncio", {"loop_factory": time.loop_factory}

    async def test_a_loop_of_the_plugin(self, time: VirtualTime) -> None:
        async with ScriptedAsyncLLM([NEVER], time=time) as llm:
            with anyio.move_on_after(3600.0) as scope:
                await text_of(llm)
            assert scope.cancelled_caught
            assert time.now() >= 3600.0
